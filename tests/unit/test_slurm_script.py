from __future__ import annotations

import pytest

from rlhpc.errors import ConfigError
from rlhpc.slurm.script import check_script, component_options, option_words, render_job_script
from tests.jobs import plan_of, three_components


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("nodes", 3, r"nodes: 3 contradicts the plan.*Set components.actor.nodes"),
        ("ntasks_per_node", 3, r"contradicts the plan.*Set components.actor.tasks_per_node"),
        ("array", "0-3", "array: 0-3 is refused.*no arrays"),
        ("requeue", True, "requeue: True is refused.*half pending"),
    ],
)
def test_options_that_break_the_plan_are_refused(option: str, value: object, message: str) -> None:
    config = three_components()
    config.components["actor"].sbatch = {option: value}
    with pytest.raises(ConfigError, match=message):
        render_job_script(config, plan_of(config, "/runs/x"), command=["true"])


def test_options_are_added_replaced_and_removed() -> None:
    config = three_components()
    plan = plan_of(config, "/runs/x")
    config.components["rollout"].sbatch = {
        "gres": None,
        "gpus_per_node": "h100:1",
        "ntasks-per-node": None,
        "hold": True,
        "exclusive": False,
        "nice": 0,
    }
    words = option_words(component_options(config, plan, plan.components[1]))
    assert not [w for w in words if w.startswith(("--gres", "--ntasks-per", "--exclusive"))]
    assert {"--gpus-per-node=h100:1", "--hold", "--nice=0", "--ntasks=2"} <= set(words)


def test_memory_of_the_first_component_is_not_carried_over_silently() -> None:
    config = three_components()
    config.components["actor"].mem = "200G"
    config.components["rollout"].mem = "10G"
    (problem,) = check_script(config, plan_of(config, "/runs/x"))
    assert problem.key == "components.reference.mem"
    assert "200G" in problem.what


def test_the_word_that_separates_components_is_refused_elsewhere() -> None:
    config = three_components()
    with pytest.raises(ConfigError, match=r"'hetjob', which sbatch takes for a directive"):
        render_job_script(config, plan_of(config, "/runs/my-hetjob"), command=["true"])


def test_names_that_no_shell_exports_are_refused() -> None:
    config = three_components()
    config.cluster.environment = {"A B": "1"}
    config.components["actor"].environment = {"2X": "1"}
    keys = [p.key for p in check_script(config, plan_of(config, "/runs/x"))]
    assert keys == ["components.actor.environment", "cluster.environment"]


def test_a_percent_sign_in_the_run_folder_is_kept() -> None:
    config = three_components()
    text = render_job_script(config, plan_of(config, "/runs/100%"), command=["true"])
    assert "--output=/runs/100%%/logs/%j_batch.out" in text.replace("'", "")
    assert "run_dir=/runs/100%\n" in text
