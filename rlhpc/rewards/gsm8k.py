"""Reward of GSM8K: the final answer is the number after `####`.

Cobbe et al. 2021, arXiv:2110.14168.
"""

from __future__ import annotations

from typing import Any

from rlhpc.rewards.numbers import find_numbers, marked_number, parse_number


def compute_score(
    data_source: str,  # noqa: ARG001  the contract's arguments
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,  # noqa: ARG001
    *,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, float]:
    """``score`` for the right number, ``format_score`` for another in its place, else 0.

    Numbers are compared by value: `18`, `18.00` and `$18` are one.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the right number.
        extra_info: not used.
        method: `strict` reads the number after the last `####`, `flexible` the last number
        anywhere.
        format_score: reward of a wrong number.
        score: reward of the right number.

    Returns:
        `score` and `acc` (1 when right).

    Raises:
        ValueError: unknown ``method``, or a ground truth that is no number.
    """
    truth = parse_number(str(ground_truth))
    if truth is None:
        raise ValueError(f"ground_truth={ground_truth!r} is not a number, as GSM8K's answers are")
    if method == "strict":
        answer = marked_number(solution_str)
    elif method == "flexible":
        answer = next(reversed(find_numbers(solution_str)), None)
    else:
        raise ValueError(f"reward.kwargs.method={method!r}; expected strict or flexible")
    right = answer is not None and answer == truth
    wrong_score = 0.0 if answer is None else format_score
    return {"score": score if right else wrong_score, "acc": float(right)}
