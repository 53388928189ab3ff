"""The hf engine with a fault: see `faulty`."""

from __future__ import annotations

import os
from typing import Any

from rlhpc.rollout.base import Sample
from rlhpc.rollout.hf import HfEngine


class FaultyHfEngine(HfEngine):
    """Fails at its second step as the environment variable FAULT says."""

    def __init__(self, **arguments: Any) -> None:
        if os.environ["FAULT"] == "build":
            raise ValueError("the engine cannot be built")
        super().__init__(**arguments)
        self._steps = 0

    def step(self) -> list[Sample]:
        self._steps += 1
        if self._steps == 2:
            if os.environ["FAULT"] == "raise":
                raise ValueError("the engine broke at its second step")
            if os.environ["FAULT"] == "exit":
                os._exit(0)
        return super().step()
