"""What a training run is told, checked by type. Hydra composes it, `check` turns it into these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlite.model.losses import LossWeights

if TYPE_CHECKING:
    from omegaconf import DictConfig

MISSING: Any = "???"  # OmegaConf's word for it


@dataclass
class TargetConfig:
    name: str = MISSING  # folder, hub id, .gguf, or "smollm2-135m"
    dtype: str = "float32"
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelConfig:
    """The student. The teacher is the same with a history branch of `history_window` positions."""

    num_hidden_layers: int = 5
    num_taps: int = 12  # DLite section 5.1: 12 for Qwen3-4B, 14 for Qwen3-8B
    tap_ids: list[int] = field(default_factory=list)  # instead of num_taps; 0-based layers
    num_draft_tokens: int = 7
    composition: str = "sequence"
    head: str = "lowrank"
    first_predictor: str = "placeholder"  # or "anchor", as in DSpark
    head_init: str = "random"  # or "svd" (lowrank only)
    rank: int = 0  # 0: hidden size / 8
    draft_vocab_size: int = 0  # 0: all; -1: as many as the training answers use
    history_window: int = 128  # 0: all positions
    history_sinks: int = 0  # an answer's first positions, seen beside the window
    mask_token_id: int | None = None  # None: the family's unused token, or a learned vector


@dataclass
class LossConfig:
    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0
    tau: float = 0.0

    def weights(self) -> LossWeights:
        return LossWeights(self.ce, self.kl, self.tv, self.tau)


@dataclass
class StageConfig:
    """One stage. `init`: "random", or the name of an earlier stage whose weights it starts from.

    `teacher`: the earlier stage whose model the `kl` term follows. `epochs` counts passes over the
    samples; `max_steps` > 0 ends the stage earlier.
    """

    name: str = MISSING
    context: str = "taps"
    loss: LossConfig = field(default_factory=LossConfig)
    epochs: int = 1
    max_steps: int = 0
    init: str = "random"
    teacher: str | None = None
    freeze_head: bool = False
    labels: str = "data"  # or "argmax": the target's own choice at each row
    learning_rate: float = 0.0  # 0: optim.learning_rate


@dataclass
class DataConfig:
    train: list[str] = MISSING  # files, hub ids, or the folder of `train.data tokenize`
    limit: int | None = None  # rows read of `train`; None: all
    eval_samples: int = 32  # held out of `train`, by a hash of their ids
    max_length: int = 4096
    last_turn_only: bool = False
    states: str = "live"  # or "memory": captured once and kept (small runs), or "cache": on disk
    cache: str = "runs/cache"  # folder of "cache"; made if it is not there, shared by runs
    cache_dtype: str = "bfloat16"  # or float16, float8, float32
    cache_anchors: int = 512  # kept of a sample; epochs draw optim.anchors_per_sample of them
    cache_limit_gb: float = 100.0  # a larger cache is made only with cache_yes=true
    cache_yes: bool = False
    states_limit_gb: float = 8.0  # "memory" is refused above this


@dataclass
class OptimConfig:
    learning_rate: float = 4e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup_ratio: float = 0.04
    batch_size: int = 32  # samples in an optimizer step, over all ranks and micro-batches
    micro_batch_size: int = 0  # samples in one forward of one rank; 0: all of its share
    micro_batch_tokens: int = 0  # > 0: in place of it, packed tokens in one forward of one rank
    anchors_per_sample: int = 512
    gamma: float = 4.0


@dataclass
class PlanConfig:
    """`run=plan` without data or weights, from the target's config alone: set `samples`."""

    samples: int = 0  # of the run; 0: read data.train, load the target, time two steps
    tokens_per_sample: int = 4096
    gpus: int = 1
    gpu_teraflops: float = 989.0  # dense bfloat16 peak of an H100, H200 or H800
    mfu: float = 0.3  # share of it that a run reaches: an assumption; the log says what yours is
    dollars_per_gpu_hour: float = 2.5  # an assumption too


@dataclass
class TrainConfig:
    name: str = MISSING
    target: TargetConfig = field(default_factory=TargetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    stages: list[StageConfig] = MISSING
    output: str = "runs"
    run: str = "train"  # or "plan": say what it would take, and stop
    seed: int = 0
    mixed_precision: str = "no"  # or "bf16": float32 masters, bfloat16 compute
    activation_checkpointing: bool = False  # less memory, a third more compute
    compile: bool = False  # torch.compile of the draft's MLPs: one graph for every size
    history_attention: str = "dense"  # or "flex" (CUDA): how the teacher reads its window
    log_every: int = 10  # optimizer steps
    eval_every: int = 200
    save_every: int = 500  # optimizer steps
    keep_states: int = 2
    tracker: str | None = None  # "wandb", "tensorboard"
    resume: bool = True


CHOICES = {
    "run": ("train", "plan"),
    "history_attention": ("dense", "flex"),
    "mixed_precision": ("no", "bf16"),
    "tracker": (None, "wandb", "tensorboard"),
    "data.states": ("live", "memory", "cache"),
    "data.cache_dtype": ("float16", "bfloat16", "float8", "float32"),
    "model.head_init": ("random", "svd"),
}


def check(composed: DictConfig) -> TrainConfig:
    """The composed configuration as checked dataclasses.

    Raises ValueError in one line for an unknown key, a wrong type, a missing value, or stages that
    do not follow from one another.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), composed))
    except OmegaConfBaseException as error:
        raise ValueError(f"configuration: {str(error).splitlines()[0]}") from None
    assert isinstance(config, TrainConfig)
    for key, allowed in CHOICES.items():
        value = OmegaConf.select(composed, key, default=allowed[0])
        if value not in allowed:
            raise ValueError(f"{key} is {value!r}; choose one of {', '.join(map(str, allowed))}")
    _check_stages(config.stages)
    return config


def _check_stages(stages: list[StageConfig]) -> None:
    if not stages:
        raise ValueError("stages is empty; name at least one stage to train")
    before: dict[str, str] = {}  # names and contexts
    for stage in stages:
        stage.loss.weights()
        if stage.name in before:
            raise ValueError(f"two stages are named {stage.name!r}; give each its own name")
        for role, named in (("init", stage.init), ("teacher", stage.teacher)):
            if named not in (None, "random") and named not in before:
                raise ValueError(
                    f"stage {stage.name!r}: {role} {named!r} is no earlier stage; earlier are "
                    f"{sorted(before) or 'none'}"
                )
        if bool(stage.loss.kl) != (stage.teacher is not None):
            raise ValueError(f"stage {stage.name!r}: the kl term and a teacher go together")
        read = {stage.context, before.get(stage.teacher or "", stage.context)}
        if "history" in read and len(read) > 1:
            raise ValueError(
                f"stage {stage.name!r}: context {stage.context!r} and its teacher's read histories "
                "of other layers; give both context=history, or neither"
            )
        if stage.labels not in ("data", "argmax"):
            raise ValueError(f"stage {stage.name!r}: labels is {stage.labels!r}; data or argmax")
        before[stage.name] = stage.context
