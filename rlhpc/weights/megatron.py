"""Weight parts of a Megatron rank: fused and padded parameters as boxes of checkpoint tensors.

The views are views of the parameters' storage, so that one list serves loading, sending and
receiving.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from rlhpc.layout import Box
from rlhpc.weights.base import WeightPart
from rlhpc.weights.names import Split, find_hf_names


@dataclass(frozen=True)
class MegatronLayout:
    """What the parameters alone do not tell."""

    architecture: str
    """Name in `architectures` of config.json."""
    tied: bool
    """`lm_head` is the embedding."""
    vocab_size: int
    """Without padding."""
    num_query_groups: int
    """Key-value heads of the whole model."""
    head_size: int
    """Elements of one head."""
    tp: int
    tp_rank: int
    first_layer: int
    """Index of this pipeline stage's first layer."""


def megatron_weight_parts(
    parameters: Iterable[tuple[str, Tensor]], layout: MegatronLayout
) -> list[WeightPart]:
    """Every parameter as boxes of checkpoint tensors, without vocabulary padding.

    A tied output layer (a copy of the embedding on the last pipeline stage) has no part: the engine
    refreshes it from the embedding.
    """
    parts: list[WeightPart] = []
    for name, parameter in parameters:
        if layout.tied and name == "output_layer.weight":
            continue
        hf_names, split = find_hf_names(layout.architecture, name, first_layer=layout.first_layer)
        parts += _SPLITTERS[split](hf_names, parameter.data, layout)
    return parts


def _part(name: str, view: Tensor, *, dim: int, start: int, full: int) -> WeightPart:
    """``view`` as the range of ``dim`` from ``start``, of ``full`` in the whole tensor."""
    shape = tuple(full if d == dim else size for d, size in enumerate(view.shape))
    box: Box = tuple(
        (start, start + size) if d == dim else (0, size) for d, size in enumerate(view.shape)
    )
    return WeightPart(name, shape, box, view)


def _replicated(names: tuple[str, ...], data: Tensor, _: MegatronLayout) -> list[WeightPart]:
    return [_part(names[0], data, dim=0, start=0, full=data.size(0))]


def _vocab(names: tuple[str, ...], data: Tensor, layout: MegatronLayout) -> list[WeightPart]:
    start = layout.tp_rank * data.size(0)
    rows = min(data.size(0), layout.vocab_size - start)
    if rows <= 0:
        return []
    return [_part(names[0], data[:rows], dim=0, start=start, full=layout.vocab_size)]


def _row(names: tuple[str, ...], data: Tensor, layout: MegatronLayout) -> list[WeightPart]:
    width = data.size(1)
    return [_part(names[0], data, dim=1, start=layout.tp_rank * width, full=layout.tp * width)]


def _qkv(names: tuple[str, ...], data: Tensor, layout: MegatronLayout) -> list[WeightPart]:
    groups = layout.num_query_groups // layout.tp
    kv = layout.head_size
    by_group = data.unflatten(0, (groups, -1))
    query = by_group.size(1) - 2 * kv
    parts = []
    for local, group in enumerate(by_group):
        index = layout.tp_rank * groups + local
        for name, view in zip(names, group.split([query, kv, kv]), strict=True):
            size = view.size(0)
            full = layout.num_query_groups * size
            parts.append(_part(name, view, dim=0, start=index * size, full=full))
    return parts


def _gate_up(names: tuple[str, ...], data: Tensor, layout: MegatronLayout) -> list[WeightPart]:
    size = data.size(0) // 2
    start, full = layout.tp_rank * size, layout.tp * size
    return [
        _part(name, view, dim=0, start=start, full=full)
        for name, view in zip(names, data.split(size), strict=True)
    ]


_SPLITTERS = {
    Split.replicated: _replicated,
    Split.vocab: _vocab,
    Split.row: _row,
    Split.qkv: _qkv,
    Split.gate_up: _gate_up,
}
