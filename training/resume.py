"""Starting, going on with and starting over: what a run folder that is already there means. Torch-free."""

from typing import Any

from model.errors import UserError
from model.settings import Settings
from training.config import Config, load
from training.run_folder import RunFolder

# Settings that change nothing a run learns, so that a resumed run may have others.
FREE = {
    "data.processes",
    "data.corpus.streaming",
    "training.out",
    "training.parallel",
    "training.log_every",
    "training.eval_every",
    "training.eval_windows",
    "training.final_windows",
    "training.checkpoint_every",
    "training.keep",
    "training.sample_every",
    "training.sample_prompt",
    "training.sample_tokens",
    "training.wandb",
    "training.wandb_project",
}
LENGTH = {"training.steps", "training.max_minutes"}


def refuse_existing(folder: RunFolder, resume: bool, overwrite: bool) -> None:
    """Raise a UserError where a run would be overwritten without being told so."""
    assert not (resume and overwrite), "the command line refuses the two together"
    if folder.exists() and not (resume or overwrite):
        raise UserError(
            f"run folder {folder.path} holds a run: go on with --resume, start again with --overwrite, "
            "or name another folder with --training.out"
        )
    for part in (folder.path, *folder.path.parents):
        if part.exists() and not part.is_dir():
            raise UserError(f"training.out {folder.path}: {part} is a file: name a folder")


def resumed_config(folder: RunFolder, asked: Config) -> Config:
    """Return the settings with which the run goes on: the stored ones, with what may change taken from `asked`.

    UserError lists every other difference, since a run that changes half-way compares with nothing.
    """
    stored = load(folder.config)
    before, now = flat(stored), flat(asked)
    if now["training.compile"] == "auto":  # settled when the run began
        now["training.compile"] = before["training.compile"]
    different = [key for key in before if before[key] != now.get(key) and key not in FREE | LENGTH]
    if different:
        listed = ", ".join(f"{key} (run: {before[key]}, asked: {now.get(key)})" for key in different[:4])
        raise UserError(
            f"run folder {folder.path} was started with other settings: {listed}; "
            "resume with its own, or start another run with --training.out"
        )
    # max_minutes was turned into steps when the run began; the same words must not measure again.
    steps = stored.training.steps if asked.training.max_minutes else asked.training.steps
    settled = {"steps": steps, "max_minutes": None, "compile": stored.training.compile}
    training = asked.training.model_copy(update=settled)
    return stored.model_copy(update={"training": training})


def flat(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Return every setting under its dotted name; what a tokenizer decides (vocab_size of the model) is left out."""
    values: dict[str, Any] = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Settings):
            values.update(flat(value, f"{prefix}{name}."))
        elif f"{prefix}{name}" != "model.vocab_size":
            values[f"{prefix}{name}"] = value
    return values
