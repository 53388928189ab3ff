"""Composition, typing, round trip and secrets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhpc.config.engines import EngineSpec, RoleKind, engine_options, resolve_engine
from rlhpc.config.load import absolute_paths, compose, load_config, read_config, save_config
from rlhpc.config.schema import (
    ClusterConfig,
    ComponentConfig,
    DataConfig,
    LossAggregation,
    ModelConfig,
    RunConfig,
)
from rlhpc.errors import ConfigError
from tests.small_runs import make_model_folder, quickstart_config


@dataclass(kw_only=True)
class OwnOptions:
    depth: int = 1


OWN_ENGINE = EngineSpec("own", frozenset({RoleKind.rollout}), OwnOptions, "own.engine:Own")

REFUSALS = {
    "seeed=1": r"seeed: unknown key; expected one of .* Did you mean seed\?",
    "data.train_batchsize=2": r"unknown key.* Did you mean data\.train_batch_size\?",
    "components.train.node=2": r"unknown key.* Did you mean components\.train\.nodes\?",
    "roles.actor.optim.learning_rate=1": r"unknown key.* mean roles\.actor\.optim\.lr\?",
    "roles.actor.tensor_model_parallel_size=2": r"unknown key.* Did you mean roles\.actor\.tp\?",
    "algorithm.n=2": r"unknown key.* Did you mean algorithm\.group_size\?",
    "roles.actor.optim.learn=1": r"roles\.actor\.optim\.learn: unknown key; expected one of lr, ",
    "roles.actor.options.recompte=full": r"options\.recompte: unknown.*options\.recompute\?",
    "roles.actor.options.recompute=ful": r"'ful' is not offered.* none, selective, full\. Did you",
    "roles.actor.dtype=fp16": r"roles\.actor\.dtype: 'fp16' is not offered; .* of fp32, bf16",
    "seed=a": r"seed: 'a' has the wrong type; expected an integer\. Set seed to an integer",
    "seed=1.5": r"seed: 1\.5 has the wrong type; expected an integer",
    "trainer.export=3": r"trainer\.export: 3 has the wrong type; expected true or false",
    "trainer.logger=file": r"trainer\.logger: 'file' has the wrong type; expected a list",
    "roles.actor.optim.betas=[1]": r"optim\.betas: \[1\] .* expected a list of 2 entries",
    "sampling.temperature=hot": r"sampling\.temperature: 'hot' .* expected a number",
    "cluster=3": r"cluster=3 is not there; expected one of devcluster, local, slurm",
    "roles.rollout.engine=vlm": r"engine 'vlm' is not known; .* Did you mean vllm\?",
    "roles.rollout.engine=no.such.THING": r"engine 'no\.such\.THING' cannot be imported",
    "roles.actor.component=''": r"roles\.actor\.component: no value is given; expected a string",
    "roles.new.kind=rollout": r"roles\.new\.component: no value is given; expected a string",
    "experiment=quickstat": r"quickstat is not there; .* mean experiment=quickstart\?",
    "trainer.project_name=a=b(": r"cannot be composed: .*quote values with special characters",
    "components.train.environment.HF_TOKEN=x": r"HF_TOKEN: looks like a secret, .* Export it",
    "cluster.setup=['export WANDB_API_KEY=x']": r"cluster\.setup\.0: looks like a secret",
}


@pytest.mark.parametrize("override", REFUSALS)
def test_a_wrong_override_is_refused_with_its_key_and_a_remedy(override: str) -> None:
    with pytest.raises(ConfigError, match=REFUSALS[override]):
        load_config(["experiment=quickstart", override])


def test_all_type_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError, match=r"3 problems in the config(?s:.)*1\.(?s:.)*3\. "):
        load_config(["experiment=quickstart", "seed=a", "dta.x=1", "roles.actor.tp=two"])


def test_an_unknown_key_does_not_hide_what_else_is_wrong() -> None:
    config, problems = compose(["experiment=quickstart", "seeed=1"])
    assert config is not None
    assert [p.key for p in problems] == ["seeed"]


def test_a_missing_model_path_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.path: no value is given.*Add model\.path="):
        load_config([])


def test_values_may_be_added_without_a_prefix() -> None:
    config = load_config(
        [
            "experiment=quickstart",
            "components.train.sbatch.comment=mine",
            "components.train.environment.NCCL_DEBUG=1",
            "cluster.time=12:00:00",
            "~roles.reward",
        ]
    )
    assert config.components["train"].sbatch == {"comment": "mine"}
    assert config.components["train"].environment == {"NCCL_DEBUG": "1"}
    assert config.cluster.time == "12:00:00"
    assert list(config.roles) == ["actor", "rollout"]


def test_the_command_line_is_stronger_than_the_experiment() -> None:
    assert load_config(["experiment=quickstart"]).cluster.launcher.value == "local"
    config = load_config(["experiment=quickstart", "cluster=devcluster"])
    assert config.cluster.launcher.value == "slurm"


def test_own_configs_extend_the_built_in_ones(tmp_path: Path) -> None:
    for group, text in {
        "experiment": "# @package _global_\ndefaults:\n  - quickstart\n  - _self_\nseed: 7\n",
        "cluster": "launcher: local\ndevice: cuda\n",
    }.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(text)
    config = load_config(["experiment=mine", "cluster=mine"], config_dir=tmp_path)
    assert (config.seed, config.cluster.device.value) == (7, "cuda")
    assert config.trainer.experiment_name == "quickstart"


def test_an_own_config_with_a_built_in_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "slurm.yaml").write_text("launcher: slurm\n")
    with pytest.raises(ConfigError, match=r"cluster/slurm\.yaml would hide .* rename it"):
        load_config([], config_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "# @package _global_\nseed: 3\n  x: [1\n",
            r"mine\.yaml, line 3, column 4: mapping values",
        ),
        ("# @package _global_\nseed: [1\n", r"mine\.yaml, line 3, column 1: expected ',' or ']'"),
        ("seed: 3\n", r"mine\.yaml sets keys below.* add `# @package _global_` as the first line"),
        ("defaults: [quickstart, _self_]\n", r"mine\.yaml sets keys .* `# @package _global_` as"),
    ],
)
def test_a_broken_experiment_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        compose(["experiment=mine"], config_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_config_dir_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config-dir .*/nowhere is not a folder"):
        load_config([], config_dir=tmp_path / "nowhere")


def test_options_are_filled_in_and_typed() -> None:
    config = load_config(["experiment=quickstart", "roles.rollout.options.max_num_seqs=4"])
    assert config.roles["rollout"].options == {"max_num_seqs": 4}
    options = engine_options("megatron", config.roles["actor"].options)
    assert options.max_tokens_per_micro_batch == 4096


def test_an_engine_of_ones_own_is_named_by_its_path() -> None:
    name = f"{__name__}.OWN_ENGINE"
    config = load_config(
        [
            "experiment=quickstart",
            f"roles.rollout={{engine: {name}, options: null}}",
            "roles.rollout.options={depth: 3}",
        ]
    )
    assert resolve_engine(name) is OWN_ENGINE
    assert engine_options(name, config.roles["rollout"].options) == OwnOptions(depth=3)


def test_an_engine_path_that_is_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is a type, not a rlhpc\.config\.engines\.EngineSpec"):
        resolve_engine(f"{__name__}.OwnOptions")


def test_saved_secrets_are_refused(tmp_path: Path) -> None:
    config = RunConfig(model=ModelConfig(path="m"))
    config.cluster.environment["MY_PASSWORD"] = "x"
    with pytest.raises(
        ConfigError, match=r"cluster\.environment\.MY_PASSWORD: looks like a secret"
    ):
        save_config(config, tmp_path / "config.yaml")
    assert not (tmp_path / "config.yaml").exists()


def test_a_secret_read_from_a_file_is_fine() -> None:
    line = "cluster.setup=['export HF_TOKEN=$(cat ~/.token)']"
    assert len(load_config(["experiment=quickstart", line]).cluster.setup) == 1


def test_a_broken_config_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"config file .*config\.yaml cannot be read"):
        read_config(tmp_path / "config.yaml")


def test_an_edited_config_file_may_write_numbers_in_short(tmp_path: Path) -> None:
    config = quickstart_config(make_model_folder(tmp_path), ["roles.actor.optim.lr=3e-4"])
    save_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text().replace("lr: 0.0003", "lr: 3e-4")
    (tmp_path / "config.yaml").write_text(text)
    optim = read_config(tmp_path / "config.yaml").roles["actor"].optim
    assert optim is not None
    assert optim.lr == 3e-4


def test_paths_become_absolute() -> None:
    config = load_config(["experiment=quickstart", "model.tokenizer_path=/t"])
    config = absolute_paths(config, Path("/base"))
    assert config.model.path == "/base/models/tiny_qwen2"
    assert config.model.tokenizer_path == "/t"
    assert config.data.train_files == ["/base/models/tiny_qwen2/train.jsonl"]
    assert config.run_root == "/base/runs"


text = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=12)
configs = st.builds(
    RunConfig,
    model=st.builds(ModelConfig, path=text.filter(bool), tokenizer_path=st.none() | text),
    components=st.dictionaries(
        st.sampled_from(["a", "b-1", "on"]),
        st.builds(
            ComponentConfig,
            partition=st.none() | text,
            sbatch=st.dictionaries(st.sampled_from(["comment", "x"]), text | st.booleans()),
            gpu_mem_gib=st.none() | st.floats(0.1, 1e3),
        ),
    ),
    data=st.builds(
        DataConfig, train_files=st.lists(text), val_max_prompts=st.none() | st.integers()
    ),
    cluster=st.builds(
        ClusterConfig, time=st.sampled_from(["12:00:00", "60", "1-0", "null", "1e3"])
    ),
    seed=st.integers(),
)


@given(config=configs, aggregation=st.sampled_from(LossAggregation))
@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_config_yaml_gives_the_same_config_back(
    tmp_path: Path, config: RunConfig, aggregation: LossAggregation
) -> None:
    config.algorithm.loss_agg_mode = aggregation
    save_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == config
