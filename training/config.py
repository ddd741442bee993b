"""One run, described whole: model, data, optimizer, training; and how it is read and written. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from data.config import DataConfig
from model.config import ModelConfig
from model.errors import UserError
from model.settings import Settings
from training.settings_tree import Tree, build, defaults, merge, nested, short
from training.yaml_file import read_mapping, written

Count = Annotated[int, Field(ge=1)]
CountOr0 = Annotated[int, Field(ge=0)]


class OptimizerConfig(Settings):
    """How the weights move, and the learning rate over time."""

    method: Literal["adamw", "muon"] = "adamw"
    """adamw: for all; muon: orthogonal steps for the matrices of the layers, AdamW for the rest, under one rate."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Peak learning rate."""
    warmup_steps: CountOr0 = 50
    """Steps over which the rate rises to its peak."""
    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The cosine ends at this share of the peak."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of matrices; gains and positional parameters have none."""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0: never."""


def _yaml_reads_off_as_false(value: object) -> object:
    return {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value


class TrainingConfig(Settings):
    """How long, in what portions and where a run trains, and what it writes down."""

    out: Annotated[str, Field(min_length=1)] | None = None
    """Run folder; none: runs/ and the configuration file's name."""
    init_from: Annotated[str, Field(min_length=1)] | None = None
    """Run folder, or checkpoint, whose weights to begin with, also under another scheme (DroPE); none: new weights."""
    seed: CountOr0 = 0
    """Seed of the weights, the order of windows and dropout."""
    steps: Count = 1000
    """Number of optimizer steps."""
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """Ceiling on training time: a short measurement at the start cuts steps to fit, and the run folder keeps them."""
    batch_size: Count = 16
    """Windows a step."""
    micro_batch_size: Count | None = None
    """Windows a forward pass; gradients are accumulated over the step; none: as fits a CPU's cache, all on a GPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 where the hardware multiplies it fast (CUDA, avx512_bf16, AMX), else fp16 on CUDA, else fp32."""
    compile: Annotated[Literal["auto", "off", "on"], BeforeValidator(_yaml_reads_off_as_false)] = "auto"
    """Compile the network with torch.compile; auto: where the run is long enough for that to pay."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda, else mps, else cpu."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun, ddp: each process has a copy of the model; fsdp: each has a part of every weight."""
    log_every: Count = 10
    """Steps between lines in metrics.jsonl."""
    eval_every: Count = 200
    """Steps between evaluations; the last step is always evaluated."""
    eval_windows: Count = 64
    """Validation windows that an evaluation on the way reads."""
    final_windows: Count | None = None
    """Validation windows that the final figures read; none: all of them."""
    checkpoint_every: Count = 200
    """Steps between checkpoints; the last step always gets one."""
    keep: Count = 2
    """Newest checkpoints to keep; the best one stays too."""
    sample_every: CountOr0 = 200
    """Steps between printed samples; 0: never."""
    sample_prompt: str = "def "
    """Prompt of the printed samples."""
    sample_tokens: Count = 64
    """Length of a printed sample, in tokens."""
    wandb: Annotated[Literal["off", "offline", "online"], BeforeValidator(_yaml_reads_off_as_false)] = "off"
    """Also send the metrics to Weights & Biases; never asks for a login and never stops a run."""
    wandb_project: str = "ropelab"
    """Project name at Weights & Biases."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "TrainingConfig":
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(
                f"training.micro_batch_size {self.micro_batch_size} is larger than batch_size {self.batch_size}"
            )
        return self


class Config(Settings):
    """One run, described whole."""

    model: ModelConfig = ModelConfig()
    """The network."""
    data: DataConfig = DataConfig()
    """The text."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    training: TrainingConfig = TrainingConfig()
    """The run."""

    @model_validator(mode="after")
    def _vocabulary_has_one_size(self) -> "Config":
        if self.model.vocab_size not in (None, self.data.vocab_size):
            raise ValueError(
                f"model.vocab_size {self.model.vocab_size} differs from data.vocab_size {self.data.vocab_size}: "
                "set data.vocab_size alone"
            )
        return self


# --- Reading and writing ---------------------------------------------------------------------------------------------


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a configuration: the defaults, under its file (with what that extends), under the overrides.

    Keys of `overrides` may be dotted: `{"model.position": "learned", "optimizer.lr": 1e-3}`.
    """
    layers = [*([] if path is None else _with_what_it_extends(Path(path))), *nested(overrides or {})]
    tree = defaults(Config)
    for layer in layers:
        tree = merge(Config, tree, layer)
    return build(Config, tree, "" if path is None else str(path))


def to_yaml(config: BaseModel) -> str:
    """Write a configuration out in full; `load` gives back an equal one."""
    return written(config.model_dump(mode="json"))


def save(config: BaseModel, path: str | Path) -> None:
    """Write a configuration to a file, in full."""
    Path(path).write_text(to_yaml(config), encoding="utf-8", newline="\n")


def _with_what_it_extends(path: Path, above: tuple[Path, ...] = ()) -> list[Tree]:
    """Return the trees of a file and of the files it extends, lowest first."""
    tree = read_mapping(path)  # first: it tells of a name that no file can have
    if path.resolve() in above:
        raise UserError(f"{path}: extends itself, by way of {' -> '.join(step.name for step in above)}")
    base = tree.pop("extends", None)
    if base is None:
        return [tree]
    if not isinstance(base, str):
        raise UserError(f"{path}: extends: {short(base)} is refused; it must be the name of one file")
    return [*_with_what_it_extends(path.parent / base, (*above, path.resolve())), tree]
