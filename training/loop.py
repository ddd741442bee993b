"""A run from start to end: steps, evaluations, samples, checkpoints, and what is said of them."""

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from data.config import DataConfig
from data.loader import Windows, evaluation_windows
from data.prepare import Prepared, open_prepared, prepare
from model.checkpoint import TOKENIZER, load_trunk, save_model
from model.durable import write_bytes, write_text
from model.errors import UserError
from model.flops import training_flops
from model.transformer import Transformer
from training.config import Config, to_yaml
from training.distributed import ALONE, Alone
from training.evaluate import Evaluation, evaluate
from training.hardware import Hardware, choose_device, choose_hardware, resolve_compile, set_up_cpu
from training.peak import measured_peak
from training.progress import Meter, Progress, clock
from training.resume import refuse_existing, resumed_config
from training.run_folder import RunFolder, checkpoint_folder
from training.samples import record_sample, rewind_samples, sample_text
from training.schedule import warmup_length
from training.tracking import Metrics, Tracker
from training.trainer import STATE, StepResult, Trainer, packed

MEASURED_STEPS = 6
# Share of `max_minutes` kept for evaluations, samples, checkpoints and a machine that slows down.
TIME_FOR_THE_REST = 0.12


class Interrupted(Exception):  # noqa: N818 - no error: the person asked to stop, and the run was saved
    """The run was stopped by the person or the system, after a checkpoint."""


def train(
    config: Config, folder: RunFolder, resume: bool = False, overwrite: bool = False, processes: Alone = ALONE
) -> Evaluation:
    """Train one run from its settings, or go on with it, and return how well it predicts the validation split."""
    with ExitStack() as held:
        # Of several processes the first one writes, and keeps other trainings out.
        processes.first(lambda: held.enter_context(folder.locked()))
        return trained(config, folder, resume, overwrite, processes)


def trained(config: Config, folder: RunFolder, resume: bool, overwrite: bool, processes: Alone) -> Evaluation:
    """Train in a folder that no other training writes into."""
    config, going_on = processes.first(lambda: decided(config, folder, resume, overwrite))
    prepared = prepared_once(config.data, processes)
    model = config.model.model_copy(update={"vocab_size": prepared.tokenizer.vocab_size})
    config = config.model_copy(update={"model": model})
    trainer = make_trainer(config if going_on else settled(config, prepared, processes), prepared, processes)
    if going_on:
        take_up(trainer, folder, prepared)
    else:
        start(trainer, folder, prepared)
    return Run(trainer, folder, prepared).go()


def decided(config: Config, folder: RunFolder, resume: bool, overwrite: bool) -> tuple[Config, bool]:
    """Return the settings of the run, and whether it goes on from where it was."""
    refuse_existing(folder, resume, overwrite)
    going_on = resume and folder.exists()
    if resume and not going_on:
        print(f"nothing to resume in {folder.path}: starting a new run")
    return (resumed_config(folder, config) if going_on else config), going_on


def prepared_once(config: DataConfig, processes: Alone) -> Prepared:
    """Return the prepared corpus; of several processes the first prepares it, and the others open it."""
    if processes.count == 1:
        return prepare(config)
    return open_prepared(processes.first(lambda: prepare(config).folder))


def make_trainer(config: Config, prepared: Prepared, processes: Alone = ALONE) -> Trainer:
    """Build the state of a run at step 0."""
    hardware = choose_hardware(config.training)
    if hardware.device.type == "cpu":
        set_up_cpu()
    refuse_huge_steps(config, len(prepared.train.ids))
    windows = Windows(prepared.train.ids, config.model.context, config.training.seed)
    return Trainer(config, windows, hardware, processes)


def refuse_huge_steps(config: Config, tokens: int) -> None:
    """Refuse a step that would read the whole text a hundred times: it would not end, and Ctrl-C waits for its end."""
    windows = max(1, tokens // config.model.context)
    if config.training.batch_size > 100 * windows:
        raise UserError(
            f"training.batch_size {config.training.batch_size} is over 100 times the {windows} windows of the training "
            f"split: lower it, to {windows} or less"
        )


def settled(config: Config, prepared: Prepared, processes: Alone) -> Config:
    """Settle how many steps a new run has and whether it is compiled; the run folder keeps the answers."""
    if config.training.max_minutes is not None:
        trial = make_trainer(with_training(config, compile="off"), prepared, processes)
        steps = fitted_steps(trial, config.training.max_minutes)
        print(f"{steps} of {config.training.steps} steps fit into {config.training.max_minutes:g} minutes here")
        config = with_training(config, steps=steps, max_minutes=None)
    compile = processes.first(lambda: resolve_compile(config, choose_device(config.training.device)))
    return with_training(config, compile=compile)


def with_training(config: Config, **changes: Any) -> Config:
    """Return the configuration with other settings of training."""
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def start(trainer: Trainer, folder: RunFolder, prepared: Prepared) -> None:
    """Write down the settings and the tokenizer of a new run."""
    begin_with(trainer, prepared)

    def write() -> None:
        folder.create()
        write_bytes(folder.tokenizer, prepared.tokenizer.model_bytes)
        write_text(folder.config, to_yaml(trainer.config))

    trainer.processes.first(write)


def begin_with(trainer: Trainer, prepared: Prepared) -> None:
    """Take over the weights of another run, where the settings say so, and say which positional ones were not."""
    source = trainer.config.training.init_from
    if source is None:
        return
    checkpoint = checkpoint_folder(Path(source))
    if (checkpoint / TOKENIZER).read_bytes() != prepared.tokenizer.model_bytes:
        raise UserError(f"training.init_from {source} was trained with another tokenizer than {prepared.folder} has")
    own = trainer.take_weights(lambda model: load_trunk(model, checkpoint))
    print(f"weights   from {checkpoint}" + (f", but for {', '.join(own)}" if own else ""))


def fitted_steps(trial: Trainer, max_minutes: float) -> int:
    """Return how many steps fit into `max_minutes`, at most those configured, from some steps of a throwaway one."""
    measured = sorted(_seconds_of_a_step(trial) for _ in range(MEASURED_STEPS))[MEASURED_STEPS // 2]
    seconds = trial.processes.first(lambda: measured)
    return max(1, min(trial.config.training.steps, int(max_minutes * 60 * (1 - TIME_FOR_THE_REST) / seconds)))


def _seconds_of_a_step(trainer: Trainer) -> float:
    begin = time.perf_counter()
    trainer.step()
    return time.perf_counter() - begin


def take_up(trainer: Trainer, folder: RunFolder, prepared: Prepared) -> None:
    """Go back to the last checkpoint, or to the start where there is none yet, and forget what came after it."""
    processes = trainer.processes
    if processes.first(lambda: folder.pointed("last")) is None:
        begin_with(trainer, prepared)
    else:
        restore_last(trainer, folder)
        if trainer.data_digest != data_digest(prepared):
            raise UserError(
                f"the prepared data in {prepared.folder} are not those that run {folder.path} was trained on: "
                "start another run with --training.out"
            )
    processes.first(lambda: forget_after(trainer, folder))
    print(f"going on with {folder.path} after step {trainer.next_step}")


def forget_after(trainer: Trainer, folder: RunFolder) -> None:
    """Remove what was written after the trainer's step: it will be written again."""
    step = trainer.next_step
    Metrics(folder.metrics).rewind(step)
    rewind_samples(folder.samples, step)
    folder.discard_after(step)
    folder.settle(trainer.best_step, trainer.config.training.keep)


def restore_last(trainer: Trainer, folder: RunFolder) -> None:
    """Take up the last checkpoint; where it is damaged, say how to go on from an earlier one."""
    try:
        trainer.restore(folder.checkpoint("last"))
    except UserError as error:
        others = ", ".join(f"step-{step:06d}" for step in folder.steps() if step != folder.pointed("last"))
        way_out = f"write the name of an earlier one ({others}) into {folder.checkpoints / 'last'}" if others else ""
        raise UserError(f"{error}; {way_out or 'there is no earlier one: start again with --overwrite'}") from error


def data_digest(prepared: Prepared) -> str:
    """Return what identifies the training tokens; their file names the tokenizer too."""
    return str(prepared.manifest["files"]["train.tokens"])


class Unheard:
    """Stands for the tracker in a process that writes nothing."""

    def log(self, row: dict[str, Any]) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""


class Run:
    """One run under way."""

    def __init__(self, trainer: Trainer, folder: RunFolder, prepared: Prepared) -> None:
        self.trainer, self.folder, self.prepared = trainer, folder, prepared
        self.processes = trainer.processes
        self.config, self.settings = trainer.config, trainer.config.training
        self.trainer.data_digest = data_digest(prepared)
        self.hardware: Hardware = trainer.hardware
        context = self.config.model.context
        self.some_windows = evaluation_windows(prepared.validation.ids, context, self.settings.eval_windows)
        self.final_windows = evaluation_windows(prepared.validation.ids, context, self.settings.final_windows)
        self.token_bytes = prepared.tokenizer.token_bytes()
        self.meter = Meter()
        self.final: Evaluation | None = None

    def go(self) -> Evaluation:
        """Take all steps that are left, then say how the run ended."""
        self.introduce()
        tracker = self.tracker()
        self.progress = Progress(self.trainer.next_step, self.settings.steps, self.peak_rate())
        self.clock = time.perf_counter()
        try:
            with stop_requested(again=self.processes.count == 1) as stop:
                while self.trainer.next_step < self.settings.steps:
                    self.take_step(tracker)
                    if self.processes.any(stop.is_set()):
                        self.leave()
        finally:
            self.progress.close()
            tracker.close()
        return self.conclude()

    def tracker(self) -> Tracker | Unheard:
        """Open the records in the first process; the others wait, for one far away may take its time to answer."""
        opened: list[Tracker] = []
        self.processes.first(lambda: opened.append(Tracker(self.folder.path, self.config)))
        return opened[0] if opened else Unheard()

    def introduce(self) -> None:
        """Say what is trained, on what and where."""
        total, positional, trunk = self.trainer.model.count_parameters()
        print(
            f"model     {total:,} parameters ({trunk:,} in the trunk, {positional:,} positional), "
            f"position {self.config.model.position.kind}\n"
            f"data      {self.prepared.name}: {len(self.prepared.train.ids):,} training tokens, "
            f"vocabulary {self.config.model.vocab_size}\n"
            f"training  {self.settings.steps} steps of {self.tokens_a_step:,} tokens on {self.hardware}{self.processes}"
            f"{', compiled: the first step takes about a minute' * (self.settings.compile == 'on')}",
            flush=True,
        )
        warmup = warmup_length(self.config.optimizer, self.settings.steps)
        if warmup < self.config.optimizer.warmup_steps:
            print(f"warm-up shortened from {self.config.optimizer.warmup_steps} to {warmup} steps: half of the run")

    @property
    def tokens_a_step(self) -> int:
        """Target tokens that one step learns from."""
        return self.settings.batch_size * self.config.model.context

    def peak_rate(self) -> float:
        """Return how many tokens a second there would be at the machine's measured peak."""
        peak = measured_peak(self.hardware.device, self.hardware.precision)
        return self.processes.count * peak / training_flops(self.config.model)

    def take_step(self, tracker: Tracker | Unheard) -> None:
        """Take one step, and do what is due after it; a checkpoint comes last, so it knows of all the rest."""
        self.trainer.advance()
        settings = self.settings
        wanted = (settings.log_every, settings.eval_every, settings.checkpoint_every, settings.sample_every or math.inf)
        # Reading what a step did makes a GPU wait for it; on a CPU it is done by now.
        if self.hardware.device.type == "cpu" or any(map(self.due, wanted)):
            self.note(tracker)

    def note(self, tracker: Tracker | Unheard) -> None:
        """Read what the last steps did, write it down, and do what is due now."""
        *before, last = self.trainer.results()
        rate = self.passed(len(before) + 1)
        for result in before:
            if result.skipped:
                self.log(tracker, result.step + 1, self.training_row(result, rate))
        done = self.trainer.next_step
        self.progress.step(done, last.loss, rate)
        row = self.training_row(last, rate) if self.due(self.settings.log_every) or last.skipped else {}
        is_best = False
        if self.due(self.settings.eval_every):
            row |= (scores := self.evaluation_row())
            is_best = scores["validation_loss"] < self.trainer.best_loss
            if is_best:
                self.trainer.best_loss, self.trainer.best_step = scores["validation_loss"], done
        if self.settings.sample_every and done % self.settings.sample_every == 0:
            self.sample()
        if row:
            self.log(tracker, done, row)
        if is_best or self.due(self.settings.checkpoint_every):
            self.save(is_best)
        self.clock = time.perf_counter()

    def passed(self, steps: int) -> float:
        """Add the time since the clock was set to that of training; return the smoothed tokens a second."""
        seconds = time.perf_counter() - self.clock
        self.trainer.seconds += seconds
        return self.meter.update(steps * self.tokens_a_step, seconds)

    def log(self, tracker: Tracker | Unheard, done: int, row: dict[str, Any]) -> None:
        """Write down what is known after `done` steps."""
        tracker.log({"step": done, "tokens": done * self.tokens_a_step, **row, "seconds": self.trainer.seconds})

    def due(self, every: float) -> bool:
        """Say whether something that happens every so many steps, and after the last one, happens now."""
        return self.trainer.next_step % every == 0 or self.trainer.next_step == self.settings.steps

    def training_row(self, result: StepResult, rate: float) -> dict[str, Any]:
        """Return what one step says of itself."""
        return {
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "skipped_steps": self.trainer.skipped,
            "tokens_per_second": rate,
        }

    def evaluation_row(self) -> dict[str, Any]:
        """Score the fixed validation windows; after the last step those of the final figures too."""
        some = self.evaluate(self.some_windows)
        self.progress.say(
            f"step {self.trainer.next_step}: validation loss {some.loss:.4f}, {some.bits_per_byte:.4f} bits per byte"
        )
        row = {"validation_loss": some.loss, "validation_bits_per_byte": some.bits_per_byte}
        if self.trainer.next_step == self.settings.steps:
            self.final = final = self.evaluate(self.final_windows)
            row |= {"final_loss": final.loss, "final_bits_per_byte": final.bits_per_byte}
        return row

    def evaluate(self, windows: Any) -> Evaluation:
        """Score windows of the validation split."""
        return evaluate(self.trainer.model, windows, self.token_bytes, self.hardware, processes=self.processes)

    def sample(self) -> None:
        """Print a short sample, and keep it in the run folder."""
        model = self.trainer.whole_model()
        self.processes.first(lambda: self._sample_from(model))

    def _sample_from(self, model: Transformer) -> None:
        text = sample_text(model, self.prepared.tokenizer, self.settings, self.trainer.next_step)
        record_sample(self.folder.samples, self.trainer.next_step, text)
        self.progress.say(f"--- sample at step {self.trainer.next_step}\n{text}\n---")

    def save(self, is_best: bool) -> None:
        """Write a checkpoint, then let `last` (and `best`) stand for it, then remove old ones."""
        model, state = self.trainer.whole_model(), self.trainer.state()
        self.processes.first(lambda: self._write(model, state, is_best))

    def _write(self, model: Transformer, state: dict[str, Any], is_best: bool) -> None:
        step = self.trainer.next_step
        extra = {STATE: lambda path: path.write_bytes(packed(state))}
        tokenizer = self.prepared.tokenizer.model_bytes
        save_model(self.folder.step_folder(step), model, to_yaml(self.config), tokenizer, extra)
        self.folder.point("last", step)
        if is_best:
            self.folder.point("best", step)
        self.folder.rotate(self.settings.keep)

    def leave(self) -> None:
        """Save what was reached and stop."""
        if self.trainer.unread:
            self.trainer.results()
        if self.processes.first(lambda: self.folder.pointed("last")) != self.trainer.next_step:
            self.save(is_best=False)
        raise Interrupted(
            f"stopped after step {self.trainer.next_step} of {self.settings.steps}, saved in {self.folder.path}; "
            "the same command with --resume goes on"
        )

    def conclude(self) -> Evaluation:
        """Say how well the model predicts, where things lie, and what to try next."""
        final = self.final or self.evaluate(self.final_windows)
        folder = self.folder.path
        print(
            f"\nvalidation loss {final.loss:.4f}   perplexity {final.perplexity:.2f}   "
            f"bits per byte {final.bits_per_byte:.4f}   ({final.tokens:,} tokens of the validation split)\n"
            f"{self.settings.steps} steps in {clock(self.trainer.seconds)} minutes of training\n\n"
            f"{folder}/checkpoints  weights    {folder}/metrics.jsonl  figures    {folder}/samples.txt  samples\n\n"
            f"try next\n"
            f'  python generate.py {folder} --prompt "class "\n'
            f"  python generate.py {folder} --interactive\n"
            f"  python train.py configs/demo.yaml --model.position learned --training.out runs/learned",
            flush=True,
        )
        return final


@contextmanager
def stop_requested(again: bool = True) -> Iterator[threading.Event]:
    """Turn Ctrl-C and SIGTERM into a flag that is read between steps; a second Ctrl-C stops at once, if `again`.

    torchrun passes on what the terminal has sent to all already: there, a second signal says no more than the first.
    Where one process is lost it also ends the others within a tenth of a second. One that fails is ending by itself,
    and does not let itself be killed before it has said why.
    """
    flag = threading.Event()

    def request(number: int, frame: FrameType | None) -> None:
        if flag.is_set():
            if again:
                raise KeyboardInterrupt
            return
        flag.set()
        more = "; again to stop at once, without saving" if again else ""
        print(f"\nstopping after this step{more}", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():
        yield flag  # only the main thread may set handlers
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    except Exception:
        if not again:
            flag.set()
            before.clear()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
