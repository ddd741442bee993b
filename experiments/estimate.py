"""What a dry run tells: the runs of an experiment, and how long they take by a short measurement."""

import time
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from data.loader import Rows
from experiments.campaign import Campaign, hours, settings_of
from experiments.plan import Run
from experiments.text import Amount, tokens_read
from experiments.tuning import Tuned, loss_of, untuned
from training.config import Config
from training.trainer import Trainer

STEPS = 4
SECONDS_TO_BEGIN = 3.0  # a run's own: building, the last checkpoint, rows


def told(campaign: Campaign) -> Iterator[str]:
    """Yield the lines of a dry run."""
    plan, experiment = campaign.plan, campaign.plan.experiment
    tuning = untuned(plan)
    first = Tuned(plan.grid()[0], (), False)  # until tuning is done, any settings stand for the chosen ones
    chosen = settings_of({place: found or first for place, found in campaign.tuned().items()})
    assert chosen is not None
    measured = plan.measured(chosen)
    yield f"{campaign.file.name}: {experiment.title}".removesuffix(": ")
    yield f"hash {campaign.file.digest[:16]}; differences are against {experiment.reference}"
    for name, arm in experiment.arms.items():
        yield f"  {name:20} {arm_in_words(arm.changes or {'train': arm.train, **arm.eval})}"
    todo = [run for run in [*tuning, *measured] if not campaign.is_done(run)]
    yield f"{len(tuning)} runs of tuning, {len(measured)} runs that are measured: {len(todo)} of them are to be done"
    yield from filter(None, [campaign.other_data()])
    yield from resolution(len(experiment.seeds))
    yield from seen_so_far(campaign, measured)
    if todo:
        yield from estimated(campaign, todo)


def arm_in_words(changes: dict[str, object]) -> str:
    """Return what an arm changes, in a line."""
    return ", ".join(f"{name}: {value}" for name, value in changes.items()) or "the base as it is"


def resolution(seeds: int) -> Iterator[str]:
    """Say which difference so many seeds can show."""
    from experiments.statistics import smallest_difference

    if seeds < 2:
        yield "one seed shows no difference, however large: give at least 2, better 5"
    else:
        times = smallest_difference(1.0, seeds)
        yield (
            f"{seeds} seeds show differences from {times:.2f} times the standard deviation of a paired difference on "
            "(80 % power, two-sided .05, before adjustment)"
        )


def seen_so_far(campaign: Campaign, runs: list[Run]) -> Iterator[str]:
    """Say in nats what the seeds can show, by the spread of the runs that are done."""
    from experiments.statistics import compare_to_reference, smallest_difference

    found: dict[str, dict[int, float | None]] = defaultdict(dict)
    for run in runs:
        row = campaign.store.row(run.key)
        if row is not None and not run.task:
            found[run.arm][run.seed] = loss_of(row)
    compared = compare_to_reference(found, campaign.plan.experiment.reference)
    spreads = [each.sd for each in compared if each.sd and each.n > 1]
    shown = smallest_difference(median(spreads), len(campaign.plan.experiment.seeds)) if spreads else None
    if shown is not None:
        yield (
            f"by the spread of the runs that are done (median over {len(spreads)} arms: {median(spreads):.4f}), "
            f"that is {shown:.4f} nats of validation loss"
        )


def estimated(campaign: Campaign, todo: list[Run]) -> Iterator[str]:
    """Measure a few steps of every arm, and say how long all runs take one after the other."""
    seconds = {arm: seconds_of_a_run(campaign, run) for arm, run in {run.arm: run for run in todo}.items()}
    for arm, each in seconds.items():
        yield f"  {arm:20} about {each:.0f} s a run"
    total = sum(seconds[run.arm] for run in todo)
    yield f"about {hours(total)} on {campaign.laboratory.hardware}, one run after the other"


def seconds_of_a_run(campaign: Campaign, run: Run) -> float:
    """Return how long a run takes, evaluation included, from a few steps of it."""
    config, rows = campaign.laboratory.rows_read(run)
    training, context = config.training, config.model.context
    step = seconds_of_a_step(campaign, config, rows)
    tokens_a_step = training.batch_size * context
    # A forward pass is a third of a step.
    scored = 0 if run.is_tuning else tokens_scored(campaign, context) * len(campaign.plan.evaluated_as(run))
    is_trained = campaign.store.row(run.key) is not None and campaign.laboratory.has_weights(run)
    return SECONDS_TO_BEGIN + step * ((0 if is_trained else training.steps) + scored / tokens_a_step / 3)


def tokens_scored(campaign: Campaign, context: int) -> int:
    """Return how many tokens the evaluation of a run reads."""
    experiment, settings = campaign.plan.experiment, campaign.plan.experiment.evaluation
    if experiment.tasks:
        return settings.task_examples * sum(experiment.lengths) * context // experiment.lengths[0]
    amount = Amount(settings.spans, settings.window_spans, settings.control_every)
    further = tokens_read(experiment.lengths, amount) if "text" in experiment.measures else 0
    # Inside, each window is read by about six passes, in float64 where attention is looked at.
    further += 6 * settings.inside_windows * context if "inside" in experiment.measures else 0
    return settings.test_windows * context + further


def seconds_of_a_step(campaign: Campaign, config: Config, rows: Rows) -> float:
    """Return the median time of a few steps; the first one warms up."""
    trainer = Trainer(config, rows, campaign.laboratory.hardware)
    return median([_timed(trainer) for _ in range(STEPS)][1:])


def _timed(trainer: Trainer) -> float:
    begin = time.perf_counter()
    trainer.step()
    return time.perf_counter() - begin
