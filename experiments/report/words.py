"""The report in words: generated from the verdicts, so that it says no more than they do."""

from experiments.report.differences import Outcome, by_layer, by_length, shown_by, to_control, to_reference, told
from experiments.report.document import Block, Items, Section, Words
from experiments.report.values import Values

FEW = 6  # lengths, all of which are told


def in_words(values: Values) -> Section:
    """Say what is shown, what is not, and what stands in the way of believing it."""
    warnings = _warnings(values)
    said = tuple(told(outcome) for outcome in _outcomes(values))
    said = said or ("Nothing is measured yet that could be compared.",)
    blocks: list[Block] = [Items(warnings, "warning")] if warnings else []
    return Section("In words", (*blocks, Items(said), Words(_power(values), "quiet")))


def _outcomes(values: Values) -> list[Outcome]:
    return [*_at_training_length(values), *_beyond(values), *_used(values), *_tasks(values), *by_layer(values)]


def _at_training_length(values: Values) -> list[Outcome]:
    what = "Test loss at the training length"
    return [to_reference(values, what, "test_loss")] if values.measured("test_loss") else []


def _beyond(values: Values) -> list[Outcome]:
    measure = "same_targets_loss"
    lengths = [at for at in values.places(measure, "length") if at != values.training_length]
    return by_length(values, "Loss on the same targets", measure, lengths)


def _used(values: Values) -> list[Outcome]:
    found = values.places("same_targets_subset_loss", "length")
    lengths = [at for at in found if at != values.training_length]
    return [to_control(values, at) for at in lengths[-1:]] if values.measured("control_loss") else []


def _tasks(values: Values) -> list[Outcome]:
    found = []
    for task in values.tasks():
        for at in told_lengths(values.places("task_exact_match", "length", task=task), values.training_length):
            what = f"Exact match of {task} at length {at}"
            found.append(to_reference(values, what, "task_exact_match", length=at, task=task))
    return found


def told_lengths(lengths: list[int], trained: int | None) -> list[int]:
    """Return the lengths that are told in words: of many the longest trained one, the next and the last."""
    if len(lengths) <= FEW or trained is None:
        return lengths
    beyond = [at for at in lengths if at > trained]
    return [*([trained] if trained in lengths else []), *beyond[:1], *beyond[1:][-1:]]


def _warnings(values: Values) -> tuple[str, ...]:
    results = values.results
    found = [f"Fairness: {each.name} does not hold: {each.detail}" for each in results.checks if each.holds is False]
    planned = sum(len(arm.seeds) for arm in results.arms)
    if results.missing:
        found.append(
            f"{len(results.missing)} of {planned} pairs of arm and seed are not measured yet: the numbers will change."
        )
    if results.diverged:
        names = dict.fromkeys(each.arm for each in results.diverged)
        found.append(f"Runs diverged: {len(results.diverged)} ({', '.join(names)}); their arms have no interval.")
    edge = [arm.name for arm in results.arms if arm.at_edge]
    if edge:
        found.append(f"Tuned at the edge of the grid, where a better value may lie beyond: {', '.join(edge)}.")
    return tuple(found)


def _power(values: Values) -> str:
    others = [arm for arm in values.results.arms if arm.name != values.results.reference]
    n = max((len(arm.seeds) for arm in values.results.arms), default=0)
    return shown_by(n, max(len(others), 1))
