import torch

from rlhpc.rollout.sampling import compute_logprobs, compute_uniforms, sample_tokens


def test_uniforms_follow_splitmix64_of_the_seed_and_the_index() -> None:
    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    # The first output of splitmix64 seeded with 0, as published with the algorithm.
    assert mix(gamma) == 0xE220A8397B1DCDAF
    for seed, index in ((0, 0), (1, 0), (0, 1), (2**63 - 1, 12345)):
        state = (mix((seed + gamma) % 2**64) + (index + 1) * gamma) % 2**64
        got = compute_uniforms(torch.tensor([seed]), torch.tensor([index]))
        assert got.item() == (mix(state) >> 11) * 2.0**-53


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    count = 200_000
    seeds, zeros = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for values in (compute_uniforms(seeds, zeros), compute_uniforms(zeros, seeds)):
        assert values.min() >= 0
        assert values.max() < 1
        counts = torch.histc(values, bins=100, min=0, max=1)
        # 99 degrees of freedom: above 148.2 in 1 of 1000 draws.
        assert ((counts - count / 100) ** 2 / (count / 100)).sum() < 148.2
        shifted = torch.stack([values[:-1], values[1:]])
        assert abs(torch.corrcoef(shifted)[0, 1]) < 0.01


def test_samples_follow_the_distribution_at_every_temperature() -> None:
    count = 100_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 2
    for temperature in (0.5, 1.0, 1.7):
        uniforms = compute_uniforms(torch.arange(count), torch.full((count,), 3))
        temperatures = torch.full((count,), temperature)
        tokens, logprobs = sample_tokens(
            logits.expand(count, -1), temperatures=temperatures, uniforms=uniforms
        )
        expected = (logits / temperature).double().softmax(-1) * count
        counts = torch.bincount(tokens, minlength=12)
        # 11 degrees of freedom: above 31.3 in 1 of 1000 draws.
        assert ((counts - expected) ** 2 / expected).sum() < 31.3
        assert torch.equal(logprobs, (logits / temperature).log_softmax(-1)[tokens])


def test_temperature_zero_takes_the_argmax_and_logprobs_of_temperature_one() -> None:
    logits = torch.randn(8, 50)
    zeros = torch.zeros(8)
    tokens, logprobs = sample_tokens(
        logits, temperatures=zeros, uniforms=torch.rand(8, dtype=torch.float64)
    )
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(logprobs, logits.log_softmax(-1).max(-1).values)


def test_a_token_without_probability_is_never_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    tokens, _ = sample_tokens(logits, temperatures=torch.ones(3), uniforms=uniforms)
    assert tokens.tolist() == [1, 3, 3]


def test_logprobs_of_bf16_logits_are_fp32() -> None:
    logits = torch.randn(2, 9).bfloat16()
    logprobs = compute_logprobs(logits, torch.tensor([0.0, 0.7]))
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(2))
