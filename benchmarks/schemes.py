"""What each positional scheme costs: training tokens a second, all schemes in one run, in turn.

python -m benchmarks.schemes --model 12m --schemes rope nope learned alibi
python -m benchmarks.schemes --context 1024 --rounds 7
"""

import argparse
import statistics

import torch

from benchmarks.measured import Measurement
from benchmarks.measured.training import steps
from benchmarks.workloads import WORKLOADS, Settings, with_training
from model.errors import UserError
from model.position import SCHEMES
from training.command_line import exit_on_user_error
from training.machine import machine


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=WORKLOADS, default="demo")
    add("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), help="default: all; rope must be among them")
    add("--context", type=int, default=256)
    add("--tokens", type=int, default=2048, help="tokens a step")
    add("--rounds", type=int, default=7)
    add("--precision", choices=("fp32", "bf16", "fp16"), help="default: what train.py takes")
    add("--compile", choices=("off", "on", "auto"), help="default: what train.py does")
    options = parser.parse_args()
    if "rope" not in options.schemes:
        raise UserError(f"--schemes {' '.join(options.schemes)}: rope must be among them, for ratios are to it")
    return options


def with_scheme(options: argparse.Namespace, kind: str) -> Settings:
    """Return the workload under this scheme, in windows of the length asked for."""
    workload = WORKLOADS[options.model]()
    workload["model"] = {**workload["model"], "position": kind, "context": options.context}
    rows = max(1, options.tokens // options.context)
    return with_training(workload, batch_size=rows, precision=options.precision, compile=options.compile)


@exit_on_user_error()
def main() -> None:
    """Measure, in rounds over all schemes, and print medians and ratios to rope as a Markdown table."""
    options = arguments()
    runs: dict[str, Measurement] = {kind: steps(with_scheme(options, kind), seconds=0.0) for kind in options.schemes}
    rates: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(options.rounds + 1):  # the first round warms up
        for kind, run in runs.items():
            rates[kind].append(run.rate())
    ratios = {kind: [a / b for a, b in zip(rates[kind], rates["rope"], strict=True)][1:] for kind in runs}
    told = ", ".join(f"{name} {runs['rope'].notes[name]}" for name in ("precision", "compile"))
    tokens = max(1, options.tokens // options.context) * options.context
    print(f"{machine()}\n")
    print(
        f"{options.model}, context {options.context}, {tokens} tokens a step, {told}, {torch.get_num_threads()} threads"
    )
    print("\n| scheme | tokens/s | of rope |\n|---|--:|--:|")
    for kind in runs:
        print(f"| `{kind}` | {statistics.median(rates[kind][1:]):,.0f} | {statistics.median(ratios[kind]):.2f} |")


if __name__ == "__main__":
    main()
