"""Batches of rows and the column store."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.data.batch import Batch, ColumnStore, pack_columns, packed_bytes, unpack_columns
from rlhpc.errors import CommandError

COLUMNS = ("loss_mask", "token_ids", "advantages", "policy_version", "truncated")


def make_batch(lengths):
    total = sum(lengths)
    columns = {
        "token_ids": torch.arange(total),
        "loss_mask": torch.arange(total) % 3 == 0,
        "policy_version": torch.arange(total, dtype=torch.int32) * 7,
        "advantages": torch.arange(len(lengths), dtype=torch.float32) / 3,
        "truncated": torch.arange(len(lengths)) % 2 == 0,
    }
    return Batch(list(range(100, 100 + len(lengths))), torch.tensor(lengths), columns)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_packed_columns_come_back_whatever_the_lengths(lengths):
    batch = make_batch(lengths)
    packed = pack_columns(batch, COLUMNS)
    assert packed.numel() == packed_bytes(batch.lengths, COLUMNS)
    out = unpack_columns(packed, batch.lengths, reversed(COLUMNS))
    for name in COLUMNS:
        assert torch.equal(out[name], batch.columns[name])
        assert out[name].dtype == batch.columns[name].dtype


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms())
def test_selected_rows_keep_their_tokens(lengths, rng):
    batch = make_batch(lengths)
    rows = rng.choices(range(len(lengths)), k=5)
    chosen = batch.select(rows)
    parts = batch.columns["token_ids"].split(lengths)
    assert torch.equal(chosen.columns["token_ids"], torch.cat([parts[r] for r in rows]))
    assert chosen.row_ids == [100 + r for r in rows]
    assert torch.equal(chosen.columns["advantages"], batch.columns["advantages"][rows])


def test_the_store_gives_back_what_was_put_until_it_is_released():
    store, batch = ColumnStore(), make_batch([3, 1, 4])
    store.put_batch(batch, COLUMNS)
    out = store.batch([102, 100], COLUMNS)
    assert torch.equal(out.columns["token_ids"], torch.tensor([4, 5, 6, 7, 0, 1, 2]))
    assert out.lengths.tolist() == [4, 3]
    store.release([100, 101])
    assert len(store) == 1
    with pytest.raises(CommandError, match="column token_ids of row 100 is not on this rank"):
        store.get("token_ids", 100)


def test_a_batch_of_no_rows_has_empty_columns():
    out = ColumnStore().batch([], ("token_ids", "advantages"))
    assert len(out) == 0
    assert out.num_tokens == 0
    assert out.columns["token_ids"].dtype == torch.int64
