"""Stage lists: what each algorithm reads and writes, and what is refused."""

from __future__ import annotations

import pytest

from rlhpc.dataflow import (
    Stage,
    check_stages,
    evaluation_stages,
    grpo_stages,
    make_stages,
    sft_stages,
)
from rlhpc.errors import ConfigError

KINDS = ("actor", "rollout", "reward", "reference")


def own_stages(*, use_reference: bool) -> list[Stage]:
    return list(sft_stages()) if not use_reference else []


@pytest.mark.parametrize(
    "stages",
    [grpo_stages(use_reference=False), grpo_stages(use_reference=True), sft_stages()],
)
def test_built_in_algorithms_are_consistent(stages: tuple[Stage, ...]) -> None:
    check_stages(stages, KINDS)


def test_evaluation_writes_rewards() -> None:
    check_stages(evaluation_stages(), ("rollout", "reward"))
    assert evaluation_stages()[-1].writes == ("rewards",)


def test_a_reference_is_read_only_where_it_is_used() -> None:
    for use in (True, False):
        update = next(s for s in grpo_stages(use_reference=use) if s.name == "update")
        assert ("ref_logprobs" in update.reads) is use


def test_a_missing_role_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"stage generate needs a role of kind rollout; .*add one"
    ):
        check_stages(grpo_stages(use_reference=False), ("actor", "reward"))


def test_a_column_that_nothing_wrote_is_refused() -> None:
    stage = Stage("update", "actor", "update", reads=("advantages",))
    with pytest.raises(
        ConfigError, match=r"update reads advantages, which no earlier stage writes"
    ):
        check_stages([stage], KINDS)


def test_a_column_written_twice_is_refused() -> None:
    score = Stage("score", "reward", "score", writes=("rewards",))
    again = Stage("again", "reward", "score", writes=("rewards",))
    with pytest.raises(ConfigError, match=r"again writes rewards, .*stage score already"):
        check_stages([score, again], KINDS)


def test_an_unknown_column_is_refused() -> None:
    stage = Stage("score", "reward", "score", writes=("scores",))
    with pytest.raises(ConfigError, match=r"column 'scores'.* \['advantages'"):
        check_stages([stage], KINDS)


def test_an_algorithm_of_ones_own_is_named_by_its_path() -> None:
    assert make_stages(f"{__name__}.own_stages", use_reference=False) == sft_stages()


@pytest.mark.parametrize("name", ["gpro", "no.such.stages", f"{__name__}.missing"])
def test_an_unknown_algorithm_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is neither grpo nor sft nor .*importable"):
        make_stages(name, use_reference=False)


def test_a_function_that_returns_no_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected rlhpc\.dataflow\.Stage objects"):
        make_stages(f"{__name__}.own_stages", use_reference=True)
