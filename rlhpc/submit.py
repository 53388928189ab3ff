"""`python -m rlhpc.submit [--dry-run] [--wait|--follow] overrides...`: a command line to a run.

Composes and checks the config, plans, makes the run folder, and hands over to Slurm or to local
processes.  Imports no torch.  Exit codes: 0 done (or queued), 1 the run or the submit failed, 2 the
config is refused and nothing was written or queued.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhpc.config.check_packages import check_packages
from rlhpc.config.checks import check_config, find_warnings, model_facts_or_none
from rlhpc.config.load import absolute_paths, compose
from rlhpc.config.schema import Launcher, RunConfig
from rlhpc.errors import ConfigError, PlanError, Problem, SubmitError, raise_problems
from rlhpc.outcome import FileFollower, failure_message, is_done
from rlhpc.plan import RunPlan, make_plan
from rlhpc.plan_table import format_plan
from rlhpc.run_folder import make_run_folder, make_run_id, point_latest

_EPILOG = """examples:
  %(prog)s experiment=quickstart
  %(prog)s experiment=smollm2_gsm8k cluster=devcluster --wait data.train_files=train.parquet
  %(prog)s experiment=qwen2_7b_gsm8k --dry-run components.actor.account=my_account
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of submit, for this module and for the `rlhpc` command."""
    parser.description = "Run an experiment as one Slurm job, or as processes of this machine."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "overrides", nargs="*", help="group=choice and key=value, as in Hydra; see configs/"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check all and write the run folder, start nothing"
    )
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument(
        "--wait", action="store_true", help="wait for the end of the job and exit 0 only on success"
    )
    waiting.add_argument(
        "--follow", action="store_true", help="like --wait, and show the run's console"
    )
    parser.add_argument(
        "--config-dir", type=Path, help="folder of your own configs: experiment/, cluster/, ..."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse ``argv`` and submit; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlhpc.submit")
    add_arguments(parser)
    return submit(parser.parse_intermixed_args(argv))


def submit(arguments: argparse.Namespace) -> int:
    """Do what the parsed ``arguments`` say; return the exit code."""
    try:
        config, plan = prepare(
            arguments.overrides, config_dir=arguments.config_dir, dry_run=arguments.dry_run
        )
    except (ConfigError, PlanError) as e:
        print(e, file=sys.stderr)
        return 2
    except SubmitError as e:
        print(e, file=sys.stderr)
        return 1
    _show_plan(config, plan)
    try:
        make_run_folder(config, plan)
        if config.cluster.launcher is Launcher.local:
            return _start_local(config, plan, dry_run=arguments.dry_run)
        return _start_slurm(config, plan, arguments)
    except (ConfigError, SubmitError) as e:
        print(e, file=sys.stderr)
        return 1


def prepare(
    overrides: Sequence[str], *, config_dir: Path | None = None, dry_run: bool = False
) -> tuple[RunConfig, RunPlan]:
    """The checked config, its paths absolute, and its plan.  Writes nothing.

    Raises:
        ConfigError: lists every problem found, the scheduler's limits included.
        SubmitError: the scheduler does not answer, and this is no dry run.
    """
    config, problems = compose(overrides, config_dir=config_dir)
    if config is None:
        raise_problems(problems)
        raise AssertionError("an untyped config always has a problem")
    problems += check_config(config)
    missing = list(check_packages(config))
    if dry_run:  # perhaps on a laptop, for a cluster that has them
        for problem in missing:
            print(f"note: {problem}", file=sys.stderr)
    else:
        problems += missing
    if config.cluster.launcher is Launcher.slurm:
        problems += _check_scheduler(config, needed=not problems and not dry_run)
    raise_problems(problems)
    config = absolute_paths(config, Path.cwd())
    run_id = make_run_id(config)
    return config, make_plan(config, run_id=run_id, run_dir=Path(config.run_root) / run_id)


def _check_scheduler(config: RunConfig, *, needed: bool) -> list[Problem]:
    """What the job script and the cluster's partitions refuse.

    A silent scheduler is an error only if its answer is ``needed``: a dry run may be on a laptop,
    and other problems come first.
    """
    from rlhpc.slurm.inventory import check_inventory, read_inventory  # not for local runs
    from rlhpc.slurm.script import check_script

    draft = replace(config, trainer=replace(config.trainer, total_training_steps=1))
    try:
        plan = make_plan(draft, run_id=config.trainer.experiment_name, run_dir="run")
    except (ConfigError, PlanError):
        if needed:
            raise
        return []
    problems = check_script(config, plan)
    try:
        return problems + check_inventory(config, plan, read_inventory())
    except SubmitError as e:
        if needed:
            raise
        print(
            f"note: partitions were not checked: {str(e).splitlines()[0].rstrip(':')}",
            file=sys.stderr,
        )
        return problems


def _show_plan(config: RunConfig, plan: RunPlan) -> None:
    facts = model_facts_or_none(config)
    assert facts is not None, "checked"
    print(format_plan(config, plan, facts))
    for warning in find_warnings(config):
        print(f"\nwarning: {warning}")
    print(flush=True)


def _start_local(config: RunConfig, plan: RunPlan, *, dry_run: bool) -> int:
    from rlhpc.local import run_local  # not for Slurm runs

    if dry_run:
        print(f"Dry run: nothing was started.  Run folder: {plan.run_dir}")
        return 0
    point_latest(plan.path)
    print(f"run folder  {plan.run_dir}\nlogs        {plan.run_dir}/logs/latest/", flush=True)
    return 1 if run_local(config, plan) else 0


def _start_slurm(config: RunConfig, plan: RunPlan, arguments: argparse.Namespace) -> int:
    from rlhpc.slurm.executor import submit_run, write_job  # Submitit takes 0.1 s to import

    if arguments.dry_run:
        script = write_job(config, plan)
        print(f"Dry run: nothing was queued.  Look at {script}\nTo queue it: sbatch {script}")
        return 0
    job_id = submit_run(config, plan).job_id
    point_latest(plan.path)
    print(
        f"job {job_id} is queued\n"
        f"  run folder  {plan.run_dir}\n"
        f"  progress    tail -F {plan.run_dir}/console.log\n"
        f"  rank logs   {plan.run_dir}/logs/latest/\n"
        f"  state       squeue -j {job_id}\n"
        f"  cancel      scancel {job_id}",
        flush=True,
    )
    if not (arguments.wait or arguments.follow):
        return 0
    try:
        return _wait(plan, job_id, follow=arguments.follow)
    except KeyboardInterrupt:
        print(f"\nStopped waiting; job {job_id} goes on.  To end it: scancel {job_id}")
        return 130


def _wait(plan: RunPlan, job_id: str, *, follow: bool) -> int:
    """Wait for the job's end; only DONE in the run folder counts as success."""
    from rlhpc.slurm.state import ComponentState, merge_states, wait_for_job

    console = FileFollower(plan.path / "console.log")

    def show_states(states: list[ComponentState]) -> None:
        names = (str(s).removeprefix(f"{plan.run_id}.") for s in states)
        print(f"job {job_id}: {'; '.join(names)}", flush=True)

    def show_console() -> None:
        print(console.read_new(), end="", flush=True)

    states = wait_for_job(job_id, on_change=show_states, on_poll=show_console if follow else None)
    if is_done(plan.path):
        print(f"The run reached its target.  Results: {plan.run_dir}")
        return 0
    logs = plan.path / "logs"
    seen = f"the job ended as {merge_states(states)} (batch log {logs}/{job_id}_batch.out)"
    message = failure_message(plan.path, logs / job_id, otherwise=seen)
    print(f"The run failed.\n{message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
