"""From the arguments of compare.py to a finished experiment: alone, as one of several shards, or by starting some."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.campaign import Campaign, Shard, shard_from
from experiments.collect import collected
from experiments.config import ExperimentFile
from experiments.estimate import told
from experiments.plan import Run
from experiments.store import Store
from experiments.tuning import untuned
from model.errors import UserError
from training.config import load
from training.loop import Interrupted, stop_requested

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "docs/results/rows"
LOOK = 2.0  # seconds between looks at what the processes have done
WORKER = "ROPELAB_WORKER"  # set where another compare.py has started this one


def conduct(file: ExperimentFile, arguments: Any, out: Path) -> None:
    """Do what the arguments ask for."""
    if WORKER in os.environ:
        end_with_parent()
    campaign = Campaign(file, Store(Path(arguments.store), (COMMITTED,)), out)
    if arguments.dry_run:
        for line in told(campaign):
            print(line, flush=True)
        return
    if (said := campaign.other_data()) and WORKER not in os.environ:
        print(said, flush=True)
    shards = environments(arguments)
    if shards:
        start_shards(campaign, arguments, shards)
    else:
        campaign.go(shard_from(arguments.shard) if arguments.shard else Shard())
    if arguments.report:
        report(campaign, arguments)


def report(campaign: Campaign, arguments: Any) -> None:
    """Write the report of what is finished, and say where it lies."""
    from experiments.report import write_report

    command = f"python compare.py {campaign.file.path}"
    results = collected(campaign, command)
    write_report(results, campaign.out)
    if arguments.wandb != "off":
        from experiments.send import send

        send(results, load(campaign.file.base), arguments.wandb, campaign.out / "figures")
    missing = f", without {len(results.missing)} runs that are not finished" if results.missing else ""
    print(f"report    {campaign.out / 'report.html'}{missing}")


# --- Several processes on this computer ---


def environments(arguments: Any) -> list[dict[str, str]]:
    """Return what each process is told of the hardware that is its own; none where one process does it all."""
    if arguments.gpus is not None:
        numbers = [number.strip() for number in arguments.gpus.split(",")]
        if not all(number.isdecimal() for number in numbers):
            raise UserError(f"--gpus {arguments.gpus}: it must be numbers with commas between, such as 0,1")
        return [{"CUDA_VISIBLE_DEVICES": number} for number in numbers]
    if arguments.workers > 1:
        threads = max(1, (os.cpu_count() or 1) // arguments.workers)
        return [{"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}] * arguments.workers
    return []


def start_shards(campaign: Campaign, arguments: Any, shards: list[dict[str, str]]) -> None:
    """Let one process for each do its share, and show how far they are; UserError where one of them failed."""
    campaign.declare()
    processes = [
        _shard(campaign, arguments, Shard(number, len(shards)), environment)
        for number, environment in enumerate(shards, start=1)
    ]
    try:
        with stop_requested(again=False) as stop:
            _watch(campaign, processes, stop)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # it saves the run under way, and ends
        ends = [process.wait() for process in processes]
    if stop.is_set():
        raise Interrupted("stopped; every run under way was saved")
    if any(ends):
        number = next(number for number, end in enumerate(ends, start=1) if end)
        raise UserError(f"shard {number} failed: {last_line(shard_log(campaign, number))}")


def _shard(campaign: Campaign, arguments: Any, shard: Shard, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "compare.py"), str(campaign.file.path), "--store", arguments.store]
    command += ["--out", str(campaign.out), "--shard", f"{shard.number}/{shard.of_all}", "--no-report"]
    with shard_log(campaign, shard.number).open("w", encoding="utf-8") as log:
        # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
        return subprocess.Popen(
            command,
            env=os.environ | environment | {WORKER: str(shard.number)},
            stdin=subprocess.PIPE,  # held open as long as this process lives
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_with_parent() -> None:
    """Stop as at a SIGTERM when stdin ends, which it does when the process that holds its other end is gone."""

    def wait() -> None:
        while os.read(0, 1):  # unbuffered: a thread inside a buffer would hold up the end of the process
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def shard_log(campaign: Campaign, number: int) -> Path:
    """Return the file for what a shard says."""
    return campaign.out / f"shard-{number}.txt"


def last_line(log: Path) -> str:
    """Return how a log ends."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return (lines or ["it said nothing"])[-1].removeprefix("error: ")


def _watch(campaign: Campaign, processes: list[subprocess.Popen[bytes]], stop: threading.Event) -> None:
    """Show how many runs are done, until all processes have ended, one has failed or somebody asks to stop."""
    tuning = untuned(campaign.plan)
    count = len(tuning) + sum(len(campaign.plan.seeds(arm)) for arm in campaign.plan.trained) * len(campaign.plan.tasks)
    with tqdm(total=count, desc="runs", unit="run", initial=done_of(campaign, tuning)) as bar:
        while any(process.poll() is None for process in processes) and not stop.is_set():
            if any(process.poll() for process in processes):
                return
            stop.wait(LOOK)
            more = done_of(campaign, tuning) - bar.n
            if more or sys.stderr.isatty():  # into a file, a line for each run and not one for each look
                bar.update(more)


def done_of(campaign: Campaign, tuning: list[Run]) -> int:
    """Return how many runs are done."""
    return sum(map(campaign.is_done, [*tuning, *(campaign.measured() or [])]))
