"""Seeds that name a row by what it is, never by where or when it is sampled.  Torch-free.

A stable hash of small integers, the same in every process, Python version and parallelism.
"""

from __future__ import annotations

import hashlib


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
