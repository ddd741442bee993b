"""Which way new tokens are read: the one place that decides."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from model.decoding import build
from model.decoding.build import BuildError
from model.decoding.compiled import CompiledDecoder
from model.decoding.decoder import Decoder
from model.decoding.eager import EagerDecoder
from model.decoding.native import NativeDecoder
from model.decoding.weights import rounded
from model.errors import UserError
from model.sampling_config import DecoderName, Precision
from model.transformer import Transformer

KINDS: dict[str, type[Decoder]] = {kind.name: kind for kind in (EagerDecoder, CompiledDecoder, NativeDecoder)}
# Where a token's time goes in the eager step on a laptop: a block's operations, and the weights that are read.
SECONDS_A_BLOCK, BYTES_A_SECOND = 0.25e-3, 6e9
# By what share of one row's time each further row lengthens the step.
SHARE_OF_A_ROW = 1 / 8
# What of it the kernel saves, at least.
SAVED = 0.7


class Reading(NamedTuple):
    """The model that reads prompts, its weights rounded as asked, and what reads new tokens; None: the model too."""

    model: Transformer
    decoder: Decoder | None


def seconds_saved(model: Transformer, rows: int, new_tokens: int) -> float:
    """Estimate what the kernel saves over so many tokens of so many rows at once."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    step = len(model.layers) * SECONDS_A_BLOCK + weights / BYTES_A_SECOND
    return new_tokens * SAVED * step * (1 + SHARE_OF_A_ROW * (rows - 1))


def obstacle(model: Transformer, kind: str) -> str | None:
    """Say why this way cannot serve this model; None where it can."""
    weight = model.norm.weight
    if model.position.reads_content:
        return f"position {model.config.position.kind!r} reads content, which only the model itself does"
    if kind == "native" and (weight.device.type != "cpu" or weight.dtype != torch.float32):
        return f"the native decoder is float32 on a CPU, the model {weight.dtype} on {weight.device.type}"
    return None


def automatic(model: Transformer, rows: int, new_tokens: int, say: Callable[[str], None]) -> DecoderName:
    """Return what is fastest here, without a wait that does not pay."""
    if model.position.reads_content:
        return "model"
    if obstacle(model, "native") is not None:
        return "eager"
    if build.is_built():
        return "native"
    saved = seconds_saved(model, rows, new_tokens)
    if saved < 1 or not build.has_compiler():
        return "eager"
    if saved < 2 * build.BUILD_SECONDS:
        say(f"--decoder native is faster, once it is built, which takes about {build.BUILD_SECONDS:.0f} s")
        return "eager"
    return "native"


def choose_decoder(
    model: Transformer,
    decoder: DecoderName = "auto",
    precision: Precision = "fp32",
    rows: int = 1,
    new_tokens: int = 256,
    say: Callable[[str], None] = lambda text: None,
) -> Reading:
    """Return what reads prompts and new tokens for `generate(reading.model, ..., decoder=reading.decoder)`.

    `model` is the definition, `Transformer.forward`; `auto` takes the native kernel on a CPU where it is built or the
    asked tokens pay for building it, else the eager step. On a CPU, bf16 and int8 round the weights and compute in
    float32; on another device bf16 is the precision of all, and int8 is refused (UserError). What cannot be had is
    replaced, and `say` told why in one line.
    """
    on_cpu = model.norm.weight.device.type == "cpu"
    if precision == "int8" and not on_cpu:
        raise UserError(f"precision int8 is for a CPU, the model is on {model.norm.weight.device.type}: take bf16")
    if precision == "bf16" and not on_cpu:
        model, precision = model.to(torch.bfloat16), "fp32"
    kind = automatic(model, rows, new_tokens, say) if decoder == "auto" else decoder
    hindrance = None if kind == "model" else obstacle(model, kind)
    if hindrance is not None:
        say(f"no {kind} decoder: {hindrance}")
        kind = "model" if model.position.reads_content else "eager"
    if kind == "native" and build.has_compiler() and not build.is_built():
        say(f"building the native decoder, once: about {build.BUILD_SECONDS:.0f} s")
    return made(model, kind, precision, say)


def made(model: Transformer, kind: DecoderName, precision: Precision, say: Callable[[str], None]) -> Reading:
    """Build a decoder, or the eager one where what it needs is not to be had."""
    if kind == "model":
        return Reading(rounded(model, precision), None)
    try:
        decoder = KINDS[kind](model, precision)
    except BuildError as error:
        say(f"no {kind} decoder, the eager one goes on: {error}")
        decoder = EagerDecoder(model, precision)
    return Reading(decoder.model, decoder)
