"""What the controller knows of a batch: ids, lengths, [N] columns and who holds which [T] column.

No token tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RowTable:
    """Rows of one pass through the stages, by position 0..N-1.

    Siblings of a prompt are neighbours.
    """

    ids: list[int]
    """[N] global row ids."""
    prompts: list[int]
    """[N] position of the row's prompt in the batch: siblings share it."""
    prompt_indices: list[int]
    """[N] index of the row's prompt in its data set."""
    seeds: list[int]
    """[N] row seeds."""
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """[N] columns; `length` is prompt + response in tokens."""
    writer: dict[str, str] = field(default_factory=dict)
    """[T] column -> role that wrote it."""
    places: dict[str, list[int]] = field(default_factory=dict)
    """Role -> [N] rank that holds the row's columns for that role."""
    copies: dict[str, set[str]] = field(default_factory=dict)
    """Role -> [T] columns that it has fetched."""

    def __len__(self) -> int:
        return len(self.ids)

    def __post_init__(self) -> None:
        self._position = {row: i for i, row in enumerate(self.ids)}

    @property
    def num_prompts(self) -> int:
        """Prompts of the batch."""
        return self.prompts[-1] + 1 if self.prompts else 0

    @property
    def lengths(self) -> list[int]:
        """[N] tokens of each row, prompt + response."""
        return self.columns["length"]

    @property
    def response_lengths(self) -> list[int]:
        """[N] sampled tokens of each row."""
        pairs = zip(self.lengths, self.columns["prompt_length"], strict=True)
        return [length - prompt for length, prompt in pairs]

    def positions_of(self, row_ids: Iterable[int]) -> list[int]:
        """Positions of the given row ids."""
        return [self._position[r] for r in row_ids]

    def set_values(self, column: str, row_ids: Sequence[int], values: Sequence[Any]) -> None:
        """Set an [N] column for some rows."""
        target = self.columns.setdefault(column, [None] * len(self))
        for position, value in zip(self.positions_of(row_ids), values, strict=True):
            target[position] = value

    def copies_at(self, role: str) -> set[str]:
        """[T] columns fetched to the places of ``role``, by it or by a role placed alike."""
        alike = (r for r in self.copies if self.places[r] == self.places[role])
        return {column for r in alike for column in self.copies[r]}

    def rows_by_place(self, role: str, positions: Iterable[int]) -> dict[int, list[int]]:
        """Rank -> positions, of the rows at ``positions`` as placed for ``role``."""
        out: dict[int, list[int]] = {}
        for p in positions:
            out.setdefault(self.places[role][p], []).append(p)
        return out

    def moves(
        self, source: str, destination: str, positions: Iterable[int]
    ) -> dict[tuple[int, int], list[int]]:
        """(source rank, destination rank) -> positions whose columns must travel.

        Same-rank rows need not.
        """
        out: dict[tuple[int, int], list[int]] = {}
        for p in positions:
            pair = self.places[source][p], self.places[destination][p]
            if pair[0] != pair[1]:
                out.setdefault(pair, []).append(p)
        return out
