"""The text of the job script, from a config and its plan.  Pure: nothing is run or written.

The template is `sbatch/job.sbatch.j2`.  Every component states every resource field: Slurm gives a
later component some of the first one's values (time, memory) and defaults for the rest.
"""

from __future__ import annotations

import shlex
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from rlhpc.config.check_run import check_variables
from rlhpc.config.schema import RunConfig
from rlhpc.errors import PlanError, Problem, raise_problems
from rlhpc.plan import ComponentPlan, RunPlan
from rlhpc.slurm.environ import rank_variables

_DIRECTIVE = "hetjob"
_COUNTS = {"nodes": "nodes", "ntasks": "tasks_per_node", "ntasks-per-node": "tasks_per_node"}
"""sbatch options that the plan's ranks depend on -> the config field that sets them."""
_REFUSED = {
    "array": "Slurm has no arrays of such jobs; submit the runs one by one",
    "requeue": "Slurm leaves such a job half pending after a node failure; submit it again instead",
    "wrap": "the job script is the command",
    "output": "logs are in the run folder; set run_root",
}


def render_job_script(config: RunConfig, plan: RunPlan, *, command: list[str]) -> str:
    """The job script whose tasks each run ``command`` as one rank.

    Raises:
        ConfigError: a component asks for something that the script cannot carry, see
            `check_script`.
    """
    raise_problems(check_script(config, plan))
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(read_template("job.sbatch.j2")).render(
        components=[_component_values(config, plan, component) for component in plan.components],
        run_dir=shlex.quote(plan.run_dir),
        command=shlex.join(command),
        python=shlex.quote(sys.executable),
        srun_options=shlex.join(_srun_options(config, plan)),
    )


def read_template(name: str) -> str:
    """The text of a file of `sbatch/`: next to the package in a checkout, else `rlhpc.sbatch`."""
    checkout = Path(__file__).parents[2] / "sbatch" / name
    if checkout.is_file():
        return checkout.read_text()
    return resources.files("rlhpc.sbatch").joinpath(name).read_text()


def component_options(
    config: RunConfig, plan: RunPlan, component: ComponentPlan
) -> dict[str, str | None]:
    """Long options of sbatch for ``component``: name -> value, None for a bare flag."""
    c = config.components[component.name]
    gpus = f"gpu:{c.gpu_type}:{c.gpus_per_node}" if c.gpu_type else f"gpu:{c.gpus_per_node}"
    options: dict[str, Any] = {
        "job-name": f"{plan.run_id}.{component.name}",
        "partition": c.partition,
        "nodes": component.nodes,
        "ntasks": component.num_ranks,
        "ntasks-per-node": component.ranks_per_node,
        "distribution": "block",
        "cpus-per-task": c.cpus_per_task,
        "gres": gpus if c.gpus_per_node else None,
        "mem": c.mem,
        "account": c.account,
        "qos": c.qos,
        "constraint": c.constraint,
        "reservation": c.reservation,
        "exclusive": c.exclusive,
        "time": c.time or config.cluster.time,
    }
    if component.index == 0:
        output = plan.run_dir.replace("%", "%%") + "/logs/%j_batch.out"
        options |= {"output": output, "open-mode": "append", "no-requeue": True}
    options |= {name.replace("_", "-"): value for name, value in c.sbatch.items()}
    return {
        name: None if value is True else str(value)
        for name, value in options.items()
        if value is not None and value is not False
    }


def option_words(options: dict[str, str | None]) -> list[str]:
    """``options`` as words of a command line: `--nodes=2`, `--exclusive`."""
    return [
        f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()
    ]


def check_script(config: RunConfig, plan: RunPlan) -> list[Problem]:
    """What the script cannot carry: options that break the plan, values that Slurm would change."""
    problems = []
    for component in plan.components:
        problems += _check_sbatch(config, component.name)
        problems += _check_values(config, plan, component)
    problems += check_variables("cluster", config.cluster.environment)
    return problems + _check_memory(config, plan)


def _check_memory(config: RunConfig, plan: RunPlan) -> list[Problem]:
    """Slurm carries the first component's --mem over to those that say nothing."""
    if not plan.components:
        return []  # reported by the checks of the config
    first = plan.components[0].name
    mem = config.components[first].mem
    later = [c.name for c in plan.components[1:] if not config.components[c.name].mem]
    return [
        Problem(
            key=f"components.{name}.mem",
            what=f"not set, and Slurm would carry over mem={mem} from {first}",
            expected="a value for every component, or for none",
            remedy=f"Set components.{name}.mem",
        )
        for name in later
        if mem
    ]


def _check_sbatch(config: RunConfig, name: str) -> list[Problem]:
    """Further options of one component that the plan or the script does not allow."""
    problems = []
    for option, value in config.components[name].sbatch.items():
        key, long_name = f"components.{name}.sbatch.{option}", option.replace("_", "-")
        if long_name in _COUNTS and not (long_name == "ntasks-per-node" and value is None):
            field = f"components.{name}.{_COUNTS[long_name]}"
            problems.append(
                Problem(key, f"{value} contradicts the plan", "no such option", f"Set {field}")
            )
        elif long_name in _REFUSED:
            problems.append(
                Problem(
                    key,
                    f"{value} is refused",
                    "no such option",
                    f"Remove it: {_REFUSED[long_name]}",
                )
            )
    return problems


def _check_values(config: RunConfig, plan: RunPlan, component: ComponentPlan) -> list[Problem]:
    """Values that cannot stand in an #SBATCH line, and names that cannot be a variable's."""
    key = f"components.{component.name}"
    problems = list(check_variables(key, config.components[component.name].environment))
    for word in option_words(component_options(config, plan, component)):
        if "\n" in word or _DIRECTIVE in word:
            problems.append(
                Problem(
                    key=key,
                    what=f"the sbatch option {word!r} has a line break or the word {_DIRECTIVE!r}",
                    expected=f"one line, and no {_DIRECTIVE!r}, which sbatch takes for a directive",
                    remedy="Change that option, trainer.experiment_name or run_root",
                )
            )
    return problems


def _component_values(config: RunConfig, plan: RunPlan, component: ComponentPlan) -> dict[str, Any]:
    """What the template says of one component."""
    c = config.components[component.name]
    words = option_words(component_options(config, plan, component))
    return {
        "index": component.index,
        "name": component.name,
        "first_rank": component.first_rank,
        "last_rank": component.ranks[-1],
        "ranks_per_node": component.ranks_per_node,
        "options": [_quote_option(word) for word in words],
        "slots": shlex.join(_slot_roles(plan, component)),
        "threads": c.cpus_per_task,
        "environment": [f"{k}={shlex.quote(str(v))}" for k, v in rank_variables(config, c).items()],
        "setup": [*config.cluster.setup, *c.setup],
        "prefix": shlex.join(c.launch_prefix),
    }


def _slot_roles(plan: RunPlan, component: ComponentPlan) -> list[str]:
    """Role names joined with `+` for each slot of a node: the same on every node."""
    names = ["+".join(r.name for r in plan.roles_of(rank)) for rank in component.ranks]
    slots = names[: component.ranks_per_node]
    if names != slots * component.nodes:
        raise PlanError(f"component {component.name}: roles differ from node to node: {names}")
    return slots


def _quote_option(word: str) -> str:
    """``word`` as sbatch reads it in a line: it knows quotes and takes a bare # for a comment."""
    name, equals, value = word.partition("=")
    return name + equals + (shlex.quote(value) if equals else "")


def _srun_options(config: RunConfig, plan: RunPlan) -> list[str]:
    """Options of the one step."""
    options = ["--unbuffered", "--kill-on-bad-exit=1"]
    if len(plan.components) > 1:
        options.append("--het-group=" + ",".join(str(c.index) for c in plan.components))
    return [*options, *config.cluster.srun_args]
