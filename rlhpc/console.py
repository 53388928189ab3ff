"""What a person reads while a run goes on: pure functions from metrics to lines of text.

Input are the metrics of one step under their usual names; nothing here touches a file or a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BAR_WIDTH = 20
CARDS_A_LINE = 4


@dataclass(frozen=True)
class RoleLine:
    """What the line of a role shows; parts whose metric is absent are left out."""

    prefix: str
    seconds: str
    """Metric of the role's time in the step."""
    rate: str
    """Metric of its tokens per second."""
    parts: tuple[tuple[str, str, str], ...]
    """(metric, label, format)."""


ROLE_LINES = (
    RoleLine(
        "rollout",
        "timing_s/gen",
        "perf/tokens_per_s/rollout",
        (
            ("response_length/mean", "length", ".1f"),
            ("response_length/max", "longest", ".0f"),
            ("response_length/clip_ratio", "truncated", ".1%"),
            ("training/rollout_logprobs_diff_mean", "logprob diff", ".1e"),
            ("sync/received_gib", "synced GiB", ".3f"),
            ("sync/received_over_shard", "of least", ".2f"),
        ),
    ),
    RoleLine(
        "reward",
        "timing_s/reward",
        "",
        (
            ("critic/rewards/mean", "mean", ".3f"),
            ("critic/rewards/min", "min", ".3f"),
            ("critic/rewards/max", "max", ".3f"),
            ("critic/rewards/missing", "missing", ".0f"),
            ("critic/zero_variance_groups", "groups without variance", ".0f"),
        ),
    ),
    RoleLine("reference", "timing_s/ref", "perf/tokens_per_s/reference", ()),
    RoleLine(
        "actor",
        "timing_s/update_actor",
        "perf/tokens_per_s/actor",
        (
            ("train/loss", "loss", ".4f"),
            ("actor/pg_loss", "pg_loss", "+.4f"),
            ("actor/kl_loss", "kl", ".4f"),
            ("actor/entropy", "entropy", ".3f"),
            ("actor/pg_clipfrac", "clipped", ".1%"),
            ("actor/grad_norm", "grad_norm", ".3f"),
            ("actor/lr", "lr", ".1e"),
        ),
    ),
)

Devices = Mapping[str, Sequence[Mapping[str, Any]]]
"""Role name -> samples of `metrics.sample_device`, one a rank."""


def format_number(value: float, form: str) -> str:
    """``value`` by a format spec, `n/a` when it is missing."""
    return "n/a" if math.isnan(value) else format(value, form)


def format_count(value: float) -> str:
    """`950`, `12.3k`, `4.5M`."""
    for limit, divisor, unit in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (math.inf, 1e6, "M")):
        if value < limit or limit == math.inf:
            return f"{value / divisor:.1f}{unit}" if unit else f"{value:.0f}"
    return "n/a"


def format_duration(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def progress_line(
    step: int, total: int, metrics: Mapping[str, float], *, seconds_per_step: float
) -> str:
    """Progress bar of one step: share done, reward, accuracy, length, tokens/s, seconds, ETA."""
    done = min(BAR_WIDTH, BAR_WIDTH * step // max(total, 1))
    words = [
        f"step {step:>{len(str(total))}}/{total} [{'#' * done}{'.' * (BAR_WIDTH - done)}]"
        f" {100 * step / max(total, 1):3.0f}%"
    ]
    for name, label, form in (
        ("train/loss", "loss", ".4f"),
        ("critic/rewards/mean", "reward", ".3f"),
        ("critic/acc/mean", "acc", ".3f"),
        ("response_length/mean", "length", ".1f"),
    ):
        if name in metrics:
            words.append(f"{label} {format_number(metrics[name], form)}")
    if (throughput := metrics.get("perf/throughput")) is not None:
        words.append(f"{format_count(throughput)} tok/s/rank")
    words.append(f"{seconds_per_step:.2f} s/step")
    words.append(f"ETA {format_duration(seconds_per_step * (total - step))}")
    return "  ".join(words)


def role_lines(metrics: Mapping[str, float], devices: Devices) -> list[tuple[str, str]]:
    """(prefix, text) of every role that took part in the step, with its cards below.

    A role that the config calls by a name of its own has its cards under that name.
    """
    lines = []
    for role in ROLE_LINES:
        if role.seconds not in metrics:
            continue
        words = [f"{metrics[role.seconds]:.2f} s"]
        if role.rate in metrics:
            words.append(f"{format_count(metrics[role.rate])} tok/s")
        words += [
            f"{label} {format_number(metrics[name], form)}"
            for name, label, form in role.parts
            if name in metrics
        ]
        lines.append((role.prefix, "  ".join(words)))
        lines += [(role.prefix, text) for text in device_lines(devices.get(role.prefix, ()))]
    shown = {prefix for prefix, _ in lines}
    for name in devices:
        if name not in shown:
            lines += [(name, text) for text in device_lines(devices[name])]
    return lines


def device_lines(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Use and memory of each GPU, and of the CPU ranks of each host together."""
    cards = {
        f"{s['host']}:{s['device'].partition(':')[2] or 0}": s
        for s in samples
        if s["device"].startswith("cuda")
    }
    words = [
        f"gpu {name} {_percent(s['utilization'])} "
        f"{s['memory_used_gib']:.1f}/{s['memory_total_gib']:.1f} GiB"
        for name, s in sorted(cards.items())
    ]
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        if not sample["device"].startswith("cuda"):
            hosts.setdefault(sample["host"], []).append(sample)
    for host, ranks in sorted(hosts.items()):
        known = [r["utilization"] for r in ranks if r["utilization"] is not None]
        memory = sum(r["memory_used_gib"] for r in ranks)
        words.append(f"cpu {host} {_percent(sum(known) if known else None)} rss {memory:.1f} GiB")
    return [
        "  | ".join(words[i : i + CARDS_A_LINE]).replace("  | ", " | ")
        for i in range(0, len(words), CARDS_A_LINE)
    ]


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.0f}%"


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """Held-out scores of one evaluation."""
    words = [f"evaluation at step {step}"]
    for name, value in sorted(metrics.items()):
        if name.startswith("val-core/"):
            source, variable = name.split("/")[1:3]
            words.append(f"{source} {variable} {format_number(value, '.3f')}")
    if "timing_s/testing" in metrics:
        words.append(f"{metrics['timing_s/testing']:.1f} s")
    return "  ".join(words)
