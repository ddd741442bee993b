"""How fast training, decoding and tokenising are here, and what share of this machine that is.

python -m benchmarks                      everything: minutes
python -m benchmarks training --compile off on
python -m benchmarks --baseline HEAD~3    the same beside another revision, in turn
"""

import argparse
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import FrameType

from benchmarks.decoding_speed import decoding
from benchmarks.limits import limits
from benchmarks.plan import Plan
from benchmarks.processes import revision
from benchmarks.report import Table
from benchmarks.tokenising_speed import tokenising
from benchmarks.training_speed import training
from benchmarks.workloads import FOR_A_LAPTOP, ROOT, WORKLOADS, tiny
from model.durable import write_text
from model.errors import UserError
from training.command_line import exit_on_user_error
from training.machine import machine

TOPICS: dict[str, Callable[[Plan], list[Table]]] = {
    "limits": limits,
    "training": training,
    "decoding": decoding,
    "tokenising": tokenising,
}
DECODERS = ("model", "eager", "compiled", "native")
RESULTS = ROOT / "docs/results/speed.md"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("topics", nargs="*", metavar="TOPIC", help=f"{', '.join(TOPICS)}; none: all")
    add("--model", nargs="+", choices=WORKLOADS, default=FOR_A_LAPTOP, help="default: 12m demo")
    add("--precision", nargs="+", choices=("fp32", "bf16", "fp16"), default=[None], help="default: what train.py takes")
    add("--compile", nargs="+", choices=("off", "on", "auto"), default=[None], help="default: what train.py does")
    add("--decoders", nargs="+", choices=("auto", *DECODERS), default=DECODERS, help="default: all but auto")
    add("--rounds", type=int, default=5, help="rounds over all that is compared, after one that warms up")
    add("--seconds", type=float, default=1.0, help="least time of one measurement")
    add("--baseline", metavar="REV", help="measure another revision of this repository beside this one")
    add("--quick", action="store_true", help="a tiny model and one short round: does it run at all?")
    add("--write", action="store_true", help=f"also write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    if unknown := [topic for topic in options.topics if topic not in TOPICS]:
        raise UserError(f"topic {unknown[0]!r} is not one of {', '.join(TOPICS)}")
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds} leaves nothing to measure: give 1 or more")
    if options.write and (options.quick or options.topics):
        raise UserError("--write keeps whole measurements only: leave out --quick and the topics")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan that the options ask for."""
    plan = Plan(
        {name: WORKLOADS[name]() for name in options.model},
        options.rounds,
        options.seconds,
        precisions=options.precision,
        compile=options.compile,
        decoders=options.decoders,
        baseline=options.baseline,
    )
    return smoke_run(plan) if options.quick else plan


def smoke_run(plan: Plan) -> Plan:
    """Return the plan for a model so small that nothing takes long, and its figures mean nothing."""
    small = replace(plan, workloads={"tiny": tiny()}, rounds=1, seconds=0.0, prompts=3, new_tokens=4)
    return replace(small, text_bytes=200_000, vocab_size=512, beyond_cache=2**22)


def end_in_order(number: int, frame: FrameType | None) -> None:
    """Leave through all `finally`: the processes that measure end, and another revision's folder goes."""
    sys.exit(128 + number)


@exit_on_user_error()
def main() -> None:
    """Measure, and print a table a topic."""
    options = arguments()
    plan = plan_of(options)
    signal.signal(signal.SIGTERM, end_in_order)
    with nullcontext(ROOT) if plan.baseline is None else revision(plan.baseline) as other:
        if plan.baseline is not None:
            plan.trees[plan.baseline] = other
        parts = ["# Speed", machine(), f"{plan.rounds} rounds, everything in turn; medians, and ratios within a round."]
        print("\n\n".join(parts), flush=True)
        for topic in options.topics or TOPICS:
            tables = [str(table) for table in TOPICS[topic](plan)]
            parts += tables
            print("\n" + "\n\n".join(tables), flush=True)
    if options.write:
        write_text(RESULTS, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
