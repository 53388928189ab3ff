"""Placement, row table and first-cause rules of the controller."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlhpc.controller.placement import balance, split_mini_batches, spread_groups
from rlhpc.controller.rows import RowTable


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(0, 5))
def test_every_pass_visits_each_prompt_once(num_prompts, size, epochs, seed):
    updates = split_mini_batches(num_prompts, size, epochs=epochs, seed=seed)
    per_pass = -(-num_prompts // size)
    assert len(updates) == epochs * per_pass
    for e in range(epochs):
        seen = [p for u in updates[e * per_pass : (e + 1) * per_pass] for p in u]
        assert sorted(seen) == list(range(num_prompts))
    assert all(len(u) <= size for u in updates)


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 8))
def test_balanced_bins_hold_each_row_once_and_differ_by_one_row_at_most(lengths, num_bins):
    bins = balance(lengths, num_bins)
    assert sorted(p for b in bins for p in b) == list(range(len(lengths)))
    loads = [sum(lengths[p] for p in b) for b in bins]
    # Longest first to the emptiest bin: the fullest is above the emptiest by at most one row.
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(st.integers(0, 50), st.integers(1, 9))
def test_groups_are_spread_contiguously_and_evenly(num_groups, num_bins):
    bins = spread_groups(num_groups, num_bins)
    assert [g for b in bins for g in b] == list(range(num_groups))
    assert max(map(len, bins)) - min(map(len, bins)) <= 1


def make_rows():
    rows = RowTable(
        ids=[10, 11, 12, 13], prompts=[0, 0, 1, 1], prompt_indices=[5, 5, 7, 7], seeds=[1, 2, 3, 4]
    )
    rows.places = {"rollout": [4, 4, 5, 5], "actor": [0, 4, 0, 5], "reward": [4, 4, 5, 5]}
    return rows


def test_only_rows_on_another_rank_travel():
    moves = make_rows().moves("rollout", "actor", range(4))
    assert moves == {(4, 0): [0], (5, 0): [2]}
    assert make_rows().moves("rollout", "reward", range(4)) == {}


def test_values_are_set_by_row_id_and_lengths_follow():
    rows = make_rows()
    rows.set_values("length", [13, 10], [9, 4])
    rows.set_values("length", [11, 12], [5, 6])
    rows.set_values("prompt_length", [10, 11, 12, 13], [2, 2, 3, 3])
    assert rows.lengths == [4, 5, 6, 9]
    assert rows.response_lengths == [2, 3, 3, 6]
    assert rows.num_prompts == 2
