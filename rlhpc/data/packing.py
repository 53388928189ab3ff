"""Rows -> micro-batches of packed tokens under a token budget.  No padding between rows.

Shapes: R rows and T tokens of one micro-batch, S >= T tokens after alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rlhpc.data.batch import Batch
from rlhpc.errors import CommandError


def pack_rows(lengths: Sequence[int], *, max_tokens: int, align: int = 1) -> list[list[int]]:
    """Row positions of each micro-batch: first-fit decreasing, a function of ``lengths`` alone.

    Args:
        lengths: tokens of each row.
        max_tokens: no micro-batch has more, alignment included.
        align: a micro-batch is later filled up to a multiple of this.

    Raises:
        CommandError: a row does not fit into a micro-batch of its own.
    """
    capacity = max_tokens // align * align
    bins: list[list[int]] = []
    free: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        length = lengths[row]
        if length > capacity:
            raise CommandError(
                f"row {row} has {length} tokens; expected at most {capacity} "
                f"(max_tokens_per_micro_batch={max_tokens}, in multiples of tp={align}). "
                "Raise roles.<role>.options.max_tokens_per_micro_batch to the longest "
                "prompt plus response"
            )
        for i, space in enumerate(free):
            if length <= space:
                bins[i].append(row)
                free[i] -= length
                break
        else:
            bins.append([row])
            free.append(capacity - length)
    return [sorted(rows) for rows in bins]


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of some rows laid end to end, filled up to a multiple of the alignment."""

    token_ids: Tensor
    """[S] int64; the filling is token 0, as one sequence more."""
    targets: Tensor
    """[S] int64, the next token; at the last token of a row it is not a target."""
    cu_seqlens: Tensor
    """[R + 1] or, with filling, [R + 2] int32, start of each sequence and S."""
    max_seqlen: int
    """Tokens of the longest sequence."""
    row_starts: Tensor
    """[R] int64, start of each row."""
    num_tokens: int
    """T."""

    def token_column(self, next_token: Tensor) -> Tensor:
        """[S] values for the next token -> [T] for each token given its past; 0 opens a row."""
        shifted = torch.cat([next_token.new_zeros(1), next_token[: self.num_tokens - 1]])
        starts = torch.zeros_like(shifted, dtype=torch.bool)
        starts[self.row_starts] = True
        return shifted.masked_fill(starts, 0.0)


def pack_tokens(batch: Batch, *, align: int, device: torch.device) -> PackedTokens:
    """`token_ids` of ``batch`` (at least one) for one forward pass on ``device``."""
    token_ids = batch.columns["token_ids"]
    num_tokens = token_ids.numel()
    filling = -num_tokens % align
    if filling:
        token_ids = torch.cat([token_ids, token_ids.new_zeros(filling)])
    ends = batch.offsets.tolist() + ([num_tokens + filling] if filling else [])
    token_ids = token_ids.to(device)
    return PackedTokens(
        token_ids=token_ids,
        targets=token_ids.roll(-1),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
        max_seqlen=max(stop - start for start, stop in pairwise(ends)),
        row_starts=batch.offsets[:-1].to(device),
        num_tokens=num_tokens,
    )
