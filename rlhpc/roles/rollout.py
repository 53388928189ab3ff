"""Rollout role: queues rows in its engine, steps it between commands, reports finished rows.

`generate` returns at once on the leader; the rank's main loop then alternates `step` and command
polling, so that finished groups stream out and a weight sync is taken between two engine steps.
Followers of a tensor-parallel replica stay in the engine's `follow` for the time of the command.
"""

from __future__ import annotations

from typing import Any

import torch

from rlhpc.comm.messages import Command
from rlhpc.comm.world import World
from rlhpc.errors import CommandError
from rlhpc.metrics import sample_device
from rlhpc.plan import RolePlan
from rlhpc.roles.base import RankContext
from rlhpc.rollout.base import RolloutEngine, Sample, SampleRequest
from rlhpc.weights.base import WeightPart


class RolloutRole:
    """One rank of the rollout."""

    def __init__(
        self, context: RankContext, plan: RolePlan, engine: RolloutEngine, world: World
    ) -> None:
        self.name = plan.name
        self._context = context
        self._engine = engine
        self._world = world
        self._leads = plan.coordinates(context.rank)[1] == 0
        self._following = False
        self._open: dict[int, set[int]] = {}
        self._command_of: dict[int, int] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._sampled_tokens: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        """Rows are being sampled here."""
        return self._leads and self._engine.busy

    def run(self, command: Command) -> dict[str, Any] | None:
        """Only `generate` is a rollout command; weights come by the rank's `sync_weights`."""
        if command.method != "generate":
            raise CommandError(f"role {self.name} has no method {command.method!r}")
        rows = command.args["rows"]
        if not rows:
            return {"num_sampled_tokens": 0}
        if not self._leads:
            self._follow()
            return {}
        self._queue(command)
        return None

    def _queue(self, command: Command) -> None:
        args = command.args
        prompts = self._context.prompts(args["split"])
        requests = []
        for row, prompt_index, seed in args["rows"]:
            prompt = tuple(prompts[prompt_index].token_ids)
            self._prompts[row] = prompt
            self._command_of[row] = command.number
            requests.append(
                SampleRequest(
                    row_id=row,
                    prompt_ids=prompt,
                    seed=seed,
                    max_new_tokens=args["max_new_tokens"],
                    temperature=args["temperature"],
                )
            )
        self.before_collective(command.number)  # followers must take it before work ends
        self._open[command.number] = {r.row_id for r in requests}
        self._sampled_tokens[command.number] = 0
        with self._world.active():
            self._engine.add(requests)

    def _follow(self) -> None:
        """Serve the leader until it runs out of work.

        Leave for commands that the whole replica runs.
        """
        if self._following:  # a further generate while serving: the outer call goes on
            return
        self._following = True
        try:
            while True:
                with self._world.active():
                    number = self._engine.follow()
                if number is None:
                    return
                self._context.run_until(number)
        finally:
            self._following = False

    def step(self) -> None:
        """One engine step; finished rows go to the column store and to the controller."""
        with self._world.active():
            samples = self._engine.step()
        by_command: dict[int, list[Sample]] = {}
        for sample in samples:
            by_command.setdefault(self._command_of[sample.row_id], []).append(sample)
        for number, finished in by_command.items():
            self._report(number, finished)

    def _report(self, number: int, samples: list[Sample]) -> None:
        prompt_lengths = [len(self._prompts[s.row_id]) for s in samples]
        for sample in samples:
            self._keep(sample)
        self._context.emit(
            number,
            "rows",
            {
                "rows": [s.row_id for s in samples],
                "prompt_length": prompt_lengths,
                "length": [
                    p + len(s.response_ids) for p, s in zip(prompt_lengths, samples, strict=True)
                ],
                "truncated": [s.truncated for s in samples],
            },
        )
        left = self._open[number]
        left.difference_update(s.row_id for s in samples)
        self._sampled_tokens[number] += sum(len(s.response_ids) for s in samples)
        if not left:
            del self._open[number]
            self._context.reply(
                number,
                {
                    "num_sampled_tokens": self._sampled_tokens.pop(number),
                    "device": sample_device(self._context.device),
                },
            )

    def _keep(self, sample: Sample) -> None:
        """Columns of one row; the loss mask comes from the sampled length, never from token ids."""
        prompt = self._prompts.pop(sample.row_id)
        del self._command_of[sample.row_id]
        num_prompt, num_sampled = len(prompt), len(sample.response_ids)
        mask = torch.zeros(num_prompt + num_sampled, dtype=torch.bool)
        mask[num_prompt:] = True
        logprobs = torch.zeros(num_prompt + num_sampled, dtype=torch.float32)
        logprobs[num_prompt:] = torch.tensor(sample.logprobs, dtype=torch.float32)
        versions = torch.full((num_prompt + num_sampled,), -1, dtype=torch.int32)
        versions[num_prompt:] = torch.tensor(sample.policy_versions, dtype=torch.int32)
        row, store = sample.row_id, self._context.store
        store.put("token_ids", {row: torch.tensor([*prompt, *sample.response_ids])})
        store.put("loss_mask", {row: mask})
        store.put("rollout_logprobs", {row: logprobs})
        store.put("policy_version", {row: versions})

    def before_collective(self, number: int) -> None:
        """Call the followers out of their loop when rows are being sampled."""
        if self.busy:
            with self._world.active():
                self._engine.interrupt(number)

    def weight_parts(self) -> list[WeightPart]:
        """This rank's shard, written in place by a sync."""
        return self._engine.weight_parts()

    def weights_updated(self, version: int) -> None:
        """Drop the caches made with the former weights."""
        with self._world.active():
            self._engine.weights_updated(version)

    def close(self) -> None:
        """Nothing outlives the process."""
