"""Which runs an experiment is made of, and what makes two runs the same run."""

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from experiments.config import Arm, Changes, Experiment, ExperimentFile
from model.config import ModelConfig
from model.errors import UserError
from model.position.config import SchemeConfig, refuse_changes_of_weights
from training.config import Config, load

# What says where a run lies and what it tells on its way, not what it learns.
OUTSIDE = {
    "data": {"folder", "processes"},
    "training": {
        "out", "wandb", "wandb_project", "log_every", "checkpoint_every", "keep", "sample_every", "sample_prompt",
        "sample_tokens", "device", "parallel", "compile", "precision", "max_minutes",
    },
}  # fmt: skip


class Facts(NamedTuple):
    """What decides what a run learns, beside its settings."""

    data: str  # hash of the token files, or the version of the tasks
    vocabulary: int
    precision: str


class Run(NamedTuple):
    """One training: an arm with its settings, a seed, and, if it is not about text, a task."""

    arm: str
    seed: int
    settings: Changes  # those of the tuning grid
    config: Config
    task: str
    key: str
    is_tuning: bool = False

    @property
    def label(self) -> str:
        """What the run is called in messages."""
        parts = [self.arm, self.task, *(f"{name} {value:g}" for name, value in self.settings.items())]
        return ", ".join([*filter(None, parts), f"seed {self.seed}"])


class Plan:
    """The runs of one experiment on given data."""

    def __init__(self, file: ExperimentFile, facts: Facts) -> None:
        self.file, self.facts = file, facts
        self.experiment: Experiment = file.experiment
        self._runs: dict[str, Run] = {}  # reading the files again for every look would cost more than the look
        self._schemes: dict[str, SchemeConfig] = {}
        check(file)

    @property
    def trained(self) -> dict[str, Arm]:
        """The arms that are trained; the others take weights from one of them."""
        return {name: arm for name, arm in self.experiment.arms.items() if arm.train is None}

    @property
    def tasks(self) -> tuple[str, ...]:
        """What is trained on: tasks, or text (an empty name)."""
        return self.experiment.tasks or ("",)

    def seeds(self, arm: str) -> tuple[int, ...]:
        """Return the seeds of an arm: its own, or those of the arm whose weights it takes, or the experiment's."""
        described = self.experiment.arms[arm]
        return self.seeds(described.train) if described.train else described.seeds or self.experiment.seeds

    def run(self, arm: str, seed: int, settings: Changes, task: str = "") -> Run:
        """Return one run."""
        name = json.dumps([arm, seed, settings, task])
        if name not in self._runs:
            self._runs[name] = self._run(arm, seed, settings, task)
        return self._runs[name]

    def _run(self, arm: str, seed: int, settings: Changes, task: str) -> Run:
        config = with_vocabulary(configured(self.file, arm, seed, settings), self.facts.vocabulary)
        config = self._widened(config, arm, seed, settings)
        name = arm if self.experiment.key_by_name else ""
        return Run(arm, seed, settings, config, task, key_of(config, self.facts, task, name))

    def _widened(self, config: Config, arm: str, seed: int, settings: Changes) -> Config:
        other = self.experiment.arms[arm].matched_to
        if other is None:
            return config
        target = self.run(other, seed, settings).config.model
        return config.model_copy(update={"model": widened_to(config.model, count(target))})

    def grid(self) -> list[Changes]:
        """Return every combination of the values to try; the base's own settings alone where nothing is tuned."""
        values = self.experiment.tune.grid if self.experiment.tune else {}
        return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]

    def tuning(self) -> list[Run]:
        """Return the runs of the tuning grid; none where nothing is tuned."""
        if self.experiment.tune is None:
            return []
        return [
            self.run(arm, seed, settings, task)._replace(is_tuning=True)
            for seed in self.experiment.tune.seeds
            for arm in self.trained
            for task in self.tasks
            for settings in self.grid()
        ]

    def measured(self, chosen: dict[tuple[str, str], Changes]) -> list[Run]:
        """Return the runs that are measured, with the settings chosen for each arm and task; seed by seed."""
        everyone = [
            self.run(arm, seed, chosen[arm, task], task)
            for arm in self.trained
            for seed in self.seeds(arm)
            for task in self.tasks
        ]
        return sorted(everyone, key=lambda run: self.seeds(run.arm).index(run.seed))

    def evaluated_as(self, run: Run) -> dict[str, SchemeConfig]:
        """Return the arms that a run's weights are evaluated as, with the scheme of each."""
        after = {name: arm.eval for name, arm in self.experiment.arms.items() if arm.train == run.arm}
        return {name: self.scheme(run, changes) for name, changes in {run.arm: {}, **after}.items()}

    def scheme(self, run: Run, after: Changes) -> SchemeConfig:
        """Return the scheme of a run with changes made after training (UserError where they cannot be)."""
        name = json.dumps([run.key, after])
        if name not in self._schemes:
            position = configured(self.file, run.arm, run.seed, {**run.settings, **after}).model.position
            refuse_changes_of_weights(run.config.model.position, position)
            self._schemes[name] = position
        return self._schemes[name]


def configured(file: ExperimentFile, arm: str, seed: int, settings: Changes) -> Config:
    """Return the settings of a run: the base, under the arm's changes, under those of the grid, under the seed."""
    config = load(file.base, {**file.experiment.arms[arm].changes, **settings, "training.seed": seed})
    quiet = {"sample_every": 0, "keep": 1, "wandb": "off", "out": None, "device": config.training.device}
    training = config.training.model_copy(update=quiet)
    return config.model_copy(update={"training": training})


def with_vocabulary(config: Config, size: int) -> Config:
    """Return the settings with the size of the vocabulary, which the data decide."""
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})


def key_of(config: Config, facts: Facts, task: str = "", name: str = "") -> str:
    """Return what identifies a run: a hash of all that decides what it learns."""
    described = {
        "config": config.model_dump(mode="json", exclude=OUTSIDE),
        "data": facts.data,
        "precision": facts.precision,
        "task": task,
        "name": name,
    }
    return digest(described)


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits that stand for a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def count(model: ModelConfig) -> int:
    """Return how many parameters a model of this shape has."""
    return _counted(model.model_dump_json())


@cache
def _counted(model: str) -> int:
    from model.transformer import Transformer

    return Transformer(ModelConfig.model_validate_json(model)).count_parameters().total


def widened_to(model: ModelConfig, parameters: int) -> ModelConfig:
    """Return the model with the feed-forward width that brings its number of parameters nearest to the given one."""
    a_unit = 3 * model.d_model * model.n_layers  # gate, up and down
    more = round((parameters - count(model)) / a_unit)
    return model.model_copy(update={"d_ff": model.hidden_width + max(0, more)})


def check(file: ExperimentFile) -> None:
    """Refuse what would make an experiment unfair or impossible, before anything is trained (UserError)."""
    experiment = file.experiment
    for name, arm in experiment.arms.items():
        if foreign := [key for key in arm.changes if key.startswith("data.") or key == "training.seed"]:
            raise UserError(f"{file.path}: arm {name}: {foreign[0]} is the same for all arms: change it in the base")
        if arm.train is None:
            config = configured(file, name, experiment.seeds[0], {})
            for problem in _problems(experiment, config):
                raise UserError(f"{file.path}: arm {name}: {problem}")


def _problems(experiment: Experiment, config: Config) -> Iterator[str]:
    if config.training.max_minutes is not None:
        yield "training.max_minutes would give each run other steps: set training.steps alone"
    if not experiment.tasks and experiment.lengths and experiment.lengths[0] != config.model.context:
        yield f"lengths must begin with the training length, model.context {config.model.context}"
    if "text" in experiment.measures and not experiment.lengths:
        yield f"measures: text needs lengths, beginning with model.context {config.model.context}"
    if config.training.init_from is not None:
        yield "training.init_from is not compared yet: begin from new weights"
