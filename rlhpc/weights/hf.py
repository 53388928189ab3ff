"""Weight parts of a plain transformers model: its parameters are the checkpoint's tensors, whole.

No sharding and no renaming; a model whose parameters are not named as in its checkpoint is refused.
"""

from __future__ import annotations

from torch import nn

from rlhpc.errors import LayoutError
from rlhpc.weights.base import WeightPart


def hf_weight_parts(model: nn.Module) -> list[WeightPart]:
    """Every parameter of ``model`` as one part with the full box; a tied `lm_head` is not listed.

    Raises:
        LayoutError: the model fuses its experts, so that names and shapes differ from the
        checkpoint's.
    """
    parts = []
    # Tied parameters are yielded once, under the first name: that of the embedding.
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            raise LayoutError(
                f"parameter {name} of {type(model).__name__} is a fused expert tensor; expected a "
                "dense model. Change model.path, or use another rollout engine for this model"
            )
        shape = tuple(parameter.shape)
        box = tuple((0, size) for size in shape)
        parts.append(WeightPart(name, shape, box, parameter.data))
    return parts
