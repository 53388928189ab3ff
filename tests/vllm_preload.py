"""Preloaded by the fork server of the vLLM tests, so that a rank does not import vLLM for 5 s."""

import importlib.util

import torch

from rlhpc.rollout.vllm import prepare_environment

if importlib.util.find_spec("vllm") is not None:
    prepare_environment(torch.device("cpu"))
    import vllm.engine.arg_utils
    import vllm.v1.engine.llm_engine  # noqa: F401

    import rlhpc.rollout.vllm_executor  # noqa: F401
