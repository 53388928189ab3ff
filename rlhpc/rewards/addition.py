"""Reward of the addition task of `launch/make-model tiny_qwen2`: right digits count a little."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str,  # noqa: ARG001  the contract's arguments
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,  # noqa: ARG001
    *,
    digit_weight: float = 0.5,
) -> dict[str, float]:
    """1 for the exact sum, plus ``digit_weight`` times the share of right digits.

    Digits are compared by place, from the units; the share is over the longer of the two strings.
    With exact match alone a weak model's groups rarely vary.

    Returns:
        `score` (0 to 1 + digit_weight) and `acc` (exact match).
    """
    response, truth = solution_str.strip(), str(ground_truth)
    exact = float(response == truth)
    right = sum(a == b for a, b in zip(reversed(response), reversed(truth), strict=False))
    share = right / max(len(response), len(truth), 1)
    return {"score": exact + digit_weight * share, "acc": exact}
