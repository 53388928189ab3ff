"""Who holds which part of a global tensor, and who sends what to whom.

Pure integers: no tensor, no network.  A box is a hyper-rectangle of a named tensor.  Two layouts
(rank -> parts) go in, transfers come out: each element that a rank needs has exactly one sender.
`comm.exchange` carries the plan out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from math import prod
from typing import NamedTuple

from rlhpc.errors import LayoutError

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) per dim; `()` is the box of a scalar."""

SPLIT_ELEMENTS = 4 << 20


class Part(NamedTuple):
    """A piece of a named global tensor."""

    name: str
    box: Box


Layout = Mapping[int, Sequence[Part]]
"""Rank -> its parts.  Replicas are equal boxes on several ranks."""


class Transfer(NamedTuple):
    """``box`` of tensor ``name`` goes from one rank's part to another's (maybe the same rank)."""

    source: int
    destination: int
    source_part: int
    """Index in ``layout[source]`` of the sending side."""
    destination_part: int
    """Index in ``layout[destination]`` of the receiving side."""
    name: str
    box: Box


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None when it is empty."""
    common = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start = a_start if a_start > b_start else b_start
        stop = a_stop if a_stop < b_stop else b_stop
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def box_size(box: Box) -> int:
    """Elements in ``box``; 1 for a scalar."""
    return prod(max(0, stop - start) for start, stop in box)


def relative_slices(box: Box, base: Box) -> tuple[slice, ...]:
    """``box`` as slices of a tensor that stores ``base``, which must contain it."""
    return tuple(
        slice(start - base_start, stop - base_start)
        for (start, stop), (base_start, _) in zip(box, base, strict=True)
    )


def split_box(box: Box, max_elements: int) -> list[Box]:
    """``box`` cut into slabs of at most ``max_elements`` elements, outermost dims first."""
    size = box_size(box)
    if size <= max_elements:
        return [box]
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    count = min(stop - start, -(-size // max_elements))
    cuts = [start + (stop - start) * i // count for i in range(count + 1)]
    slabs = [(*box[:dim], cut, *box[dim + 1 :]) for cut in pairwise(cuts)]
    return [piece for slab in slabs for piece in split_box(slab, max_elements)]


def plan_transfers(
    source: Layout,
    destination: Layout,
    *,
    itemsize: Mapping[str, int],
    node_of: Mapping[int, Hashable] | None = None,
    split_elements: int = SPLIT_ELEMENTS,
    rank: int | None = None,
) -> list[Transfer]:
    """Transfers that fill every part of ``destination``, sorted by (source, destination).

    A receiver takes what it holds itself from itself, else from replicas on its node, else from
    all replicas, with the bytes spread over them.  Every rank that plans from equal layouts gets
    an equal plan, so the transfers of a pair come in one order on both its ranks.

    Args:
        source: Parts to send; boxes of one tensor are equal or disjoint.
        destination: Parts to fill; they may overlap each other.
        itemsize: Bytes of one element, by tensor name.
        node_of: Rank -> its node; None when nodes do not matter.
        split_elements: Larger boxes are cut, so that replicas can share them.
        rank: Return only the transfers that this rank sends or receives.

    Raises:
        LayoutError: A destination part is not covered, or source boxes overlap but differ.
    """
    classes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Piece]] = defaultdict(list)
    sources, source_groups = _by_name(source)
    wanted, wanted_groups = _by_name(destination)
    for piece in _cut_pieces(sources, wanted, wanted_groups, itemsize, split_elements):
        classes[tuple(piece.senders), tuple(g for g, _ in piece.receivers)].append(piece)
    load: dict[int, int] = defaultdict(int)
    transfers: list[Transfer] = []
    # The heaviest class first: the light ones then even out what it left uneven.
    for (senders, receivers), pieces in sorted(
        classes.items(), key=lambda item: -sum(piece.nbytes for piece in item[1])
    ):
        group_of = {r: group for group in senders for r in source_groups[group]}
        bins: dict[int, list[tuple[int, list[_Piece]]]] = {}
        for slot, group in enumerate(receivers):
            for receiver in wanted_groups[group]:
                nearest = _nearest(group_of, receiver, node_of)
                if len(nearest) not in bins:
                    bins[len(nearest)] = _share(pieces, len(nearest), split_elements // 8)
                nearest.sort(key=lambda r: (load[r], r))
                for sender, (nbytes, share) in zip(nearest, bins[len(nearest)], strict=False):
                    load[sender] += nbytes if sender != receiver else 0
                    if rank is None or rank in (sender, receiver):
                        transfers += _bind(share, sender, group_of[sender], receiver, slot)
    transfers.sort(key=lambda t: (t.source, t.destination))
    return transfers


class _Piece(NamedTuple):
    """A box that each receiver takes whole from one of the senders."""

    nbytes: int
    name: str
    box: Box
    senders: dict[int, int]
    """Source group -> part index."""
    receivers: Sequence[tuple[int, int]]
    """(destination group, part index)."""


_Holders = dict[Box, list[tuple[int, int]]]
"""Box -> (group, part index) of its holders."""


def _by_name(layout: Layout) -> tuple[dict[str, _Holders], list[list[int]]]:
    """Holders of each box of each tensor, by group: the ranks whose parts are all equal."""
    groups: dict[tuple[Part, ...], list[int]] = defaultdict(list)
    for rank in sorted(layout):
        groups[tuple(layout[rank])].append(rank)
    by_name: dict[str, _Holders] = {}
    for group, parts in enumerate(groups):
        for index, (name, box) in enumerate(parts):
            by_name.setdefault(name, {}).setdefault(box, []).append((group, index))
    return by_name, list(groups.values())


def _cut_pieces(
    sources: Mapping[str, _Holders],
    wanted: Mapping[str, _Holders],
    wanted_groups: Sequence[Sequence[int]],
    itemsize: Mapping[str, int],
    split_elements: int,
) -> Iterator[_Piece]:
    """Every (source box, destination box) overlap, cut small; raises as `plan_transfers` does."""
    for name, boxes in wanted.items():
        holders = sources.get(name, {})
        index = _BoxIndex(name, list(holders))
        senders = {box: dict(reversed(held)) for box, held in holders.items()}
        for box, receivers in boxes.items():
            if any(len(b) != len(box) for b in holders):
                raise LayoutError(
                    f"tensor {name}: box {box} of rank {wanted_groups[receivers[0][0]][0]} and the "
                    f"source boxes {list(holders)} differ in their number of dims"
                )
            covered = 0
            for source_box in index.candidates(box):
                common = intersect(source_box, box)
                if common is None:
                    continue
                covered += box_size(common)
                for cut in split_box(common, split_elements):
                    nbytes = box_size(cut) * itemsize[name]
                    yield _Piece(nbytes, name, cut, senders[source_box], receivers)
            if covered != box_size(box):
                needy = wanted_groups[receivers[0][0]][0]
                raise LayoutError(
                    f"tensor {name}, box {box} of rank {needy}: {covered} of {box_size(box)} "
                    "elements have a sender, expected all; both engines must serve the same model"
                )


class _BoxIndex:
    """Disjoint boxes, found by overlap; cut along whichever dim separates them best."""

    def __init__(self, name: str, boxes: list[Box]) -> None:
        self._leaf = boxes
        self._children: list[_BoxIndex] = []
        if len(boxes) < 2:
            return
        if len({len(box) for box in boxes}) > 1:
            raise LayoutError(f"tensor {name}: source boxes {boxes} differ in their number of dims")
        runs, self._dim = max(
            ((_runs(boxes, dim), dim) for dim in range(len(boxes[0]))), key=lambda r: len(r[0])
        )
        if len(runs) == 1:
            for a, b in combinations(boxes, 2):
                if intersect(a, b):
                    raise LayoutError(
                        f"tensor {name}: source boxes {a} and {b} overlap; "
                        "expected equal (replicas) or disjoint boxes"
                    )
            return
        self._starts = [start for start, _, _ in runs]
        self._stops = [stop for _, stop, _ in runs]
        self._children = [_BoxIndex(name, members) for _, _, members in runs]

    def candidates(self, box: Box) -> Iterator[Box]:
        """The boxes that may overlap ``box``."""
        if not self._children:
            yield from self._leaf
            return
        start, stop = box[self._dim]
        for child in self._children[
            bisect_right(self._stops, start) : bisect_left(self._starts, stop)
        ]:
            yield from child.candidates(box)


def _runs(boxes: Sequence[Box], dim: int) -> list[tuple[int, int, list[Box]]]:
    """Boxes grouped so that groups do not meet along ``dim``: (start, stop, members), rising."""
    runs: list[tuple[int, int, list[Box]]] = []
    for box in sorted(boxes, key=lambda b: b[dim]):
        start, stop = box[dim]
        if runs and start < runs[-1][1]:
            first, last, members = runs[-1]
            members.append(box)
            runs[-1] = (first, max(last, stop), members)
        else:
            runs.append((start, stop, [box]))
    return runs


def _nearest(
    senders: Mapping[int, int], receiver: int, node_of: Mapping[int, Hashable] | None
) -> list[int]:
    """The senders that ``receiver`` should take from: itself, its node's, or all."""
    if receiver in senders:
        return [receiver]
    if node_of is not None:
        near = [s for s in senders if node_of[s] == node_of[receiver]]
        if near:
            return near
    return list(senders)


def _share(
    pieces: Sequence[_Piece], count: int, min_elements: int
) -> list[tuple[int, list[_Piece]]]:
    """``pieces`` dealt to bins of nearly equal bytes: (bytes, pieces), heaviest first.

    At most ``count`` bins, and fewer when they would hold less than ``min_elements`` each: a
    message more costs more than the balance of a few bytes is worth.
    """
    elements = sum(box_size(piece.box) for piece in pieces)
    count = min(count, len(pieces), -(-elements // max(1, min_elements)))
    bins: list[list[_Piece]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for piece in sorted(pieces, key=lambda p: -p.nbytes):
        nbytes, i = heap[0]
        bins[i].append(piece)
        heapq.heapreplace(heap, (nbytes + piece.nbytes, i))
    return [(nbytes, bins[i]) for nbytes, i in sorted(heap, key=lambda h: (-h[0], h[1]))]


def _bind(
    share: Sequence[_Piece], sender: int, group: int, receiver: int, slot: int
) -> Iterator[Transfer]:
    """Transfers of ``share`` between two ranks; ``slot`` is the receiver's place in the pieces."""
    for piece in share:
        yield Transfer(
            sender,
            receiver,
            piece.senders[group],
            piece.receivers[slot][1],
            piece.name,
            piece.box,
        )
