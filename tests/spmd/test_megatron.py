"""training.megatron: every cut over ranks gives the numbers of transformers and a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhpc.config.engines import MegatronOptions, Recompute
from rlhpc.config.schema import LrSchedule, OptimConfig
from rlhpc.data.batch import Batch
from rlhpc.plan import RolePlan
from tests.megatron_models import (
    PRELOAD,
    Reference,
    load_reference,
    make_batch,
    make_engine,
    make_loss,
    make_model_folder,
    make_role,
    reference_logprobs,
)
from tests.spmd import run_spmd

LENGTHS = [20, 7, 33, 11, 5]
TEMPERATURE = 0.7
# A large epsilon: with Adam's usual one a gradient near 0 moves a weight by lr to either side.
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, eps=1e-3, clip_grad=1.0)
CASES = [
    ("llama", False, (1, 1, 1)),
    ("llama", False, (1, 2, 1)),
    ("llama", False, (2, 1, 1)),
    ("llama3", True, (1, 2, 2)),
    ("qwen2", True, (1, 1, 2)),
    ("qwen2", False, (1, 2, 1)),
    ("qwen3", False, (2, 1, 1)),
    ("qwen3", True, (1, 2, 1)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], str]:
    root = tmp_path_factory.mktemp("models")
    kinds = {(kind, tied) for kind, tied, _ in CASES}
    return {k: make_model_folder(root / f"{k[0]}-{k[1]}", k[0], tied=k[1]) for k in sorted(kinds)}


def _my_rows(batch: Batch, role: RolePlan, rank: int) -> list[int]:
    return [i for i in range(len(batch)) if i % role.dp == role.coordinates(rank)[0]]


def _score_and_train(rank: int, path: str, role: RolePlan, out: str) -> Any:
    engine = make_engine(path, rank, role=role, optim=OPTIM)
    batch = make_batch(LENGTHS)
    batch = batch.select(_my_rows(batch, role, rank))
    scores = engine.compute_logprobs(batch, temperature=TEMPERATURE)
    updates = [engine.update(batch, make_loss(61), temperature=TEMPERATURE) for _ in range(2)]
    engine.save_hf(Path(out))
    return scores, updates


@pytest.mark.parametrize(("kind", "tied", "axes"), CASES)
def test_every_cut_scores_and_trains_like_a_plain_loop(
    models: dict[tuple[str, bool], str],
    tmp_path: Path,
    kind: str,
    tied: bool,
    axes: tuple[int, int, int],
) -> None:
    path, role = models[kind, tied], make_role(*axes)
    results = run_spmd(
        _score_and_train, len(role.ranks), path, role, str(tmp_path), preload=PRELOAD
    )
    reference = Reference(path, OPTIM)
    batch = make_batch(LENGTHS)
    for rank, (scores, _) in enumerate(results):
        assert (scores is None) == (role.coordinates(rank)[2] != role.pp - 1)
        if scores is not None:
            rows = batch.select(_my_rows(batch, role, rank))
            want = reference_logprobs(reference.model, rows, TEMPERATURE)
            _assert_scores(scores, want)
    for i in range(2):
        want_metrics = reference.update(batch, make_loss(61), TEMPERATURE)
        for _, updates in results:
            assert updates[i] == pytest.approx({**want_metrics, "lr": OPTIM.lr}, rel=1e-5)
    _assert_weights(load_reference(str(tmp_path)), reference.weights(), 1e-5)


def _assert_scores(scores: dict[str, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for name, column in zip(("logprobs", "entropy"), want, strict=True):
        assert scores[name].dtype == torch.float32
        torch.testing.assert_close(scores[name], column.detach(), rtol=0, atol=1e-5)


def _assert_weights(model: Any, want: dict[str, Tensor], atol: float) -> None:
    got = dict(model.named_parameters())
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name].detach(), value, rtol=0, atol=atol, msg=name)


def _train_with(rank: int, path: str, role: RolePlan, many: list[MegatronOptions]) -> Any:
    out = []
    for options in many:
        engine = make_engine(path, rank, role=role, optim=OPTIM, options=options)
        batch = make_batch(LENGTHS)
        batch = batch.select(_my_rows(batch, role, rank))
        out.append([engine.update(batch, make_loss(61), temperature=TEMPERATURE) for _ in range(2)])
    return out


def test_the_budget_of_a_micro_batch_changes_nothing(models: dict[tuple[str, bool], str]) -> None:
    many = [MegatronOptions(max_tokens_per_micro_batch=n) for n in (34, 64, 4096)]
    role = make_role(pp=2)
    for small, middle, large in run_spmd(
        _train_with, 2, models["llama", False], role, many, preload=PRELOAD
    ):
        for a, b, c in zip(small, middle, large, strict=True):
            assert a == pytest.approx(b, rel=1e-5)
            assert a == pytest.approx(c, rel=1e-5)


def test_recomputing_gives_the_same_numbers(models: dict[tuple[str, bool], str]) -> None:
    modes: list[Any] = [Recompute.none, Recompute.selective, "full"]
    many = [MegatronOptions(recompute=mode) for mode in modes]
    (runs,) = run_spmd(_train_with, 1, models["qwen3", False], make_role(), many, preload=PRELOAD)
    assert runs[0] == runs[1] == runs[2]


def test_options_of_memory_and_layout_change_no_number(
    models: dict[tuple[str, bool], str],
) -> None:
    many = [
        MegatronOptions(),
        MegatronOptions(sequence_parallel=False),
        MegatronOptions(vocab_size_multiple=64),
        MegatronOptions(distributed_optimizer=False),
    ]
    role = make_role(tp=2)
    for plain, *others in run_spmd(
        _train_with, 2, models["qwen2", False], role, many, preload=PRELOAD
    ):
        for other in others:
            for a, b in zip(plain, other, strict=True):
                assert a == pytest.approx(b, rel=1e-5)


def _train_unequal(rank: int, path: str, role: RolePlan, cuts: list[list[list[int]]]) -> Any:
    batch = make_batch(LENGTHS)
    out = []
    for cut in cuts:
        engine = make_engine(path, rank, role=role, optim=OPTIM)
        mine = batch.select(cut[role.coordinates(rank)[0]])
        scores = engine.compute_logprobs(mine, temperature=1.0)
        tokens = None if scores is None else scores["logprobs"].numel()
        out.append((tokens, engine.update(mine, make_loss(61), temperature=1.0)))
    return out


def test_replicas_may_have_unequal_or_no_rows(models: dict[tuple[str, bool], str]) -> None:
    cuts = [[[0, 2, 4], [1, 3]], [[2], [0, 1, 3, 4]], [[0, 1, 2, 3, 4], []]]
    role = make_role(dp=2, pp=2)
    results = run_spmd(_train_unequal, 4, models["qwen2", True], role, cuts, preload=PRELOAD)
    metrics = [update for result in results for _, update in result]
    assert all(m == pytest.approx(metrics[0], rel=1e-5) for m in metrics)
    assert [tokens for tokens, _ in results[3]] == [18, 43, 0]


def _train_scheduled(rank: int, path: str, schedule: LrSchedule) -> list[float]:
    optim = OptimConfig(lr=1.0, lr_warmup_steps=2, lr_schedule=schedule, min_lr_ratio=0.1)
    engine = make_engine(path, rank, role=make_role(), optim=optim)
    batch = make_batch([5])
    zero = make_loss(1, entropy_coeff=0.0)
    batch.columns["advantages"].zero_()
    return [engine.update(batch, zero, temperature=1.0)["lr"] for _ in range(11)]


@pytest.mark.parametrize(
    ("schedule", "at_6", "at_10"),
    [
        (LrSchedule.constant, 1.0, 1.0),
        (LrSchedule.linear, 0.55, 0.1),
        (LrSchedule.cosine, 0.55, 0.1),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    models: dict[tuple[str, bool], str], schedule: LrSchedule, at_6: float, at_10: float
) -> None:
    (rates,) = run_spmd(_train_scheduled, 1, models["llama", False], schedule, preload=PRELOAD)
    assert rates[:3] == pytest.approx([0.0, 0.5, 1.0])
    assert (rates[6], rates[10]) == pytest.approx((at_6, at_10))
