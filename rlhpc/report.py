"""The end of a run for a person: a plot and a summary made from the run folder's files.

Reads `metrics.jsonl` and `samples.jsonl`, writes `plots/reward.png`; works on a run that is still
going on or has
failed, too.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.errors import ConfigError

Series = tuple[list[int], list[float]]
"""(steps, values)."""

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
BLUE, ORANGE = "#2563eb", "#d97706"


@dataclass(frozen=True)
class Report:
    """What came out of a run."""

    before: float | None
    """Held-out score of the first evaluation."""
    after: float | None
    """Held-out score of the last evaluation; None where there was only one."""
    plot: Path
    text: str


def read_records(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; a last line that is still being written is left out."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return [json.loads(line) for line in lines]


def series(records: Sequence[dict[str, Any]], name: str) -> Series:
    """Steps and values of metric ``name``, nulls left out; of a step the last record counts."""
    values = {r["step"]: r[name] for r in records if r.get(name) is not None}
    steps = sorted(values)
    return steps, [values[s] for s in steps]


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """Mean over the last ``window`` values, fewer at the start."""
    out = []
    for i in range(len(values)):
        last = values[max(0, i + 1 - window) : i + 1]
        out.append(sum(last) / len(last))
    return out


def held_out_name(records: Sequence[dict[str, Any]]) -> str | None:
    """The metric that evaluations are judged by: the first `val-core/...`."""
    return next((k for r in records for k in sorted(r) if k.startswith("val-core/")), None)


def make_report(run_dir: Path, *, num_samples: int = 3) -> Report:
    """Plot and summary of the run in ``run_dir``.

    Raises:
        ConfigError: the folder holds no metrics.
    """
    records = read_records(run_dir / "metrics.jsonl")
    if not records:
        raise ConfigError(
            f"{str(run_dir)!r} holds no metrics.jsonl with records; expected the folder of a run "
            "that made a step, "
            "with `file` in trainer.logger. Name another folder"
        )
    name = held_out_name(records)
    scores = series(records, name)[1] if name else []
    plot = plot_run(records, run_dir / "plots" / "reward.png", title=run_dir.name)
    before, after = (scores[0], scores[-1] if len(scores) > 1 else None) if scores else (None, None)
    lines = [*_score_lines(records, name), f"plot: {plot}"]
    lines += _sample_lines(read_records(run_dir / "samples.jsonl"), num_samples)
    return Report(before, after, plot, "\n".join(lines))


def _score_lines(records: Sequence[dict[str, Any]], name: str | None) -> list[str]:
    lines = []
    if name:
        _, source, variable, _ = name.split("/", 3)
        steps, scores = series(records, name)
        line = f"held-out {variable} ({source}): {scores[0]:.3f}"
        if len(scores) > 1:
            start = "before" if steps[0] == 0 else f"at step {steps[0]}"
            rise = scores[-1] - scores[0]
            line += f" {start} -> {scores[-1]:.3f} after {steps[-1]} steps ({rise:+.3f})"
        lines.append(line)
    for metric, label in (("critic/rewards/mean", "training reward"), ("train/loss", "loss")):
        steps, values = series(records, metric)
        if len(values) > 1:
            few = max(1, min(10, len(values) // 2))
            first, last = (sum(v) / few for v in (values[:few], values[-few:]))
            span = f"mean of the first and last {few} steps"
            lines.append(f"{label}: {first:.3f} -> {last:.3f} ({span})")
    return lines


def _sample_lines(samples: Sequence[dict[str, Any]], count: int) -> list[str]:
    """The last evaluation's first ``count`` responses."""
    if not samples or count < 1:
        return []
    last = [s for s in samples if s["step"] == samples[-1]["step"]]
    last = sorted(last, key=lambda s: s["index"])[:count]
    lines = [f"samples of the evaluation at step {last[0]['step']}:"]
    for number, sample in enumerate(last, 1):
        for key, label in (
            ("prompt", f"{number}. prompt"),
            ("response", "   response"),
            ("ground_truth", "   answer"),
            ("reward", "   reward"),
        ):
            value = sample[key]
            text = f"{value:.3f}" if isinstance(value, float) else str(value)
            text = "missing" if value is None else text
            lines += _field(label, text)
    return lines


def _field(label: str, text: str, *, width: int = 76, most_lines: int = 8) -> list[str]:
    """``text`` wrapped beside ``label``, cut after ``most_lines``."""
    wrapped = [
        part
        for line in (text.strip().splitlines() or [""])
        for part in (textwrap.wrap(line, width) or [""])
    ]
    if len(wrapped) > most_lines:
        wrapped = [*wrapped[: most_lines - 1], "..."]
    return [f"  {label if i == 0 else '':<12} {part}".rstrip() for i, part in enumerate(wrapped)]


def plot_run(records: Sequence[dict[str, Any]], path: Path, *, title: str) -> Path:
    """Draw reward, accuracy, response length and loss over steps; panels without data say so."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.16, h_pad=0.14)
    figure = Figure(figsize=(10, 6.4), dpi=150, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, color=INK, x=0.012, ha="left", fontweight="bold")
    axes = figure.subplots(2, 2).flat
    loss = "train/loss" if series(records, "train/loss")[0] else "actor/pg_loss"
    name = held_out_name(records)
    _draw(next(axes), "Training reward", records, "critic/rewards/mean")
    _draw_accuracy(next(axes), records, name)
    _draw(next(axes), "Response length (tokens)", records, "response_length/mean")
    _draw(next(axes), f"Loss ({loss})", records, loss)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _style(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=11, color=INK, loc="left")
    axis.set_xlabel("step", fontsize=9, color=MUTED)
    axis.tick_params(colors=MUTED, labelsize=9, length=0)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.xaxis.get_major_locator().set_params(integer=True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(GRID)


def _say_empty(axis: Any) -> None:
    axis.set_yticks([])
    axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", color=MUTED)


def _draw(axis: Any, title: str, records: Sequence[dict[str, Any]], name: str) -> None:
    """Each step pale, a running mean bold."""
    _style(axis, title)
    steps, values = series(records, name)
    if not steps:
        _say_empty(axis)
        return
    window = max(1, len(steps) // 20)
    marker = "o" if len(steps) < 10 else None
    if window > 1:
        axis.plot(steps, values, color=BLUE, alpha=0.25, linewidth=1, label="each step")
        label = f"mean of {window} steps"
        axis.plot(steps, smooth(values, window=window), color=BLUE, linewidth=2, label=label)
        axis.legend(frameon=False, fontsize=8, labelcolor=MUTED)
    else:
        axis.plot(steps, values, color=BLUE, linewidth=2, marker=marker, markersize=4)


def _draw_accuracy(axis: Any, records: Sequence[dict[str, Any]], held_out: str | None) -> None:
    """Held-out score at each evaluation, training accuracy as a pale line."""
    from matplotlib import patheffects

    _style(axis, "Accuracy")
    steps, values = series(records, "critic/acc/mean")
    if steps:
        window = max(1, len(steps) // 20)
        label = "training samples"
        axis.plot(steps, smooth(values, window=window), color=BLUE, alpha=0.45, label=label)
    if held_out:
        points = series(records, held_out)
        look = {"color": ORANGE, "linewidth": 2, "marker": "o", "markersize": 5}
        axis.plot(*points, **look, label="held out, greedy")
        outline = [patheffects.withStroke(linewidth=3, foreground="white")]
        ends = [0, -1] if len(points[0]) > 1 else [0]
        for i in ends:
            at, text = (points[0][i], points[1][i]), f"{points[1][i]:.2f}"
            note = axis.annotate(text, at, (0, 9), textcoords="offset points", ha="center")
            note.set(fontsize=10, color=ORANGE, fontweight="bold", path_effects=outline)
        axis.margins(y=0.15)
    if steps or held_out:
        axis.legend(frameon=False, fontsize=8, labelcolor=MUTED, loc="lower right")
    else:
        _say_empty(axis)
