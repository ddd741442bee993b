"""A model folder: weights, configuration and tokenizer, written and read whole."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from model.config import ModelConfig
from model.durable import Writer, check_folder, write_folder
from model.errors import NotFinite, UserError
from model.position.config import SchemeConfig, refuse_changes_of_weights
from model.transformer import Transformer

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.yaml", "tokenizer.model"


class Loaded(NamedTuple):
    """What a model folder holds: the network in evaluation mode, its tokenizer's file, and the run's settings."""

    model: Transformer
    tokenizer: bytes
    config: dict[str, Any]


def save_model(
    folder: Path, model: Transformer, config_yaml: str, tokenizer: bytes, extra: Mapping[str, Writer] | None = None
) -> None:
    """Write a model folder whole, with whatever `extra` files belong to it.

    `config_yaml` describes the run; its part `model` describes the network, and is all that loading needs.
    """
    weights = {name: parameter.detach().contiguous().cpu() for name, parameter in model.named_parameters()}
    refuse_endless(folder, weights)
    writers: dict[str, Writer] = {
        WEIGHTS: lambda path: path.write_bytes(save(weights)),
        CONFIG: lambda path: path.write_text(config_yaml, encoding="utf-8"),
        TOKENIZER: lambda path: path.write_bytes(tokenizer),
    }
    write_folder(folder, {**writers, **(extra or {})})


def refuse_endless(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise a UserError that names the first weight with an infinity or a NaN in it: such a model is worth nothing.

    Finite gradients do not guarantee finite weights: a learning rate can be so high that the step itself overflows.
    """
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise NotFinite(
                f"{folder} is not written: {name} is not finite; checkpoints before it are sound: resume from the last "
                "one with a lower --optimizer.lr"
            )


def load_model(folder: Path | str, device: torch.device | str = "cpu", position: SchemeConfig | None = None) -> Loaded:
    """Read a model folder; UserError names what is missing, damaged or does not fit.

    `position` replaces the stored settings of the scheme, where they differ in what may change after training.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give a run folder or one of its checkpoints")
    check_folder(folder)
    config = _read_config(folder / CONFIG)
    model_config = _model_config(folder / CONFIG, config)
    if position is not None:
        refuse_changes_of_weights(model_config.position, position)
        model_config = model_config.model_copy(update={"position": position})
    model = Transformer(model_config)
    load_weights(model, folder)
    return Loaded(model.to(device).eval(), (folder / TOKENIZER).read_bytes(), config)


def load_weights(model: Transformer, folder: Path) -> None:
    """Copy the weights of a folder into a model; every name and shape must agree, nothing more and nothing less."""
    _copy(dict(model.named_parameters()), _read_weights(folder / WEIGHTS), folder / WEIGHTS)


def load_trunk(model: Transformer, folder: Path) -> list[str]:
    """Copy all but the positional weights of a folder into a model; return the names that only one of the two has.

    A positional weight is taken over too where both have it in the same shape: the rest begins anew, or is dropped.
    """
    check_folder(folder)
    wanted, stored = dict(model.named_parameters()), _read_weights(folder / WEIGHTS)
    own = [name for name in {**wanted, **stored} if name.startswith("position.") and not _agree(name, wanted, stored)]
    kept = [{name: value for name, value in weights.items() if name not in own} for weights in (wanted, stored)]
    _copy(kept[0], kept[1], folder / WEIGHTS)
    return sorted(own)


def _agree(name: str, wanted: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> bool:
    return name in wanted and name in stored and wanted[name].shape == stored[name].shape


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error


@torch.no_grad()
def _copy(wanted: Mapping[str, Tensor], stored: Mapping[str, Tensor], path: Path) -> None:
    refuse_difference(path, _shapes(wanted), _shapes(stored))
    for name, parameter in wanted.items():
        parameter.copy_(stored[name])


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def refuse_difference(path: Path, wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> None:
    """Raise a UserError that lists the first differences between the weights wanted and those stored."""
    different = [name for name in {**wanted, **stored} if wanted.get(name) != stored.get(name)]
    if different:
        first = ", ".join(f"{n} (wanted {wanted.get(n)}, stored {stored.get(n)})" for n in sorted(different)[:3])
        raise UserError(f"{path} does not fit this model in {len(different)} weights: {first}")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise UserError(f"{path} has no part 'model' that describes the network")
    return config


def _model_config(path: Path, config: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.model_validate(config["model"])
    except ValidationError as error:
        raise UserError(f"{path}: {error.errors()[0]['msg']} at {error.errors()[0]['loc']}") from error
