"""WeightPart: a box of a Hugging Face-named tensor and the view of storage that holds it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhpc.layout import Box


@dataclass(frozen=True)
class WeightPart:
    """A piece of a global weight in this rank's storage."""

    name: str
    """Name in a Hugging Face checkpoint, for example `model.layers.0.self_attn.q_proj.weight`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint (no vocabulary padding)."""
    box: Box
    """The piece: half-open (start, stop) per dim of the whole tensor."""
    view: Tensor
    """Storage, of the box's extents; read when sending, written in place when receiving."""
