"""Two processes: the same gradients, steps and files as one, and what happens when one of them is stopped or dies."""

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.distributed import HashStore, TCPStore

from model.checkpoint import save_model
from model.errors import UserError
from model.transformer import IGNORED
from tests.conftest import ARMS
from tests.test_run import ROOT, assert_same_results, read, results, run
from tests.test_trainer import CPU, Fixed, trainer_on_text
from training import loop
from training.command_line import exit_on_user_error
from training.config import TrainingConfig
from training.distributed import ALONE, Copies, joined, name_of_this_start, packages, threads_of_one
from training.evaluate import evaluate
from training.run_folder import RunFolder
from training.trainer import STATE, Trainer, packed, read_state

# Processes are forked from a server that has imported everything once, and started no threads.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.test_distributed", "training.loop", "torch.distributed.fsdp"])
SECONDS = 240  # only ever waited for in full where something hangs


def child(rank, port, parallel, folder, work, arguments):
    """One of two processes, as torchrun would have started it; what it says and returns is kept in the folder."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")  # fmt: skip
    with (folder / f"{rank}.txt").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.chdir(ROOT)
    with exit_on_user_error(), joined(TrainingConfig(parallel=parallel, compile="off", device="cpu")) as processes:
        torch.set_num_threads(1)
        torch.save(work(processes, *arguments), folder / f"{rank}.pt")


def started(folder, work, *arguments, parallel="ddp"):
    """Start both; like torchrun, this process keeps the store in which they find each other."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = (store.port, parallel, folder, work, arguments)
    both = [SERVER.Process(target=child, args=(rank, *common)) for rank in range(2)]
    for process in both:
        process.start()
        process.store = store  # which lives as long as they do
    return both


def ended(folder, both):
    """Wait for both, and return their exit statuses and what they said."""
    deadline = time.monotonic() + SECONDS
    for process in both:
        process.join(max(0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return [p.exitcode for p in both], [(folder / f"{rank}.txt").read_text() for rank in range(2)]


def two(folder, work, *arguments, parallel="ddp"):
    """Run the work in two processes, and return what each of them got."""
    statuses, said = ended(folder, started(folder, work, *arguments, parallel=parallel))
    assert statuses == [0, 0], said
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def trainer_of(processes, **settings):
    alone = trainer_on_text(**settings)
    return Trainer(alone.config, alone.windows, alone.hardware, processes)


# --- The same figures as one process ----------------------------------------------------------------------------------

# Rows of a step and of a micro-batch; one row leaves a process with none.
PORTIONS = [(8, 8), (8, 3), (7, 2), (1, 1)]
OPTIMIZERS = ["adamw", "muon"]
EVALUATED = [1, 5, 33]


def gradient(processes, rows, micro_rows):
    """The gradient in float64 of rows with very unequal numbers of targets."""
    torch.set_default_dtype(torch.float64)
    try:
        trainer = trainer_of(processes, batch_size=rows, micro_batch_size=micro_rows)
    finally:
        torch.set_default_dtype(torch.float32)
    mine, counted = processes.share(np.arange(rows))
    windows = torch.from_numpy(trainer.windows.batch(0, 8))
    inputs, targets = windows[:, :-1], windows[:, 1:].clone()
    targets[:3, 3:] = IGNORED
    targets = targets[mine]
    targets[counted:] = IGNORED
    loss = trainer.accumulate(inputs[mine], targets)
    whole = {name: processes.whole(p.grad) for name, p in trainer.model.named_parameters()}
    norms = processes.gradient_norms(trainer.parameters)
    return loss.item(), whole, norms


def steps(trainer, count):
    return [trainer.step() for _ in range(count)]


def of_kind(processes, kind):
    """Seven rows a step: the processes get unequal shares, in unequal numbers of micro-batches."""
    optimizer = {"method": kind, "lr": 1e-2, "clip_norm": 0.5}
    return trainer_of(processes, optimizer=optimizer, batch_size=7, micro_batch_size=2)


def save(processes, trainer, folder):
    model, state = trainer.whole_model(), trainer.state()
    if processes.is_first:
        extra = {STATE: lambda path: path.write_bytes(packed(state))}
        save_model(folder, model, yaml.safe_dump({"model": {}}), b"tokenizer", extra)


def scores(processes):
    """Validation losses of a model, evaluated before its first step and trained on, and of a known function."""
    trainer = trainer_of(processes)
    windows = trainer.windows.batch(0, max(EVALUATED))
    known = windows[:, :2].copy()
    known[:, 0], known[:, 1] = np.arange(1, len(known) + 1), 1
    of_model = [evaluate(trainer.model, windows[:n], np.ones(260), CPU, 4, processes) for n in EVALUATED]
    of_known = [evaluate(Fixed(), known[:n], np.array([1, 4]), CPU, 4, processes) for n in EVALUATED]
    return of_model, of_known, trainer.step().loss


def skipping(processes):
    """Steps of which the second has a gradient that is not finite: in the last process alone."""
    trainer = trainer_of(processes, batch_size=6)
    real = trainer.micro_loss
    if processes.rank == processes.count - 1:
        trainer.micro_loss = lambda *rows: real(*rows) * (float("nan") if trainer.next_step == 1 else 1.0)
    return [result.skipped for result in steps(trainer, 3)], trainer.whole_model().state_dict()


def dropping(processes):
    trainer = trainer_of(processes, model={"dropout": 0.5})
    trainer.advance()
    return torch.rand(1).item(), trainer.results()[0].loss


def all_figures(processes, work_folder, alone_folder):
    """Everything that is compared with one process, in one go: starting processes is what costs."""
    found = {"gradients": [gradient(processes, *portion) for portion in PORTIONS], "names": []}
    for kind in OPTIMIZERS:
        trainer = of_kind(processes, kind)
        found["names"] = [name for name, _ in trainer.model.named_parameters()]
        first = steps(trainer, 10)
        save(processes, trainer, work_folder / kind)
        found[kind] = first + steps(trainer, 10)
        resumed = of_kind(processes, kind)
        resumed.restore(alone_folder / kind)
        found[f"{kind} resumed"] = steps(resumed, 10)
    found |= {"scores": scores(processes), "skipping": skipping(processes), "dropping": dropping(processes)}
    found["any"] = [processes.any(processes.rank == 1), processes.any(False)]
    found["first"] = processes.first(lambda: os.getpid())
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process finds, and its checkpoints after ten steps."""
    folder = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    found = {"gradients": [gradient(ALONE, *portion) for portion in PORTIONS], "scores": scores(ALONE)}
    for kind in OPTIMIZERS:
        trainer = of_kind(ALONE, kind)
        first = steps(trainer, 10)
        save(ALONE, trainer, folder / kind)
        found[kind] = first + steps(trainer, 10)
    return {**found, "folder": folder}


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def together(request, alone, tmp_path_factory):
    """What two processes find, and their checkpoints."""
    folder = tmp_path_factory.mktemp(request.param)
    both = two(folder, all_figures, folder, alone["folder"], parallel=request.param)
    return {"both": both, "folder": folder}


@pytest.mark.parametrize("portion", range(len(PORTIONS)), ids=str)
def test_two_processes_and_accumulation_give_the_gradient_of_one_process(together, alone, portion):
    loss, expected, norms = alone["gradients"][portion]
    for found in together["both"]:
        their_loss, theirs, their_norms = found["gradients"][portion]
        assert their_loss == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(their_norms.double(), norms.double(), rtol=1e-6, atol=1e-12)
        for name, whole in expected.items():
            torch.testing.assert_close(theirs[name], whole, rtol=0, atol=1e-12 * whole.abs().max().item() + 1e-15)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_twenty_steps_of_two_processes_are_those_of_one(together, alone, kind):
    for found in together["both"]:
        for what, tolerance in (("loss", 1e-5), ("grad_norm", 1e-3)):
            expected = [getattr(step, what) for step in alone[kind]]
            assert [getattr(step, what) for step in found[kind]] == pytest.approx(expected, rel=tolerance), what
    assert together["both"][0][kind] == together["both"][1][kind]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_processes_go_on_from_the_checkpoint_of_one(together, alone, kind):
    expected = [step.loss for step in alone[kind][10:]]
    assert [step.loss for step in together["both"][0][f"{kind} resumed"]] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_process_goes_on_from_the_checkpoint_of_two(together, alone, kind):
    trainer = of_kind(ALONE, kind)
    trainer.restore(together["folder"] / kind)
    expected = [step.loss for step in alone[kind][10:]]
    assert [step.loss for step in steps(trainer, 10)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_of_two_processes_is_laid_out_as_that_of_one(together, alone, kind):
    ours, theirs = (
        read_state(folder / kind / STATE, torch.device("cpu")) for folder in (alone["folder"], together["folder"])
    )
    assert theirs.keys() == ours.keys()
    assert theirs["optimizer"]["param_groups"] == ours["optimizer"]["param_groups"]
    assert theirs["optimizer"]["state"].keys() == ours["optimizer"]["state"].keys()
    for number, values in ours["optimizer"]["state"].items():
        assert theirs["optimizer"]["state"][number].keys() == values.keys()
        for name, value in values.items():
            tolerance = 1e-3 * value.abs().max().item() + 1e-9
            torch.testing.assert_close(theirs["optimizer"]["state"][number][name], value, rtol=0, atol=tolerance)


def test_parameters_keep_their_names(together):
    assert together["both"][0]["names"] == [name for name, _ in trainer_on_text().model.named_parameters()]


def test_an_evaluation_counts_every_target_once_whoever_reads_it(together, alone):
    expected_model, expected_known, loss = alone["scores"]
    for count, known in zip(EVALUATED, expected_known, strict=True):
        assert known.loss == pytest.approx(sum(range(1, count + 1)) / count / 10, rel=1e-12)
    for found in together["both"]:
        of_model, of_known, loss_after = found["scores"]
        for one, other in zip(of_model + of_known, expected_model + expected_known, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-6)
            assert one[1:] == other[1:]
        assert loss_after == pytest.approx(loss, rel=1e-6)


def test_a_gradient_that_is_not_finite_in_one_process_skips_the_step_in_both(together):
    (skipped, weights), (others_skipped, others_weights) = (found["skipping"] for found in together["both"])
    assert skipped == others_skipped == [False, True, False]
    assert all(torch.equal(weights[name], others_weights[name]) for name in weights)
    assert all(weight.isfinite().all() for weight in weights.values())


def test_processes_draw_dropout_of_their_own_and_agree_on_the_loss(together):
    (drawn, loss), (others_drawn, others_loss) = (found["dropping"] for found in together["both"])
    assert drawn != others_drawn
    assert loss == others_loss


def test_what_one_process_knows_all_learn(together):
    first, second = together["both"]
    assert first["any"] == second["any"] == [True, False]
    assert first["first"] == second["first"]


# --- Shares -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 16])
def test_shares_are_equally_long_and_their_counted_rows_are_all_rows_once(rows, count):
    numbers = np.arange(100, 100 + rows)
    shares = [(Copies(None, rank, count) if count > 1 else ALONE).share(numbers) for rank in range(count)]
    assert len({len(mine) for mine, _ in shares}) == 1
    assert np.array_equal(np.concatenate([mine[:counted] for mine, counted in shares]), numbers)
    assert all(set(mine[counted:]) <= {100} for mine, counted in shares)


def test_packages_hold_every_tensor_once_in_order(monkeypatch):
    monkeypatch.setattr("training.distributed.PACKAGE", 10)
    tensors = [torch.zeros(size) for size in (3, 8, 25, 1, 1)]
    assert [[len(t) for t in some] for some in packages(tensors)] == [[3, 8], [25], [1, 1]]


@pytest.mark.parametrize(("asked", "here", "expected"), [("1", 2, 4), ("3", 2, 3), (None, 4, 2), (None, 16, 1)])
def test_processes_share_the_cores_unless_told_otherwise(asked, here, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads_of_one(here) == expected


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # some clusters set it for themselves
    monkeypatch.delenv("RANK", raising=False)
    with joined(TrainingConfig()) as processes:
        assert processes is ALONE


def named(store, rank, names):
    names[rank] = name_of_this_start(store, rank, 3, timedelta(seconds=20))


def test_processes_that_are_started_again_agree_on_another_name_whatever_the_store_still_holds():
    store, found = HashStore(), []
    for order in itertools.permutations(range(3)):
        names = {}
        threads = [threading.Thread(target=named, args=(store, rank, names)) for rank in order]
        for thread in threads:
            thread.start()
            time.sleep(0.03)
        for thread in threads:
            thread.join()
        assert len(set(names.values())) == 1
        found.append(names[0])
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_never_comes_is_not_waited_for_for_ever(rank):
    with pytest.raises(UserError, match=r"not all 2 processes of this run have come within 0\.05 seconds"):
        name_of_this_start(HashStore(), rank, 2, timedelta(seconds=0.05))


# --- Errors and ends --------------------------------------------------------------------------------------------------


def refusing(processes, ranks):
    print("never shown by the second")
    if processes.rank in ranks:
        raise UserError("this is refused")
    processes.any(False)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_mistake_is_one_line_whoever_finds_it(tmp_path, ranks):
    statuses, said = ended(tmp_path, started(tmp_path, refusing, ranks))
    assert said[0].startswith("never shown")
    assert "never shown" not in said[1]
    assert "".join(said).count("error: this is refused") == 1
    assert "Traceback" not in "".join(said)
    assert statuses[ranks[-1]] == 2
    assert 0 not in statuses


def failing(processes):
    if processes.rank == 1:
        raise ZeroDivisionError("a fault of ours")
    processes.sum(torch.ones(3))


def test_a_fault_of_one_process_is_told_once_and_ends_both(tmp_path):
    statuses, said = ended(tmp_path, started(tmp_path, failing))
    assert statuses == [1, 1]
    assert "ZeroDivisionError: a fault of ours" in said[1]
    assert said[0] == ""


def failing_first(processes):
    def action():
        raise UserError("no room")

    processes.first(action)


def test_what_the_first_process_fails_to_do_alone_ends_both(tmp_path):
    statuses, said = ended(tmp_path, started(tmp_path, failing_first))
    assert statuses == [2, 2]
    assert said == ["error: no room\n", ""]


def fire(processes):
    trainer_of(processes, position="fire")


@pytest.mark.skipif("fire" not in ARMS, reason="no scheme with single numbers")
def test_a_scheme_that_cannot_be_sharded_is_refused_in_one_line(tmp_path):
    statuses, said = ended(tmp_path, started(tmp_path, fire, parallel="fsdp"))
    assert statuses == [2, 2]
    assert re.fullmatch(r"error: training.parallel fsdp cannot divide .*: use --training.parallel ddp\n", "".join(said))


def waiting(processes, folder):
    (folder / "ready").touch()
    while True:
        processes.sum(torch.ones(3))


def test_a_killed_process_ends_the_other_with_one_line(tmp_path):
    both = started(tmp_path, waiting, tmp_path)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    both[1].kill()
    statuses, said = ended(tmp_path, both)
    assert statuses[0] == 2
    assert re.fullmatch(r"error: another process of this run has ended, .* again with --resume\n", said[0])


def acting(processes, folder, slow):
    """The slow one is held up where the other waits for it: before the first acts, or while it does."""

    def hold_up():
        (folder / "ready").touch()
        time.sleep(SECONDS)

    if processes.rank == slow == 1:
        hold_up()
    processes.first(hold_up if slow == 0 else lambda: None)


@pytest.mark.parametrize("slow", [0, 1])
def test_where_one_acts_and_the_other_waits_a_killed_process_ends_the_other_with_one_line(tmp_path, slow):
    both = started(tmp_path, acting, tmp_path, slow)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    time.sleep(0.5)  # the other is waiting by now
    both[slow].kill()
    killed_at = time.monotonic()
    statuses, said = ended(tmp_path, both)
    assert time.monotonic() - killed_at < 30  # when torchrun's own patience ends
    assert statuses[1 - slow] == 2
    assert re.fullmatch(r"error: another process of this run has ended, .* again with --resume\n", said[1 - slow])


# --- Whole runs -------------------------------------------------------------------------------------------------------


def whole_run(processes, folder, settings):
    from training.config import load
    from training.loop import Interrupted, train

    try:
        train(load(None, settings), RunFolder(folder), resume=True, processes=processes)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(130)


def without_dropout(settings, **training):
    settings["model"]["dropout"] = 0.0
    settings["training"].update(training)
    return settings


def wait_for_step(folder, step, process):
    def is_there():
        return (folder / "metrics.jsonl").exists() and f'"step": {step},' in (folder / "metrics.jsonl").read_text()

    while not is_there():
        assert process.is_alive() if hasattr(process, "is_alive") else process.poll() is None
        time.sleep(0.02)


def assert_learned_the_same(folder, other):
    ours, theirs = (results(each) for each in (folder, other))
    for name, weight in ours[0].items():
        torch.testing.assert_close(theirs[0][name], weight, rtol=0, atol=2e-4)
    for row, their_row in zip(ours[2], theirs[2], strict=True):
        assert row == pytest.approx(their_row, rel=1e-3)
    assert ours[4:] == theirs[4:]


@pytest.mark.parametrize(("parallel", "number"), [("ddp", signal.SIGTERM), ("fsdp", signal.SIGINT)])
def test_a_signal_to_one_process_stops_both_after_one_step_and_one_process_finishes(
    tmp_path, settings, parallel, number
):
    settings = without_dropout(settings, steps=4000, parallel=parallel, max_minutes=None, checkpoint_every=100_000)
    both = started(tmp_path, whole_run, tmp_path / "r", settings, parallel=parallel)
    wait_for_step(tmp_path / "r", 4, both[0])
    for _ in range(2):  # torchrun passes on what the terminal sends too
        os.kill(both[1].pid, number)
    statuses, said = ended(tmp_path, both)
    assert statuses == [130, 130]
    assert said[1] == ""
    assert said[0].count("the same command with --resume goes on") == 1
    reached = RunFolder(tmp_path / "r").pointed("last")
    assert 4 <= reached < 4000
    last = RunFolder(tmp_path / "r").checkpoint("last")
    assert read_state(last / STATE, torch.device("cpu"))["next_step"] == reached
    assert [row["step"] for row in read(tmp_path / "r" / "metrics.jsonl")] == list(range(2, reached + 1, 2))
    # One process takes two more steps; from the start it would have come to the same place.
    end = reached + 2
    run(tmp_path / "r", settings, resume=True, steps=end)
    assert RunFolder(tmp_path / "r").pointed("last") == end


@contextlib.contextmanager
def watched_steps(at=None, happens=None):
    """Collect the steps that this process takes; let something happen before one of them."""
    taken, real = [], Trainer.advance

    def advance(self):
        if self.next_step == at:
            happens()
        taken.append(self.next_step)
        real(self)

    Trainer.advance = advance
    try:
        yield taken
    finally:
        Trainer.advance = real


def limited_run(processes, folder, settings):
    """A run under a ceiling on time, whose second process takes its steps to be faster; then a longer one."""
    real = loop._seconds_of_a_step
    loop._seconds_of_a_step = lambda trainer: real(trainer) / 1000**processes.rank
    with watched_steps() as first:
        whole_run(processes, folder, settings)
    settings["training"].update(steps=first[-1] + 4, max_minutes=None)
    with watched_steps() as more:
        whole_run(processes, folder, settings)
    return first[-1] + 1, more


def test_a_ceiling_on_time_ends_both_after_the_same_step_and_the_run_goes_on_from_there(tmp_path, settings):
    settings = without_dropout(settings, steps=10_000_000, max_minutes=0.01, eval_every=10**6, sample_every=0)
    settings["training"]["checkpoint_every"] = 10**6  # none between the two ends, wherever the first one falls
    both = two(tmp_path, limited_run, tmp_path / "r", settings)
    end = both[0][0]
    assert 1 <= end < 5000
    assert both == [(end, [end, end + 1, end + 2])] * 2
    rows = [row["step"] for row in read(tmp_path / "r" / "metrics.jsonl")]
    assert rows[-1] == end + 3
    assert sorted(set(rows)) == rows
    assert RunFolder(tmp_path / "r").steps()[-2:] == [end, end + 3]


def stopped_run(processes, folder, settings, step):
    """A run whose second process is told to stop."""
    with (
        watched_steps(step, lambda: processes.rank and os.kill(os.getpid(), signal.SIGTERM)),
        pytest.raises(SystemExit),
    ):
        whole_run(processes, folder, settings)


def a_whole_run_and_a_stopped_one(processes, folder, settings):
    whole_run(processes, folder / "whole", settings)
    stopped_run(processes, folder / "stopped", settings, 8)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_two_processes_give_the_same_bits_again_also_after_a_stop(tmp_path, settings, parallel):
    """With dropout: what a process draws in a step depends on the seed, the step and the number of the process."""
    settings["training"].update(steps=12, compile="off", parallel=parallel, sample_every=6)
    two(tmp_path, a_whole_run_and_a_stopped_one, tmp_path, settings, parallel=parallel)
    assert RunFolder(tmp_path / "stopped").pointed("last") == 9
    two(tmp_path, whole_run, tmp_path / "stopped", settings, parallel=parallel)
    assert_same_results(results(tmp_path / "stopped"), results(tmp_path / "whole"))


def slow_to_end(processes, folder, settings):
    """A run that takes its time to close its records, as one does that wandb follows."""
    real = loop.Tracker.close

    def close(self):
        (folder / "closing").touch()
        time.sleep(1)
        real(self)

    loop.Tracker.close = close
    whole_run(processes, folder / "r", settings)


def test_a_process_that_torchrun_ends_because_another_died_still_says_why(tmp_path, settings):
    settings = without_dropout(settings, steps=100_000, max_minutes=None)
    both = started(tmp_path, slow_to_end, tmp_path, settings)
    wait_for_step(tmp_path / "r", 4, both[0])
    both[1].kill()
    while not (tmp_path / "closing").exists():
        time.sleep(0.01)
    os.kill(both[0].pid, signal.SIGTERM)
    statuses, said = ended(tmp_path, both)
    assert statuses == [2, -signal.SIGKILL]
    assert said[0].count("error: another process of this run has ended") == 1
    assert said[0].endswith("again with --resume\n")
    assert "stopping" not in said[0]


def children_of(pid):
    with contextlib.suppress(FileNotFoundError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def rank_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(each[5:]) for each in variables if each.startswith(b"RANK=")), None)


# What torchrun starts here: train.py, but that something happens before each step.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
import train
from training import distributed
from training.trainer import Trainer
distributed.threads_of_one = lambda here: 1
real = Trainer.advance
def advance(self):
    {before}
    real(self)
Trainer.advance = advance
train.main()
"""


def under_torchrun(folder, settings, before, *flags):
    """Start two processes under torchrun, which do what is said before each of their steps."""
    (folder / "c.yaml").write_text(yaml.safe_dump(settings))
    (folder / "script.py").write_text(SCRIPT.format(root=str(ROOT), before=before))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *flags]
    return subprocess.Popen([*command, str(folder / "script.py"), str(folder / "c.yaml"), "--resume",
                             "--training.out", str(folder / "r")], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the processes in /proc")
def test_under_torchrun_a_killed_process_ends_the_job_and_one_process_finishes_the_run(tmp_path, settings):
    settings = without_dropout(settings, compile="off", device="cpu", steps=30)
    process = under_torchrun(tmp_path, settings, "time.sleep(0.2 * (self.next_step > 8))")
    wait_for_step(tmp_path / "r", 10, process)
    victim = next(pid for pid in children_of(process.pid) if rank_of(pid) == 1)
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    out, errors = process.communicate(timeout=SECONDS)
    assert time.monotonic() - killed_at < 60
    assert process.returncode == 1
    assert out.count("validation loss") == 1  # at step 10, by the first process alone
    assert "Signal 9 (SIGKILL)" in errors  # torchrun names it
    # Of the training alone this is strict: before it, torchrun's own signal may be what ends the other process.
    assert errors.count("error: another process of this run has ended") == 1
    torch.set_num_threads(1)
    run(tmp_path / "r", settings, resume=True)
    run(tmp_path / "whole", settings)
    assert_learned_the_same(tmp_path / "r", tmp_path / "whole")


DIE_ONCE = """marker = Path({marker!r})
    if self.next_step == 9 and self.processes.rank == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)"""


@pytest.mark.soak
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_with_restarts_torchrun_takes_a_run_that_lost_a_process_to_the_end_as_if_nothing_had_been(
    tmp_path, settings, parallel
):
    settings["training"].update(steps=16, compile="off", device="cpu", parallel=parallel)
    marker = tmp_path / "died"
    process = under_torchrun(tmp_path, settings, DIE_ONCE.format(marker=str(marker)), "--max-restarts", "1")
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert marker.exists()
    assert out.count("nothing to resume") == 1
    assert out.count(f"going on with {tmp_path / 'r'} after step 7") == 1
    two(tmp_path, whole_run, tmp_path / "whole", settings, parallel=parallel)
    assert_same_results(results(tmp_path / "r"), results(tmp_path / "whole"))
