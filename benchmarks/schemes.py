"""What each positional scheme costs: training tokens a second, all schemes in one run, in turn.

python -m benchmarks.schemes --context 1024 --rounds 7
"""

import argparse
import statistics
import time

import torch

from model.config import ModelConfig
from model.position import SCHEMES
from model.transformer import Transformer, token_losses
from training.hardware import use_faster_float32


def build(kind: str, context: int) -> Transformer:
    """Build a model of the demo's shape with this scheme."""
    return Transformer(ModelConfig(n_layers=4, n_heads=4, d_model=128, vocab_size=1024, context=context, position=kind))


def seconds_of_a_step(model: Transformer, windows: torch.Tensor) -> float:
    """Time one forward and backward pass."""
    begin = time.perf_counter()
    token_losses(model(windows[:, :-1]), windows[:, 1:]).mean().backward()
    model.zero_grad()
    return time.perf_counter() - begin


def main() -> None:
    """Measure, in rounds over all schemes, and print medians and ratios to rope as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a step")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    use_faster_float32()
    windows = torch.randint(1024, (max(1, options.tokens // options.context), options.context + 1))
    models = {kind: build(kind, options.context) for kind in SCHEMES}
    seconds: dict[str, list[float]] = {kind: [] for kind in models}
    for _ in range(options.rounds + 1):  # the first round warms up
        for kind, model in models.items():
            seconds[kind].append(seconds_of_a_step(model, windows))
    medians = {kind: statistics.median(values[1:]) for kind, values in seconds.items()}
    print(f"context {options.context}, {windows[:, 1:].numel()} tokens a step, {torch.get_num_threads()} threads\n")
    print("| scheme | tokens/s | of rope |\n|---|---|---|")
    for kind, median in medians.items():
        print(f"| `{kind}` | {windows[:, 1:].numel() / median:,.0f} | {medians['rope'] / median:.2f} |")


if __name__ == "__main__":
    main()
