"""Rows laid end to end, without padding, and the store that keeps a rank's columns in host memory.

Shapes: N rows, T tokens of all rows (prompt + response each), laid end to end with offsets.
Entry t of a [T] column speaks of token t given what precedes it; entries outside the response are
undefined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhpc.dataflow import COLUMNS
from rlhpc.errors import CommandError


@dataclass
class Batch:
    """Some rows and their columns."""

    row_ids: list[int]
    """Global ids, one a row."""
    lengths: Tensor
    """[N] int64, tokens of each row (prompt + response)."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[N] or [T] by name; see `dataflow.COLUMNS`."""

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.lengths.sum())

    @property
    def offsets(self) -> Tensor:
        """[N + 1] int64, start of each row in the [T] columns."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def select(self, rows: Sequence[int]) -> Batch:
        """The rows at positions ``rows``, in that order."""
        index = torch.as_tensor(list(rows), dtype=torch.int64)
        starts, lengths = self.offsets[:-1][index], self.lengths[index]
        total = int(lengths.sum())
        first = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
        tokens = first + torch.arange(total)
        columns = {
            name: value[tokens] if COLUMNS[name].per_token else value[index]
            for name, value in self.columns.items()
        }
        return Batch([self.row_ids[r] for r in rows], lengths, columns)

    def token_rows(self) -> Tensor:
        """[T] int64, the position of each token's row."""
        positions = torch.arange(len(self), device=self.lengths.device)
        return torch.repeat_interleave(positions, self.lengths)

    def to(self, device: torch.device) -> Batch:
        """The same rows with lengths and columns on ``device``."""
        columns = {name: value.to(device) for name, value in self.columns.items()}
        return Batch(self.row_ids, self.lengths.to(device), columns)


def _dtype(column: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, COLUMNS[column].dtype)
    return dtype


def _packing(lengths: Tensor, columns: Iterable[str]) -> list[tuple[str, int]]:
    """(column, bytes) in packed order; wide dtypes first keeps each column aligned unpadded."""
    tokens = int(lengths.sum())
    return [
        (name, _dtype(name).itemsize * (tokens if COLUMNS[name].per_token else len(lengths)))
        for name in sorted(columns, key=lambda name: (-_dtype(name).itemsize, name))
    ]


def packed_bytes(lengths: Tensor, columns: Iterable[str]) -> int:
    """Size in bytes of `pack_columns` for rows with ``lengths`` ([N])."""
    return sum(nbytes for _, nbytes in _packing(lengths, columns))


def pack_columns(batch: Batch, columns: Iterable[str]) -> Tensor:
    """The named columns of ``batch`` in one [bytes] uint8 buffer; both ends know its layout."""
    parts = [batch.columns[name].contiguous() for name, _ in _packing(batch.lengths, columns)]
    return torch.cat([part.view(torch.uint8).flatten() for part in parts])


def unpack_columns(buffer: Tensor, lengths: Tensor, columns: Iterable[str]) -> dict[str, Tensor]:
    """Columns of rows with ``lengths`` ([N]) from a host buffer of `pack_columns`; views of it."""
    out, start = {}, 0
    for name, nbytes in _packing(lengths, columns):
        out[name] = buffer[start : start + nbytes].view(_dtype(name))
        start += nbytes
    return out


class ColumnStore:
    """Columns of the rows that this rank owns or has fetched; [T] columns as one tensor a row."""

    def __init__(self) -> None:
        self._columns: dict[str, dict[int, Tensor]] = {}

    def put(self, column: str, values: Mapping[int, Tensor]) -> None:
        """Keep ``values`` (row id -> [length] or scalar tensor)."""
        self._columns.setdefault(column, {}).update(values)

    def put_batch(self, batch: Batch, columns: Iterable[str]) -> None:
        """Keep the named columns of ``batch``."""
        for name in columns:
            value = batch.columns[name]
            parts = value.split(batch.lengths.tolist()) if COLUMNS[name].per_token else value
            self.put(name, dict(zip(batch.row_ids, parts, strict=True)))

    def get(self, column: str, row: int) -> Tensor:
        """One row of a column; raises CommandError when it is not here."""
        try:
            return self._columns[column][row]
        except KeyError:
            raise CommandError(f"column {column} of row {row} is not on this rank") from None

    def batch(self, rows: Sequence[int], columns: Iterable[str]) -> Batch:
        """The named columns of ``rows`` as one batch; lengths follow a [T] column."""
        found = {name: [self.get(name, row) for row in rows] for name in columns}
        lengths = torch.tensor(self.lengths(rows, found), dtype=torch.int64)
        out = Batch(list(rows), lengths)
        for name, values in found.items():
            if not values:
                out.columns[name] = torch.empty(0, dtype=_dtype(name))
            elif COLUMNS[name].per_token:
                out.columns[name] = torch.cat(values)
            else:
                out.columns[name] = torch.stack(values)
        return out

    def lengths(self, rows: Sequence[int], columns: Iterable[str]) -> list[int]:
        """Tokens of each row, by the first [T] column of ``columns`` or else `token_ids`."""
        measure = next((c for c in columns if COLUMNS[c].per_token), "token_ids")
        return [self.get(measure, row).numel() for row in rows]

    def release(self, rows: Iterable[int]) -> None:
        """Forget every column of ``rows``."""
        for row in rows:
            for column in list(self._columns.values()):
                column.pop(row, None)

    def __len__(self) -> int:
        return len({row for column in self._columns.values() for row in column})
