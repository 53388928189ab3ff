"""One vLLM replica over our own ranks: the leader schedules, followers repeat its worker calls.

It starts no process and needs neither Ray nor multiprocessing.  Who waits for whom, in one replica:

    tp 0: LLMEngine -> LeaderExecutor.collective_rpc --- Call ---> Follower.serve on tp 1.. (gloo
    broadcast)
              own worker  <-- model collectives (NCCL, gloo) -->  their workers
              replies     <---------- gather --------------------  (none for the calls of a sampling
              step) release(n)  ----------- Release(n) -------------->  serve returns n

This module imports vLLM: import it only after `prepare_environment` of `rollout.vllm`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm.model_executor.layers import utils as layers
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from rlhpc.errors import CommandError

# Calls of a sampling step: the leader's own result counts; a follower that fails ends its rank.
_WITHOUT_REPLY = frozenset({"execute_model", "sample_tokens", "take_draft_token_ids"})


@dataclass(frozen=True)
class Call:
    """Run a worker method."""

    method: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Release:
    """Stop serving; ``number`` is the command to run next, None when there is no more work."""

    number: int | None


def send(message: Call | Release, group: ProcessGroup) -> None:
    """Leader: broadcast ``message`` to the followers.  Collective over ``group`` (gloo)."""
    payload = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
    dist.broadcast(torch.tensor([payload.numel()]), group=group, group_src=0)
    dist.broadcast(payload, group=group, group_src=0)


def receive(group: ProcessGroup) -> Call | Release:
    """Follower: the leader's next message.  Collective over ``group`` (gloo)."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, group=group, group_src=0)
    payload = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(payload, group=group, group_src=0)
    message = pickle.loads(payload.numpy().tobytes())
    assert isinstance(message, Call | Release), f"unexpected message {type(message)}"
    return message


def release_followers(number: int | None) -> None:
    """Leader: end the followers' `serve`, which returns ``number``.  Collective."""
    group = get_world_group().cpu_group
    if group.size() > 1:
        send(Release(number), group)


class LeaderExecutor(UniProcExecutor):
    """vLLM's executor on tp 0: own worker in this process, the other tp ranks by broadcast."""

    supports_pp = False

    def _init_executor(self) -> None:
        self.driver_worker = build_worker(self.vllm_config)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Run ``method`` on every worker.  Collective over the replica.

        Raises:
            CommandError: a worker failed; the first failure is named.
        """
        group = get_world_group().cpu_group
        alone = group.size() == 1
        if not alone:
            send(Call(method, args, kwargs or {}), group)
        if alone or method in _WITHOUT_REPLY:
            return super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        results = _gather(_attempt(self.driver_worker, method, args, kwargs or {}), group)
        value = results[0] if single_value else results
        if not non_block:
            return value
        future: Future[Any] = Future()
        future.set_result(value)
        return future


class Follower:
    """The worker of a tp rank above 0."""

    def __init__(self, config: VllmConfig) -> None:
        """Build the worker and serve until the leader is ready.  Collective over the replica."""
        self._worker = build_worker(config)
        self._group = get_world_group().cpu_group
        self.serve()

    def serve(self) -> int | None:
        """Repeat the leader's calls until it releases; returns its number.  Collective."""
        while True:
            message = receive(self._group)
            if isinstance(message, Release):
                return message.number
            if message.method in _WITHOUT_REPLY:
                run_method(self._worker, message.method, message.args, message.kwargs)
            else:
                outcome = _attempt(self._worker, message.method, message.args, message.kwargs)
                dist.gather_object(outcome, None, group=self._group, group_dst=0)

    def model(self) -> nn.Module:
        """The model shard."""
        return self._worker.get_model()


def keep_plain_cpu_weights() -> None:
    """Make vLLM keep linear weights as plain tensors on CPU, as it does on GPU.

    By default it packs them into opaque handles and leaves empty parameters, which no sync can
    write.
    """

    def keep(layer: Any, remove_weight: bool) -> None:
        del remove_weight
        layer.cpu_linear = nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep


def build_worker(config: VllmConfig) -> WorkerWrapperBase:
    """The worker of this process, its model loaded.  Collective over the replica."""
    place = config.additional_config["rlhpc"]
    rank = dist.get_rank()
    arguments = {
        "vllm_config": config,
        "local_rank": place["local_rank"],
        "rank": rank,
        # The world exists already: vLLM reads only the name after the last colon.  It differs on
        # every rank, so that on CPU vLLM uses gloo and not its shared-memory communicator, which
        # spins (tp 4 on 2 cores: 10 times slower) and leaves files behind when a rank is killed.
        "distributed_init_method": f"tcp://rlhpc:{place['engine_id']}-r{rank}",
        "is_driver_worker": rank == 0,
        # Of the fork context because that one leaves no named semaphore behind.
        "shared_worker_lock": get_context("fork").Lock(),
    }
    worker = WorkerWrapperBase(rpc_rank=0, global_rank=rank)
    worker.init_worker(all_kwargs=[arguments])
    worker.init_device()
    worker.load_model()
    current_platform.update_block_size_for_backend(config)
    return worker


def drop_shared_memory() -> None:
    """Unlink the shared-memory queue of vLLM's tp group, whose broadcasts then take gloo.

    Nothing here uses the queue, and a killed rank would leave its file behind.
    """
    get_tp_group().mq_broadcaster = None


def _attempt(
    worker: WorkerWrapperBase,
    method: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, str | None]:
    """(result, None) or (None, error): both sides must reach the gather."""
    try:
        return run_method(worker, method, args, kwargs), None
    except Exception as error:
        return None, f"{method}: {error!r}"


def _gather(outcome: tuple[Any, str | None], group: ProcessGroup) -> list[Any]:
    outcomes: list[Any] = [None] * group.size()
    dist.gather_object(outcome, outcomes, group=group, group_dst=0)
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            raise CommandError(f"vLLM worker tp{rank} failed in {error}")
    return [result for result, _ in outcomes]
