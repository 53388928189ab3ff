"""A reward for tests: depends on the response only and differs between almost any two."""

from typing import Any


def compute_score(
    data_source: str,  # noqa: ARG001 - the contract of reward functions
    solution_str: str,
    ground_truth: Any,  # noqa: ARG001
    extra_info: Any = None,  # noqa: ARG001
) -> float:
    """A number in [0, 1) from the response's characters."""
    return sum((i + 1) * ord(c) for i, c in enumerate(solution_str)) % 17 / 17
