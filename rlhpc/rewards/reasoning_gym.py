"""Reward of a `reasoning-gym` task: the task's own scorer on the prompt's own problem."""

from __future__ import annotations

import functools
import json
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,  # noqa: ARG001  the task's entry knows it
    extra_info: dict[str, Any] | None = None,
    *,
    answer_tag: str = "answer",
) -> dict[str, float]:
    """What the task gives for the answer, usually 0 to 1 with part marks.

    The answer is what stands in the last `<answer>...</answer>`, else the whole response without
    outer white space.

    Args:
        data_source: not used but in errors.
        solution_str: the response.
        ground_truth: not used: some tasks have many right answers.
        extra_info: `task`, `options` and `index`, as `load_prompts` writes them.
        answer_tag: name of the tag.

    Returns:
        `score` and `acc` (1 for full marks).

    Raises:
        ValueError: ``extra_info`` does not name a problem.
    """
    recipe = extra_info or {}
    if missing := [key for key in ("task", "options", "index") if key not in recipe]:
        raise ValueError(
            f"extra_info of {data_source} lacks {missing}; expected prompts from data.reasoning_gym"
        )
    dataset = _make_dataset(recipe["task"], json.dumps(recipe["options"], sort_keys=True))
    head, opened, tail = solution_str.rpartition(f"<{answer_tag}>")
    answer = tail.partition(f"</{answer_tag}>")[0] if opened else head or tail
    score = float(dataset.score_answer(answer.strip(), dataset[recipe["index"]]))
    return {"score": score, "acc": float(score >= 1)}


@functools.lru_cache(maxsize=8)
def _make_dataset(task: str, options: str) -> Any:
    """A task's problems are a pure function of its options, so the scorer makes them again."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(options))
