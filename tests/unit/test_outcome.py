from __future__ import annotations

import json
import os
from pathlib import Path

from rlhpc.outcome import FileFollower, clear_outcome, failure_message, is_done
from rlhpc.outcome import write_failure as write_first_cause


def write_failure(run_dir: Path, rank: int, message: str, time_s: int) -> None:
    path = run_dir / "failures" / f"{rank}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"message": message, "rank": rank}))
    os.utime(path, (time_s, time_s))


def test_the_controllers_word_comes_first_then_the_earliest_rank(tmp_path: Path) -> None:
    write_failure(tmp_path, 0, "victim", 200)
    write_failure(tmp_path, 3, "culprit", 100)
    assert failure_message(tmp_path, tmp_path / "logs") == "culprit"
    (tmp_path / "failure.json").write_text('{"message": "first cause"}')
    assert failure_message(tmp_path, tmp_path / "logs") == "first cause"


def test_the_launchers_word_replaces_what_the_victims_said(tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text('{"message": "signal SIGTERM"}')
    write_first_cause(tmp_path, "the launcher was terminated (SIGTERM)")
    assert failure_message(tmp_path, tmp_path) == "the launcher was terminated (SIGTERM)"
    assert [p.name for p in tmp_path.iterdir()] == ["failure.json"]


def test_half_a_file_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text('{"message": "out of mem')
    assert failure_message(tmp_path, tmp_path) == '{"message": "out of mem'


def test_without_a_word_the_logs_are_named(tmp_path: Path) -> None:
    message = failure_message(tmp_path, Path("/runs/x/logs/7"), otherwise="rank 2 ended with 137")
    assert message.startswith("rank 2 ended with 137, without DONE")
    assert "/runs/x/logs/7" in message


def test_an_earlier_outcome_is_forgotten(tmp_path: Path) -> None:
    write_failure(tmp_path, 0, "old", 1)
    (tmp_path / "DONE").touch()
    assert is_done(tmp_path)
    clear_outcome(tmp_path)
    assert not is_done(tmp_path)
    assert "without a word" in failure_message(tmp_path, tmp_path)


def test_a_follower_gives_whole_new_lines(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    follower = FileFollower(path)
    assert follower.read_new() == ""
    path.write_text("one\ntw")
    assert follower.read_new() == "one\n"
    with path.open("a") as file:
        file.write("o\n")
    assert follower.read_new() == "two\n"
    assert FileFollower(path, from_end=True).read_new() == ""
