import json
import math
import re
import sys
from pathlib import Path

import pytest

from rlhpc.config.schema import ModelConfig, RunConfig, TrainerConfig
from rlhpc.console import device_lines, format_count, format_duration, progress_line, role_lines
from rlhpc.errors import ConfigError, RunFailedError
from rlhpc.metrics import (
    MetricsReporter,
    batch_metrics,
    sample_device,
    throughput_metrics,
    validation_metrics,
)

NAN = math.nan
STEP = {
    "critic/rewards/mean": 0.5,
    "critic/acc/mean": 0.25,
    "response_length/mean": 3.0,
    "prompt_length/mean": 6.0,
    "perf/total_num_tokens": 900.0,
    "timing_s/gen": 0.5,
    "timing_s/update_actor": 1.5,
    "timing_s/step": 2.0,
    "actor/pg_loss": -0.01,
}


def make_config(*loggers):
    trainer = TrainerConfig(logger=list(loggers))
    return RunConfig(model=ModelConfig(path="m"), trainer=trainer)


def gpu(host, index, utilization=71.0):
    return {
        "host": host,
        "device": f"cuda:{index}",
        "utilization": utilization,
        "memory_used_gib": 34.1,
        "memory_total_gib": 79.2,
    }


def test_batch_metrics_have_the_usual_names():
    metrics = batch_metrics(
        [1.0, 0.0, NAN, 0.5],
        prompt_lengths=[4, 4, 6, 6],
        response_lengths=[1, 2, 3, 6],
        truncated=[False, False, False, True],
        extra={"acc": [1.0, 0.0, NAN, 1.0]},
        groups=[0, 0, 1, 1],
    )
    assert metrics["critic/zero_variance_groups"] == 1
    assert metrics["critic/rewards/mean"] == metrics["critic/score/mean"] == 0.5
    assert metrics["critic/rewards/missing"] == 1
    assert metrics["critic/acc/mean"] == pytest.approx(2 / 3)
    assert [metrics[f"response_length/{k}"] for k in ("mean", "max", "min")] == [3, 6, 1]
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["prompt_length/mean"] == 5
    assert metrics["perf/total_num_tokens"] == 32


def test_a_supervised_batch_has_no_reward_metrics():
    metrics = batch_metrics([], prompt_lengths=[4], response_lengths=[1], truncated=[False])
    assert not any(name.startswith("critic/") for name in metrics)


def test_validation_is_by_source_and_counts_ungraded_rows_as_wrong():
    metrics = validation_metrics(["a", "b", "a"], [1.0, 1.0, NAN], extra={"acc": [1.0, 0.0, NAN]})
    assert metrics == {
        "val-core/a/acc/mean@1": 0.5,
        "val-aux/a/reward/mean@1": 0.5,
        "val-core/b/acc/mean@1": 0.0,
        "val-aux/b/reward/mean@1": 1.0,
    }
    assert validation_metrics(["a"], [0.5]) == {"val-core/a/reward/mean@1": 0.5}


def test_tokens_per_second_are_over_the_roles_own_time():
    assert throughput_metrics(STEP) == {
        "perf/tokens_per_s/rollout": pytest.approx(600),
        "perf/tokens_per_s/actor": pytest.approx(600),
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (12_345, "12.3k"), (4_500_000, "4.5M"), (3e9, "3000.0M")],
)
def test_counts_are_short(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(("value", "text"), [(7.4, "0:07"), (750, "12:30"), (11_100, "3:05:00")])
def test_durations_are_short(value, text):
    assert format_duration(value) == text


def test_the_progress_line_shows_what_matters():
    line = progress_line(40, 160, {**STEP, "perf/throughput": 12_300.0}, seconds_per_step=2.0)
    assert line == (
        "step  40/160 [#####...............]  25%  reward 0.500  acc 0.250  length 3.0  "
        "12.3k tok/s/rank  2.00 s/step  ETA 4:00"
    )


def test_role_lines_name_each_role_and_its_cards():
    devices = {"rollout": [gpu("n5", 1), gpu("n5", 0), gpu("n5", 0)]}
    lines = role_lines({**STEP, **throughput_metrics(STEP)}, devices)
    assert lines[0] == ("rollout", "0.50 s  600 tok/s  length 3.0")
    assert lines[1] == ("rollout", "gpu n5:0 71% 34.1/79.2 GiB | gpu n5:1 71% 34.1/79.2 GiB")
    assert lines[2] == ("actor", "1.50 s  600 tok/s  pg_loss -0.0100")


def test_cards_of_roles_with_names_of_their_own_are_shown_too():
    assert role_lines({}, {"judge": [gpu("n5", 0)]}) == [("judge", "gpu n5:0 71% 34.1/79.2 GiB")]


def test_what_cannot_be_measured_is_said_to_be_so():
    assert device_lines([gpu("n1", 0, None)]) == ["gpu n1:0 n/a 34.1/79.2 GiB"]
    assert "reward n/a" in progress_line(1, 2, {"critic/rewards/mean": NAN}, seconds_per_step=1.0)


def test_cpu_ranks_are_told_by_host():
    rank = {"host": "n1", "device": "cpu", "utilization": 49.0, "memory_used_gib": 0.6}
    assert device_lines([rank, rank]) == ["cpu n1 98% rss 1.2 GiB"]


def test_many_cards_take_several_lines():
    lines = device_lines([gpu("n1", i) for i in range(6)])
    assert [line.count("gpu") for line in lines] == [4, 2]


def test_this_process_can_be_sampled():
    sample = sample_device("cpu")
    assert sample["device"] == "cpu"
    assert 0 < sample["memory_used_gib"] < sample["memory_total_gib"]
    assert sample_device("cpu")["utilization"] >= 0


def test_the_reporter_writes_console_file_and_tensorboard(tmp_path):
    reporter = MetricsReporter(
        tmp_path, make_config("console", "file", "tensorboard"), total_steps=2
    )
    reporter.line("run", "hello")
    reporter.evaluation(0, {"val-core/addition/acc/mean@1": 0.25})
    reporter.step(1, STEP, devices={"actor": [sample_device("cpu")]})
    reporter.step(2, {**STEP, "actor/pg_loss": NAN})
    reporter.close()
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert lines[:2] == [
        "[run]       hello",
        "[run]       evaluation at step 0  addition acc 0.250",
    ]
    assert any(line.startswith("[actor]     cpu ") for line in lines)
    assert sum("step 2/2 [####################] 100%" in line for line in lines) == 1
    assert any(line.startswith("[run]       plot: ") for line in lines)
    records = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2]
    assert records[1]["perf/tokens_per_s/rollout"] == pytest.approx(600)
    assert records[2]["actor/pg_loss"] is None
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_every_line_has_a_prefix(tmp_path):
    reporter = MetricsReporter(tmp_path, make_config("console", "file"), total_steps=1)
    reporter.line("run", "two\nlines")
    reporter.step(1, STEP)
    reporter.close()
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert all(re.match(r"\[(run|rollout|reward|actor|reference)\] +\S", line) for line in lines)


def test_a_full_disk_ends_the_run_at_the_next_report(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    reporter = MetricsReporter(tmp_path, make_config("file"), total_steps=1)
    reporter.step(1, STEP)
    with pytest.raises(RunFailedError, match=r"metrics cannot be written .*No space left"):
        reporter.close()


def test_unknown_and_missing_trackers_are_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"trainer\.logger: unknown \['swan'\]"):
        MetricsReporter(tmp_path, make_config("swan"), total_steps=1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb needs the package wandb.*pip install wandb"):
        MetricsReporter(tmp_path, make_config("wandb"), total_steps=1)
