"""Metrics of one batch from what the stages replied; names and formulas are in `metrics`."""

from __future__ import annotations

import math
from typing import Any

from rlhpc.controller.steps import BatchRun
from rlhpc.metrics import batch_metrics, validation_metrics
from rlhpc.plan import RunPlan

GIB = 2**30


def step_metrics(plan: RunPlan, batch: BatchRun, *, step_s: float, epoch: int) -> dict[str, float]:
    """Metrics of a training step."""
    rows = batch.rows
    metrics = batch_metrics(
        rows.columns.get("rewards", []),
        prompt_lengths=rows.columns["prompt_length"],
        response_lengths=rows.response_lengths,
        truncated=rows.columns["truncated"],
        extra=_extra_scores(batch),
        groups=rows.prompts,
    )
    metrics |= _update_metrics(batch)
    metrics |= _sync_metrics(plan, batch)
    for run in batch.runs.values():
        seconds = run.busy_seconds if run.stage.streams else run.seconds
        metrics[f"timing_s/{run.stage.timing or run.stage.name}"] = seconds or 0.0
    metrics |= {
        "timing_s/step": step_s,
        "perf/time_per_step": step_s,
        "perf/throughput": metrics["perf/total_num_tokens"] / (step_s * plan.num_ranks),
        "training/global_step": float(batch.spec.step),
        "training/epoch": float(epoch),
    }
    return metrics


def evaluation_metrics(batch: BatchRun, *, seconds: float) -> dict[str, float]:
    """Metrics of an evaluation."""
    columns = batch.rows.columns
    return {
        **validation_metrics(
            columns["data_source"], columns["rewards"], extra=_extra_scores(batch)
        ),
        "timing_s/testing": seconds,
    }


def device_samples(plan: RunPlan, batch: BatchRun) -> dict[str, list[dict[str, Any]]]:
    """Role -> the latest device samples of its ranks."""
    samples: dict[str, dict[int, dict[str, Any]]] = {}
    for run in batch.runs.values():
        for results in batch.results(run.stage.name):
            for rank, result in results.items():
                if "device" in result:
                    role = plan.role_of_kind(run.stage.role)
                    assert role is not None, "the stage ran on it"
                    samples.setdefault(role.name, {})[rank] = result["device"]
    return {role: [of[r] for r in sorted(of)] for role, of in samples.items()}


def _extra_scores(batch: BatchRun) -> dict[str, list[float]]:
    """Further [N] numbers of the reward function; NaN where it gave none."""
    return {
        name.removeprefix("score/"): [math.nan if v is None else v for v in values]
        for name, values in batch.rows.columns.items()
        if name.startswith("score/")
    }


def _update_metrics(batch: BatchRun) -> dict[str, float]:
    """Means over the step's updates; every rank of the role has the same numbers."""
    updates = [next(iter(r.values()))["metrics"] for r in batch.results("update")]
    if not updates:
        return {}
    means = {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}
    own = {"loss": "actor/loss", "grad_norm": "actor/grad_norm", "lr": "actor/lr"}
    return {own.get(name, name): value for name, value in means.items()}


def _sync_metrics(plan: RunPlan, batch: BatchRun) -> dict[str, float]:
    """Bytes that rollout ranks received, also over the bytes of their shards: 1 is the least."""
    rollout = plan.role_of_kind("rollout")
    results = batch.results("sync_weights")
    if not results or rollout is None:
        return {}
    stats = [results[0][rank] for rank in rollout.ranks]
    shard = sum(s["own_bytes"] for s in stats)
    came = sum(s["bytes_received"] + s["bytes_local"] for s in stats)
    return {
        "sync/received_gib": sum(s["bytes_received"] for s in stats) / GIB,
        "sync/received_over_shard": came / shard,
        "sync/transfer_s": max(s["seconds"] for s in results[0].values()),
    }
