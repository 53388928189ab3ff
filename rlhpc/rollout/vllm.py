"""The `vllm` rollout engine: vLLM's scheduler and workers in our own ranks, one replica a world.

It is not a server and starts no process: tp 0 steps vLLM's `LLMEngine`, the others serve it in
`follow` (`vllm_executor` has the drawing).  vLLM is imported when an engine is built, because it
reads its environment variables at import.

vLLM draws from the process's random state while it samples; ranks that host another engine too keep
the two apart by swapping that state with the world.  Building an engine leaves it as it was.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rlhpc.config.engines import MIN_TEMPERATURE, VllmOptions
from rlhpc.errors import CommandError, PlanError
from rlhpc.plan import RolePlan
from rlhpc.rollout.base import Sample, SampleRequest, check_request
from rlhpc.weights.base import WeightPart
from rlhpc.weights.vllm import vllm_weight_parts

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# Tokens of one step on CPU, where a prompt cannot be split over steps (see `_engine_arguments`).
_CPU_STEP_TOKENS = 8192


class VllmEngine:
    """Rollout with vLLM on the tp ranks of one replica; satisfies `rollout.base.RolloutEngine`."""

    def __init__(
        self,
        *,
        model_path: str,
        role: RolePlan,
        rank: int,
        options: VllmOptions,
        dtype: str,
        device: torch.device,
        max_model_len: int,
        seed: int,
        stop_token_ids: tuple[int, ...],
        engine_id: str,
    ) -> None:
        """Load the model.  Collective over the replica, inside its world (the torch default group).

        Raises:
            PlanError: the world does not have the role's tp ranks.
        """
        self._label = role.label(rank)
        self._tp, self._tp_rank = role.tp, role.coordinates(rank)[1]
        if (dist.get_world_size(), dist.get_rank(), role.pp) != (role.tp, self._tp_rank, 1):
            raise PlanError(
                f"{self._label}: rank {dist.get_rank()} of a world of {dist.get_world_size()} with "
                f"pp={role.pp}; expected rank {self._tp_rank} of {role.tp} and pp=1. "
                f"Set roles.{role.name}.pp=1 and build the engine inside its replica's world"
            )
        self._max_model_len = max_model_len
        self._stop_ids = frozenset(stop_token_ids)
        self._version = 0
        prepare_environment(device)
        arguments = _engine_arguments(options, device=device, max_model_len=max_model_len) | {
            "model": model_path,
            "dtype": _DTYPES[dtype],
            "tensor_parallel_size": role.tp,
            "seed": seed,
            "additional_config": {
                "rlhpc": {"engine_id": engine_id, "local_rank": device.index or 0}
            },
        }
        with _process_state_kept(device):
            self._build(arguments)
            self._parts = self._find_parts()

    @property
    def busy(self) -> bool:
        """Leader: rows are waiting or being sampled."""
        return bool(self._leader().has_unfinished_requests())

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Leader: queue rows.  Local.

        Raises:
            CommandError: a row is empty or longer than the engine's maximum, or its temperature is
            not served.
        """
        from vllm.inputs.engine import tokens_input

        engine = self._leader()
        for request in requests:
            check_request(request, max_model_len=self._max_model_len)
        for request in requests:
            prompt = tokens_input(list(request.prompt_ids))
            engine.add_request(str(request.row_id), prompt, self._sampling_params(request))

    def step(self) -> list[Sample]:
        """Leader: advance every running row; returns rows that finished.  Collective.

        Lets followers out of `follow` when the last row has finished.
        """
        if not self.busy:
            return []
        samples = [self._to_sample(output) for output in self._leader().step()]
        if not self.busy:
            self._release(None)
        return samples

    def follow(self) -> int | None:
        """Follower: serve the leader until it lets go.  Collective over the replica.

        Returns:
            None when the leader ran out of work, else the number of the command to run before
            coming back.
        """
        if self._follower is None:
            raise CommandError(f"{self._label}: follow() on the leader; expected tp above 0")
        return self._follower.serve()

    def interrupt(self, number: int) -> None:
        """Leader, while busy: let followers out of `follow` to run command ``number``."""
        if not self.busy:
            raise CommandError(
                f"{self._label}: interrupt({number}) without rows; expected a busy engine, because "
                "followers listen only while the leader has work"
            )
        self._release(number)

    def weight_parts(self) -> list[WeightPart]:
        """This rank's shard as boxes of checkpoint tensors, in place.  Local."""
        return self._parts

    def weights_updated(self, version: int) -> None:
        """Leader: drop the KV cache, recompute that of running rows, label later tokens.  Local."""
        self._version = version
        if self._engine is None:
            return
        self._engine.set_weight_version(str(version))
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise CommandError(f"{self._label}: vLLM kept its prefix cache at version {version}")

    def _build(self, arguments: dict[str, Any]) -> None:
        """Leader: engine and own worker; follower: worker, serving the leader until it is ready."""
        # vLLM reads the environment at import, so it comes after `prepare_environment`.
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from rlhpc.rollout import vllm_executor

        vllm_executor.keep_plain_cpu_weights()
        executor = vllm_executor.LeaderExecutor
        config = EngineArgs(
            **arguments, distributed_executor_backend=executor
        ).create_engine_config()
        self._hf_config = config.model_config.hf_text_config
        self._engine: Any = None
        self._follower: vllm_executor.Follower | None = None
        if self._tp_rank > 0:
            self._follower = vllm_executor.Follower(config)
        else:
            self._engine = LLMEngine(config, executor, log_stats=False, multiprocess_mode=False)
            self._engine.set_weight_version(str(self._version))
            # A call to all workers, cached: later it would find no follower listening.
            self._engine.get_supported_tasks()
            self._release(None)
        if self._tp > 1:
            vllm_executor.drop_shared_memory()

    def _find_parts(self) -> list[WeightPart]:
        if self._follower is None:
            model: nn.Module = self._engine.model_executor.driver_worker.get_model()
        else:
            model = self._follower.model()
        return vllm_weight_parts(
            model, tp=self._tp, tp_rank=self._tp_rank, hf_config=self._hf_config
        )

    def _leader(self) -> Any:
        """The vLLM engine, which only the leader has."""
        if self._engine is None:
            raise CommandError(f"{self._label}: only the leader (tp 0) adds and steps rows")
        return self._engine

    def _release(self, number: int | None) -> None:
        """Let followers out of their loop.  Collective over the replica."""
        from rlhpc.rollout.vllm_executor import release_followers

        release_followers(number)

    def _sampling_params(self, request: SampleRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if 0 < request.temperature < MIN_TEMPERATURE:
            raise CommandError(
                f"row {request.row_id} has temperature {request.temperature}; expected 0 (greedy) "
                f"or at least {MIN_TEMPERATURE} with engine vllm. Change sampling.temperature"
            )
        return SamplingParams(
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            # torch's CPU generator reads the low 32 bits of a seed only.
            seed=request.seed ^ (request.seed >> 32),
            logprobs=0,
            # The run's own stop tokens decide, as in the other engines.
            ignore_eos=True,
            stop_token_ids=sorted(self._stop_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _to_sample(self, output: Any) -> Sample:
        """A finished `RequestOutput` as a sample."""
        completion = output.outputs[0]
        tokens = tuple(completion.token_ids)
        logprobs = tuple(
            entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)
        )
        if not all(map(math.isfinite, logprobs)):
            raise CommandError(
                f"{self._label}: row {output.request_id} has log-probs {logprobs}; expected finite "
                f"numbers. Weights of version {self._version} gave logits that are not finite"
            )
        versions: list[int] = []
        for span in completion.weight_versions:
            versions += [int(span.version)] * (span.end - span.start)
        return Sample(
            row_id=int(output.request_id),
            response_ids=tokens,
            logprobs=logprobs,
            policy_versions=tuple(versions),
            truncated=tokens[-1] not in self._stop_ids,
        )


def prepare_environment(device: torch.device) -> None:
    """Set what vLLM reads from the environment; must come before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On CPU its warnings advise on settings that a rehearsal does not need.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if device.type == "cpu" else "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device.type == "cpu":
        # Eager mode still compiles one function of the sampler, for 10 s and with a C++ compiler.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        torch._dynamo.config.disable = True


def _engine_arguments(
    options: VllmOptions, *, device: torch.device, max_model_len: int
) -> dict[str, Any]:
    """The part of vLLM's `EngineArgs` that follows from options and device."""
    arguments: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enable_prefix_caching": options.enable_prefix_caching,
        "block_size": options.block_size,
        # Log-probs of the distribution that is sampled from, after temperature.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        # With a step in flight, tokens sampled across a weight sync would carry the wrong version.
        "async_scheduling": False,
    }
    if device.type != "cpu":
        return arguments | {
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "enforce_eager": options.enforce_eager,
        }
    return arguments | {
        "kv_cache_memory_bytes": int(options.kv_cache_gib * 2**30),
        "enforce_eager": True,
        # A prompt split over steps rewinds its row's generator; CPU generators cannot.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_len, _CPU_STEP_TOKENS),
    }


@contextmanager
def _process_state_kept(device: torch.device) -> Iterator[None]:
    """Undo what building vLLM does to the process: random states, `torch.set_num_threads`."""
    devices = [device.index or 0] if device.type == "cuda" else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads = torch.set_num_threads
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            random.setstate(python_state)
            np.random.set_state(numpy_state)
