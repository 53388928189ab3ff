"""Which prompts form a mini-batch and which replica gets which row.

Pure functions; no rank is asked.

Mini-batches are whole prompts in seeded order, fixed before and independent of dp, so that the
maths does not change with the layout.  Rows of one mini-batch are spread over replicas by tokens.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from itertools import pairwise


def split_mini_batches(
    num_prompts: int, mini_batch_size: int, *, epochs: int, seed: int
) -> list[list[int]]:
    """Prompt positions of each optimizer update of one step, pass after pass.

    Args:
        num_prompts: prompts of the batch.
        mini_batch_size: prompts of one update; the last of a pass takes what is left.
        epochs: passes over the batch, each in a new order.
        seed: seed of the order.
    """
    updates = []
    rng = random.Random(seed)
    for _ in range(epochs):
        order = list(range(num_prompts))
        rng.shuffle(order)
        updates += [order[i : i + mini_batch_size] for i in range(0, num_prompts, mini_batch_size)]
    return updates


def balance(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Positions for each bin so that token sums are even: longest first, to the emptiest bin.

    Returns:
        ``num_bins`` lists of positions in ascending order; some are empty when there are fewer rows
        than bins.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, i) for i in range(num_bins)]
    for position in sorted(range(len(lengths)), key=lambda p: (-lengths[p], p)):
        load, i = heapq.heappop(heap)
        bins[i].append(position)
        heapq.heappush(heap, (load + lengths[position], i))
    return [sorted(b) for b in bins]


def spread_groups(num_groups: int, num_bins: int) -> list[list[int]]:
    """Groups for each bin, contiguous and as even as possible.

    Lengths are not known before sampling.
    """
    edges = [num_groups * i // num_bins for i in range(num_bins + 1)]
    return [list(range(a, b)) for a, b in pairwise(edges)]
