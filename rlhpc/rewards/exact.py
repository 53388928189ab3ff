"""Reward 1 for the answer and nothing else.  For tasks whose response is the answer itself."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str,  # noqa: ARG001  the contract's arguments
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,  # noqa: ARG001
    *,
    ignore_case: bool = False,
) -> dict[str, float]:
    """1 when response and ground truth agree, outer white space aside; else 0.

    Returns:
        `score` and `acc`, the same.
    """
    response, truth = solution_str.strip(), str(ground_truth).strip()
    if ignore_case:
        response, truth = response.lower(), truth.lower()
    score = float(response == truth)
    return {"score": score, "acc": score}
