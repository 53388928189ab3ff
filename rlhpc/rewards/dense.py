"""Reward for word problems that a weak model never solves: partial credit, so that groups vary.

With exact match alone a small model scores 0 everywhere, every advantage is 0 and nothing is
learnt or tested.  Meant for rehearsals; a capable model should be graded by `rewards.gsm8k`.
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
    closeness_weight: float = 0.5,
    form_weight: float = 0.25,
) -> dict[str, float]:
    """1 for the right number, plus credit for a near one and for the form of an answer.

    The answer is the number after the last `####`, else the last number.  Closeness is
    1 / (1 + |answer - truth| / max(1, |truth|)), 0 without a number.  Form is worth
    ``form_weight`` each for a `####` and for ending with a finished sentence or number.

    Returns:
        `score` (0 to 1 + closeness_weight + 2 form_weight) and `acc` (1 when right).

    Raises:
        ValueError: the ground truth is no number.
    """
    truth = parse_number(str(ground_truth))
    if truth is None:
        raise ValueError(f"ground_truth={ground_truth!r} is not a number; use another reward")
    marked = marked_number(solution_str)
    answer = next(reversed(find_numbers(solution_str)), None) if marked is None else marked
    right = float(answer is not None and answer == truth)
    closeness = 0.0
    if answer is not None:
        closeness = 1 / (1 + float(abs(answer - truth)) / max(1.0, abs(float(truth))))
    ended = solution_str.rstrip()[-1:] in tuple(".!?)]}0123456789")
    form = float(marked is not None) + float(ended)
    return {"score": right + closeness_weight * closeness + form_weight * form, "acc": right}
