"""Where the runs of an experiment are trained and measured, once each: on text, or on a synthetic task."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np

from data.loader import Windows, evaluation_windows
from data.prepare import prepare
from data.tasks import FORMAT, VOCAB_SIZE, TaskWindows
from experiments.config import Evaluation, Experiment, ExperimentFile
from experiments.inside import inside
from experiments.plan import Facts, Run, digest
from experiments.rows import described, evaluation_name, task_row, training_row, watched
from experiments.store import Row, Store
from experiments.tasks import fitted, measure_task, train_task
from experiments.text import Amount, text_measures
from model.checkpoint import load_model
from model.durable import remove_folder
from model.errors import NotFinite
from model.position.config import SchemeConfig
from model.sampling import generate
from model.sampling_config import SamplingSettings
from model.transformer import Transformer
from training.config import Config, load
from training.evaluate import evaluate
from training.hardware import choose_hardware, set_up_cpu
from training.loop import train


def laboratory_of(file: ExperimentFile, store: Store) -> "Laboratory":
    """Return the place for an experiment's runs."""
    return (TaskLaboratory if file.experiment.tasks else TextLaboratory)(file.experiment, load(file.base), store)


class Laboratory:
    """What all runs of an experiment need; what is done already is only read."""

    facts: Facts

    def __init__(self, experiment: Experiment, base: Config, store: Store) -> None:
        self.experiment, self.store, self.hardware = experiment, store, choose_hardware(base.training)
        if self.hardware.device.type == "cpu":
            set_up_cpu()

    def train(self, run: Run) -> Row:
        """Train a run, going on where it was stopped, and return its row."""
        row = self.store.row(run.key)
        if row is None:
            row = {"key": run.key} | self.trained(run)
            self.store.keep(run.key, row)
        return row

    def measure(self, run: Run, scheme: SchemeConfig) -> Row:
        """Measure the weights of a run under a scheme, and return the row."""
        name = evaluation_name(run, scheme, self.experiment)
        row = self.store.row(name)
        if row is None:
            if not self.has_weights(run):
                self.trained(run)  # its row came from elsewhere, without them
            begin = time.perf_counter()
            row = {"key": run.key} | self.measured(run, scheme) | {"seconds": time.perf_counter() - begin}
            self.store.keep(name, row)
        return row

    def rows_read(self, run: Run) -> "tuple[Config, Windows | TaskWindows]":
        """Return a run's settings as they are used, and what it is trained on."""
        raise NotImplementedError

    def trained(self, run: Run) -> Row:
        """Train a run, and return what came out."""
        raise NotImplementedError

    def has_weights(self, run: Run) -> bool:
        """Say whether the weights of a finished run lie here."""
        raise NotImplementedError

    def measured(self, run: Run, scheme: SchemeConfig) -> Row:
        """Return the measurements of a run under a scheme, and its samples."""
        raise NotImplementedError


class TextLaboratory(Laboratory):
    """Runs that are trained on text by the loop of train.py."""

    def __init__(self, experiment: Experiment, base: Config, store: Store) -> None:
        super().__init__(experiment, base, store)
        self.prepared = prepare(base.data)
        data = digest(self.prepared.manifest["files"])
        self.facts = Facts(data, self.prepared.tokenizer.vocab_size, self.hardware.precision)

    def rows_read(self, run: Run) -> tuple[Config, Windows]:
        config = run.config
        return config, Windows(self.prepared.train.ids, config.model.context, config.training.seed)

    def trained(self, run: Run) -> Row:
        folder = self.store.folder(run.key)
        known = described(*self.rows_read(run), self.hardware)
        try:
            with said_into(self.store.log(run.key)):
                train(watched(run.config), folder, resume=True)
        except NotFinite as error:
            return known | {"status": "diverged", "why": str(error)}
        metrics = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        return known | training_row(metrics, run.config)

    def has_weights(self, run: Run) -> bool:
        folder = self.store.folder(run.key)
        return folder.exists() and folder.pointed("last") == run.config.training.steps

    def measured(self, run: Run, scheme: SchemeConfig) -> Row:
        folder = self.store.folder(run.key).checkpoint("last")
        model = load_model(folder, self.hardware.device, scheme).model
        measurements = [*self._at_training_length(model), *self._further(model)]
        samples = [self.sample(model, self.experiment.evaluation)] if "samples" in self.experiment.measures else []
        return {"measurements": measurements, "samples": samples}

    def test_windows(self, model: Transformer, count: int) -> np.ndarray:
        """Return evenly spread windows of the test split, of the training length."""
        return evaluation_windows(self.prepared.test.ids, model.config.context, count, "test")

    def _at_training_length(self, model: Transformer) -> Iterator[Row]:
        windows = self.test_windows(model, self.experiment.evaluation.test_windows)
        score = evaluate(model, windows, self.prepared.tokenizer.token_bytes(), self.hardware)
        yield {"measure": "test_loss", "value": score.loss, "count": score.tokens}
        yield {"measure": "test_bits_per_byte", "value": score.bits_per_byte, "count": score.tokens}

    def _further(self, model: Transformer) -> Iterator[Row]:
        settings, lengths = self.experiment.evaluation, self.experiment.lengths
        if "text" in self.experiment.measures:
            amount = Amount(settings.spans, settings.window_spans, settings.control_every)
            for found in text_measures(model, self.prepared.test.ids, lengths, amount, self.hardware):
                yield found._asdict()
        if "inside" in self.experiment.measures:
            for seen in inside(model, self.test_windows(model, settings.inside_windows), self.hardware):
                yield seen._asdict()

    def sample(self, model: Transformer, settings: Evaluation) -> Row:
        """Return how a model continues the prompt that all arms get, from the same seed."""
        tokenizer = self.prepared.tokenizer
        prompt = [tokenizer.bos, *tokenizer.encode(settings.prompt)]
        steps = generate(model, [prompt], SamplingSettings(seed=0), settings.sample_tokens, (tokenizer.bos,))
        new = [token for step in steps for token in step.tokens if token is not None]
        return {"prompt": settings.prompt, "text": tokenizer.decode(new)}


class TaskLaboratory(Laboratory):
    """Runs that are trained on a synthetic task; they are short, so one that was stopped begins again."""

    def __init__(self, experiment: Experiment, base: Config, store: Store) -> None:
        super().__init__(experiment, base, store)
        self.facts = Facts(f"tasks {FORMAT}, up to {experiment.lengths[0]}", VOCAB_SIZE, self.hardware.precision)

    def rows_read(self, run: Run) -> tuple[Config, TaskWindows]:
        windows = TaskWindows(run.task, self.experiment.lengths[0], run.config.training.seed)
        return fitted(run.config, windows.context), windows

    def trained(self, run: Run) -> Row:
        folder = self.store.folder(run.key).path
        if folder.exists():
            remove_folder(folder)
        found = train_task(watched(run.config), run.task, self.experiment.lengths[0], folder)
        return described(*self.rows_read(run), self.hardware) | task_row(found)

    def has_weights(self, run: Run) -> bool:
        return (self.store.folder(run.key).path / "model").is_dir()

    def measured(self, run: Run, scheme: SchemeConfig) -> Row:
        model = load_model(self.store.folder(run.key).path / "model", self.hardware.device, scheme).model
        examples, lengths = self.experiment.evaluation.task_examples, self.experiment.lengths
        scores = measure_task(model, run.task, lengths, examples, self.hardware)
        return {"measurements": [m._asdict() for s in scores for m in s.measurements(run.arm, run.seed)], "samples": []}


@contextmanager
def said_into(log: Path) -> Iterator[None]:
    """Let what a training says go into its log; the screen belongs to the experiment."""
    with log.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        yield
