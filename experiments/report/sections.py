"""The sections of a report that show measurements. Each is empty where nothing of its kind was measured."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from experiments.report.curves import ceiling, chance_line, chart, head_map, heat_map, over_length, over_x
from experiments.report.differences import by_layer, by_length, difference_table, to_control, to_reference
from experiments.report.document import Block, Cell, Items, Section, Table
from experiments.report.numbers import NOTHING, give_or_take, number, perplexity, settings, whole
from experiments.report.values import Values
from experiments.results import ArmFacts
from experiments.statistics import interval, tokens_to

BAND = "Lines are means over seeds, bands their 95 % t intervals."


def arms(values: Values) -> Section:
    """Say what each arm is: declared settings, parameters, how attention was computed, what tuning found."""
    columns = ("arm", "differs from the base in", "parameters", "positional", "non-embedding", "attention", "tuned")
    rows = tuple(_arm_row(arm) for arm in values.results.arms)
    note = f"Differences are against {values.results.reference}. Seeds planned: {_seeds(values)}."
    after = tuple(
        f"{arm.name}: the weights of {arm.trained_as}, changed after training in {settings(arm.after_training)}"
        for arm in values.results.arms
        if arm.trained_as is not None
    )
    return Section("Arms", (Table("", columns, rows, note), *([Items(after)] if after else [])))


def training_length(values: Values) -> Section:
    """Show loss, perplexity and bits per byte at the training length, and tokens to the reference's final loss."""
    measures = ("validation_loss", "test_loss", "test_bits_per_byte", "validation_curve")
    if not any(values.measured(measure) for measure in measures):
        return Section("", ())
    curve = over_x(values, "validation_curve")
    labels = ("tokens seen", "validation loss")
    return Section(
        "At the training length" + (f" ({values.training_length} tokens)" if values.training_length else ""),
        (
            _levels(values),
            *_differences(values, "Test loss", "test_loss"),
            *_differences(values, "Test bits per byte", "test_bits_per_byte", folded=True),
            *chart("curve", "Validation loss against tokens", labels, curve, note=BAND, ceiling=ceiling(curve)),
        ),
    )


def speed(values: Values) -> Section:
    """Show tokens a second apart from quality, beside how attention was computed."""
    blocks = tuple(_speed_table(values, task) for task in ("", *values.tasks()) if _timed(values, task))
    return Section("Speed", blocks)


def _timed(values: Values, task: str) -> bool:
    return any(values.measured(measure, task=task) for measure in ("tokens_per_second", "training_seconds"))


def _speed_table(values: Values, task: str) -> Table:
    measures = ("tokens_per_second", "training_seconds")
    rows = tuple(
        (
            Cell(arm.name),
            Cell(arm.backend, "words"),
            *(Cell(level(values, arm.name, measure, task=task)) for measure in measures),
        )
        for arm in values.results.arms
        if arm.trained_as is None
    )
    note = (
        "Speed is that of the code which computes a scheme's attention on this machine, not of the scheme: compare "
        "only where the attention is the same."
    )
    return Table(f"Task {task}" if task else "", ("arm", "attention", "tokens/s", "training, s"), rows, note)


def lengths(values: Values) -> Section:
    """Show the loss beyond the training length: the same targets, the control, plain windows, by position."""
    blocks = (*_same_targets(values), *_control(values), *_windows(values), *_by_position(values))
    return Section("Beyond the training length", blocks) if blocks else Section("", ())


def tasks(values: Values) -> list[Section]:
    """Show exact match and token accuracy of each task by length, beside chance."""
    return [_task(values, task) for task in values.tasks()]


def inside(values: Values) -> Section:
    """Show what the layers and heads do with positions."""
    blocks = (*_by_layer(values), *_layers_compared(values), *_by_head(values), *_frequencies(values))
    return Section("Inside the model", blocks) if blocks else Section("", ())


def level(values: Values, arm: str, measure: str, write: Callable[[float | None], str] = number, **where: Any) -> str:
    """Write an arm's mean: "undefined" where it has none, with the seeds it stands on where some diverged."""
    if values.undefined(arm, measure, **where):
        return "undefined"
    found = values.by_seed(arm, measure, **where)
    left = sum(value is not None for value in found.values())
    mean = write(values.mean(arm, measure, **where))
    return mean if left in (0, len(found)) else f"{mean} ({left} of {len(found)})"


def _arm_row(arm: ArmFacts) -> tuple[Cell, ...]:
    tuned = settings(arm.settings)
    return (
        Cell(arm.name),
        Cell(settings(arm.declared), "words"),
        Cell(whole(arm.total)),
        Cell(whole(arm.positional)),
        Cell(whole(arm.non_embedding)),
        Cell(arm.backend, "words"),
        Cell(f"{tuned} (at the edge of its grid)", "words warning") if arm.at_edge else Cell(tuned, "words"),
    )


def _seeds(values: Values) -> str:
    planned = {arm.name: ", ".join(map(str, arm.seeds)) for arm in values.results.arms}
    if len(set(planned.values())) == 1:
        return next(iter(planned.values()))
    return "; ".join(f"{arm}: {seeds}" for arm, seeds in planned.items())


def _levels(values: Values) -> Table:
    columns = (
        "arm",
        "test loss",
        "sd over seeds",
        "perplexity",
        "bits per byte",
        "validation loss",
        "tokens to final loss",
    )
    reference = values.results.reference
    rows = tuple(
        (
            Cell(arm.name),
            Cell(level(values, arm.name, "test_loss")),
            Cell(_spread(values, arm.name, "test_loss")),
            Cell(level(values, arm.name, "test_loss", perplexity)),
            Cell(level(values, arm.name, "test_bits_per_byte")),
            Cell(level(values, arm.name, "validation_loss")),
            Cell(_tokens(values, arm)),
        )
        for arm in values.results.arms
    )
    note = (
        "Perplexity is e to the mean loss. Tokens to final loss: at which the validation curve first reaches the final "
        f"validation loss of {reference} with the same seed, mean over seeds. It depends on the decay of the learning "
        "rate, under which every curve falls most at the end: it is no speed-up for another length of training."
    )
    return Table("Loss", columns, rows, note)


def _spread(values: Values, arm: str, measure: str) -> str:
    known = [value for value in values.by_seed(arm, measure).values() if value is not None]
    return number(float(np.std(known, ddof=1))) if len(known) > 1 else NOTHING


def _tokens(values: Values, arm: ArmFacts) -> str:
    if arm.trained_as is not None:
        return f"as {arm.trained_as}"
    targets = {seed: curve[-1][1] for seed, curve in values.curve(values.results.reference, "validation_curve").items()}
    curves = values.curve(arm.name, "validation_curve")
    found = [tokens_to(curves[seed], targets[seed]) for seed in sorted(curves.keys() & targets.keys())]
    reached = [each for each in found if each is not None]
    if not found or not reached:
        return "not reached" if found else NOTHING
    if len(reached) < len(found):
        return f"reached in {len(reached)} of {len(found)}"
    return number(sum(reached) / len(reached))


def _differences(values: Values, what: str, measure: str, folded: bool = False, **where: Any) -> list[Block]:
    if not values.measured(measure, **where):
        return []
    return [difference_table(to_reference(values, what, measure, **where), folded=folded)]


def _length_table(values: Values, title: str, measure: str, note: str, **where: Any) -> Table:
    found = values.places(measure, "length", **where)
    names = [arm for arm in values.arms if values.rows(arm, measure, **where)]
    rows = [(Cell(arm), *(_cell(level(values, arm, measure, length=at, **where)) for at in found)) for arm in names]
    return Table(title, ("arm", *map(str, found)), tuple(rows), note)


def _cell(text: str) -> Cell:
    return Cell(text, "quiet" if text == "undefined" else "")


def _same_targets(values: Values) -> list[Block]:
    measure = "same_targets_loss"
    if not values.measured(measure):
        return []
    note = (
        "Sliding windows: the same target tokens are scored at every length, each time with as many tokens before them "
        "as the length allows, positions from 0. Undefined: the scheme has no position that far."
    )
    labels = ("length of the window", "loss on the same targets")
    start = values.training_length
    title = "Loss on the same targets by length"
    line = over_length(values, measure)
    return [
        _length_table(values, title, measure, note),
        heat_map(values, measure, "length-map", "Loss on the same targets by arm and length"),
        *chart("length", title, labels, line, note=BAND, doubling=True, marked=start),
        *_differences_by_length(values, "Loss on the same targets", measure),
    ]


def _differences_by_length(values: Values, what: str, measure: str, **where: Any) -> list[Block]:
    outcomes = by_length(values, what, measure, values.places(measure, "length", **where), **where)
    return [difference_table(outcome, folded=True) for outcome in outcomes]


def _control(values: Values) -> list[Block]:
    measure = "same_targets_subset_loss"
    if not values.measured(measure):
        return []
    start = values.training_length
    found = values.places(measure, "length")
    names = [arm for arm in values.arms if values.rows(arm, measure)]
    rows = [
        (
            Cell(arm),
            Cell(level(values, arm, "control_loss")),
            *(_cell(level(values, arm, measure, length=at)) for at in found),
        )
        for arm in names
    ]
    note = (
        "A part of the same targets, and beside it the control: each with exactly the training length as context. "
        "A scheme that only survives the longer context does not get below its control."
    )
    title = "Is the longer context used?"
    tests = [to_control(values, at) for at in found if at != start] if values.measured("control_loss") else []
    return [
        Table(title, ("arm", "control", *map(str, found)), tuple(rows), note),
        *(
            difference_table(outcome, f"{outcome.what}: differences of each arm to its control", True)
            for outcome in tests
        ),
    ]


def _windows(values: Values) -> list[Block]:
    if not values.measured("windows_loss"):
        return []
    note = (
        "Windows side by side: here a longer window also gains from having fewer tokens near its start, so compare "
        "down a column and not along a row."
    )
    line = over_length(values, "windows_loss")
    title, labels = "Loss in windows side by side", ("length of the window", "loss")
    start = values.training_length
    return [
        _length_table(values, title, "windows_loss", note),
        *chart("windows", title, labels, line, note=BAND, doubling=True, marked=start),
        *_differences_by_length(values, "Loss in windows", "windows_loss"),
    ]


def _by_position(values: Values) -> list[Block]:
    line = over_x(values, "by_position_loss")
    title, labels = "Loss by position in the longest window", ("position", "loss")
    return [*chart("by-position", title, labels, line, note=BAND, marked=values.training_length)]


def _task(values: Values, task: str) -> Section:
    exact, tokens = "task_exact_match", "task_token_accuracy"
    line = (*over_length(values, exact, task=task), *chance_line(values, task))
    learning = over_x(values, "validation_curve", task=task)
    name, note = _slug(task), f"{BAND} The grey line is chance."
    return Section(
        f"Task: {task}",
        (
            *_with_chance(values, "Exact match by length", exact, "task_chance", task),
            *_with_chance(values, "Accuracy by token, by length", tokens, "task_token_chance", task),
            *chart(
                f"task-{name}",
                f"{task}: exact match by length",
                ("length", "exact match"),
                line,
                note=note,
                doubling=True,
            ),
            *chart(f"task-{name}-curve", f"{task}: learning", ("tokens seen", "loss"), learning, note=BAND),
            *_differences_by_length(values, f"{task}, exact match", exact, task=task),
            *_differences_by_length(values, f"{task}, accuracy by token", tokens, task=task),
        ),
    )


def _with_chance(values: Values, title: str, measure: str, by_chance: str, task: str) -> list[Block]:
    """Return the table of a task by length, with a last row for chance: that of the first arm that knows it."""
    if not values.measured(measure, task=task):
        return []
    table = _length_table(values, title, measure, "Means over seeds of shares of 1.", task=task)
    source = next((arm for arm in values.arms if values.rows(arm, by_chance, task=task)), None)
    if source is None:
        return [table]
    found = values.places(measure, "length", task=task)
    chance = [Cell(number(values.mean(source, by_chance, length=at, task=task)), "quiet") for at in found]
    return [table._replace(rows=(*table.rows, (Cell("chance"), *chance)))]


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())


OVER_SEEDS = "Mean, and the half width of its 95 % t interval over seeds"
OVER_HEADS = f"{OVER_SEEDS}, both of the mean over heads; in brackets the range of single heads."
LAYER_TABLES = (
    (
        "distance_share",
        "Share of the scores' variance that distance explains, by layer",
        f"Of the scores before the softmax, the mean of each row removed. {OVER_HEADS}",
    ),
    (
        "loss_without_position",
        "Rise of the loss when one layer alone loses its positional signal",
        f"{OVER_SEEDS}. Exactly 0 where the scheme does nothing in a layer, by construction.",
    ),
    (
        "probe_r2",
        "R² of a linear probe for the absolute position, by layer",
        f"{OVER_SEEDS}. A contrast, read off what each block reads; the last column is the state after the last block.",
    ),
    ("attention_distance", "Mean distance of attention in tokens, by layer", OVER_HEADS),
    ("attention_entropy", "Entropy of attention in nats, by layer", OVER_HEADS),
    (
        "attention_entropy_relative",
        "Entropy of attention as a share of the largest possible, by layer",
        OVER_HEADS,
    ),
)


def _by_layer(values: Values) -> list[Block]:
    return [_layer_table(values, *each) for each in LAYER_TABLES if values.measured(each[0])]


def _layer_table(values: Values, measure: str, title: str, note: str) -> Table:
    found = values.places(measure, "layer")
    names = [arm for arm in values.arms if values.rows(arm, measure)]
    rows = tuple((Cell(arm), *(_cell(_over_heads(values, arm, measure, layer)) for layer in found)) for arm in names)
    return Table(title, ("arm", *(f"layer {layer}" for layer in found)), rows, note)


def _over_heads(values: Values, arm: str, measure: str, layer: int) -> str:
    mean = level(
        values, arm, measure, partial(give_or_take, half=_half_width(values, arm, measure, layer)), layer=layer
    )
    heads = values.places(measure, "head", layer=layer)
    each = [values.mean(arm, measure, layer=layer, head=head) for head in heads]
    known = [value for value in each if value is not None]
    return f"{mean} ({number(min(known))} to {number(max(known))})" if len(known) > 1 else mean


def _half_width(values: Values, arm: str, measure: str, layer: int) -> float | None:
    found = values.by_seed(arm, measure, layer=layer).values()
    bounds = interval([value for value in found if value is not None])
    return None if bounds is None else (bounds[1] - bounds[0]) / 2


def _layers_compared(values: Values) -> list[Block]:
    return [difference_table(outcome, folded=True) for outcome in by_layer(values)]


def _by_head(values: Values) -> list[Block]:
    title = "Share of the scores' variance that distance explains, by layer.head"
    return [head_map(values, "distance_share", "heads-map", title)] if values.measured("distance_share") else []


def _frequencies(values: Values) -> list[Block]:
    blocks: list[Block] = []
    for layer in values.places("frequency_use", "layer"):
        line = over_x(values, "frequency_use", layer=layer)
        title = f"Use of the frequencies in layer {layer}"
        note = f"{BAND} Pair 0 turns fastest."
        blocks += chart(f"frequencies-{layer}", title, ("pair", "share"), line, note=note)
    return blocks
