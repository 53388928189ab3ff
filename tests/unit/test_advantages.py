import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.algorithms.advantages import (
    compute_grpo_advantages,
    group_statistics,
)

NAN = math.nan


def advantages(rewards, groups, **options):
    return compute_grpo_advantages(torch.tensor(rewards), torch.tensor(groups), **options)


def test_a_hand_computed_group():
    out = advantages([1.0, 0.0, 0.0, 1.0], [7, 7, 7, 7])
    # mean 1/2, unbiased variance 4 * 1/4 / 3 = 1/3
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert out.tolist() == pytest.approx([expected, -expected, -expected, expected], rel=1e-6)


def test_without_normalisation_only_the_mean_goes():
    assert advantages([3.0, 1.0, 5.0], [0, 0, 1], normalize=False).tolist() == [1.0, -1.0, 0.0]


def test_groups_need_not_be_contiguous():
    mixed = advantages([1.0, 10.0, 0.0, 30.0], [0, 1, 0, 1])
    apart = advantages([1.0, 0.0, 10.0, 30.0], [0, 0, 1, 1])
    assert torch.equal(mixed, apart[[0, 2, 1, 3]])


def test_equal_rewards_that_do_not_sum_exactly_give_exactly_zero():
    assert advantages([0.1] * 7, [0] * 7).tolist() == [0.0] * 7


def test_a_missing_reward_changes_nothing_for_its_group():
    out = advantages([1.0, NAN, 0.0, 1.0], [0] * 4)
    assert out[1] == 0
    assert torch.equal(out[[0, 2, 3]], advantages([1.0, 0.0, 1.0], [0] * 3))


def test_a_group_left_with_one_reward_or_none_gets_zero():
    assert advantages([5.0, NAN, NAN, NAN], [0, 0, 1, 1]).tolist() == [0.0] * 4


def test_statistics_count_groups_that_teach_nothing():
    rewards = torch.tensor([1.0, 0.0, 2.0, 2.0, 3.0, NAN, NAN, NAN])
    stats = group_statistics(rewards, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    assert stats == (4, 3, 3)


def test_no_rows_give_no_advantages():
    assert advantages([], torch.zeros(0, dtype=torch.int64).tolist()).shape == (0,)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"rewards has shape \(2,\) and groups \(1,\)"):
        advantages([1.0, 2.0], [0])


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-1e3, 1e3, width=32)), max_size=40))
def test_advantages_of_a_group_sum_to_zero_and_are_bounded(rows):
    groups = torch.tensor([g for g, _ in rows], dtype=torch.int64)
    rewards = torch.tensor([r for _, r in rows], dtype=torch.float64)
    out = compute_grpo_advantages(rewards, groups)
    for group in groups.unique():
        values = out[groups == group]
        assert abs(values.sum()) < 1e-6 * len(values)
        assert values.abs().max() <= (len(values) - 1) / math.sqrt(len(values)) + 1e-9
