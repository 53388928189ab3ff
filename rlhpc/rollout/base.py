"""What a rollout engine must do, and what goes in and out of it.

One engine a dp replica; its first rank (tp 0) leads, the others follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhpc.errors import CommandError
from rlhpc.weights.base import WeightPart


@dataclass(frozen=True)
class SampleRequest:
    """One row to sample."""

    row_id: int
    prompt_ids: tuple[int, ...]
    seed: int
    """Row seed in [0, 2**63).

    The same seed, prompt and weights give the same tokens in any batch, in fp32 and but for a token
    in a million whose draw lies within rounding of the boundary between two tokens.
    """
    max_new_tokens: int
    temperature: float
    """0 is greedy."""


@dataclass(frozen=True)
class Sample:
    """One finished row.  All lists have one entry a sampled token, an EOS included."""

    row_id: int
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log softmax(logits / temperature) of the sampled token (temperature 1 when greedy)."""
    policy_versions: tuple[int, ...]
    """Version of the weights that sampled each token."""
    truncated: bool
    """Ended by the length limit, not by an EOS."""


def check_request(request: SampleRequest, *, max_model_len: int) -> None:
    """Raise CommandError when ``request`` cannot be sampled within ``max_model_len`` tokens."""
    length, limit = len(request.prompt_ids), request.max_new_tokens
    if length < 1 or limit < 1 or length + limit > max_model_len:
        raise CommandError(
            f"row {request.row_id} has {length} prompt tokens and may sample {limit}; expected at "
            f"least one each and at most {max_model_len} together. Lower data.max_prompt_length or "
            "data.max_response_length"
        )


class RolloutEngine(Protocol):
    """Continuous sampling in one replica.

    Leader: `add`, then `step` until `busy` is False.  Followers: `follow` between commands.
    """

    @property
    def busy(self) -> bool:
        """Leader: rows are waiting or being sampled."""
        ...

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Leader: queue rows.  Does not block."""
        ...

    def step(self) -> list[Sample]:
        """Leader: advance every running row by (at least) one token; returns rows that finished.

        When the last row finishes, followers are let out of `follow`.
        """
        ...

    def follow(self) -> int | None:
        """Follower: serve the leader until it lets go.

        Returns:
            None when the leader ran out of work; else the number of the command that all ranks of
            the replica must run now before coming back to `follow`.
        """
        ...

    def interrupt(self, number: int) -> None:
        """Leader, while busy: let followers out of `follow` to run command ``number``.

        They come back by themselves.
        """
        ...

    def weight_parts(self) -> list[WeightPart]:
        """This rank's shard as boxes, in place; views stay valid for the engine's life.  Local."""
        ...

    def weights_updated(self, version: int) -> None:
        """Told on every rank after the views were written: drop caches.  Local.

        Later tokens carry ``version``.
        """
        ...
