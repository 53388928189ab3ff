"""What Slurm refuses, or lets pend for ever, is found before; nothing stays in the queue."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.errors import SubmitError
from rlhpc.slurm.executor import submit_run
from rlhpc.slurm.inventory import check_inventory, read_inventory
from rlhpc.slurm.state import GONE, job_states
from tests.jobs import plan_of, three_components

pytestmark = pytest.mark.slurm


def queue() -> str:
    return subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout


def problems_of(config: RunConfig) -> list[str]:
    return [str(p) for p in check_inventory(config, plan_of(config, "/runs/x"), read_inventory())]


def test_a_plan_that_fits_has_no_problems() -> None:
    assert problems_of(three_components()) == []


def test_the_inventory_is_the_clusters() -> None:
    inventory = read_inventory()
    assert [p.name for p in inventory.partitions] == ["a100", "h100"]
    a100 = inventory.partition(None)
    assert a100 is not None
    assert (a100.name, a100.state, a100.max_time_s, a100.max_nodes) == ("a100", "UP", 86400, None)
    assert [n.name for n in a100.nodes] == ["n1", "n2"]
    assert a100.nodes[0].gpus == (("a100", 4),)
    assert (a100.nodes[0].cpus, a100.nodes[0].mem_mb) == (32, 128000)
    assert a100.nodes[0].features == {"a100"}


REFUSED: dict[str, tuple[Callable[[RunConfig], None], str]] = {
    "partition": (
        lambda c: setattr(c.components["rollout"], "partition", "h10"),
        r"components.rollout.partition: no partition 'h10'.*partition=h100",
    ),
    "gpus": (
        lambda c: setattr(c.components["actor"], "gpus_per_node", 5),
        r"components.actor.gpus_per_node: 5 of each node; expected at most 4",
    ),
    "type": (
        lambda c: setattr(c.components["reference"], "gpu_type", "v100"),
        r"components.reference.gpu_type: 'v100' .* expected one of \['a100'\]",
    ),
    "cpus": (
        lambda c: setattr(c.components["actor"], "cpus_per_task", 17),
        r"components.actor.cpus_per_task: 17 for each of 2 ranks.*at most 16",
    ),
    "mem": (
        lambda c: [setattr(x, "mem", "1T") for x in c.components.values()],
        r"components.actor.mem: 1T of each node; expected at most 128000M",
    ),
    "constraint": (
        lambda c: setattr(c.components["rollout"], "constraint", "h100&80gb"),
        r"components.rollout.constraint: 'h100&80gb' .* features of \['h100'\]",
    ),
}
PENDS: dict[str, tuple[Callable[[RunConfig], None], str]] = {
    "nodes": (
        lambda c: setattr(c.components["rollout"], "nodes", 3),
        r"components.rollout.nodes: 3 nodes; expected at most the 2",
    ),
    "sum": (
        lambda c: setattr(c.components["actor"], "nodes", 2),
        r"components actor, reference need 3 different nodes together and 2 fit",
    ),
    "time": (
        lambda c: setattr(c.components["actor"], "time", "1-00:00:01"),
        r"components.actor.time: 1-00:00:01 is over .* expected at most 1-00:00:00",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_sbatch_and_the_inventory_refuse_the_same(kind: str, tmp_path: Path) -> None:
    spoil, message = REFUSED[kind]
    config = three_components()
    spoil(config)
    assert any(re.search(message, p) for p in problems_of(config)), problems_of(config)
    with pytest.raises(SubmitError, match=r"nothing was queued(.|\n)*components\.\w+: \w+"):
        submit_run(config, plan_of(config, tmp_path), command=[sys.executable])
    assert queue() == ""


@pytest.mark.parametrize("kind", PENDS)
def test_what_would_pend_for_ever_is_found_in_the_inventory(kind: str) -> None:
    spoil, message = PENDS[kind]
    config = three_components()
    spoil(config)
    assert any(re.search(message, p) for p in problems_of(config)), problems_of(config)


def test_a_partition_that_is_down_is_told() -> None:
    subprocess.run(["scontrol", "update", "partition=h100", "state=down"], check=True)
    try:
        assert re.search(
            r"components.rollout.partition: partition h100 is DOWN.*UP: \['a100'\]",
            problems_of(three_components())[0],
        )
    finally:
        subprocess.run(["scontrol", "update", "partition=h100", "state=up"], check=True)


def test_a_refusal_names_its_component_and_leaves_nothing(tmp_path: Path) -> None:
    config = three_components()
    config.components["rollout"].sbatch = {"licenses": "no-such:1"}
    with pytest.raises(SubmitError, match=r"components\.rollout: .*Invalid license specification"):
        submit_run(config, plan_of(config, tmp_path), command=[sys.executable])
    assert queue() == ""
    assert not (tmp_path / "job.sbatch").exists()


def test_a_job_that_slurm_forgot_is_gone_and_not_unknown_for_ever() -> None:
    (state,) = job_states("99999999")
    assert (state.state, state.is_final) == (GONE, True)
