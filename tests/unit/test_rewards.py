import contextlib
import math
import os
import subprocess
import sys
import time
import traceback
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from rlhpc.config.engines import FunctionOptions
from rlhpc.errors import CommandError, ConfigError
from rlhpc.rewards import addition, exact, gsm8k
from rlhpc.rewards.child import check_result
from rlhpc.rewards.function import FunctionEngine, ScoreItem
from rlhpc.rewards.numbers import find_numbers

HERE = "tests.unit.reward_functions"


@pytest.fixture
def make_engine():
    engines = []

    def make(name, *, timeout_s=30.0, **kwargs):
        options = FunctionOptions(timeout_s=timeout_s)
        path = name if "." in name else f"{HERE}.{name}"
        engines.append(FunctionEngine(function=path, kwargs=kwargs, options=options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def items(*texts, truth="1"):
    return [ScoreItem(10 + i, "test", text, truth) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("text", "method", "score"),
    [
        ("so\n#### 18", "strict", 1.0),
        ("so #### $1,018.00.", "strict", 0.0),
        ("first #### 17, no, #### 18.00", "strict", 1.0),
        ("the answer is 18", "strict", 0.0),
        ("the answer is 18", "flexible", 1.0),
        ("18 or 19", "flexible", 0.0),
        ("nothing", "flexible", 0.0),
        ("#### none", "strict", 0.0),
    ],
)
def test_gsm8k_reads_the_answer_as_a_value(text, method, score):
    assert gsm8k.compute_score("gsm8k", text, "18", method=method)["score"] == score


def test_gsm8k_gives_format_score_to_a_wrong_number_only():
    wrong = gsm8k.compute_score("gsm8k", "#### 5", "18", format_score=0.1)
    assert wrong == {"score": 0.1, "acc": 0.0}
    assert gsm8k.compute_score("gsm8k", "18", "18", format_score=0.1)["score"] == 0


def test_gsm8k_refuses_what_it_cannot_grade():
    with pytest.raises(ValueError, match="ground_truth='many' is not a number"):
        gsm8k.compute_score("gsm8k", "#### 5", "many")
    with pytest.raises(ValueError, match=r"reward\.kwargs\.method='loose'"):
        gsm8k.compute_score("gsm8k", "#### 5", "5", method="loose")


def test_numbers_are_found_by_value():
    found = find_numbers("1,234.50 is -3, 5-3, $18 and .5, 12,")
    assert found == [Decimal(n) for n in ("1234.50", "-3", "5", "3", "18", "0.5", "12")]


def test_exact_ignores_outer_space_and_case_only_if_told():
    assert exact.compute_score("s", " Yes\n", "Yes")["acc"] == 1
    assert exact.compute_score("s", "yes", "Yes")["acc"] == 0
    assert exact.compute_score("s", "yes", "Yes", ignore_case=True)["acc"] == 1


@pytest.mark.parametrize(
    ("response", "score", "acc"),
    [
        ("146", 1.5, 1),
        ("147", 1 / 3, 0),
        ("46", 1 / 3, 0),
        ("", 0, 0),
        ("a", 0, 0),
        ("1146", 3 / 8, 0),
    ],
)
def test_addition_counts_right_digits_by_place(response, score, acc):
    result = addition.compute_score("addition", response, "146")
    assert result == {"score": pytest.approx(score), "acc": acc}


def test_reasoning_gym_scores_with_the_tasks_own_scorer():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    from rlhpc.rewards.reasoning_gym import compute_score

    options = {"size": 3, "seed": 5}
    answer = reasoning_gym.create_dataset("chain_sum", **options)[2]["answer"]
    info = {"task": "chain_sum", "options": options, "index": 2}
    for text in (answer, f"So <answer> {answer} </answer>."):
        assert compute_score("chain_sum", text, "", info) == {"score": 1.0, "acc": 1.0}
    assert compute_score("chain_sum", "many", "", info)["score"] < 1
    with pytest.raises(ValueError, match=r"lacks \['task', 'options', 'index'\]"):
        compute_score("chain_sum", "1", "")


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.int64(1), np.array(1.0)])
def test_any_scalar_is_a_reward(value):
    assert check_result(value) == (1.0, {})


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "returned None"),
        ("1", TypeError, r"returned '1' \(str\)"),
        ([1.0], TypeError, "list"),
        ({"acc": 1}, TypeError, r"keys \['acc'\]; expected 'score'"),
        (math.inf, ValueError, "returned inf"),
        ({"score": math.nan}, ValueError, "returned nan"),
    ],
)
def test_anything_else_is_an_error(value, error, message):
    with pytest.raises(error, match=message):
        check_result(value)


def test_rows_come_back_in_order_with_their_numbers(make_engine):
    engine = make_engine("length", scale=2.0)
    rows = [ScoreItem(5, "s", "abc", "", truncated=True), ScoreItem(3, "s", "a", "")]
    results = engine.score(rows)
    assert [(r.row_id, r.reward, r.error) for r in results] == [(5, 6.0, ""), (3, 2.0, "")]
    assert [r.extra for r in results] == [{"truncated": 1.0}, {"truncated": 0.0}]


def test_a_row_without_reward_is_nan_with_its_reason_and_spares_the_others(make_engine):
    engine = make_engine("moody")
    texts = ("fine", "none", "nan", "text", "dict", "raise", "die", "exit", "fine")
    results = engine.score(items(*texts))
    assert [r.reward for r in (results[0], results[-1])] == [1.0, 1.0]
    assert all(math.isnan(r.reward) for r in results[1:-1])
    said = [r.error for r in results[1:-1]]
    expected = (
        "returned None",
        "returned nan",
        "returned '1'",
        "expected 'score'",
        "KeyError: 'answer'",
        "died (exit code 137)",
        "died (exit code 3)",
    )
    assert all(e in s for e, s in zip(expected, said, strict=True))


@pytest.mark.parametrize("how", ["hang", "loop"])
def test_a_hanging_function_costs_its_deadline_and_its_row(make_engine, how):
    engine = make_engine("moody", timeout_s=0.5)
    start = time.monotonic()
    results = engine.score(items("fine", how, "fine"))
    assert time.monotonic() - start < 10
    assert [r.reward for r in results if not r.error] == [1.0, 1.0]
    assert results[1].error == "the function took longer than 0.5 s"


def test_a_function_that_fails_on_every_row_ends_the_run_with_its_traceback(make_engine):
    engine = make_engine("broken")
    with pytest.raises(CommandError, match=r"reward_functions\.broken gave no reward") as caught:
        engine.score(items(*"abcdefgh"))
    assert str(caught.value).count("\n") == 0
    assert "First: ZeroDivisionError: always" in str(caught.value)
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count('raise ZeroDivisionError("always")') == 1
    assert printed.count("\nCommandError: ") + printed.count(".CommandError: ") == 1


def test_one_odd_row_at_the_start_does_not_end_the_run(make_engine):
    engine = make_engine("moody")
    assert engine.score(items("raise"))[0].error == "KeyError: 'answer'"
    assert engine.score(items("fine"))[0].reward == 1


def test_a_function_that_has_worked_is_given_up_later(make_engine):
    engine = make_engine("moody")
    engine.score(items("fine"))
    engine.score(items(*["raise"] * 40))
    with pytest.raises(CommandError, match="any of 80 rows"):
        engine.score(items(*["raise"] * 40))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.score", "there is no module 'no_such_package'"),
        (f"{HERE}.nothing", "has no 'nothing'"),
        (f"{HERE}.NOT_A_FUNCTION", "is a int; expected a function"),
        ("nomodule", "has no 'nomodule'"),
        (f"{HERE}.wants_more", "missing a required argument: 'judge'"),
    ],
)
def test_a_function_that_cannot_be_used_is_named_at_once(make_engine, name, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(name)


def test_unknown_keyword_arguments_are_refused_at_once(make_engine):
    with pytest.raises(ConfigError, match="unexpected keyword argument 'colour'"):
        make_engine("length", colour=1)


def sleepers(seconds):
    """The pids of the processes `sleep <seconds>` that are not zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if path.read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(int(path.parent.name))
    return found


def wait_until(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def unique_seconds():
    return f"98765.{os.getpid()}{time.monotonic_ns() % 10**9}"


@pytest.mark.parametrize("how", ["wait", "leave", "session"])
def test_what_a_late_function_started_is_killed_with_it(make_engine, how):
    seconds = unique_seconds()
    engine = make_engine("start_sleep", timeout_s=2.0, how=how)
    assert engine.score(items(seconds, truth="hang"))[0].error.endswith("longer than 2 s")
    assert wait_until(lambda: not sleepers(seconds), 3)


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("leave", "close"),
        ("leave", "child"),
        ("leave", "guard"),
        ("session", "close"),
        ("session", "child"),
    ],
)
def test_what_a_function_left_running_ends_with_its_engine_or_child(make_engine, how, end):
    seconds = unique_seconds()
    engine = make_engine("start_sleep", how=how)
    engine.score(items(seconds))
    assert wait_until(lambda: len(sleepers(seconds)) == 1, 3)
    if end == "close":
        engine.close()
    elif end == "child":
        engine.score(items(seconds, truth="die"))
    else:
        engine._process.kill()
        engine.score(items(seconds, truth="die"))
    assert wait_until(lambda: not sleepers(seconds), 3)


@pytest.mark.parametrize("how", ["wait", "native", "session"])
def test_nothing_outlives_a_killed_parent(how):
    seconds = unique_seconds()
    code = (
        "from rlhpc.config.engines import FunctionOptions as O\n"
        "from rlhpc.rewards.function import *\n"
        f"e = FunctionEngine(function='{HERE}.start_sleep', kwargs={{'how': {how!r}}}, "
        "options=O())\n"
        f"e.score([ScoreItem(0, 's', {seconds!r}, 'hang')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    assert wait_until(lambda: len(sleepers(seconds)) == 1, 60)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not sleepers(seconds), 3)


def test_the_child_dies_with_a_killed_parent(tmp_path):
    code = (
        "import sys, time\n"
        "from rlhpc.config.engines import FunctionOptions as O\n"
        "from rlhpc.rewards.function import *\n"
        f"e = FunctionEngine(function='{HERE}.report_pid', kwargs={{}}, options=O())\n"
        "e.score([ScoreItem(0, 's', sys.argv[1], '')])\n"
        "time.sleep(60)\n"
    )
    file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", code, str(file)])
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(file.read_text())
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{child}")
