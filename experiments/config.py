"""An experiment, described whole: which arms are trained how often, and what is measured. Torch-free."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from model.errors import UserError
from model.settings import Settings
from training.config import load
from training.settings_tree import build, short
from training.yaml_file import read_mapping

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]
Changes = dict[str, Any]

ARM_WORDS = ("train", "eval", "seeds", "matched_to", "label")


class Arm(Settings):
    """One way of telling a model where its tokens are: what it changes of the base, and what after training."""

    changes: Changes = Field(default_factory=dict)
    """Settings under their dotted names, such as `model.position: alibi`."""
    train: str | None = None
    """Another arm, whose weights are taken as they are."""
    eval: Changes = Field(default_factory=dict)
    """Settings that are changed for evaluation alone."""
    seeds: tuple[Seed, ...] | None = None
    """Seeds of this arm; none: those of the experiment."""
    matched_to: str | None = None
    """Widen the feed-forward layers until the model has as many parameters as this other arm has."""
    label: str = ""
    """A remark for the report, such as `workaround`."""

    @model_validator(mode="after")
    def _weights_have_one_source(self) -> "Arm":
        if self.train is not None and (self.changes or self.matched_to or self.seeds):
            raise ValueError("an arm with `train` takes weights as they are: all it may change stands under `eval`")
        if self.eval and self.train is None:
            raise ValueError("`eval` needs `train`: the arm whose weights are evaluated so")
        return self


class Tune(Settings):
    """The grid that each arm is tuned on, by validation loss at the training length, with seeds of its own."""

    grid: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """Values to try, by the dotted name of the setting."""
    seeds: tuple[Seed, ...] = (100,)
    """Seeds of the tuning runs."""


class Evaluation(Settings):
    """How much text is scored."""

    test_windows: Count = 512
    """Windows of the test split, evenly spread, that are scored at the training length."""
    spans: Count = 96
    """Stretches of test text, each of the longest length, whose last tokens are scored at every length."""
    window_spans: Count = 24
    """Of these stretches, how many are also read as windows without overlap."""
    control_every: Count = 8
    """Of the targets of a span, every so many is also scored with exactly the training length before it."""
    inside_windows: Annotated[int, Field(ge=2)] = 32
    """Windows that the measures inside the model read."""
    task_examples: Count = 256
    """Strings of a task that are tried at each length."""
    prompt: str = "def "
    """What all arms continue for the samples."""
    sample_tokens: Count = 120
    """Length of a sample, in tokens."""


class Experiment(Settings):
    """What is compared, and how."""

    title: str = ""
    """Heading of the report."""
    question: str = ""
    """What the experiment asks, in a sentence or two."""
    base: str
    """File with the settings that all arms share, beside the experiment's own."""
    seeds: tuple[Seed, ...] = (0, 1, 2, 3, 4)
    """Every arm is trained once with each."""
    lengths: tuple[Count, ...] = ()
    """Lengths to evaluate at; the first is the training length."""
    reference: str
    """Differences are against this arm."""
    tune: Tune | None = None
    """none: the base's settings for all."""
    tuned: str | None = None
    """File with what an earlier tuning found, which is then not run again; absent, or of other settings: it is run."""
    arms: dict[str, Arm]
    """What is compared."""
    measures: tuple[Literal["text", "inside", "samples"], ...] = ("text", "samples")
    """text: loss at several lengths; inside: what attention does; samples: a text from each arm."""
    tasks: tuple[str, ...] = ()
    """Synthetic tasks, trained on one by one instead of text; `lengths` are then their sizes."""
    evaluation: Evaluation = Evaluation()
    """How much text is scored."""
    key_by_name: bool = False
    """Train arms that are the same model under several names once for each: a check of the machinery."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "Experiment":
        if self.reference not in self.arms:
            raise ValueError(f"reference {self.reference!r} is no arm; there are: {', '.join(self.arms)}")
        for name, arm in self.arms.items():
            for role, other in (("train", arm.train), ("matched_to", arm.matched_to)):
                if other is not None and (other not in self.arms or self.arms[other].train is not None):
                    raise ValueError(f"arms.{name}.{role} {other!r} is no arm that is trained")
        everyone = [self.seeds, *(arm.seeds for arm in self.arms.values() if arm.seeds is not None)]
        if any(len(set(seeds)) < len(seeds) or not seeds for seeds in everyone):
            raise ValueError("seeds must be at least one, and each stand once")
        both = set(self.tune.seeds) & {seed for seeds in everyone for seed in seeds} if self.tune else set()
        if both:
            raise ValueError(
                f"tune.seeds {sorted(both)} are seeds of the experiment too: tuning needs seeds of its own"
            )
        return self


class ExperimentFile(Settings):
    """An experiment and the file that it was read from."""

    experiment: Experiment
    path: Path
    digest: str
    """SHA-256 of the experiment and of the base's settings, whatever the files look like."""

    @property
    def name(self) -> str:
        """Name of the experiment: that of its file."""
        return self.path.stem

    @property
    def base(self) -> Path:
        """The file of settings that all arms share."""
        return self.path.parent / self.experiment.base


def read_experiment(path: Path) -> ExperimentFile:
    """Read an experiment file; UserError in one line for what is wrong with it."""
    tree = dict(read_mapping(path))
    if isinstance(tree.get("tune"), Mapping):
        tree["tune"] = _tuning(tree["tune"])
    if isinstance(tree.get("arms"), Mapping):
        tree["arms"] = {name: _arm(path, name, arm) for name, arm in tree["arms"].items()}
    experiment = build(Experiment, tree, str(path))
    shared = load(path.parent / experiment.base)
    digest = hashlib.sha256(f"{experiment.model_dump_json()}\n{shared.model_dump_json()}".encode()).hexdigest()
    return ExperimentFile(experiment=experiment, path=path, digest=digest)


def _tuning(tree: Mapping[str, Any]) -> dict[str, Any]:
    grid = {name: values for name, values in tree.items() if name != "seeds"}
    return {"grid": grid, **({"seeds": tree["seeds"]} if "seeds" in tree else {})}


def _arm(path: Path, name: str, tree: Any) -> dict[str, Any]:
    """Part an arm's own words from the settings that it changes."""
    if not isinstance(tree, Mapping):
        raise UserError(
            f"{path}: arms.{name}: {short(tree)} is refused; it must be settings, such as {{model.position: rope}}"
        )
    words = {key: value for key, value in tree.items() if key in ARM_WORDS}
    return {"changes": {key: value for key, value in tree.items() if key not in ARM_WORDS}, **words}
