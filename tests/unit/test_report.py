import json

import pytest

from rlhpc.errors import ConfigError
from rlhpc.report import make_report, read_records, series, smooth


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def make_run(folder, *, evaluations=((0, 0.25), (40, 0.75)), steps=40):
    records = [{"step": s, "val-core/addition/acc/mean@1": v} for s, v in evaluations]
    records += [
        {"step": s, "critic/rewards/mean": s / steps, "actor/pg_loss": -0.1, "critic/acc/mean": 0.1}
        for s in range(1, steps + 1)
    ]
    write(folder / "metrics.jsonl", records)
    sample = {"prompt": "12+34=", "response": "46", "ground_truth": "46", "reward": 1.5}
    write(
        folder / "samples.jsonl",
        [{"step": s, "index": i, **sample} for s, i in ((0, 0), (0, 1), (40, 1), (40, 0))],
    )


def test_before_and_after_plot_and_samples_are_told(tmp_path):
    make_run(tmp_path)
    report = make_report(tmp_path, num_samples=1)
    assert (report.before, report.after) == (0.25, 0.75)
    lines = report.text.splitlines()
    assert lines[0] == "held-out acc (addition): 0.250 before -> 0.750 after 40 steps (+0.500)"
    assert lines[1] == "training reward: 0.138 -> 0.887 (mean of the first and last 10 steps)"
    assert lines[2] == f"plot: {report.plot}"
    assert lines[3] == "samples of the evaluation at step 40:"
    assert lines[4:] == [
        "  1. prompt    12+34=",
        "     response  46",
        "     answer    46",
        "     reward    1.500",
    ]
    assert report.plot.read_bytes()[:4] == b"\x89PNG"


def test_one_evaluation_has_no_after(tmp_path):
    make_run(tmp_path, evaluations=((0, 0.25),))
    report = make_report(tmp_path)
    assert (report.before, report.after) == (0.25, None)
    assert report.text.startswith("held-out acc (addition): 0.250\n")


def test_a_supervised_run_without_evaluations_is_reported(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"step": s, "train/loss": 3.0 / s} for s in (1, 2, 3, 4)])
    report = make_report(tmp_path)
    assert report.before is None
    assert "loss: 2.250 -> 0.875 (mean of the first and last 2 steps)" in report.text
    assert report.plot.exists()


def test_long_responses_are_wrapped_and_cut(tmp_path):
    make_run(tmp_path)
    text = "\n".join(["word " * 40] * 20)
    write(
        tmp_path / "samples.jsonl",
        [
            {
                "step": 1,
                "index": 0,
                "prompt": "p",
                "response": text,
                "ground_truth": 1,
                "reward": None,
            }
        ],
    )
    lines = make_report(tmp_path).text.splitlines()
    assert max(len(line) for line in lines[3:]) <= 100
    assert sum("word" in line for line in lines) == 7
    assert "     reward    missing" in lines


def test_a_half_written_last_line_is_left_out(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"ste')
    assert read_records(tmp_path / "m.jsonl") == [{"step": 1}]


def test_a_step_that_was_done_again_counts_once():
    records = [{"step": 1, "x": 1.0}, {"step": 2, "x": None}, {"step": 1, "x": 5.0}]
    assert series(records, "x") == ([1], [5.0])


def test_the_running_mean_looks_back_only():
    assert smooth([1.0, 3.0, 5.0], window=2) == [1.0, 2.0, 4.0]


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl"):
        make_report(tmp_path)
