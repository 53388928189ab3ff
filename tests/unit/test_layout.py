"""plan_transfers: every element arrives once, replicas share the work, near ones send."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.errors import LayoutError
from rlhpc.layout import (
    Box,
    Part,
    Transfer,
    box_size,
    intersect,
    plan_transfers,
    relative_slices,
    split_box,
)

SHAPES = {"embed": (48, 16), "mlp": (16, 40), "norm": (16,), "scale": ()}
ITEMSIZE = {"embed": 2, "mlp": 2, "norm": 4, "scale": 4}


def _grid(cuts: tuple[int, int], replicas: int, first_rank: int) -> dict[int, list[Part]]:
    """Ranks hold cells of a (rows x columns) grid of each tensor, ``replicas`` times over."""
    layout: dict[int, list[Part]] = {}
    for _ in range(replicas):
        for cell in range(cuts[0] * cuts[1]):
            at = (cell // cuts[1], cell % cuts[1])
            parts = []
            for name, shape in SHAPES.items():
                n = len(shape)
                box = tuple(
                    (s * a // c, s * (a + 1) // c)
                    for s, a, c in zip(shape, at[:n], cuts[:n], strict=True)
                )
                parts.append(Part(name, box))
            layout[first_rank + len(layout)] = parts
    return layout


def _cells(box: Box) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for start, stop in box:
        out = [(*c, i) for c in out for i in range(start, stop)]
    return out


def _sent(plan: Sequence[Transfer]) -> Counter[int]:
    sent: Counter[int] = Counter()
    for t in plan:
        sent[t.source] += box_size(t.box) * ITEMSIZE.get(t.name, 2) * (t.source != t.destination)
    return sent


_cuts = st.tuples(st.integers(1, 4), st.integers(1, 3))


@settings(max_examples=40, deadline=None)
@given(_cuts, st.integers(1, 3), _cuts, st.integers(1, 3), st.integers(0, 8), st.integers(1, 300))
def test_every_element_arrives_exactly_once_at_every_receiver(
    cuts, replicas, wanted_cuts, wanted_replicas, first_rank, split
):
    source = _grid(cuts, replicas, 0)
    wanted = _grid(wanted_cuts, wanted_replicas, first_rank)
    plan = plan_transfers(source, wanted, itemsize=ITEMSIZE, split_elements=split)
    got: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for t in plan:
        held, needed = source[t.source][t.source_part], wanted[t.destination][t.destination_part]
        assert t.name == held.name == needed.name
        assert intersect(held.box, t.box) == intersect(needed.box, t.box) == t.box
        assert box_size(t.box) <= split
        got.setdefault((t.destination, t.destination_part), []).extend(_cells(t.box))
    for rank, parts in wanted.items():
        for i, part in enumerate(parts):
            assert sorted(got.get((rank, i), [])) == _cells(part.box)


@settings(max_examples=20, deadline=None)
@given(_cuts, st.integers(1, 3), _cuts, st.integers(0, 8))
def test_a_ranks_own_plan_is_its_share_of_the_whole_plan(cuts, replicas, wanted_cuts, first_rank):
    source, wanted = _grid(cuts, replicas, 0), _grid(wanted_cuts, 2, first_rank)
    plan = plan_transfers(source, wanted, itemsize=ITEMSIZE)
    for rank in {*source, *wanted}:
        own = plan_transfers(source, wanted, itemsize=ITEMSIZE, rank=rank)
        assert own == [t for t in plan if rank in (t.source, t.destination)]


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("receivers", [1, 2, 5])
def test_replicas_share_the_sending(replicas, receivers):
    source = {r: [Part("w", ((0, 64), (0, 64)))] for r in range(replicas)}
    wanted = {100 + r: [Part("w", ((0, 64), (0, 64)))] for r in range(receivers)}
    plan = plan_transfers(source, wanted, itemsize={"w": 2}, split_elements=64)
    sent = _sent(plan)
    assert max(sent.values()) <= 1.05 * sum(sent.values()) / replicas


def test_light_tensors_even_out_what_a_lone_holder_must_send():
    source = {0: [Part("a", ((0, 100),)), Part("b", ((0, 100),))], 1: [Part("b", ((0, 100),))]}
    wanted = {r: [Part("a", ((0, 50),)), Part("b", ((0, 50),))] for r in (2, 3)}
    plan = plan_transfers(source, wanted, itemsize={"a": 2, "b": 2}, split_elements=1 << 20)
    assert _sent(plan) == {0: 200, 1: 200}


def test_a_rank_takes_what_it_holds_from_itself():
    source = _grid((4, 1), 2, 0)
    plan = plan_transfers(source, source, itemsize=ITEMSIZE)
    assert all(t.source == t.destination for t in plan)
    assert {t.destination for t in plan} == set(range(8))


def test_a_rank_takes_the_rest_from_its_node():
    source, wanted = _grid((2, 1), 2, 0), _grid((1, 1), 2, 4)
    node_of = {0: "a", 1: "a", 2: "b", 3: "b", 4: "a", 5: "b"}
    plan = plan_transfers(source, wanted, itemsize=ITEMSIZE, node_of=node_of)
    assert all(node_of[t.source] == node_of[t.destination] for t in plan)


def test_a_part_without_a_sender_is_named():
    source = {0: [Part("w", ((0, 4), (0, 8)))]}
    wanted = {3: [Part("w", ((2, 6), (0, 8)))]}
    with pytest.raises(
        LayoutError, match=r"tensor w, box \(\(2, 6\), \(0, 8\)\) of rank 3: 16 of 32"
    ):
        plan_transfers(source, wanted, itemsize={"w": 2})
    with pytest.raises(LayoutError, match=r"tensor v, box .* of rank 3: 0 of 4"):
        plan_transfers(source, {3: [Part("v", ((0, 4),))]}, itemsize={"v": 2})


def test_source_boxes_that_overlap_are_refused():
    source = {0: [Part("w", ((0, 5), (0, 8)))], 1: [Part("w", ((4, 8), (0, 8)))]}
    with pytest.raises(LayoutError, match=r"tensor w: source boxes .* overlap"):
        plan_transfers(source, {2: [Part("w", ((0, 8), (0, 8)))]}, itemsize={"w": 2})


def test_boxes_of_different_rank_are_refused():
    source = {0: [Part("w", ((0, 4), (0, 8)))]}
    with pytest.raises(LayoutError, match="differ in their number of dims"):
        plan_transfers(source, {1: [Part("w", ((0, 4),))]}, itemsize={"w": 2})


def test_a_box_is_split_into_equal_slabs_that_tile_it():
    box = ((3, 10), (5, 25), (0, 4))
    pieces = split_box(box, 30)
    assert max(map(box_size, pieces)) <= 30
    assert sorted(c for p in pieces for c in _cells(p)) == _cells(box)


def test_slices_are_relative_to_the_stored_box():
    assert relative_slices(((4, 6), (0, 3)), ((2, 8), (0, 3))) == (slice(2, 4), slice(0, 3))
    assert relative_slices((), ()) == ()
