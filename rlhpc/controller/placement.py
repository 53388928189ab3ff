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

from rlhpc.dataflow import COLUMNS, Stage
from rlhpc.plan import RolePlan, RunPlan


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


def ports_of(role: RolePlan) -> tuple[int, ...]:
    """The port of each replica of ``role``."""
    return tuple(role.port(d) for d in range(role.dp))


def rows_stay(source: RolePlan, reader: RolePlan) -> bool:
    """Whether every row that ``source`` wrote is already where ``reader`` will read it.

    A reward is computed where a row was sampled, if a reward rank lives there.  Training engines
    place rows by one rule, so equal ports mean equal places; a rollout's rows are placed anew.
    """
    mine, theirs = ports_of(source), ports_of(reader)
    if reader.kind == "reward":
        return set(mine) <= set(theirs)
    return mine == theirs and (source.kind != "rollout" or len(mine) == 1)


def row_bridges(plan: RunPlan, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Bridges that rows cross: `writer->reader` -> ports of both, in stage order."""
    bridges: dict[str, tuple[int, ...]] = {}
    writers: dict[str, RolePlan] = {}
    for stage in stages:
        role = plan.role_of_kind(stage.role)
        if role is None:
            continue
        for source in (writers[c] for c in stage.reads if COLUMNS[c].per_token):
            if source.name != role.name and not rows_stay(source, role):
                ranks = dict.fromkeys((*ports_of(source), *ports_of(role)))
                bridges[f"{source.name}->{role.name}"] = tuple(ranks)
        writers.update(dict.fromkeys(stage.writes, role))
    return bridges
