"""The runs that are measured, as settings that any revision of the project can read. Torch-free."""

from pathlib import Path
from typing import Any

from model.config import ModelConfig
from training.config import load

ROOT = Path(__file__).resolve().parents[1]

Settings = dict[str, Any]


def twelve_million() -> Settings:
    """Return the 12M workload: 16 windows of 256 tokens a step."""
    shape = {"n_layers": 6, "n_heads": 6, "d_model": 384, "d_ff": 1024, "context": 256, "vocab_size": 4096}
    return {"model": shape, "data": {"vocab_size": 4096}, "training": {"batch_size": 16}}


def demo() -> Settings:
    """Return the model and the steps of configs/demo.yaml; only what differs from the defaults, as a person wrote."""
    config = load(ROOT / "configs/demo.yaml")
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": config.data.vocab_size})})
    return config.model_dump(mode="json", exclude_defaults=True)


def hundred_and_twenty_four_million() -> Settings:
    """Return a model of GPT-2's size at context 1024, half a million tokens a step: what GPUs are compared by."""
    shape = {"n_layers": 12, "n_heads": 12, "d_model": 768, "context": 1024, "vocab_size": 50304}
    return {"model": shape, "data": {"vocab_size": 50304}, "training": {"batch_size": 512, "micro_batch_size": 32}}


def tiny() -> Settings:
    """Return a run that costs nothing: it shows that the measurements work."""
    shape = {"n_layers": 1, "n_heads": 2, "d_model": 32, "d_ff": 32, "context": 16, "vocab_size": 512}
    return {"model": shape, "data": {"vocab_size": 512}, "training": {"batch_size": 2}}


WORKLOADS = {"12m": twelve_million, "demo": demo, "124m": hundred_and_twenty_four_million}
FOR_A_LAPTOP = ("12m", "demo")


def model_of(workload: Settings) -> ModelConfig:
    """Return the network of a workload."""
    return ModelConfig.model_validate(workload["model"])


def with_training(workload: Settings, **changes: Any) -> Settings:
    """Return the workload with other training settings; None leaves a default as it is."""
    given = {name: value for name, value in changes.items() if value is not None}
    return {**workload, "training": {**workload["training"], **given}}
