"""run_spmd: a function on N gloo ranks, in processes forked from a server that has torch loaded."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    args: tuple[Any, ...],
    conn: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        if store:
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
            )
        # Plain bytes: tensors sent as such would live in the memory of a process about to end.
        conn.send_bytes(pickle.dumps((True, fn(rank, *args))))
    except BaseException:
        conn.send_bytes(pickle.dumps((False, traceback.format_exc())))
    conn.close()
    os._exit(0)  # engines leave threads that would hold the interpreter


_preloaded: tuple[str, ...] = ()


def _use_fork_server(preload: tuple[str, ...]) -> None:
    """A running server keeps what it imported: start another one where a test wants more."""
    global _preloaded
    if set(preload) <= set(_preloaded):
        return
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    # The server of Python 3.11 does not take over sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    mp.set_forkserver_preload(list(preload))
    _preloaded = preload


def run_spmd(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    init: bool = True,
    preload: tuple[str, ...] = ("torch",),
) -> list[Any]:
    """Results of ``fn(rank, *args)`` on every rank; the first traceback is re-raised.

    ``fn`` must be importable (module level).  ``init`` makes the torch default world of all ranks.
    """
    ctx = mp.get_context("forkserver")
    _use_fork_server(preload)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store" if init else ""
        conns: dict[Connection, int] = {}
        procs = []
        for rank in range(world_size):
            mine, theirs = ctx.Pipe(duplex=False)
            proc = ctx.Process(
                target=_rank_main, args=(fn, rank, world_size, store, args, theirs), daemon=True
            )
            proc.start()
            theirs.close()
            conns[mine] = rank
            procs.append(proc)
        results: dict[int, Any] = {}
        failure = None
        deadline = time.monotonic() + timeout_s
        while conns and failure is None:
            ready = wait(list(conns), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failure = f"ranks {sorted(conns.values())} gave no result within {timeout_s} s"
            for conn in ready:
                rank = conns.pop(conn)
                try:
                    ok, value = pickle.loads(conn.recv_bytes())
                except EOFError:
                    ok, value = False, "died without a word"
                if ok:
                    results[rank] = value
                else:
                    failure = f"rank {rank}:\n{value}"
        for proc in procs:
            if failure is not None:
                proc.kill()
            proc.join(timeout=10)
        if failure is not None:
            raise RuntimeError(failure)
    return [results[r] for r in range(world_size)]
