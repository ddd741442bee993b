"""`python -m model.position`: print the table of schemes, and draw what each does to scores."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from model.errors import UserError


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, print the tables, and draw where a folder is given."""
    options = parser().parse_args(arguments)
    try:
        show(options.context, options.base, options.plot)
    except (UserError, OSError) as error:
        parser().exit(2, f"{error}\n")


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    result = argparse.ArgumentParser(
        prog="python -m model.position",
        description="Print the table of positional schemes: where each enters the network, what it adds, its limit.",
    )
    result.add_argument("--plot", type=Path, metavar="FOLDER", help="also draw each scheme, as PNG files in FOLDER")
    result.add_argument("--context", type=more_than(1, int), default=256, help="training length (default: 256)")
    result.add_argument("--base", type=more_than(1, float), default=10000.0, help="base of RoPE (default: 10000)")
    return result


def more_than(limit: int, kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return a reader of numbers above a limit."""

    def number(text: str) -> float:
        value = kind(text)
        if not limit < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is refused; it must be a number above {limit}")
        return value

    return number


def show(context: int, base: float, folder: Path | None) -> None:
    """Print the tables; draw the pictures if there is a folder for them."""
    # Here and not above: torch takes a second, and --help needs none of it.
    from model.position.overview import base_config, overview

    draw_all = drawing() if folder else None
    config = base_config(context, base)
    print(overview(config))
    if draw_all and folder:
        print(f"\n{len(draw_all(config, folder))} pictures in {folder}")


def drawing() -> Callable[..., list[Path]]:
    """Return the function that draws, or say how to get what it needs."""
    try:
        from model.position.pictures import draw_all
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    return draw_all


if __name__ == "__main__":
    main()
