"""A worker whose controller follows a test's script, and an engine that records its samples.

Usage on each rank: python -m tests.e2e.scripted RUN_DIR
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rlhpc.comm.channel import ChannelServer
from rlhpc.comm.messages import Event
from rlhpc.config.load import read_config
from rlhpc.controller.calls import Call, Calls
from rlhpc.plan import read_plan
from rlhpc.slurm.environ import RankEnvironment
from rlhpc.worker import Worker

NUM_ROWS = 24


class ScriptedWorker(Worker):
    """Rank 0 syncs weights while rows are being sampled, twice, and writes down the order."""

    def _control(self, server: ChannelServer) -> None:
        ranks = range(self._plan.num_ranks)
        server.wait_for_peers({r: str(r) for r in ranks}, 120)
        calls = Calls(server, self._plan)
        calls.wait(calls.issue("build", {r: {} for r in ranks}))
        seen: list[str] = []
        generate = self._generate(
            calls, lambda event: seen.append(f"{len(event.data['rows'])} rows")
        )
        for version in (1, 2):
            while len(seen) < version:
                calls.poll(1.0)
            sync = calls.issue("sync_weights", {r: {"version": version} for r in ranks})
            calls.wait(sync)
            seen.append("sync, generate done" if generate.done else "sync, generating")
        second = self._generate(calls, lambda _: None)
        calls.wait(generate, second)
        calls.wait(calls.issue("stop", {r: {} for r in ranks}))
        calls.wait_for_goodbyes(60)
        (self._plan.path / "seen.json").write_text(json.dumps(seen))
        (self._plan.path / "DONE").touch()
        server.close()

    def _generate(self, calls: Calls, on_event: object) -> Call:
        role = self._plan.role("rollout")
        first = 1000 * calls._next
        args = {
            "rows": [[first + i, i, 77 + i] for i in range(NUM_ROWS)],
            "split": "train",
            "temperature": 1.0,
            "max_new_tokens": self._config.data.max_response_length,
        }

        def note(event: Event) -> None:
            on_event(event)  # type: ignore[operator]

        everyone = dict.fromkeys(role.ranks, args)
        return calls.issue("generate", everyone, role="rollout", on_event=note)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ScriptedWorker(
        read_config(folder / "config.yaml"),
        read_plan(folder / "plan.json"),
        RankEnvironment.from_env(os.environ),
    ).run()
