"""The sections that say how far the numbers can be believed: fairness, tuning, what is missing, where they are from."""

from collections.abc import Iterable

from experiments.report.document import Block, Cell, Items, Section, SideBySide, Table, Words, Writing
from experiments.report.numbers import NOTHING, number, settings
from experiments.results import ArmFacts, Results, Trial

ANSWERS = {
    True: Cell("holds", "words"),
    False: Cell("does NOT hold", "words warning"),
    None: Cell("cannot be said", "words"),
}


def samples(results: Results) -> Section:
    """Show what the arms wrote behind the same prompt from the same seed."""
    places = dict.fromkeys((each.prompt, each.seed) for each in results.samples)
    return Section("Samples", tuple(_side_by_side(results, *place) for place in places))


def fairness(results: Results) -> Section:
    """List the conditions of a fair comparison, and whether each holds."""
    rows = tuple((Cell(each.name), ANSWERS[each.holds], Cell(each.detail, "words")) for each in results.checks)
    return Section("Fairness", (Table("", ("condition", "", "detail"), rows),) if rows else ())


def tuning(results: Results) -> Section:
    """Show the whole grid of each arm, and the cell that was chosen."""
    tasks = dict.fromkeys(each.task for each in results.trials)
    blocks: list[Block] = [_grid(results, task) for task in tasks]
    edges = [arm for arm in results.arms if arm.at_edge]
    blocks += [Words(_edge(arm), "warning") for arm in edges]
    return Section("Tuning", tuple(blocks))


def gaps(results: Results) -> Section:
    """List the runs that diverged, and those that are not measured yet."""
    lost = tuple(f"{_named(each.arm, each.seed, each.task)}: {each.why}" for each in results.diverged)
    missing = tuple(_named(arm, seed, "") for arm, seed in results.missing)
    blocks: list[Block] = [Words("No run diverged.")] if not lost else [Words("Diverged:", "warning"), Items(lost)]
    blocks += [Words("No run is missing.")] if not missing else [Words("Not measured yet:", "warning"), Items(missing)]
    return Section("Diverged and missing runs", tuple(blocks))


def provenance(results: Results) -> Section:
    """Say where the numbers are from, and how to get them again."""
    rows = tuple((Cell(name), Cell(text, "words")) for name, text in results.provenance.items())
    notes = [Items(results.notes)] if results.notes else []
    return Section("Where this is from", (*notes, *([Table("", ("", ""), rows)] if rows else [])))


def _side_by_side(results: Results, prompt: str, seed: int) -> SideBySide:
    order = {arm.name: i for i, arm in enumerate(results.arms)}
    here = [each for each in results.samples if (each.prompt, each.seed) == (prompt, seed)]
    here.sort(key=lambda each: order.get(each.arm, len(order)))
    return SideBySide(prompt, seed, tuple(Writing(each.arm, each.text) for each in here))


def _edge(arm: ArmFacts) -> str:
    return f"{arm.name}: the best ({settings(arm.settings)}) lies at the edge of its grid; a better one may lie beyond."


def _named(arm: str, seed: int, task: str) -> str:
    return f"{arm}, seed {seed}" + (f", task {task}" if task else "")


def _grid(results: Results, task: str) -> Table:
    trials = [each for each in results.trials if each.task == task]
    columns = list(dict.fromkeys(settings(each.settings) for each in trials))
    arms = [arm for arm in results.arms if any(each.arm == arm.name for each in trials)]
    rows = tuple((Cell(arm.name), *_grid_cells(arm, trials, columns, task)) for arm in arms)
    seeds = ", ".join(map(str, sorted({each.seed for each in trials})))
    note = (
        f"Validation loss at the training length, mean over the seeds of tuning ({seeds}), which are no seeds of the "
        "comparison. ✓ marks the chosen cell."
    )
    return Table(f"Task {task}" if task else "", ("arm", *columns), rows, note)


def _grid_cells(arm: ArmFacts, trials: list[Trial], columns: list[str], task: str) -> list[Cell]:
    losses = {column: _loss(arm.name, trials, column) for column in columns}
    chosen = settings(arm.settings.get(task, {}) if task else arm.settings)  # each task has a grid of its own
    return [_grid_cell(losses[column], column == chosen) for column in columns]


def _grid_cell(loss: float | str, chosen: bool) -> Cell:
    text = number(loss) if isinstance(loss, float) else loss
    return Cell(f"✓ {text}", "chosen") if chosen else Cell(text, "quiet" if isinstance(loss, str) else "")


def _loss(arm: str, trials: Iterable[Trial], column: str) -> float | str:
    found = [each.loss for each in trials if each.arm == arm and settings(each.settings) == column]
    known = [loss for loss in found if loss is not None]
    if len(known) < len(found):
        return "diverged"
    return sum(known) / len(known) if known else NOTHING
