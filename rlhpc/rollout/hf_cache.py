"""KV cache of the `hf` engine: prefill, join, shrink; it knows neither requests nor sampling.

Shapes: B rows, S columns.  Sequences are aligned to the right: with C columns, a row of n tokens
fills the last n, so the mask follows from the lengths and two caches join by padding the shorter
one on its left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache

PREFILL_TOKENS = 16384
"""Padded tokens of one prefill pass; bounds its activations, not what can be prefilled."""


def right_aligned_mask(lengths: Tensor, columns: int) -> Tensor:
    """[B, columns] int64, 1 where a row of ``lengths`` [B] tokens has a token."""
    index = torch.arange(columns, device=lengths.device)
    return (index[None, :] >= columns - lengths[:, None]).long()


def prefill(model: nn.Module, sequences: Sequence[tuple[int, ...]]) -> DynamicCache:
    """Cache of ``sequences`` (one a row, may be empty); equal sequences are computed once."""
    unique = {sequence: i for i, sequence in enumerate(dict.fromkeys(sequences))}
    cache: DynamicCache | None = None
    for chunk in _chunks(list(unique)):
        part = _prefill_chunk(model, chunk)
        cache = part if cache is None else join(cache, part)
    assert cache is not None, "prefill of no rows"
    if len(unique) < len(sequences):
        shrink(cache, [unique[s] for s in sequences], max(map(len, sequences)))
    return cache


def join(first: DynamicCache, second: DynamicCache) -> DynamicCache:
    """One cache with the rows of both, in that order."""
    columns = max(first.get_seq_length(), second.get_seq_length())
    for a, b in zip(first.layers, second.layers, strict=True):
        a.keys = torch.cat([_pad_left(a.keys, columns), _pad_left(b.keys, columns)])
        a.values = torch.cat([_pad_left(a.values, columns), _pad_left(b.values, columns)])
    return first


def shrink(cache: DynamicCache, rows: Sequence[int], longest: int) -> None:
    """Keep ``rows`` in that order, and no more columns than the ``longest`` of them needs."""
    columns = max(1, longest)
    for layer in cache.layers:
        index = torch.tensor(rows, device=layer.keys.device)
        layer.keys = layer.keys[:, :, -columns:].index_select(0, index)
        layer.values = layer.values[:, :, -columns:].index_select(0, index)


def _chunks(sequences: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    chunks: list[list[tuple[int, ...]]] = []
    longest = 0
    for sequence in sequences:
        longest = max(longest, len(sequence))
        if not chunks or longest * (len(chunks[-1]) + 1) > PREFILL_TOKENS:
            chunks.append([])
            longest = len(sequence)
        chunks[-1].append(sequence)
    return chunks


def _prefill_chunk(model: nn.Module, sequences: Sequence[tuple[int, ...]]) -> DynamicCache:
    # One column at least: a cache without columns has no shape to join.
    columns = max(1, *map(len, sequences))
    ids = torch.tensor([(0,) * (columns - len(s)) + s for s in sequences])
    lengths = torch.tensor([len(s) for s in sequences])
    device = next(model.parameters()).device
    mask = right_aligned_mask(lengths, columns)
    cache = DynamicCache()
    model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        position_ids=(mask.cumsum(1) - 1).clamp(min=0).to(device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return cache


def _pad_left(states: Tensor, columns: int) -> Tensor:
    """[B, heads, S, dim] -> [B, heads, columns, dim]."""
    return pad(states, (0, 0, columns - states.shape[2], 0))
