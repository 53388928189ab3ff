"""What Megatron needs to run without CUDA: call `install()` before megatron is imported.

Megatron writes "cuda" into calls all over its code.  Here these calls reach the CPU, so that a
rehearsal runs the same schedules, collectives and optimizer as a GPU run.  Nothing is replaced
where CUDA is there.

Stand-ins, none of which a CPU test can prove for the GPU; each has a test with the `gpu` mark:

- optimizer: `FusedAdam` for the fused one of Transformer Engine or Apex;
- streams: one stream that does nothing, no synchronisation;
- RNG: the CPU generator for the CUDA one, also in Megatron's tracker of states per tensor-parallel
  rank;
- compilation: functions that Megatron compiles at import stay plain Python.

The redirection of devices holds for one thread only: every engine entry point is decorated with
`as_cuda()`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

_MEGATRON_MODULES = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
)
_installed = False


def install() -> None:
    """Prepare this process for Megatron on CPU; does nothing with CUDA or at the second call."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    assert "megatron.core" not in sys.modules, "megatron was imported before cpu.install()"
    _replace_cuda_calls()
    _installed = True
    with as_cuda():
        _import_megatron()
    _replace_rng()
    _replace_optimizer()


def is_installed() -> bool:
    """True when the stand-ins are in place."""
    return _installed


@contextmanager
def as_cuda() -> Iterator[None]:
    """Send "cuda" devices of torch calls in this thread to the CPU; also a decorator.

    Does nothing where CUDA is there.
    """
    with _CudaToCpu() if _installed else nullcontext():
        yield


def _names_cuda(device: Any) -> bool:
    """True for "cuda:0", torch.device("cuda") and a bare device index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return (isinstance(device, str) and device.startswith("cuda")) or type(device) is int


class _CudaToCpu(TorchFunctionMode):
    """Rewrites device arguments; `Tensor.type()` gives CUDA's text, which Megatron compares."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None and _names_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is Tensor.cuda or func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Stream:
    """A CUDA stream where everything is done in order anyway."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _stream: _Stream) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _replace_cuda_calls() -> None:
    """Names of torch.cuda that Megatron calls, as their meaning on CPU."""
    stream = _Stream()
    stand_ins: dict[str, Any] = {
        "current_device": lambda: CPU,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "current_stream": lambda *_: stream,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)


def _import_megatron() -> None:
    """Import Megatron with `torch.compile` as identity: no compiler is loaded, nothing compiled."""

    def identity(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
        return fn if fn is not None else lambda inner: inner

    compiler = torch.compile
    torch.compile = identity  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            for module in _MEGATRON_MODULES:
                importlib.import_module(module)
    finally:
        torch.compile = compiler


def _module(name: str) -> Any:
    """An imported module whose names are about to be replaced."""
    return importlib.import_module(name)


def _replace_rng() -> None:
    """Let Megatron's tracker of RNG states switch the CPU generator."""
    random = _module("megatron.core.tensor_parallel.random")

    @contextmanager
    def fork(tracker: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        # Megatron's own also checks that the CPU generator stays as it is, which here is the one in
        # use.
        outer = torch.get_rng_state()
        torch.set_rng_state(tracker.states_[name])
        try:
            yield
        finally:
            tracker.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random.CudaRNGStatesTracker.fork = fork


class FusedAdam(torch.optim.Optimizer):
    """AdamW in the shape of the fused CUDA ones: one `step` a parameter group, not one a parameter.

    Megatron's distributed optimizer can save and load its state in this shape only.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        assert adam_w_mode, "only decoupled weight decay is implemented"
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One AdamW step (Loshchilov and Hutter 2019, arXiv:1711.05101)."""
        assert closure is None, "a closure is not served"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            adamw(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                # torch counts the step up before it uses it
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                foreach=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _replace_optimizer() -> None:
    """Let Megatron take `FusedAdam` as if Apex were there."""
    optimizer = _module("megatron.core.optimizer")
    distributed = _module("megatron.core.optimizer.distrib_optimizer")
    if distributed.HAVE_APEX_OR_TE:
        return
    optimizer.Adam = distributed.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
