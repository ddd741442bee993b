"""What a person sees while a run goes on: a bar on a terminal, a plain line every few seconds elsewhere."""

import sys
import time

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


def clock(seconds: float) -> str:
    """Return minutes and seconds, 3:07."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """Steps done of all, with loss, tokens a second, their share of the peak and time left, on stderr.

    `peak_rate` is how many tokens a second there would be if every matrix product ran at the machine's measured peak;
    None: no share is shown.
    """

    def __init__(self, done: int, total: int, peak_rate: float | None = None) -> None:
        self.total, self.peak_rate = total, peak_rate
        self.first, self.started, self.last_line = done, time.monotonic(), 0.0
        self.is_terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=total, initial=done, desc="train", unit="step", bar_format=BAR, disable=not self.is_terminal
        )

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """Say that `done` steps are done."""
        if self.is_terminal:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {self.speed(tokens_per_second)}", refresh=False)
            self.bar.update(done - self.bar.n)
        elif done == self.total or time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            left = (self.last_line - self.started) / (done - self.first) * (self.total - done)
            line = f"step {done}/{self.total}  loss {loss:.3f}  {self.speed(tokens_per_second)}  {clock(left)} left"
            print(line, file=sys.stderr, flush=True)

    def speed(self, tokens_per_second: float) -> str:
        """Return the speed in words: 7,300 tokens/s, 71 % of peak."""
        share = f", {tokens_per_second / self.peak_rate:.0%} of peak".replace("%", " %") if self.peak_rate else ""
        return f"{tokens_per_second:,.0f} tokens/s{share}"

    def say(self, text: str) -> None:
        """Print a line on stdout without tearing the bar."""
        with tqdm.external_write_mode():
            print(text, flush=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        self.bar.close()


class Meter:
    """Tokens a second over the last steps; clocks only, so it may differ from run to run."""

    def __init__(self) -> None:
        self.rate = 0.0

    def update(self, tokens: int, seconds: float) -> float:
        """Take in one step and return the smoothed rate."""
        now = tokens / max(seconds, 1e-9)
        self.rate = now if self.rate == 0 else 0.9 * self.rate + 0.1 * now
        return self.rate
