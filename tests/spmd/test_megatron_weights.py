"""training.megatron: weight parts, writing through them, export, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhpc.config.engines import MegatronOptions
from rlhpc.config.schema import OptimConfig
from rlhpc.data.batch import Batch
from rlhpc.errors import CommandError, ConfigError
from rlhpc.layout import intersect, relative_slices
from rlhpc.plan import RolePlan
from rlhpc.weights.hf_folder import load_weight_parts
from tests.megatron_models import (
    PRELOAD,
    load_reference,
    make_batch,
    make_engine,
    make_loss,
    make_model_folder,
    make_role,
    reference_logprobs,
)
from tests.spmd import run_spmd


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("untied"), "qwen2")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("tied"), "llama", tied=True)


def _copy_parts(rank: int, path: str, role: RolePlan) -> Any:
    options = MegatronOptions(vocab_size_multiple=8)
    engine = make_engine(path, rank, role=role, optim=OptimConfig(), options=options)
    return [(p.name, p.shape, p.box, p.view.clone()) for p in engine.weight_parts()]


@pytest.mark.parametrize("model", ["untied", "tied"])
def test_parts_hold_each_element_of_the_checkpoint_once(
    model: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    ranks = run_spmd(_copy_parts, 4, path, make_role(tp=2, pp=2), preload=PRELOAD)
    whole: dict[str, Tensor] = {}
    boxes: dict[str, list[Any]] = {}
    for name, shape, box, view in (part for rank in ranks for part in rank):
        target = whole.setdefault(name, torch.full(shape, torch.nan))
        seen = boxes.setdefault(name, [])
        # Norms are whole on both tp ranks; any other overlap would be a mistake.
        assert len(shape) == 1 or not any(intersect(box, other) for other in seen)
        seen.append(box)
        target[relative_slices(box, tuple((0, n) for n in shape))] = view
    state = load_reference(path).state_dict()
    expected = {k: v for k, v in state.items() if model == "untied" or k != "lm_head.weight"}
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in expected)


def _write_and_score(rank: int, path: str, other: str, role: RolePlan) -> Any:
    engine = make_engine(path, rank, role=role, optim=OptimConfig(lr=1e-9, weight_decay=0.0))
    load_weight_parts(other, engine.weight_parts())
    engine.weights_updated()
    batch = make_batch([9, 14])
    scores = engine.compute_logprobs(batch, temperature=1.0)
    engine.update(batch, make_loss(30), temperature=1.0)
    again = engine.compute_logprobs(batch, temperature=1.0)
    return scores, again


@pytest.mark.parametrize("axes", [(1, 2, 1), (1, 1, 2)])
def test_weights_written_through_the_views_are_the_ones_in_use(
    tied: str, tmp_path: Path, axes: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    other = load_reference(tied)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    other.save_pretrained(tmp_path / "other")
    results = run_spmd(
        _write_and_score,
        2,
        tied,
        str(tmp_path / "other"),
        make_role(*axes),
        preload=PRELOAD,
    )
    with torch.no_grad():
        want, _ = reference_logprobs(other, make_batch([9, 14]), 1.0)
    scores, again = results[-1]
    torch.testing.assert_close(scores["logprobs"], want, rtol=0, atol=1e-5)
    torch.testing.assert_close(again["logprobs"], want, rtol=0, atol=1e-4)


def _bf16(rank: int, path: str, other: str, role: RolePlan, out: str) -> Any:
    engine = make_engine(path, rank, role=role, optim=OptimConfig(lr=1e-3), dtype="bf16")
    engine.save_hf(Path(out) / "loaded")
    batch = make_batch([9, 14])
    before = engine.compute_logprobs(batch, temperature=1.0)["logprobs"]
    metrics = engine.update(batch, make_loss(30), temperature=1.0)
    # The fp32 copies must follow what is written, or the next update brings the old weights back.
    still = make_engine(
        path, rank, role=role, optim=OptimConfig(lr=1e-9, weight_decay=0.0), dtype="bf16"
    )
    load_weight_parts(other, still.weight_parts())
    still.weights_updated()
    still.update(batch, make_loss(30), temperature=1.0)
    still.save_hf(Path(out) / "written")
    return before, metrics


def test_bf16_keeps_fp32_copies_and_exports_its_exact_bytes(untied: str, tmp_path: Path) -> None:
    other = load_reference(untied)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other.save_pretrained(tmp_path / "other")
    results = run_spmd(
        _bf16,
        2,
        untied,
        str(tmp_path / "other"),
        make_role(tp=2),
        str(tmp_path),
        preload=PRELOAD,
    )
    # An update at lr 1e-9 may move a weight near 0 by one bf16 step.
    for name, model, atol in (("loaded", load_reference(untied), 0.0), ("written", other, 1e-8)):
        exported = load_file(tmp_path / name / "model.safetensors")
        want_state = {k: v.bfloat16() for k, v in model.state_dict().items()}
        torch.testing.assert_close(exported, want_state, rtol=0, atol=atol)
    with torch.no_grad():
        want, _ = reference_logprobs(load_reference(untied), make_batch([9, 14]), 1.0)
    before, metrics = results[0]
    assert float((before - want).abs().mean()) < 0.1
    assert metrics["grad_norm"] > 0


def _export(rank: int, path: str, role: RolePlan, out: str) -> None:
    make_engine(path, rank, role=role).save_hf(Path(out))


def test_an_export_loads_with_transformers_and_has_the_same_bytes(
    untied: str, tmp_path: Path
) -> None:
    (Path(untied) / "tokenizer.json").write_text("{}")
    run_spmd(_export, 4, untied, make_role(tp=2, pp=2), str(tmp_path), preload=PRELOAD)
    state = load_reference(untied).state_dict()
    exported = load_reference(str(tmp_path)).state_dict()
    assert state.keys() == exported.keys()
    assert all(torch.equal(state[name], exported[name]) for name in state)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "generation_config.json").is_file()


def _nan_loss(_rows: Batch, logprobs: Tensor, _: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs.sum() * torch.nan, {}


def _nan_gradient(_rows: Batch, logprobs: Tensor, _: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return (logprobs * 0).sum().abs().sqrt(), {}  # the value is 0, its slope infinite


def _refuse_to_step(rank: int, path: str) -> list[str]:
    engine = make_engine(path, rank, role=make_role(dp=2), optim=OptimConfig(lr=1.0))
    before = [p.view.clone() for p in engine.weight_parts()]
    messages = []
    for loss_fn in (_nan_loss, _nan_gradient):
        # Only one replica goes wrong; both must stop.
        mine = loss_fn if rank == 1 else make_loss(30)
        with pytest.raises(CommandError) as error:
            engine.update(make_batch([9]), mine, temperature=1.0)
        messages.append(str(error.value))
    for old, part in zip(before, engine.weight_parts(), strict=True):
        assert torch.equal(old, part.view)
    engine.update(make_batch([9]), make_loss(30), temperature=1.0)
    return messages


def test_a_loss_or_gradient_that_is_not_finite_stops_all_ranks(untied: str) -> None:
    for loss, gradient in run_spmd(_refuse_to_step, 2, untied, preload=PRELOAD):
        assert loss.startswith("loss=nan at update 1; expected a finite number")
        assert gradient.startswith("grad_norm=nan at update 1; expected a finite number")


def _actor_and_reference(rank: int, path: str) -> Any:
    role, batch = make_role(tp=2), make_batch([9, 14])
    actor = make_engine(path, rank, role=role, optim=OptimConfig(lr=1e-2))
    reference = make_engine(path, rank, role=role)
    random_state = torch.get_rng_state()
    scores = [actor.compute_logprobs(batch, temperature=1.0)["logprobs"]]
    actor.update(batch, make_loss(30), temperature=1.0)
    scores += [e.compute_logprobs(batch, temperature=1.0)["logprobs"] for e in (actor, reference)]
    assert torch.equal(random_state, torch.get_rng_state())
    with pytest.raises(CommandError, match=r"role actor has no optimizer and cannot be updated"):
        reference.update(batch, make_loss(30), temperature=1.0)
    with pytest.raises(CommandError, match=r"\(tp, pp, dp\)=\(1, 1, 2\), but another"):
        make_engine(path, rank, role=make_role(dp=2))
    return scores


def test_an_actor_and_its_reference_share_a_process(untied: str) -> None:
    for before, after, reference in run_spmd(_actor_and_reference, 2, untied, preload=PRELOAD):
        assert torch.equal(before, reference)
        assert float((before - after).abs().max()) > 1e-3


def _refuse_models(rank: int, folder: str) -> str:
    kinds = [
        ("use_sliding_window=true", "qwen2", {"use_sliding_window": True}),
        ("mlp_bias=true", "llama", {"mlp_bias": True}),
        (
            "rope_type=yarn",
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
        ),
        ("tp=3 does not divide num_attention_heads=4", "llama", {}),
    ]
    for i, (message, kind, changes) in enumerate(kinds):
        path = make_model_folder(Path(folder) / str(i), kind, **changes)
        role = (
            RolePlan(**{**vars(make_role()), "tp": 3}) if message.startswith("tp") else make_role()
        )
        with pytest.raises(ConfigError, match=message):
            make_engine(path, rank, role=role)
    return "refused"


def test_a_model_that_is_not_served_is_refused(tmp_path: Path) -> None:
    assert run_spmd(_refuse_models, 1, str(tmp_path), preload=PRELOAD) == ["refused"]
