"""Partial credit of `rewards.dense`."""

from __future__ import annotations

import pytest

from rlhpc.rewards.dense import compute_score


def score(text: str) -> float:
    return compute_score("gsm8k", text, "12")["score"]


def test_the_right_marked_number_gets_all() -> None:
    assert compute_score("gsm8k", "5 + 7 = 12\n#### 12", "12") == {"score": 2.0, "acc": 1.0}


def test_nearer_numbers_get_more() -> None:
    assert score("It is 12.") > score("It is 11.") > score("It is 40.") > score("It is nine.")


def test_form_counts_a_little() -> None:
    assert score("#### 11") - score("11") == pytest.approx(0.25)
    assert score("It is 11.") - score("It is 11 and") == pytest.approx(0.25)


def test_an_empty_response_gets_nothing() -> None:
    assert score("") == 0.0


def test_a_ground_truth_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ground_truth='Paris' is not a number"):
        compute_score("x", "Paris", "Paris")
