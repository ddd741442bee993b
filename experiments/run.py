"""One run of an experiment: train it, measure it, write down what came out."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from data.loader import Windows, evaluation_windows
from data.prepare import Prepared, prepare
from experiments.config import Evaluation, Experiment
from experiments.plan import Facts, Run, digest
from experiments.store import Row, Store
from experiments.text import Amount, text_measures
from model.attention import attend_reference, with_kernel
from model.checkpoint import load_model
from model.errors import NotFinite
from model.position.config import SchemeConfig
from model.sampling import generate
from model.sampling_config import SamplingSettings
from model.transformer import Transformer
from training.config import Config
from training.evaluate import evaluate
from training.hardware import Hardware, choose_hardware, use_faster_float32
from training.loop import train
from training.machine import hardware as machine
from training.machine import revision, today, versions

CURVE = 20  # points of a curve of losses, at least


class Laboratory:
    """What the runs of an experiment need: the text, the hardware and the place where rows are kept."""

    def __init__(self, base: Config, store: Store, tasks: bool) -> None:
        self.store, self.hardware = store, choose_hardware(base.training)
        if self.hardware.device.type == "cpu":
            use_faster_float32()
        self.prepared: Prepared | None = None if tasks else prepare(base.data)

    @property
    def facts(self) -> Facts:
        """Return what decides what a run learns beside its settings."""
        precision = self.hardware.precision
        if self.prepared is None:
            from data.tasks import FORMAT, VOCABULARY_SIZE

            return Facts(f"tasks {FORMAT}", VOCABULARY_SIZE, precision)
        return Facts(digest(self.prepared.manifest["files"]), self.prepared.tokenizer.vocab_size, precision)

    # --- Training ---

    def train(self, run: Run) -> Row:
        """Train a run, going on where it was stopped; a finished one is only read. Return its row."""
        row = self.store.row(run.key)
        if row is None:
            row = self._trained(run)
            self.store.keep(run.key, row)
        return row

    def _trained(self, run: Run) -> Row:
        assert self.prepared is not None
        folder = self.store.folder(run.key)
        begin = time.perf_counter()
        try:
            with said_into(self.store, run.key):
                train(watched(run.config), folder, resume=True)
        except NotFinite as error:
            return self.described(run) | {"status": "diverged", "why": str(error)}
        metrics = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        return self.described(run) | training_row(metrics, run.config) | {"wall_seconds": time.perf_counter() - begin}

    def described(self, run: Run) -> Row:
        """Return what is known of a run before it begins."""
        return {
            "key": run.key,
            "config": run.config.model_dump(mode="json"),
            "precision": self.hardware.precision,
            "machine": machine(),
            "versions": versions(),
            "revision": revision(),
            "date": today(),
            **model_facts(run.config, self.hardware),
            "hashes": {"weights": weights_hash(run.config), "windows": self.windows_hash(run.config)},
        }

    def windows_hash(self, config: Config) -> str:
        """Return a hash of where every window of the run begins, in order."""
        assert self.prepared is not None
        windows = Windows(self.prepared.train.ids, config.model.context, config.training.seed)
        starts = windows.starts(np.arange(config.training.steps * config.training.batch_size))
        return sha256(starts.tobytes()).hexdigest()[:16]

    # --- Measuring ---

    def measure(self, run: Run, scheme: SchemeConfig, experiment: Experiment) -> Row:
        """Measure the weights of a run under a scheme; what is measured already is only read. Return its row."""
        name = evaluation_name(run, scheme, experiment)
        row = self.store.row(name)
        if row is None:
            if not self.store.folder(run.key).exists():
                self._trained(run)  # its row came from elsewhere, without the weights
            row = self._measured(run, scheme, experiment)
            self.store.keep(name, row)
        return row

    def _measured(self, run: Run, scheme: SchemeConfig, experiment: Experiment) -> Row:
        assert self.prepared is not None
        begin = time.perf_counter()
        folder = self.store.folder(run.key).checkpoint("last")
        model = load_model(folder, self.hardware.device, scheme).model
        measurements = list(self._measurements(model, experiment))
        samples = [self.sample(model, experiment.evaluation)] if "samples" in experiment.measures else []
        seconds = time.perf_counter() - begin
        return {"key": run.key, "measurements": measurements, "samples": samples, "seconds": seconds}

    def _measurements(self, model: Transformer, experiment: Experiment) -> Iterator[Row]:
        assert self.prepared is not None
        settings, ids = experiment.evaluation, self.prepared.test.ids
        windows = evaluation_windows(ids, model.config.context, settings.test_windows, "test")
        score = evaluate(model, windows, self.prepared.tokenizer.token_bytes(), self.hardware)
        yield {"measure": "test_loss", "value": score.loss, "count": score.tokens}
        yield {"measure": "test_bits_per_byte", "value": score.bits_per_byte, "count": score.tokens}
        if "text" in experiment.measures:
            amount = Amount(settings.spans, settings.window_spans, settings.control_every)
            for found in text_measures(model, ids, experiment.lengths, amount, self.hardware):
                yield found._asdict()
        if "inside" in experiment.measures:
            from experiments.inside import inside

            for found in inside(model, windows[:: max(1, len(windows) // settings.inside_windows)], self.hardware):
                yield found._asdict()

    def sample(self, model: Transformer, settings: Evaluation) -> Row:
        """Return how a model continues the prompt that all arms get, from the same seed."""
        assert self.prepared is not None
        tokenizer = self.prepared.tokenizer
        prompt = [tokenizer.bos, *tokenizer.encode(settings.prompt)]
        steps = generate(model, [prompt], SamplingSettings(seed=0), settings.sample_tokens, (tokenizer.bos,))
        new = [token for step in steps for token in step.tokens if token is not None]
        return {"prompt": settings.prompt, "text": tokenizer.decode(new)}


def evaluation_name(run: Run, scheme: SchemeConfig, experiment: Experiment) -> str:
    """Return under which name an evaluation is kept: by the run's key and all that decides what is measured."""
    asked = experiment.model_dump(mode="json", include={"lengths", "measures", "evaluation"})
    return f"{run.key}-{digest([scheme.model_dump(mode='json'), asked])}"


def watched(config: Config) -> Config:
    """Return the settings with an evaluation often enough for a curve, and few other interruptions."""
    training = config.training
    often = {
        "eval_every": min(training.eval_every, max(1, training.steps // CURVE)),
        "checkpoint_every": max(1, -(-training.steps // 4)),
        "log_every": max(1, training.steps // 50),
    }
    return config.model_copy(update={"training": training.model_copy(update=often)})


def training_row(metrics: list[dict[str, Any]], config: Config) -> Row:
    """Return what a finished run's metrics come to.

    Diverged is also a run that ends worse than guessing all tokens alike, ln V.
    """
    last = metrics[-1]
    guessing = math.log(config.model.vocab_size or math.inf)
    failed = last["final_loss"] is None or last["final_loss"] > guessing
    return {
        "status": "diverged" if failed else "finished",
        "why": f"its loss {last['final_loss']} is above ln V {guessing:.2f}" if failed else "",
        "validation_loss": last["final_loss"],
        "validation_bits_per_byte": last["final_bits_per_byte"],
        "curve": [[row["tokens"], row["validation_loss"]] for row in metrics if "validation_loss" in row],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_second": last["tokens"] / last["seconds"],
        "skipped_steps": last["skipped_steps"],
    }


def model_facts(config: Config, hardware: Hardware) -> Row:
    """Return the numbers of parameters, and how attention is computed."""
    model = Transformer(config.model, config.training.seed)
    return {"parameters": model.count_parameters()._asdict(), "backend": backend(model, hardware)}


def backend(model: Transformer, hardware: Hardware) -> str:
    """Return the name of what computes attention in training."""
    if model.position.reads_content:
        return attend_reference.__name__
    signal = model.signal(model.config.context, None, None, torch.device("cpu"))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(hardware.precision, torch.float32)
    kernel = with_kernel(signal, dtype, hardware.device).kernel
    assert kernel is not None
    return kernel.__name__


def weights_hash(config: Config) -> str:
    """Return a hash of the weights at the start, without those of the positional scheme."""
    model = Transformer(config.model, config.training.seed)
    weights = sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not name.startswith("position."):
            weights.update(name.encode() + parameter.detach().numpy().tobytes())
    return weights.hexdigest()[:16]


@contextmanager
def said_into(store: Store, key: str) -> Iterator[None]:
    """Let what a training says go into its log; the screen belongs to the experiment."""
    with store.log(key).open("a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        yield
