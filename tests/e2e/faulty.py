"""An engine that fails in the way named by FAULT, for tests of failure handling.  Torch-free."""

from rlhpc.config.engines import EngineSpec, HfOptions, RoleKind

FAULTY_HF = EngineSpec(
    "faulty_hf", frozenset({RoleKind.rollout}), HfOptions, "tests.e2e.faulty_engine:FaultyHfEngine"
)
