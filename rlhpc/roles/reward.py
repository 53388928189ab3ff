"""Reward role: decodes responses, calls the reward function on each, reports [N] rewards.

Rows stay where they are.
"""

from __future__ import annotations

import json
import math
from typing import Any

from rlhpc.comm.messages import Command
from rlhpc.errors import CommandError
from rlhpc.plan import RolePlan
from rlhpc.rewards.function import FunctionEngine, ScoreItem, ScoreResult
from rlhpc.roles.base import RankContext
from rlhpc.weights.base import WeightPart


class RewardRole:
    """One rank that scores."""

    def __init__(self, context: RankContext, plan: RolePlan, engine: FunctionEngine) -> None:
        self.name = plan.name
        self._context = context
        self._engine = engine
        self._tokenizer = context.tokenizer()

    @property
    def busy(self) -> bool:
        """Never: scoring is one command."""
        return False

    def step(self) -> None:
        """Nothing to do between commands."""

    def run(self, command: Command) -> dict[str, Any] | None:
        """`score`: rewards by an event, counts in the reply."""
        if command.method != "score":
            raise CommandError(f"role {self.name} has no method {command.method!r}")
        args = command.args
        items = [
            self._make_item(row, prompt_index, truncated, args["split"])
            for (row, prompt_index), truncated in zip(args["rows"], args["truncated"], strict=True)
        ]
        results = self._engine.score(items)
        names = sorted({name for r in results for name in r.extra})
        self._context.emit(
            command.number,
            "scores",
            {
                "rows": [r.row_id for r in results],
                "rewards": [r.reward for r in results],
                "data_source": [i.data_source for i in items],
                "extra": {n: [r.extra.get(n, float("nan")) for r in results] for n in names},
            },
        )
        self._write_samples(command, items, results)
        errors = [r.error for r in results if r.error]
        return {"num_missing": len(errors), "errors": sorted(set(errors))[:3]}

    def _make_item(self, row: int, prompt_index: int, truncated: bool, split: str) -> ScoreItem:
        store = self._context.store
        response = store.get("token_ids", row)[store.get("loss_mask", row)]
        prompt = self._context.prompts(split)[prompt_index]
        return ScoreItem(
            row_id=row,
            data_source=prompt.data_source,
            solution_str=self._tokenizer.decode(response.tolist(), skip_special_tokens=True),
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            truncated=truncated,
        )

    def _write_samples(
        self, command: Command, items: list[ScoreItem], results: list[ScoreResult]
    ) -> None:
        """The responses of an evaluation that the controller chose for the run's summary."""
        chosen = set(command.args["sample_rows"])
        if not chosen:
            return
        prompts = self._context.prompts(command.args["split"])
        with open(self._context.plan.path / "samples.jsonl", "a", encoding="utf-8") as file:
            for (row, prompt_index), item, result in zip(
                command.args["rows"], items, results, strict=True
            ):
                if row not in chosen:
                    continue
                record = {
                    "step": command.args["step"],
                    "index": prompt_index,
                    "prompt": prompts[prompt_index].text,
                    "response": item.solution_str,
                    "ground_truth": item.ground_truth,
                    "reward": None if math.isnan(result.reward) else result.reward,
                }
                file.write(json.dumps(record) + "\n")

    def before_collective(self, number: int) -> None:
        """Scoring is local."""

    def weight_parts(self) -> list[WeightPart]:
        """A function has none."""
        return []

    def weights_updated(self, version: int) -> None:
        """A function has no weights."""
        raise CommandError(f"role {self.name} has no weights (version {version})")

    def close(self) -> None:
        """End the scoring process."""
        self._engine.close()
