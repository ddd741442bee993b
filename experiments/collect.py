"""From the rows of finished runs to the results that the report shows, and whether the comparison was fair."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from experiments.campaign import Campaign
from experiments.plan import Run, configured
from experiments.results import ArmFacts, Check, Diverged, Measurement, Results, Sample
from experiments.rows import evaluation_name
from experiments.store import Row
from experiments.tuning import Tuned
from training.config import load
from training.resume import flat

Trained = list[tuple[Run, Row]]
Evaluated = dict[tuple[str, str, int], Row]  # arm, task, seed


def collected(campaign: Campaign, command: str) -> Results:
    """Return all that is known by now."""
    experiment = campaign.plan.experiment
    tuned = campaign.tuned()
    runs = campaign.measured() or []
    found = [(run, row) for run in runs if (row := campaign.store.row(run.key)) is not None]
    trained = [(run, row) for run, row in found if row["status"] == "finished"]
    evaluated = dict(_evaluations(campaign, trained))
    diverged = tuple(
        Diverged(run.arm, run.seed, row["why"], run.task) for run, row in found if (run, row) not in trained
    )
    return Results(
        name=campaign.file.name,
        title=experiment.title or campaign.file.name,
        question=experiment.question,
        reference=experiment.reference,
        lengths=experiment.lengths,
        arms=tuple(_facts(campaign, arm, tuned, trained) for arm in experiment.arms),
        trials=tuple(trial for each in tuned.values() if each is not None for trial in each.trials),
        diverged=diverged,
        missing=tuple(_missing(campaign, diverged, evaluated)),
        measurements=tuple(_measurements(trained, evaluated)),
        checks=tuple(checks(campaign, trained, evaluated, tuned)),
        samples=tuple(_samples(evaluated)),
        provenance=provenance(campaign, command, [row for _, row in found]),
        notes=tuple(notes(campaign)),
    )


def _evaluations(campaign: Campaign, trained: Trained) -> Iterator[tuple[tuple[str, str, int], Row]]:
    for run, _ in trained:
        for arm, scheme in campaign.plan.evaluated_as(run).items():
            row = campaign.store.row(evaluation_name(run, scheme, campaign.plan.experiment))
            if row is not None:
                yield (arm, run.task, run.seed), row


def _missing(campaign: Campaign, diverged: tuple[Diverged, ...], evaluated: Evaluated) -> Iterator[tuple[str, int]]:
    plan = campaign.plan
    failed = {(each.arm, each.task, each.seed) for each in diverged}
    for arm, described in plan.experiment.arms.items():
        for seed in plan.seeds(arm):
            places = [(arm, task, seed) for task in plan.tasks]
            source = described.train or arm
            if any(place not in evaluated and (source, *place[1:]) not in failed for place in places):
                yield arm, seed


def _facts(campaign: Campaign, arm: str, tuned: dict[Any, Tuned | None], trained: Trained) -> ArmFacts:
    plan, described = campaign.plan, campaign.plan.experiment.arms[arm]
    source = described.train or arm
    places = [found for task in plan.tasks if (found := tuned[source, task]) is not None]
    row = next((row for run, row in trained if run.arm == source), None)
    parameters = row["parameters"] if row else {"total": 0, "positional": 0, "non_embedding": 0}
    several = {task: found.settings for task, found in zip(plan.tasks, places, strict=False)}
    return ArmFacts(
        name=arm,
        declared=dict(described.changes) | ({"matched_to": described.matched_to} if described.matched_to else {}),
        trained_as=described.train,
        after_training=dict(described.eval),
        settings=several if plan.experiment.tasks else (places[0].settings if places else {}),
        at_edge=any(found.at_edge for found in places),
        seeds=plan.seeds(arm),
        **parameters,
        backend=row["backend"] if row else "",
    )


def _measurements(trained: Trained, evaluated: Evaluated) -> Iterator[Measurement]:
    for run, row in trained:
        for name in sorted(
            row.keys() & {"validation_loss", "validation_bits_per_byte", "tokens_per_second", "seconds"}
        ):
            measure = "training_seconds" if name == "seconds" else name
            yield Measurement(run.arm, run.seed, measure, row[name], task=run.task)
        for tokens, loss in row["curve"]:
            yield Measurement(run.arm, run.seed, "validation_curve", loss, x=tokens, task=run.task)
    for (arm, task, seed), row in evaluated.items():
        for found in row["measurements"]:
            yield Measurement(**{**found, "arm": arm, "seed": seed, "task": task})


def _samples(evaluated: Evaluated) -> Iterator[Sample]:
    first = min((seed for _, _, seed in evaluated), default=0)
    for (arm, _, seed), row in evaluated.items():
        for sample in row["samples"] if seed == first else ():
            yield Sample(arm, seed, sample["prompt"], sample["text"])


def provenance(campaign: Campaign, command: str, rows: list[Row]) -> dict[str, str]:
    """Return where the figures come from."""

    def listed(name: str) -> str:
        return "; ".join(sorted({str(row[name]) for row in rows})) or "nothing yet"

    return {
        "experiment": f"{campaign.file.path.name}, SHA-256 {campaign.file.digest}",
        "revision": listed("revision"),
        "machine": listed("machine"),
        "versions": listed("versions"),
        "precision": listed("precision"),
        "dates": listed("date"),
        "data": campaign.laboratory.facts.data,
        "command": command,
    }


def notes(campaign: Campaign) -> Iterator[str]:
    """Yield what a reader should know besides."""
    for arm, described in campaign.plan.experiment.arms.items():
        if described.label:
            yield f"{arm}: {described.label}"


# --- Was it fair? ---


def checks(
    campaign: Campaign, trained: Trained, evaluated: Evaluated, tuned: dict[Any, Tuned | None]
) -> Iterator[Check]:
    """Yield every condition of a fair comparison and whether it holds."""
    yield declared_alone(campaign)
    yield same_within_seeds("windows", "Equal seeds read the same windows in the same order", trained)
    yield same_within_seeds("weights", "Equal seeds start from bitwise equal shared weights", same_trunks(trained))
    yield the_same("Equal numbers of tokens in training", "tokens", trained)
    yield the_same("Equal precision", "precision", trained)
    yield same_targets(evaluated)
    yield short_evaluation(trained, evaluated)
    yield inside_the_grid(tuned)
    yield declared_before(campaign, trained)


def declared_alone(campaign: Campaign) -> Check:
    """Compare the settings of every arm with those of the base."""
    plan, base = campaign.plan, flat(load(campaign.file.base))
    free = {"training.seed", "training.sample_every", "training.keep", "training.wandb", "training.out"}
    undeclared = []
    for name, arm in plan.trained.items():
        now = flat(configured(campaign.file, name, 0, {}))
        changed = {key for key in now.keys() | base.keys() if now.get(key) != base.get(key)} - free
        undeclared += [
            f"{name}: {key}" for key in changed if not any(f"{key}.".startswith(f"{word}.") for word in arm.changes)
        ]
    detail = f"{counted(len(plan.trained), 'arm')}, and the tuned settings"
    detail = f"undeclared: {', '.join(undeclared)}" if undeclared else detail
    return Check("Arms differ from the base in the declared settings alone", not undeclared, detail)


def same_trunks(trained: Trained) -> Trained:
    """Return the runs whose trunk has the most common size: an arm that declares another shares no weights."""
    sizes: dict[int, int] = defaultdict(int)
    for _, row in trained:
        sizes[row["parameters"]["non_embedding"]] += 1
    most = max(sizes, key=lambda size: sizes[size], default=0)
    return [(run, row) for run, row in trained if row["parameters"]["non_embedding"] == most]


def same_within_seeds(what: str, name: str, trained: Trained) -> Check:
    """Compare a hash over the arms of each seed."""
    hashes: dict[tuple[str, int], set[str]] = defaultdict(set)
    for run, row in trained:
        hashes[run.task, run.seed].add(row["hashes"][what])
    different = sorted({str(seed) for (_, seed), found in hashes.items() if len(found) > 1})
    detail = f"seeds that differ: {', '.join(different)}" if different else sizes_of(trained)
    return Check(name, not different if trained else None, detail)


def sizes_of(trained: Trained) -> str:
    """Return how many seeds, arms and tasks the runs are of."""
    seeds, arms, tasks = (len({getattr(run, field) for run, _ in trained}) for field in ("seed", "arm", "task"))
    on_tasks = any(run.task for run, _ in trained)
    return ", ".join([counted(seeds, "seed"), counted(arms, "arm"), *([counted(tasks, "task")] if on_tasks else [])])


def counted(number: int, what: str) -> str:
    """Return a number with its word: 1 arm, 2 arms."""
    return f"{number} {what}{'s' * (number != 1)}"


def the_same(name: str, what: str, trained: Trained) -> Check:
    """Say whether all runs on one text or task have one value."""
    found: dict[str, set[str]] = defaultdict(set)
    for run, row in trained:
        found[run.task].add(f"{row[what]:,}" if isinstance(row[what], int) else row[what])
    detail = "; ".join(": ".join(filter(None, [task, ", ".join(sorted(values))])) for task, values in found.items())
    return Check(name, all(len(values) == 1 for values in found.values()) if found else None, detail)


def same_targets(evaluated: Evaluated) -> Check:
    """Compare the number of scored tokens of every measure over the arms."""
    counts: dict[Any, set[int]] = defaultdict(set)
    for (_, task, _), row in evaluated.items():
        for found in row["measurements"]:
            if found.get("count") and found["value"] is not None:
                counts[task, found["measure"], found.get("length"), found.get("x")].add(found["count"])
    different = [str(place) for place, found in counts.items() if len(found) > 1]
    scored = {name: max(found) for (_, name, _, x), found in counts.items() if x is None}
    detail = ", ".join(f"{name} {count:,}" for name, count in sorted(scored.items()))
    return Check("Equal numbers of scored targets", not different if counts else None, "; ".join(different) or detail)


def short_evaluation(trained: Trained, evaluated: Evaluated) -> Check:
    """Hold the time of each evaluation against a third of the training time, and tell that of all of a run's arms."""
    training = {row["key"]: row["seconds"] for _, row in trained}
    shares: dict[str, list[float]] = defaultdict(list)
    for row in evaluated.values():
        shares[row["key"]].append(row["seconds"] / training[row["key"]])
    worst, together = max(map(max, shares.values()), default=0.0), max(map(sum, shares.values()), default=0.0)
    detail = f"at most {worst:.0%}"
    if any(len(each) > 1 for each in shares.values()):
        detail += f"; where arms share a training, all their evaluations together at most {together:.0%} of it"
    return Check(
        "Evaluation takes at most a third of the training time",
        worst <= 1 / 3 if shares else None,
        detail.replace("%", " %") if shares else "",
    )


def inside_the_grid(tuned: dict[Any, Tuned | None]) -> Check:
    """Name the arms whose best settings lie at the edge of the grid: better ones may lie beyond."""
    known: Iterable[Tuned] = [found for found in tuned.values() if found is not None]
    edge = [" ".join(filter(None, place)) for place, found in tuned.items() if found is not None and found.at_edge]
    if not any(found.trials for found in known):
        detail = "nothing was tuned: all arms have the settings of the base, whichever of them these suit"
        return Check("No arm's best settings lie at the edge of the grid", None, detail)
    detail = f"at the edge: {', '.join(edge)}" if edge else f"{sum(len(found.trials) for found in known)} runs"
    return Check("No arm's best settings lie at the edge of the grid", not edge, detail)


def declared_before(campaign: Campaign, trained: Trained) -> Check:
    """Say whether the experiment is the one that was declared, and how many of its runs are older than that."""
    name, declared = "The experiment was declared before its first run", campaign.declared()
    if not declared:
        return Check(name, None, "nothing was run here")
    same = {entry["hash"] for entry in declared} == {campaign.file.digest}
    dates = ", ".join(f"{entry['hash'][:12]} on {entry['date']}" for entry in declared)
    found = [is_older(row, declared[0]["date"]) for _, row in trained]
    told = "" if same else "changed: "
    told += dates
    if older := found.count(True):
        told += f"; {older} of {len(found)} runs are older, made for another experiment"
    if unsure := found.count(None):
        told += f"; {unsure} of {len(found)} runs are of the same day, before or after"
    return Check(name, False if older or not same else None if unsure else True, told)


def is_older(row: Row, date: str) -> bool | None:
    """Say whether a run began before a date; None: its day is that of the date, and its hour is not known."""
    begun: str = row["begun"] if "begun" in row else row["date"]
    is_vague = len(begun) < len(date) and date.startswith(begun)
    return None if is_vague else begun < date
