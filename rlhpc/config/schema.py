"""The config's types.  Defaults live here and nowhere else; every field says meaning, unit, range.

Plain dataclasses, made by `typed.build` from what Hydra composes.  `load.py` composes
them from `configs/`, `checks.py` checks what spans fields, `plan.py` turns the result into a frozen
plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlhpc.config.engines import RoleKind


class Launcher(Enum):
    """Who starts the ranks."""

    slurm = "slurm"
    local = "local"


class Device(Enum):
    """What the ranks compute on."""

    cpu = "cpu"
    cuda = "cuda"


class DType(Enum):
    """Precision of a role's weights and activations."""

    fp32 = "fp32"
    bf16 = "bf16"


class LrSchedule(Enum):
    """Course of the learning rate after warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class LossAggregation(Enum):
    """How token losses become one number; denominators are those of the whole mini-batch."""

    token_mean = "token-mean"
    seq_mean_token_sum = "seq-mean-token-sum"
    seq_mean_token_mean = "seq-mean-token-mean"


class KlLossType(Enum):
    """Estimator of KL(policy || reference) as a loss (k1 has no gradient on average)."""

    k2 = "k2"
    k3 = "k3"


@dataclass(kw_only=True)
class ComponentConfig:
    """One component of the job: what is asked of Slurm for the roles that live there."""

    partition: str | None = None
    """Slurm partition; None takes the cluster's default."""
    nodes: int = 1
    """Number of nodes; components never share a node."""
    gpus_per_node: int = 0
    """GPUs of each node, one rank each; 0 for a CPU component (then set `tasks_per_node`)."""
    tasks_per_node: int | None = None
    """Ranks of each node; None means one a GPU.  Only a component without GPUs may set it."""
    gpu_type: str | None = None
    """GPU type for `--gres=gpu:<type>:<n>`; None asks for any."""
    gpu_mem_gib: float | None = None
    """Memory of one GPU in GiB, for the memory check; None takes that of a well-known `gpu_type`.
    """
    cpus_per_task: int = 1
    """CPU cores of each rank."""
    mem: str | None = None
    """Host memory of each node (`--mem`), for example `200G`; None takes the partition's default.
    """
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features, for example `a100&80gb`."""
    reservation: str | None = None
    """Name of a reservation."""
    exclusive: bool = False
    """Take whole nodes."""
    time: str | None = None
    """Time limit of this component, Slurm's format; None takes `cluster.time`."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Any further sbatch option by its long name; null removes one that rlhpc sets, true gives a
    bare flag.
    """
    setup: list[str] = field(default_factory=list)
    """Shell lines run on every task of this component before Python starts (modules, conda)."""
    launch_prefix: list[str] = field(default_factory=list)
    """Words put before the rank's command, for example a container runtime and its options.

    Taken as they are, without expansion; ranks start in the run folder, so give absolute paths.
    """
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of this component's ranks."""


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW and its schedule, for a role that is trained."""

    lr: float = 1e-6
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay; norms and biases are exempt."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Global gradient norm limit; 0 turns clipping off."""
    lr_warmup_steps: int = 0
    """Updates of linear warm-up from 0."""
    lr_schedule: LrSchedule = LrSchedule.constant
    """Course after warm-up, over the run's total number of updates."""
    min_lr_ratio: float = 0.0
    """Final learning rate over the peak, for cosine and linear."""


@dataclass(kw_only=True)
class RoleConfig:
    """One model role: an SPMD group of ranks inside one component."""

    kind: RoleKind
    """What it does in the algorithm."""
    component: str
    """Name of the component that hosts it; several roles may name one."""
    engine: str
    """`megatron`, `vllm`, `hf`, `function`, or the dotted path of an `EngineSpec`."""
    gpus: str | None = None
    """Slots of each node, for example `0-1` or `0,2`; None means all.  Roles may share slots or
    split them.
    """
    dp: int | None = None
    """Data-parallel replicas; None means what the other axes leave."""
    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""
    cp: int = 1
    """Context-parallel size; only 1 is served."""
    ep: int = 1
    """Expert-parallel size; only 1 is served."""
    vpp: int = 1
    """Virtual pipeline stages a rank; only 1 is served."""
    dtype: DType = DType.bf16
    """Precision of weights and activations."""
    optim: OptimConfig | None = None
    """Optimizer; required for a trained role (actor), refused for others."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the engine; loading checks them against its dataclass and fills in its defaults.
    """


@dataclass(kw_only=True)
class ModelConfig:
    """The policy's starting point."""

    path: str
    """Hugging Face folder: `config.json`, safetensors, tokenizer.  A path, never a hub name:
    compute nodes are offline.
    """
    tokenizer_path: str | None = None
    """Folder of the tokenizer; None takes `path`."""


@dataclass(kw_only=True)
class ReasoningGymConfig:
    """Prompts made by a `reasoning-gym` task instead of files."""

    task: str
    """Task name, for example `chain_sum`."""
    train_size: int = 1000
    """Number of training problems."""
    val_size: int = 100
    """Number of held-out problems, from another seed."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task's own config."""


@dataclass(kw_only=True)
class DataConfig:
    """Prompts."""

    train_files: Any = field(default_factory=list)
    """Path or list of paths: `.parquet` in verl's columns or `.jsonl`."""
    val_files: Any = field(default_factory=list)
    """The same for held-out prompts; may be empty."""
    reasoning_gym: ReasoningGymConfig | None = None
    """Take prompts from reasoning-gym instead of files."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of messages or a string."""
    answer_key: str = "reward_model.ground_truth"
    """Column of the ground truth handed to the reward; dots descend into structs.  JSONL may also
    use `answer`.
    """
    response_key: str = "response"
    """Column of the target text, for supervised stages only."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template; False feeds a string prompt as it is."""
    train_batch_size: int = 64
    """Prompts of one step."""
    max_prompt_length: int = 512
    """Longest prompt in tokens, after the chat template."""
    max_response_length: int = 512
    """Longest response in tokens."""
    filter_overlong_prompts: bool = False
    """Drop prompts over the limit (counted and told) instead of stopping with an error that names
    them.
    """
    shuffle: bool = True
    """Visit prompts in a seeded order, new in each epoch."""
    val_max_prompts: int | None = None
    """Use only the first so many held-out prompts."""


@dataclass(kw_only=True)
class SamplingConfig:
    """How responses are sampled in training; evaluation is greedy."""

    temperature: float = 1.0
    """Softmax temperature, the same in the sampler and in the trainer's log-probs."""


@dataclass(kw_only=True)
class RewardConfig:
    """Rule-based reward."""

    function: str = "rlhpc.rewards.gsm8k.compute_score"
    """Dotted path of `compute_score(data_source, solution_str, ground_truth, extra_info=None,
    **kwargs)`.
    """
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    shuffle: bool = False
    """Negative control: give each row the reward of another row of its batch."""


@dataclass(kw_only=True)
class AlgorithmConfig:
    """The algorithm: a list of stages and the numbers of its maths."""

    name: str = "grpo"
    """`grpo`, `sft`, or the dotted path of a function that returns stages."""
    group_size: int = 8
    """Responses sampled for each prompt."""
    mini_batch_size: int | None = None
    """Prompts of one optimizer update; None means the whole batch.  Must divide
    `data.train_batch_size`.
    """
    epochs: int = 1
    """Passes over each batch."""
    norm_adv_by_std: bool = True
    """Divide by the group's standard deviation (GRPO); False is Dr.GRPO."""
    clip_ratio_low: float = 0.2
    """Lower clip of the ratio: 1 - this."""
    clip_ratio_high: float = 0.2
    """Upper clip of the ratio: 1 + this."""
    clip_ratio_c: float = 3.0
    """Dual clip for negative advantages; above 1."""
    loss_agg_mode: LossAggregation = LossAggregation.token_mean
    """How token losses become one number."""
    use_kl_loss: bool = False
    """Add KL to the reference to the loss; needs a reference role."""
    kl_loss_coef: float = 0.001
    """Weight of the KL loss."""
    kl_loss_type: KlLossType = KlLossType.k3
    """Estimator of the KL loss."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""


@dataclass(kw_only=True)
class TrainerConfig:
    """Course of the run and what it leaves behind."""

    project_name: str = "rlhpc"
    """Project of the trackers."""
    experiment_name: str = "run"
    """Name of the run; first part of the run folder's name and of the Slurm job name."""
    total_training_steps: int | None = None
    """Steps to run; None means what `total_epochs` gives."""
    total_epochs: int = 1
    """Passes over the prompts, where `total_training_steps` is None."""
    val_before_train: bool = True
    """Evaluate before the first step (needs held-out prompts)."""
    test_freq: int = -1
    """Evaluate every so many steps; -1 only at the end."""
    logger: list[str] = field(default_factory=lambda: ["console", "file", "tensorboard"])
    """Where metrics go: console, file (metrics.jsonl), tensorboard, wandb."""
    num_samples: int = 3
    """Responses shown at the end."""
    export: bool = False
    """Write the trained weights as a Hugging Face folder, `export/` in the run folder, at the end.
    """
    check_sync: bool = True
    """Compare log-probs of sampler and trainer in every step; stop above `sync_tolerance`."""
    sync_tolerance: float = 0.5
    """Largest mean |rollout_logprobs - old_logprobs| of a batch that is taken for rounding."""


@dataclass(kw_only=True)
class ClusterConfig:
    """The machine: who starts ranks, on what they compute, and site settings."""

    launcher: Launcher = Launcher.slurm
    """`slurm` (one job) or `local` (processes on this machine)."""
    device: Device = Device.cuda
    """`cuda` (NCCL) or `cpu` (gloo)."""
    time: str = "04:00:00"
    """Time limit of the job, Slurm's format."""
    network_interface: str | None = None
    """Interface for gloo and NCCL; None lets each rank take the route to rank 0."""
    connect_timeout_s: float = 600.0
    """How long rank 0 waits for all ranks to report."""
    collective_timeout_s: float = 1800.0
    """Time limit of a collective operation."""
    srun_args: list[str] = field(default_factory=lambda: ["--cpu-bind=none"])
    """Further words for srun."""
    setup: list[str] = field(default_factory=list)
    """Shell lines run on every task before the component's own."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of all ranks."""
    offline: bool = True
    """Set the offline switches of Hugging Face and W&B on the ranks."""


@dataclass(kw_only=True)
class RunConfig:
    """One run."""

    components: dict[str, ComponentConfig] = field(default_factory=dict)
    """Components in job order; the first hosts the batch script and rank 0."""
    roles: dict[str, RoleConfig] = field(default_factory=dict)
    """Roles by name."""
    model: ModelConfig
    """The policy."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Rule-based reward."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Algorithm."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Course of the run."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Machine."""
    seed: int = 1
    """Seed of everything random."""
    run_root: str = "runs"
    """Folder under which the run folder is made; on a file system that all nodes see."""
