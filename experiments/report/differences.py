"""Differences to the reference: as a table, and as a sentence."""

from itertools import pairwise
from typing import NamedTuple

from experiments.report.document import Cell, Table, Words
from experiments.report.numbers import NOTHING, bounds, chance_of, change, number
from experiments.report.values import Values
from experiments.statistics import EQUAL, Comparison, compare_pairs, compare_to_reference, smallest_difference

COLUMNS = ("arm", "n", "mean", "difference", "95 % interval", "p", "Holm p", "could show", "verdict")


# What is compared layer by layer.
BY_LAYER = {"distance_share": "Share of distance", "loss_without_position": "Rise of the loss without positions"}


class Outcome(NamedTuple):
    """What the arms differ in at one place, and against what."""

    what: str
    against: str
    found: tuple[Comparison, ...]
    undefined: tuple[str, ...] = ()
    why_not: str = ""  # why there is nothing to compare with


def to_reference(values: Values, what: str, measure: str, **where: object) -> Outcome:
    """Compare the arms that are defined at a place with the reference, if that is."""
    reference = values.results.reference
    undefined = tuple(arm for arm in values.arms if values.undefined(arm, measure, **where))
    if reference in undefined:
        return Outcome(
            what, reference, (), undefined, f"{reference} is undefined there, so there is no difference to it"
        )
    defined = {arm: values.by_seed(arm, measure, **where) for arm in values.arms if arm not in undefined}
    return Outcome(what, reference, tuple(compare_to_reference(defined, reference)), undefined)


def by_length(values: Values, what: str, measure: str, lengths: list[int], **where: object) -> list[Outcome]:
    """Compare with the reference at each length; the lengths at which it is undefined are told in one."""
    named = {at: to_reference(values, f"{what} at length {at}", measure, length=at, **where) for at in lengths}
    beyond = [at for at, outcome in named.items() if outcome.why_not]
    told_in_one = [
        named[at]._replace(what=f"{what} at length {', '.join(map(str, beyond))}", undefined=()) for at in beyond[:1]
    ]
    return [outcome for outcome in named.values() if not outcome.why_not] + told_in_one


def to_layer_below(values: Values, arm: str, what: str, measure: str) -> Outcome:
    """Compare each layer of an arm with the one below it, paired by seed."""
    layers = values.places(measure, "layer")
    pairs = {
        f"layer {layer}": (values.by_seed(arm, measure, layer=layer), values.by_seed(arm, measure, layer=below))
        for below, layer in pairwise(layers)
    }
    return Outcome(f"{what}, {arm}", "the layer below", tuple(compare_pairs(pairs, "the layer below")))


def by_layer(values: Values) -> list[Outcome]:
    """Compare each layer with the one below within an arm, and the arms with the reference within a layer."""
    outcomes: list[Outcome] = []
    for measure, what in BY_LAYER.items():
        layers = values.places(measure, "layer")
        known = [arm for arm in values.arms if values.rows(arm, measure) and len(layers) > 1]
        outcomes += [to_layer_below(values, arm, what, measure) for arm in known]
        outcomes += [to_reference(values, f"{what}, layer {layer}", measure, layer=layer) for layer in layers]
    return outcomes


def to_control(values: Values, length: int) -> Outcome:
    """Compare each arm at a length with itself on the same targets at exactly the training length of context."""
    measure, control = "same_targets_subset_loss", "control_loss"
    undefined = tuple(arm for arm in values.arms if values.undefined(arm, measure, length=length))
    pairs = {
        arm: (values.by_seed(arm, measure, length=length), values.by_seed(arm, control))
        for arm in values.arms
        if arm not in undefined and values.rows(arm, measure, length=length)
    }
    what = f"Loss with windows of {length} tokens"
    return Outcome(what, "its control", tuple(compare_pairs(pairs, "its control")), undefined)


def difference_table(outcome: Outcome, title: str = "", folded: bool = False) -> Table | Words:
    """List every difference with n, interval, adjusted p and the smallest that could have been shown."""
    title = title or f"{outcome.what}: differences to {outcome.against}"
    if outcome.why_not:
        return Words(f"{title}: {outcome.why_not}.", "quiet")
    rows = [_row(each) for each in outcome.found]
    rows += [(Cell(arm), *[Cell(NOTHING)] * 7, Cell("undefined", "quiet words")) for arm in outcome.undefined]
    return Table(title, COLUMNS, tuple(rows), _note(outcome), folded)


def told(outcome: Outcome) -> str:
    """Say in a sentence what is shown; only what was tested is counted."""
    if outcome.why_not:
        return f"{outcome.what}: {outcome.why_not}."
    tested = [each for each in outcome.found if each.adjusted is not None]
    untested = [each for each in outcome.found if each.adjusted is None]
    verdicts = dict.fromkeys([each.verdict for each in (*tested, *untested)])
    parts = [_group(verdict, [each for each in outcome.found if each.verdict == verdict]) for verdict in verdicts]
    parts += [f"undefined: {', '.join(outcome.undefined)}"] if outcome.undefined else []
    return f"{outcome.what}, against {outcome.against} ({len(tested)} tested): {'; '.join(parts)}."


def shown_by(n: int, tests: int) -> str:
    """Say what n runs could show, as a multiple of the spread of paired differences."""
    one, first = smallest_difference(1.0, n), smallest_difference(1.0, n, tests)
    if one is None or first is None:
        return "One run an arm shows no difference, whatever its size."
    return (
        f"{n} runs an arm show a difference of {number(one)} standard deviations of the paired differences with 80 % "
        f"power in a single test at .05, and of {number(first)} in the first step of Holm's procedure over {tests}."
    )


def _group(verdict: str, arms: list[Comparison]) -> str:
    return f"{verdict}: {', '.join(map(_named, arms))}"


def _named(found: Comparison) -> str:
    """Name an arm, with its difference where one is shown, and with what both have where they are equal."""
    if mark(found) == "shown":
        return f"{found.arm} ({change(found.difference)})"
    return f"{found.arm} (both {number(found.mean)})" if found.verdict == EQUAL else found.arm


def _row(found: Comparison) -> tuple[Cell, ...]:
    scale = max((abs(each) for each in (found.difference, found.low, found.high) if each is not None), default=None)
    smallest = smallest_difference(found.sd, found.n) if found.sd and found.adjusted is not None else None
    return (
        Cell(found.arm),
        Cell(str(found.n)),
        Cell(number(found.mean)),
        Cell(change(found.difference, scale)),
        Cell(bounds(found.low, found.high)),
        Cell(chance_of(found.p)),
        Cell(chance_of(found.adjusted)),
        Cell(number(smallest)),
        Cell(found.verdict, f"words {mark(found)}".strip()),
    )


def mark(found: Comparison) -> str:
    """Return how a verdict is to look: what diverged is a warning, what is not shown is quiet."""
    if "diverged" in found.verdict:
        return "warning"
    return "shown" if found.adjusted is not None and found.verdict != "no difference shown" else "quiet"


def _note(outcome: Outcome) -> str:
    tests = sum(each.adjusted is not None for each in outcome.found)
    n = max((each.n for each in outcome.found if each.adjusted is not None), default=0)
    note = (
        "n: pairs of runs with equal seeds. The interval is that of a paired t test, not adjusted for several arms. "
        f"Holm's p is over the arms tested in this table ({tests}); the verdict follows from it alone. Could show: the "
        "smallest difference that these runs find with 80 % power in one test at .05, from the spread observed"
    )
    one, first = smallest_difference(1.0, n), smallest_difference(1.0, n, max(tests, 1))
    if one is None or first is None or tests < 2:
        return note + "."
    return note + f"; the first step of Holm's procedure over {tests} arms needs {number(first / one)} times that."
