"""The rank table of a run and plan.json."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhpc.config.engines import RoleKind
from rlhpc.config.placement import parse_slots
from rlhpc.config.schema import ComponentConfig, ModelConfig, RoleConfig, RunConfig, TrainerConfig
from rlhpc.errors import ConfigError, PlanError
from rlhpc.plan import RunPlan, compute_total_steps, make_plan, read_plan, write_plan
from rlhpc.plan_table import format_ranks
from tests.small_runs import make_model_folder, quickstart_config

KINDS = {RoleKind.actor: "megatron", RoleKind.rollout: "vllm", RoleKind.reference: "megatron"}


FEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def plans(draw: st.DrawFn) -> RunPlan:
    """Plans of one to three components, each with one role on some of its slots."""
    components, roles = {}, {}
    for i, kind in enumerate(draw(st.sets(st.sampled_from(list(KINDS)), min_size=1))):
        tp, pp, dp = (draw(st.integers(1, 3)) for _ in range(3))
        if kind is RoleKind.rollout:
            pp = 1
        nodes = draw(st.sampled_from([n for n in (1, 2, 3) if tp * pp * dp % n == 0]))
        used = tp * pp * dp // nodes
        gpus = used + draw(st.integers(0, 2))
        slots = draw(st.permutations(range(gpus)))[:used]
        components[f"c{i}"] = ComponentConfig(nodes=nodes, gpus_per_node=gpus)
        roles[kind.value] = RoleConfig(
            kind=kind,
            component=f"c{i}",
            engine=KINDS[kind],
            tp=tp,
            pp=pp,
            dp=draw(st.sampled_from([None, dp])),
            gpus=",".join(map(str, slots)),
        )
    trainer = TrainerConfig(total_training_steps=draw(st.integers(1, 9)))
    config = RunConfig(
        model=ModelConfig(path="m"), components=components, roles=roles, trainer=trainer
    )
    return make_plan(config, run_id="r", run_dir="/runs/r")


@given(plans())
@FEW
def test_every_rank_of_a_role_has_its_own_coordinates(plan: RunPlan) -> None:
    for role in plan.roles:
        assert len(set(role.ranks)) == len(role.ranks) == role.dp * role.tp * role.pp
        coordinates = {role.coordinates(r) for r in role.ranks}
        assert coordinates == {
            (d, t, p) for d in range(role.dp) for t in range(role.tp) for p in range(role.pp)
        }


@given(plans())
@FEW
def test_replicas_are_disjoint_and_cover_the_role(plan: RunPlan) -> None:
    for role in plan.roles:
        replicas = [role.replica_ranks(d) for d in range(role.dp)]
        assert sorted(r for replica in replicas for r in replica) == sorted(role.ranks)


@given(plans())
@FEW
def test_a_port_is_tp_0_of_the_last_stage_of_its_replica(plan: RunPlan) -> None:
    for role in plan.roles:
        for d in range(role.dp):
            assert role.coordinates(role.port(d)) == (d, 0, role.pp - 1)
            assert role.port(d) in role.replica_ranks(d)


@given(plans())
@FEW
def test_components_are_blocks_of_ranks_and_hold_their_roles(plan: RunPlan) -> None:
    assert [r for c in plan.components for r in c.ranks] == list(range(plan.num_ranks))
    for role in plan.roles:
        assert {plan.component_of(r).name for r in role.ranks} == {role.component}


@given(plan=plans())
@FEW
def test_plan_json_gives_the_same_plan_back(tmp_path: Path, plan: RunPlan) -> None:
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_a_plan_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"run_id": "x", "ranks": 3}')
    with pytest.raises(PlanError, match=r"not a plan of this version.*submit again"):
        read_plan(tmp_path / "plan.json")


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"plan .*plan\.json cannot be read"):
        read_plan(tmp_path / "plan.json")


def test_the_mesh_puts_tp_first_then_dp_then_pp() -> None:
    component = ComponentConfig(nodes=2, gpus_per_node=4)
    role = RoleConfig(kind=RoleKind.actor, component="c", engine="megatron", tp=2, pp=2)
    config = RunConfig(
        model=ModelConfig(path="m"),
        components={"cpu": ComponentConfig(tasks_per_node=3), "c": component},
        roles={"actor": role},
        trainer=TrainerConfig(total_training_steps=1),
    )
    actor = make_plan(config, run_id="r", run_dir="r").role("actor")
    assert actor.ranks == tuple(range(3, 11))
    assert actor.dp == 2
    assert actor.replica_ranks(1) == (5, 6, 9, 10)
    assert actor.coordinates(8) == (0, 1, 1)


@pytest.mark.parametrize(
    ("text", "slots"), [("0-1", (0, 1)), ("0,2", (0, 2)), ("0-1,4", (0, 1, 4)), ("3", (3,))]
)
def test_slots_are_read(text: str, slots: tuple[int, ...]) -> None:
    assert parse_slots(text) == slots


@pytest.mark.parametrize("text", ["", "a", "1-", "2-1", "0 1", "-1", "0,,1"])
def test_malformed_slots_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"are malformed; write them like 0-1"):
        parse_slots(text)


def test_a_slot_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'0-2,1' name a slot twice"):
        parse_slots("0-2,1")


def test_steps_follow_from_epochs_and_prompts(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n\n' * 70)
    words = ["trainer.total_training_steps=null", "trainer.total_epochs=3"]
    config = quickstart_config(folder, [*words, "data.train_batch_size=32"])
    assert compute_total_steps(config) == 3 * (70 // 32)
    config.trainer.total_training_steps = 5
    assert compute_total_steps(config) == 5


def test_parquet_rows_are_counted_from_the_footer(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    folder = make_model_folder(tmp_path)
    pq.write_table(pa.table({"prompt": ["x"] * 65}), folder / "a.parquet")
    words = ["trainer.total_training_steps=null", f"data.train_files={folder}/a.parquet"]
    config = quickstart_config(folder, [*words, "data.train_batch_size=32"])
    assert compute_total_steps(config) == 2


def test_fewer_prompts_than_a_batch_are_refused(tmp_path: Path) -> None:
    words = ["trainer.total_training_steps=null", "data.train_batch_size=129"]
    config = quickstart_config(make_model_folder(tmp_path), words)
    with pytest.raises(
        ConfigError, match=r"train_batch_size=129 with 128 prompts .* gives no step"
    ):
        compute_total_steps(config)


def test_ranks_are_shown_in_runs() -> None:
    assert format_ranks((5, 0, 1, 2, 7, 8)) == "0-2,5,7-8"
