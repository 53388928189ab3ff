"""Seeds that name a row by what it is, never by where or when it is sampled.  Torch-free.

A stable hash of small integers, the same in every process, Python version and parallelism.
"""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple


class Visit(NamedTuple):
    """One prompt at one pass over the data."""

    epoch: int
    prompt_index: int


def stable_hash(*values: int | str) -> int:
    """An int in [0, 2**63) that depends on ``values`` and their order only."""
    text = "\x1f".join(f"{type(v).__name__}:{v}" for v in values)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def row_seed(
    run_seed: int, epoch: int, prompt_index: int, sample_index: int, segment: int = 0
) -> int:
    """Sampling seed of one row, in [0, 2**63).

    Args:
        run_seed: `RunConfig.seed`.
        epoch: pass over the prompts, from 0.
        prompt_index: position of the prompt in its dataset.
        sample_index: position of the row in its group.
        segment: number of the continuation, for rows that are sampled in pieces.
    """
    return stable_hash("row", run_seed, epoch, prompt_index, sample_index, segment)


class PromptOrder:
    """The order in which prompts are visited, a pure function of the seed: no reader state."""

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool) -> None:
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self.order = functools.lru_cache(maxsize=2)(self._make_order)
        """`order(epoch)`: indices of all prompts in the order of that pass."""

    def _make_order(self, epoch: int) -> tuple[int, ...]:
        indices = range(self._num_prompts)
        if not self._shuffle:
            return tuple(indices)
        return tuple(sorted(indices, key=lambda i: stable_hash("order", self._seed, epoch, i)))

    def visits(self, step: int, batch_size: int) -> list[Visit]:
        """The prompts of 0-based ``step``; a batch may run over the end of a pass.

        Each pass visits every prompt once.
        """
        positions = range(step * batch_size, (step + 1) * batch_size)
        passes = [divmod(p, self._num_prompts) for p in positions]
        return [Visit(epoch, self.order(epoch)[place]) for epoch, place in passes]
