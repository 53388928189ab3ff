"""data.packing: micro-batches under a budget, and columns that come back in place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.data.batch import Batch
from rlhpc.data.packing import pack_rows, pack_tokens
from rlhpc.errors import CommandError

LENGTHS = st.lists(st.integers(1, 32), max_size=40)


def _batch(rows: list[list[int]]) -> Batch:
    token_ids = torch.tensor([token for row in rows for token in row])
    lengths = torch.tensor([len(row) for row in rows])
    return Batch(list(range(len(rows))), lengths, {"token_ids": token_ids})


@given(LENGTHS, st.integers(1, 4))
def test_each_row_is_in_one_micro_batch_and_none_exceeds_the_budget(
    lengths: list[int], align: int
) -> None:
    micro_batches = pack_rows(lengths, max_tokens=35, align=align)
    assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths)))
    for rows in micro_batches:
        tokens = sum(lengths[row] for row in rows)
        assert tokens + -tokens % align <= 35


@given(LENGTHS)
def test_first_fit_leaves_at_most_one_micro_batch_half_empty(lengths: list[int]) -> None:
    fills = [sum(lengths[r] for r in rows) for rows in pack_rows(lengths, max_tokens=32)]
    assert sum(fill <= 16 for fill in fills) <= 1


def test_longest_rows_are_placed_first() -> None:
    assert pack_rows([2, 7, 3, 8], max_tokens=10) == [[0, 3], [1, 2]]


def test_a_row_over_the_budget_is_named() -> None:
    with pytest.raises(CommandError, match=r"row 1 has 12 tokens; expected at most 10 .*=10"):
        pack_rows([3, 12], max_tokens=10)


def test_alignment_lowers_the_budget() -> None:
    with pytest.raises(CommandError, match=r"row 0 has 9 tokens; expected at most 8"):
        pack_rows([9], max_tokens=9, align=4)


def test_filling_is_a_sequence_of_its_own() -> None:
    packed = pack_tokens(_batch([[5, 6, 7], [8, 9]]), align=4, device=torch.device("cpu"))
    assert packed.token_ids.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert packed.max_seqlen == 3
    assert packed.num_tokens == 5


def test_targets_are_the_next_tokens_and_come_back_at_their_own_place() -> None:
    packed = pack_tokens(_batch([[5, 6, 7], [8, 9], [4]]), align=4, device=torch.device("cpu"))
    column = packed.token_column(packed.targets.float())
    assert column.tolist() == [0, 6, 7, 0, 9, 0]


def test_gradients_flow_to_the_position_before_a_token_only() -> None:
    packed = pack_tokens(_batch([[5, 6, 7], [8, 9]]), align=1, device=torch.device("cpu"))
    values = torch.zeros(5, requires_grad=True)
    packed.token_column(values).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 0, 1, 0]
