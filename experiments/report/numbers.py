"""Numbers as a reader wants them: about four significant digits, true minus signs, never an empty word."""

import json
import math
from typing import Any

NOTHING = "–"
DIGITS = 4


def number(value: float | None) -> str:
    """Write a number with four significant digits: 3.142, 0.01235, 3,686,000, 1.235e-07."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 1e12 or 0 < size < 1e-5:
        return _minus(f"{value:.3e}")
    return _minus(f"{_rounded(value):,.{_decimals(size)}f}")


def whole(value: int) -> str:
    """Write a count in full, with commas."""
    return _minus(f"{value:,}")


def change(value: float | None, scale: float | None = None) -> str:
    """Write a difference with its sign, to the precision of `scale`, the largest number beside it."""
    if value is None:
        return NOTHING
    size = abs(value) if scale is None else scale
    if size >= 1e12 or 0 < size < 1e-5:
        return _minus(f"{value:+.2e}")
    text = f"{value:+,.{_decimals(size)}f}"
    return _minus(text if float(text.replace(",", "")) else text[1:])


def bounds(low: float | None, high: float | None) -> str:
    """Write an interval, [low, high], both to the precision of the larger."""
    if low is None or high is None:
        return NOTHING
    scale = max(abs(low), abs(high))
    return f"[{change(low, scale)}, {change(high, scale)}]"


def give_or_take(value: float | None, half: float | None) -> str:
    """Write a mean with the half width of its interval, both to the second digit of that: 0.291 ± 0.065."""
    if value is None or not half or not 1e-9 < half < 1e9:
        return number(value)
    decimals = max(0, 1 - math.floor(math.log10(half)))
    return _minus(f"{value:.{decimals}f} ± {half:.{decimals}f}")


def chance_of(p: float | None) -> str:
    """Write a p value with three decimals, and with more where these would not tell it from .05."""
    if p is None:
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.5f}" if 0.0495 <= p < 0.0505 else f"{p:.3f}"


def perplexity(loss: float | None) -> str:
    """Write e to the loss."""
    if loss is None:
        return NOTHING
    return number(math.exp(loss)) if loss < 700 else "over 1e300"


def setting(value: Any) -> str:
    """Write the value of a setting as a person types it: words without quotes, the rest as in JSON."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return f"({settings(value)})"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def settings(values: dict[str, Any]) -> str:
    """Write settings as `name: value`, separated by commas."""
    return ", ".join(f"{name}: {setting(value)}" for name, value in values.items()) or NOTHING


def _decimals(size: float) -> int:
    if size == 0:
        return DIGITS - 1
    return max(0, DIGITS - 1 - math.floor(math.log10(size)))


def _rounded(value: float) -> float:
    """Round large numbers to four significant digits too: they have no decimals to lose."""
    return float(f"{value:.{DIGITS - 1}e}")


def _minus(text: str) -> str:
    return text.replace("-", "−", 1) if text.startswith("-") else text
