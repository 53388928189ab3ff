import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.algorithms.losses import Denominators, make_policy_loss, make_sft_loss
from rlhpc.config.schema import AlgorithmConfig, KlLossType, LossAggregation
from rlhpc.data.batch import Batch
from rlhpc.errors import CommandError


def make_batch(lengths, seed=0):
    """Random rows of (prompt, response) ``lengths`` in float64 and current log-probs."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.cat([torch.arange(p + r) >= p for p, r in lengths])

    def draw(scale=0.5):
        return -2 + scale * torch.randn(len(mask), generator=g, dtype=torch.float64)

    columns = {"loss_mask": mask}
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        columns[name] = draw()
    columns["advantages"] = torch.randn(len(lengths), generator=g, dtype=torch.float64) * 2
    total = torch.tensor([p + r for p, r in lengths])
    return Batch(list(range(len(lengths))), total, columns), draw(), draw().abs()


def evaluate(loss_fn, parts, logprobs, entropy, batch):
    """Loss, metrics and gradients of ``batch`` cut into ``parts`` (lists of rows), summed."""
    logprobs = logprobs.clone().requires_grad_()
    entropy = entropy.clone().requires_grad_()
    loss, metrics = torch.zeros((), dtype=torch.float64), {}
    token = torch.arange(batch.num_tokens).split(batch.lengths.tolist())
    for rows in parts:
        at = torch.cat([token[r] for r in rows])
        value, more = loss_fn(batch.select(rows), logprobs[at], entropy[at])
        loss = loss + value
        metrics = {k: metrics.get(k, 0) + v for k, v in more.items()}
    loss.backward()
    grads = [g if g is not None else torch.zeros(0) for g in (logprobs.grad, entropy.grad)]
    return loss.detach(), metrics, grads


def full_config(mode, kind=KlLossType.k3):
    return AlgorithmConfig(
        loss_agg_mode=mode,
        use_kl_loss=True,
        kl_loss_coef=0.3,
        kl_loss_type=kind,
        entropy_coeff=0.1,
        clip_ratio_high=0.28,
    )


ROWS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from(list(LossAggregation)), st.sampled_from(list(KlLossType)), st.data())
def test_neither_split_nor_order_of_rows_changes_loss_metrics_or_gradients(rows, mode, kind, data):
    batch, logprobs, entropy = make_batch(rows)
    denominators = Denominators.from_lengths([r for _, r in rows])
    loss_fn = make_policy_loss(full_config(mode, kind), denominators=denominators)
    order = data.draw(st.permutations(range(len(rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(rows) - 1)))) & set(range(len(rows))))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    whole = evaluate(loss_fn, [list(range(len(rows)))], logprobs, entropy, batch)
    split = evaluate(loss_fn, parts, logprobs, entropy, batch)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", list(LossAggregation))
@pytest.mark.parametrize("make", [make_policy_loss, make_sft_loss])
def test_nan_outside_the_mask_changes_neither_loss_nor_gradient(mode, make):
    rows = [(3, 2), (1, 4), (2, 0)]
    batch, logprobs, entropy = make_batch(rows)
    loss_fn = make(full_config(mode), denominators=Denominators.from_lengths([2, 4, 0]))
    clean = evaluate(loss_fn, [[0, 1, 2]], logprobs, entropy, batch)
    mask = batch.columns["loss_mask"]
    for column in (
        batch.columns["old_logprobs"],
        batch.columns["ref_logprobs"],
        logprobs,
        entropy,
        batch.columns["rollout_logprobs"],
    ):
        column[~mask] = math.nan
    torch.testing.assert_close(
        evaluate(loss_fn, [[0, 1, 2]], logprobs, entropy, batch), clean, rtol=0, atol=0
    )


def one_token(ratio, advantage, **options):
    """Loss, metrics and d loss / d logprob of one response token with this ratio."""
    batch = Batch(
        [0],
        torch.tensor([2]),
        {
            "loss_mask": torch.tensor([False, True]),
            "old_logprobs": torch.tensor([0.0, -1.0], dtype=torch.float64),
            "advantages": torch.tensor([advantage], dtype=torch.float64),
        },
    )
    logprobs = torch.tensor([0.0, -1.0 + math.log(ratio)], dtype=torch.float64)
    loss_fn = make_policy_loss(AlgorithmConfig(**options), denominators=Denominators(1, 1))
    loss, metrics, grads = evaluate(loss_fn, [[0]], logprobs, torch.zeros(2).double(), batch)
    return loss.item(), metrics, grads[0][1].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # above 1 + 0.2
        (0.5, 2.0, -1.0, -1.0),  # the pessimistic side is not clipped
        (0.5, -2.0, 1.6, 0.0),  # below 1 - 0.2
        (1.5, -2.0, 3.0, 3.0),
        (4.0, -2.0, 6.0, 0.0),  # dual clip at 3
    ],
)
def test_the_clip_table_by_hand(ratio, advantage, loss, gradient):
    value, _, grad = one_token(ratio, advantage)
    assert value == pytest.approx(loss)
    assert grad == pytest.approx(gradient)


def test_clip_fractions_count_each_clip():
    assert one_token(1.5, 2.0)[1]["actor/pg_clipfrac"] == 1
    assert one_token(1.25, 2.0, clip_ratio_high=0.28)[1]["actor/pg_clipfrac"] == 0
    lower = one_token(4.0, -2.0)[1]
    assert (lower["actor/pg_clipfrac"], lower["actor/pg_clipfrac_lower"]) == (0, 1)
    assert one_token(1.5, 1.0)[1]["actor/ppo_kl"] == pytest.approx(-math.log(1.5))


@pytest.mark.parametrize("ratio", [1e-300, 1e300])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_loss_and_gradient_are_finite_at_any_ratio(ratio, advantage):
    loss, metrics, grad = one_token(ratio, advantage)
    assert all(math.isfinite(v) for v in (loss, grad, *metrics.values()))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (LossAggregation.token_mean, (1 * 1 + 3 * 2) / 4),
        (LossAggregation.seq_mean_token_sum, (1 * 1 + 3 * 2) / 2),
        (LossAggregation.seq_mean_token_mean, (1 + 2) / 2),
    ],
)
def test_aggregation_by_hand(mode, expected):
    # Row 0 has one token of loss 1, row 1 three of loss 2, row 2 none.
    batch, logprobs, entropy = make_batch([(1, 1), (1, 3), (2, 0)])
    logprobs[1], logprobs[3:6] = -1.0, -2.0
    denominators = Denominators.from_lengths([1, 3, 0])
    assert denominators == Denominators(4, 2)
    loss_fn = make_sft_loss(AlgorithmConfig(loss_agg_mode=mode), denominators=denominators)
    loss, metrics, _ = evaluate(loss_fn, [[0, 1, 2]], logprobs, entropy, batch)
    assert loss.item() == metrics["train/loss"].item() == pytest.approx(expected)


def test_mismatch_of_sampler_and_trainer_is_a_mean_over_tokens():
    batch, logprobs, entropy = make_batch([(1, 2), (1, 2)])
    mask = batch.columns["loss_mask"]
    batch.columns["rollout_logprobs"] = batch.columns["old_logprobs"].clone()
    batch.columns["rollout_logprobs"][mask] += torch.tensor([0.4, 0, 0, -0.4], dtype=torch.float64)
    loss_fn = make_policy_loss(AlgorithmConfig(), denominators=Denominators(4, 2))
    metrics = evaluate(loss_fn, [[0], [1]], logprobs, entropy, batch)[1]
    assert metrics["training/rollout_logprobs_diff_mean"].item() == pytest.approx(0.2)
    assert 0 < metrics["training/rollout_probs_diff_mean"] < 0.2


def test_the_entropy_bonus_raises_entropy():
    batch, logprobs, entropy = make_batch([(1, 2)])
    config = AlgorithmConfig(entropy_coeff=0.5)
    loss_fn = make_policy_loss(config, denominators=Denominators(2, 1))
    grad = evaluate(loss_fn, [[0]], logprobs, entropy, batch)[2][1]
    assert grad.tolist() == [0.0, -0.25, -0.25]


def test_a_missing_column_is_named():
    batch, logprobs, entropy = make_batch([(1, 2)])
    del batch.columns["ref_logprobs"]
    config = AlgorithmConfig(use_kl_loss=True)
    with pytest.raises(CommandError, match="the loss needs column ref_logprobs"):
        make_policy_loss(config, denominators=Denominators(2, 1))(batch, logprobs, entropy)
