from __future__ import annotations

import pytest

from rlhpc.config.schema import ComponentConfig
from rlhpc.slurm.inventory import check_inventory, format_time, parse_inventory, parse_time
from tests.jobs import make_config, plan_of

NODES = """\
big|a1|64|512000|gpu:a100:4(S:0-1)|a100,80gb|idle
big|a2|64|512000|gpu:a100:4(S:0-1)|a100|drained*
small|a2|64|512000|gpu:a100:4(S:0-1)|a100|drained*
small|s1|16+|64000+|gpu:2,nvme:1|(null)|mixed
"""
PARTITIONS = """\
PartitionName=big AllowGroups=ALL Default=NO MaxNodes=UNLIMITED MaxTime=2-00:00:00 State=UP
PartitionName=small Default=YES MaxNodes=1 MaxTime=UNLIMITED State=UP TotalNodes=2
PartitionName=empty Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP
"""


def problems_of(first: ComponentConfig, second: ComponentConfig | None = None) -> list[str]:
    components = {"one": first} | ({"two": second} if second else {})
    roles = {"actor": ("one", None)} | ({"rollout": ("two", None)} if second else {})
    config = make_config(components, roles)
    inventory = parse_inventory(nodes=NODES, partitions=PARTITIONS)
    return [str(p) for p in check_inventory(config, plan_of(config, "/runs/x"), inventory)]


def test_nodes_and_partitions_are_read() -> None:
    inventory = parse_inventory(nodes=NODES, partitions=PARTITIONS)
    small = inventory.partition(None)
    assert small is not None
    assert (small.name, small.max_nodes, small.max_time_s) == ("small", 1, None)
    node = small.nodes[1]
    assert (node.name, node.cpus, node.mem_mb, node.gpus) == ("s1", 16, 64000, (("", 2),))
    assert node.features == frozenset()
    assert inventory.partition("big").max_time_s == 172800  # type: ignore[union-attr]
    assert inventory.partition("none") is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("01:30:00", 5400),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("1-00:00:01", 86401),
        ("UNLIMITED", None),
    ],
)
def test_times_in_slurms_ways(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds
    if seconds is not None and "-" in text:
        assert parse_time(format_time(seconds)) == seconds


def test_a_time_that_is_none_is_a_problem_of_its_key() -> None:
    (problem,) = problems_of(ComponentConfig(tasks_per_node=1, time="2 hours"))
    assert problem.startswith("components.one.time: '2 hours' is no Slurm time")


def test_overlapping_partitions_share_their_nodes() -> None:
    whole = ComponentConfig(partition="big", nodes=2, gpus_per_node=4)
    part = ComponentConfig(partition="small", gpus_per_node=4)
    assert problems_of(whole) == []
    assert problems_of(part) == []
    (problem,) = problems_of(whole, part)
    assert "components one, two need 3 different nodes together and 2 fit" in problem
    assert problems_of(whole, ComponentConfig(partition="small", gpus_per_node=2)) == []


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (ComponentConfig(partition="bog", tasks_per_node=1), "Set components.one.partition=big"),
        (ComponentConfig(partition="empty", tasks_per_node=1), "partition empty has no nodes"),
        (ComponentConfig(nodes=2, tasks_per_node=1), "at most 1 in one job"),
        (ComponentConfig(partition="big", nodes=2, gpus_per_node=1, constraint="80gb"), "the 1 of"),
        (ComponentConfig(gpus_per_node=1, gpu_type="h100"), "'h100' is not on"),
        (ComponentConfig(tasks_per_node=4, cpus_per_task=17), "at most 16, since"),
        (ComponentConfig(tasks_per_node=1, mem="600G"), "at most 512000M"),
        (ComponentConfig(tasks_per_node=1, mem="lots"), "no amount of memory"),
    ],
)
def test_what_no_node_has_is_told_with_its_key(component: ComponentConfig, message: str) -> None:
    (problem,) = problems_of(component)
    assert problem.startswith("components.one.")
    assert message in problem


def test_alternatives_of_a_constraint_are_understood_and_brackets_left_to_slurm() -> None:
    either = ComponentConfig(partition="big", nodes=2, gpus_per_node=1, constraint="80gb|a100")
    bracket = ComponentConfig(partition="big", gpus_per_node=1, constraint="[rack1|rack2]")
    assert problems_of(either) == []
    assert problems_of(bracket) == []
