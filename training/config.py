"""One run, described whole: model, data, optimizer, training. Torch-free."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from data.config import DataConfig
from model.config import ModelConfig
from model.settings import Settings

Count = Annotated[int, Field(ge=1)]
CountOr0 = Annotated[int, Field(ge=0)]


class OptimizerConfig(Settings):
    """AdamW and its learning rate over time (Loshchilov and Hutter, 2019)."""

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

    out: str | None = None
    """Run folder; none: runs/ and the configuration file's name."""
    seed: CountOr0 = 0
    """Seed of the weights, the order of windows and dropout."""
    steps: Count = 1000
    """Number of optimizer steps."""
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """Ceiling on training time: a short measurement at the start cuts steps to fit, and the run folder keeps them."""
    batch_size: Count = 16
    """Windows a step."""
    micro_batch_size: Count | None = None
    """Windows a forward pass; gradients are accumulated over the step; none: batch_size."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 where the hardware multiplies it fast (CUDA, avx512_bf16, AMX), else fp16 on CUDA, else fp32."""
    compile: Annotated[Literal["off", "on"], BeforeValidator(_yaml_reads_off_as_false)] = "off"
    """Compile the blocks with torch.compile; pays on runs of more than a few minutes."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda, else mps, else cpu."""
    log_every: Count = 10
    """Steps between lines in metrics.jsonl."""
    eval_every: Count = 200
    """Steps between evaluations; the last step is always evaluated."""
    eval_windows: Count = 64
    """Validation windows a evaluation reads on the way; the final figures read all of them."""
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
