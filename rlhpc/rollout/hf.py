"""The `hf` rollout engine: plain transformers with its own sampling loop, one rank a replica.

Rows join and leave the running batch between two tokens, so a long tail is cheap.  The cache holds
every token of a row but the last, which is the input of the next step: admission, and recomputing
after new weights, are the same prefill.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from rlhpc.config.engines import HfOptions
from rlhpc.errors import CommandError, PlanError
from rlhpc.plan import RolePlan
from rlhpc.rollout.base import Sample, SampleRequest, check_request
from rlhpc.rollout.hf_cache import join, prefill, right_aligned_mask, shrink
from rlhpc.rollout.sampling import compute_uniforms, sample_tokens
from rlhpc.weights.base import WeightPart
from rlhpc.weights.hf import hf_weight_parts

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Rows are admitted in batches of this share of the maximum: a prefill for every single slot that
# comes free would cost more than the slots stand idle.
_ADMIT_SHARE = 8


@dataclass
class _Row:
    request: SampleRequest
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.response)

    @property
    def cached_ids(self) -> tuple[int, ...]:
        """All tokens but the last, which is the input of the next step."""
        return (*self.request.prompt_ids, *self.response)[:-1]

    @property
    def last_id(self) -> int:
        return self.response[-1] if self.response else self.request.prompt_ids[-1]


class HfEngine:
    """Rollout with transformers on one rank; satisfies `rollout.base.RolloutEngine`."""

    def __init__(
        self,
        *,
        model_path: str,
        role: RolePlan,
        rank: int,
        options: HfOptions,
        dtype: str,
        device: torch.device,
        max_model_len: int,
        seed: int,
        stop_token_ids: tuple[int, ...],
        engine_id: str,
    ) -> None:
        """Load the model.  Local.

        ``seed`` and ``engine_id`` are part of the constructor that all rollout engines share: here
        rows carry their own seeds, and nothing outlives the process.

        Raises:
            PlanError: the replica has more than one rank.
        """
        del seed, engine_id
        if role.tp * role.pp != 1:
            raise PlanError(
                f"roles.{role.name}: tp={role.tp} pp={role.pp} with engine hf; expected tp=1 pp=1. "
                f"Set roles.{role.name}.tp=1 or roles.{role.name}.engine=vllm"
            )
        self._label = role.label(rank)
        self._max_num_seqs = options.max_num_seqs
        self._max_model_len = max_model_len
        self._stop_ids = frozenset(stop_token_ids)
        self._device = device
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=_DTYPES[dtype], attn_implementation="sdpa"
        )
        self._model = model.to(device).eval().requires_grad_(False)
        self._version = 0
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache: DynamicCache | None = None

    @property
    def busy(self) -> bool:
        """Rows are waiting or being sampled."""
        return bool(self._rows or self._waiting)

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Queue rows.

        Raises:
            CommandError: a row is empty or longer than the engine's maximum.
        """
        for request in requests:
            check_request(request, max_model_len=self._max_model_len)
        self._waiting.extend(_Row(request) for request in requests)

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Advance every running row by one token; returns rows that finished."""
        self._admit()
        if not self._rows:
            return []
        if self._cache is None:
            self._cache = prefill(self._model, [row.cached_ids for row in self._rows])
        tokens, logprobs = self._sample(self._decode(self._cache))
        for row, token, logprob in zip(self._rows, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                raise CommandError(
                    f"{self._label}: row {row.request.row_id} sampled token {token} with log-prob "
                    f"{logprob} after {row.length} tokens; expected a finite number. Weights of "
                    f"version {self._version} gave logits that are not finite"
                )
            row.response.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self._version)
        return self._remove_finished()

    def follow(self) -> int | None:
        """Never called: a replica of one rank has no followers.

        Raises:
            CommandError: always.
        """
        raise CommandError(f"{self._label}: follow() on an hf engine, which has no followers")

    def interrupt(self, number: int) -> None:
        """Nothing to do for command ``number``: a replica of one rank has no followers."""

    def weight_parts(self) -> list[WeightPart]:
        """Every parameter whole, under its checkpoint name.  Local."""
        return hf_weight_parts(self._model)

    def weights_updated(self, version: int) -> None:
        """Drop the cache; the next step recomputes it with the new weights.  Local."""
        self._version = version
        self._cache = None

    def _admit(self) -> None:
        """Let waiting rows join when a worthwhile number of slots is free."""
        count = min(self._max_num_seqs - len(self._rows), len(self._waiting))
        worthwhile = min(max(1, self._max_num_seqs // _ADMIT_SHARE), len(self._waiting))
        if not count or (self._rows and count < worthwhile):
            return
        joining = [self._waiting.popleft() for _ in range(count)]
        if self._cache is not None:
            added = prefill(self._model, [row.cached_ids for row in joining])
            self._cache = join(self._cache, added)
        self._rows += joining

    def _decode(self, cache: DynamicCache) -> Tensor:
        """[N, V] logits of the token after each row's last one; the last one enters the cache."""
        lengths = torch.tensor([row.length for row in self._rows], device=self._device)
        last_ids = torch.tensor([[row.last_id] for row in self._rows], device=self._device)
        output = self._model(
            input_ids=last_ids,
            attention_mask=right_aligned_mask(lengths, cache.get_seq_length() + 1),
            position_ids=lengths[:, None] - 1,
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _sample(self, logits: Tensor) -> tuple[list[int], list[float]]:
        device = self._device
        requests = [row.request for row in self._rows]
        indices = torch.tensor([len(row.response) for row in self._rows], device=device)
        seeds = torch.tensor([r.seed for r in requests], dtype=torch.int64, device=device)
        tokens, logprobs = sample_tokens(
            logits,
            temperatures=torch.tensor([r.temperature for r in requests], device=device),
            uniforms=compute_uniforms(seeds, indices),
        )
        return tokens.tolist(), logprobs.tolist()

    def _remove_finished(self) -> list[Sample]:
        keep = [i for i, row in enumerate(self._rows) if not self._is_finished(row)]
        if len(keep) == len(self._rows):
            return []
        finished = [self._to_sample(row) for row in self._rows if self._is_finished(row)]
        self._rows = [self._rows[i] for i in keep]
        if not keep:
            self._cache = None
        elif self._cache is not None:
            shrink(self._cache, keep, max(row.length - 1 for row in self._rows))
        return finished

    def _is_finished(self, row: _Row) -> bool:
        full = len(row.response) == row.request.max_new_tokens
        return full or row.response[-1] in self._stop_ids

    def _to_sample(self, row: _Row) -> Sample:
        return Sample(
            row_id=row.request.row_id,
            response_ids=tuple(row.response),
            logprobs=tuple(row.logprobs),
            policy_versions=tuple(row.versions),
            truncated=row.response[-1] not in self._stop_ids,
        )
