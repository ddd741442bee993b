"""The report of an experiment: what must be in it, from figures that are invented here and look it."""

import csv
import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from experiments.report import compose, write_report
from experiments.report.axes import tick_text, ticks
from experiments.report.differences import difference_table, to_layer_below, to_reference, told
from experiments.report.document import Chart, HeatMap, Point, Series, Table, Words
from experiments.report.markdown import markdown
from experiments.report.numbers import bounds, chance_of, change, give_or_take, number, perplexity, settings
from experiments.report.sections import inside
from experiments.report.svg import chart_svg, heat_svg
from experiments.report.values import Values
from experiments.report.words import told_lengths
from experiments.results import ArmFacts, Check, Diverged, Measurement, Results, Sample, Trial

SEEDS = (0, 1, 2, 3, 4)
LENGTHS = (128, 256, 512, 1024)
ATTACK = '<script>alert("x")</script> & def f(x): return x < 1 if x else "`|*"\n    pass'
# Loss at 128 tokens, and its rise for each doubling.
LOSSES = {
    "learned": (3.41, 0.0),
    "rope": (3.14, 0.35),
    "alibi": (3.18, -0.02),
    "nope": (3.46, 0.15),
    "lost": (3.3, 0.1),
}
LAYERS, HEADS, PAIRS = 3, 2, 8


def arm(name: str, **changed: Any) -> ArmFacts:
    return ArmFacts(
        name=name,
        declared={"model.position": name},
        trained_as=None,
        after_training={},
        settings={"optimizer.lr": 4e-3},
        at_edge=False,
        seeds=SEEDS,
        total=1_234_567,
        positional=16_384 if name == "learned" else 0,
        non_embedding=700_000,
        backend="is_causal" if name != "alibi" else "blocks of queries",
    )._replace(**changed)


def text_rows(draw: np.random.Generator) -> Iterator[Measurement]:
    for seed in SEEDS:
        shared = draw.normal(0, 0.03)
        for name, (loss, rise) in LOSSES.items():
            if (name, seed) in (("lost", 2), ("nope", 4)):
                continue
            yield from run_rows(name, seed, loss + shared + draw.normal(0, 0.01), rise, draw)
        for length in LENGTHS:  # the same weights as rope, evaluated otherwise
            rising = 0.1 * math.log2(length / 128)
            yield Measurement("rope-yarn", seed, "same_targets_loss", 3.14 + shared + rising, length)


def run_rows(name: str, seed: int, loss: float, rise: float, draw: np.random.Generator) -> Iterator[Measurement]:
    yield Measurement(name, seed, "test_loss", loss, count=60_000)
    yield Measurement(name, seed, "test_bits_per_byte", loss / 2.1, count=60_000)
    yield Measurement(name, seed, "validation_loss", loss + 0.02)
    yield Measurement(name, seed, "tokens_per_second", draw.normal(45_000, 500))
    yield Measurement(name, seed, "training_seconds", draw.normal(80, 2))
    for step in range(16):
        yield Measurement(name, seed, "validation_curve", loss + 4.2 * math.exp(-step / 2.5), x=step * 245_760)
    for length in LENGTHS:
        undefined = name == "learned" and length > 128
        value = None if undefined else loss + rise * math.log2(length / 128) + draw.normal(0, 0.01)
        yield Measurement(name, seed, "same_targets_loss", value, length)
        yield Measurement(name, seed, "same_targets_subset_loss", value, length)
        yield Measurement(name, seed, "windows_loss", value, length)
    yield Measurement(name, seed, "control_loss", loss - 0.01 + draw.normal(0, 0.003), 128)
    if name != "learned":
        for x in range(0, 1024, 32):
            yield Measurement(name, seed, "by_position_loss", loss + 1 / (1 + x / 20) + rise * x / 400, 1024, x)
    yield from inside_rows(name, seed, draw)


def inside_rows(name: str, seed: int, draw: np.random.Generator) -> Iterator[Measurement]:
    for layer in range(LAYERS):
        yield Measurement(name, seed, "loss_without_position", abs(draw.normal(0.2, 0.1)), 128, layer=layer)
        yield Measurement(name, seed, "probe_r2", draw.uniform(-0.1, 0.9), 128, layer=layer)
        for head in range(HEADS):
            for measure, top in (("distance_share", 1.0), ("attention_distance", 40.0), ("attention_entropy", 4.0)):
                yield Measurement(name, seed, measure, draw.uniform(0, top), 128, layer=layer, head=head)
            for pair in range(PAIRS if name == "rope" else 0):
                share = draw.uniform(0, 1 / PAIRS)
                yield Measurement(name, seed, "frequency_use", share, 128, pair, layer=layer, head=head)


def task_rows(draw: np.random.Generator) -> Iterator[Measurement]:
    for name in ("learned", "rope", "alibi", "nope"):
        for seed in SEEDS:
            for length in (8, 16, 32):
                exact = {8: 1.0, 16: 0.5 if name != "nope" else 0.9, 32: 0.0}[length]
                value = min(1.0, max(0.0, exact + (draw.normal(0, 0.02) if length == 16 else 0)))
                yield Measurement(name, seed, "task_exact_match", value, length, task="copy", count=256)
                yield Measurement(name, seed, "task_token_accuracy", (1 + value) / 2, length, task="copy", count=256)
                yield Measurement(name, seed, "task_chance", 10.0**-length, length, task="copy")
                yield Measurement(name, seed, "task_token_chance", 0.1, length, task="copy")


def fake() -> Results:
    """Return an experiment that never was: an arm diverged, a run missing, a table that ends, a script in a sample."""
    draw = np.random.default_rng(0)
    names = ("learned", "rope", "alibi", "nope", "lost")
    yarn = arm("rope-yarn", declared={}, trained_as="rope", after_training={"model.position.scaling": {"kind": "yarn"}})
    grid = (2e-3, 4e-3, 8e-3)
    losses = {"learned": (3.5, 3.4, 3.45), "rope": (3.2, 3.1, 3.15), "alibi": (3.2, 3.1, None), "nope": (3.6, 3.5, 3.4)}
    return Results(
        name="fake",
        title="Invented figures <b>for</b> a test",
        question="Does the report show what it is given? Nothing here was measured.",
        reference="learned",
        lengths=LENGTHS,
        arms=(*(arm(name, at_edge=name == "nope") for name in names), yarn),
        trials=tuple(
            Trial(name, {"optimizer.lr": rate}, 100, loss)
            for name, row in losses.items()
            for rate, loss in zip(grid, row, strict=True)
        ),
        diverged=(Diverged("lost", 2, "the loss was inf at step 17 <here>"),),
        missing=(("nope", 4),),
        measurements=(*text_rows(draw), *task_rows(draw)),
        checks=(
            Check("Equal windows", True, "5 seeds, 5 arms"),
            Check("Equal tokens", False, "rope has 7 & the others 8"),
            Check("Declared before", None, ""),
        ),
        samples=tuple(Sample(name, 0, "def f(<x>):", f"{ATTACK} {name}") for name in ("rope", "learned")),
        provenance={"experiment": "fake.yaml, SHA-256 0123abcd", "command": "python compare.py fake.yaml"},
        notes=("rope-yarn: changed after training",),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment") / "report"
    write_report(fake(), folder)
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Reads a page as a browser would: which tags are open, what is text, what is loaded."""

    VOID = frozenset({"meta", "br", "img", "link", "hr", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data + " "


def table_of(results: Results, title: str) -> Table:
    blocks = [block for section in compose(results).sections for block in section.blocks]
    return next(block for block in blocks if isinstance(block, Table) and block.title == title)


def row_of(table: Table, name: str) -> list[str]:
    return next([cell.text for cell in row] for row in table.rows if row[0].text == name)


# --- the page


def test_the_page_is_well_formed(page: str) -> None:
    outline = Outline(page)
    assert outline.faults == []
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert page.startswith("<!doctype html>")


def test_the_page_needs_nothing_but_itself(page: str) -> None:
    outline = Outline(page)
    assert all(load.startswith("#s") for load in outline.loads)
    assert "://" not in page
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []


def test_the_page_has_light_dark_and_a_phones_width(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport" content="width=device-width' in page
    outline = Outline(page)
    assert outline.tags.count("table") == len(re.findall(r'<div class="wide" [^>]*>\s*<table>', page))


def test_charts_take_their_colours_from_the_page(page: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) > 10
    assert not any(re.search(r"#[0-9a-fA-F]{3,6}\b", drawing.replace("url(#", "url(")) for drawing in drawings)
    assert all(f"--arm{i}:" in page for i in range(8))


def test_what_a_model_writes_is_shown_and_not_run(page: str) -> None:
    assert "<script" not in page.lower()
    assert f"{ATTACK} rope" in Outline(page).text
    assert "&lt;b&gt;for&lt;/b&gt;" in page


def test_the_names_of_arms_are_escaped_in_drawings() -> None:
    heat = HeatMap("map", "a & b", ("<b>rope",), ("128",), ((None,),))
    chart = Chart("chart", "a & b", "x<", "y<", (Series("<b>rope", 0, (Point(1, 2.0, 1.0, 3.0), Point(2, 3, 2, 4))),))
    for drawn in (heat_svg(heat), chart_svg(chart)):
        assert "<b>" not in drawn
        assert "&lt;b&gt;rope" in drawn
        assert "a &amp; b" in drawn


def test_no_empty_word_of_the_language_reaches_a_reader(folder: Path) -> None:
    for text in (Outline((folder / "report.html").read_text()).text, (folder / "report.md").read_text()):
        assert re.findall(r"\b(nan|NaN|None|inf|Infinity|True|False)\b", text.replace("loss was inf", "")) == []


def test_an_arm_that_was_lost_and_runs_that_are_missing_are_listed(folder: Path) -> None:
    for text in (Outline((folder / "report.html").read_text()).text, (folder / "report.md").read_text()):
        assert "lost, seed 2: the loss was inf at step 17" in text
        assert "nope, seed 4" in text
        assert "1 of 5 diverged" in text
        assert "1 of 30 pairs of arm and seed are not measured yet" in text


def test_what_hinders_belief_stands_at_the_top(page: str) -> None:
    first = Outline(page).text.split("Arms", 2)[1]
    assert "Equal tokens does not hold: rope has 7 & the others 8" in first
    assert "may lie beyond: nope" in first
    assert "Runs diverged: 1 (lost)" in first


def test_samples_of_one_prompt_stand_side_by_side_in_the_order_of_the_arms(page: str) -> None:
    (samples,) = re.findall(r'<div class="wide samples".*?</div>', page, flags=re.DOTALL)
    assert re.findall(r"<figcaption>(.*?)</figcaption>", samples) == ["learned", "rope"]


# --- Markdown, CSV, JSON, plots


def test_markdown_links_every_plot_and_every_plot_is_linked(folder: Path) -> None:
    linked = re.findall(r"\]\((.*?)\)", (folder / "report.md").read_text())
    plots = {path.name for path in folder.glob("*.png")}
    assert set(linked) == plots
    assert {"curve.png", "length.png", "length-map.png", "by-position.png", "task-copy.png"} <= plots
    assert all((folder / name).read_bytes().startswith(b"\x89PNG\r\n") for name in plots)


def test_markdown_has_the_words_and_numbers_of_the_page(folder: Path) -> None:
    document, text = compose(fake()), (folder / "report.md").read_text()
    shown = Outline((folder / "report.html").read_text()).text
    for block in (block for section in document.sections for block in section.blocks):
        if isinstance(block, Table):
            for cell in (cell for row in block.rows for cell in row):
                assert cell.text in shown
                assert cell.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in text


def test_every_row_of_a_markdown_table_has_the_cells_of_its_head(folder: Path) -> None:
    text = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", (folder / "report.md").read_text())
    for table in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_code_in_a_sample_does_not_break_out_of_its_fence(folder: Path) -> None:
    sample = "\n```\n# no heading\n````"
    results = fake()._replace(samples=(Sample("rope", 0, "p", sample),), measurements=())
    write_report(results, folder / "fenced")
    assert f"`````text\n{sample}\n`````" in (folder / "fenced" / "report.md").read_text()


def test_csv_holds_a_row_a_measurement_with_full_precision(folder: Path) -> None:
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    measurements = fake().measurements
    assert len(rows) == len(measurements)
    assert list(rows[0]) == list(Measurement._fields)
    for row, measurement in zip(rows, measurements, strict=True):
        assert row["arm"] == measurement.arm
        assert (row["value"] == "") == (measurement.value is None)
        assert measurement.value is None or float(row["value"]) == measurement.value


def test_json_holds_everything_under_its_name(folder: Path) -> None:
    def refused(word: str) -> None:
        raise AssertionError(word)

    found = json.loads((folder / "results.json").read_text(), parse_constant=refused)
    results = fake()
    assert set(found) == set(Results._fields)
    assert [Measurement(**row) for row in found["measurements"]] == list(results.measurements)
    assert [Trial(**row) for row in found["trials"]] == list(results.trials)
    assert [Check(**row) for row in found["checks"]] == list(results.checks)
    assert found["provenance"] == results.provenance
    assert found["arms"][0]["declared"] == {"model.position": "learned"}


# --- the numbers


def test_the_table_of_differences_is_scipys_paired_test() -> None:
    results = fake()
    loss = {(row.arm, row.seed): row.value for row in results.measurements if row.measure == "test_loss"}
    truth = stats.ttest_rel([loss["nope", seed] for seed in SEEDS[:4]], [loss["learned", seed] for seed in SEEDS[:4]])
    low, high = truth.confidence_interval(0.95)
    row = row_of(table_of(results, "Test loss: differences to learned"), "nope")
    assert row[1] == "4"
    inside = [float(bound.replace("−", "-")) for bound in row[4].strip("[]").split(", ")]
    assert inside == pytest.approx([low, high], abs=1e-5)
    assert row[-1] == "higher than learned"


def test_every_table_of_differences_has_n_interval_adjusted_p_and_what_could_be_shown() -> None:
    blocks = [block for section in compose(fake()).sections for block in section.blocks]
    tables = [block for block in blocks if isinstance(block, Table) and "differences" in block.title]
    assert len(tables) > 8
    for table in tables:
        assert {"n", "95 % interval", "Holm p", "could show", "verdict"} <= set(table.columns)
        assert "80 % power" in table.note


def test_a_diverged_arm_has_its_mean_over_the_rest_and_no_interval() -> None:
    row = row_of(table_of(fake(), "Test loss: differences to learned"), "lost")
    assert row[1] == "4"
    assert row[4:] == ["–", "–", "–", "–", "1 of 5 diverged"]
    assert row_of(table_of(fake(), "Loss"), "lost")[1].endswith("(4 of 5)")


def test_a_diverged_run_is_not_counted_even_where_it_left_a_number() -> None:
    results = fake()
    left = Measurement("lost", 2, "test_loss", 999.0)
    assert row_of(table_of(results._replace(measurements=(*results.measurements, left)), "Loss"), "lost") == row_of(
        table_of(results, "Loss"), "lost"
    )


def test_an_arm_shares_the_fate_of_the_weights_it_takes() -> None:
    results = fake()._replace(diverged=(Diverged("rope", 1, "inf"),))
    verdicts = {
        found.arm: found.verdict for found in to_reference(Values(results), "", "same_targets_loss", length=128).found
    }
    assert verdicts["rope"] == verdicts["rope-yarn"] == "1 of 5 diverged"


def test_a_run_that_diverged_on_a_task_leaves_the_others_alone() -> None:
    results = fake()._replace(diverged=(Diverged("rope", 1, "inf", task="copy"),))
    found = to_reference(Values(results), "", "test_loss").found
    assert next(each for each in found if each.arm == "rope").verdict == "lower than learned"
    found = to_reference(Values(results), "", "task_exact_match", task="copy", length=16).found
    assert next(each for each in found if each.arm == "rope").verdict == "1 of 5 diverged"


def test_beyond_a_table_the_cell_says_undefined_and_there_is_no_difference() -> None:
    results = fake()
    assert row_of(table_of(results, "Loss on the same targets by length"), "learned")[2:] == ["undefined"] * 3
    said = difference_table(to_reference(Values(results), "Loss", "same_targets_loss", length=512))
    assert said == Words(
        "Loss: differences to learned: learned is undefined there, so there is no difference to it.", "quiet"
    )


def test_an_arm_that_is_undefined_is_said_to_be_so_beside_the_others() -> None:
    results = fake()._replace(reference="rope")
    outcome = to_reference(Values(results), "Loss", "same_targets_loss", length=512)
    assert outcome.undefined == ("learned",)
    assert "undefined: learned" in told(outcome)
    table = difference_table(outcome)
    assert isinstance(table, Table)
    assert row_of(table, "learned")[-1] == "undefined"


def test_words_count_only_what_is_tested() -> None:
    said = told(to_reference(Values(fake()), "Test loss", "test_loss"))
    assert said.startswith("Test loss, against learned (3 tested): lower than learned: rope (−0.2")
    assert "1 of 5 diverged: lost" in said
    assert "not measured: rope-yarn" in said
    assert told(to_reference(Values(fake()), "Copy", "task_exact_match", task="copy", length=8)).startswith(
        "Copy, against learned (0 tested): exactly equal: rope (both 1.000), alibi (both 1.000), nope (both 1.000)"
    )


def test_one_seed_is_reported_without_a_verdict() -> None:
    results = fake()
    one = results._replace(
        measurements=tuple(row for row in results.measurements if row.seed == 0),
        arms=tuple(each._replace(seeds=(0,)) for each in results.arms),
    )
    said = told(to_reference(Values(one), "Test loss", "test_loss"))
    assert "one seed: no verdict" in said
    assert "lower" not in said
    assert "One run an arm shows no difference" in markdown(compose(one))


def test_tokens_to_the_references_final_loss_are_paired_by_seed() -> None:
    results = fake()
    curves = [
        ("learned", 0, ((0, 6.0), (100, 4.0))),
        ("learned", 1, ((0, 6.0), (100, 3.0))),
        ("rope", 0, ((0, 6.0), (100, 2.0))),  # reaches 4 at 50
        ("rope", 1, ((0, 6.0), (100, 2.0))),  # reaches 3 at 75
        ("alibi", 0, ((0, 6.0), (100, 3.0))),
        ("alibi", 1, ((0, 6.0), (100, 3.5))),
        ("nope", 0, ((0, 6.0), (100, 5.0))),
    ]
    rows = tuple(
        Measurement(name, seed, "validation_curve", loss, x=x) for name, seed, curve in curves for x, loss in curve
    )
    table = table_of(results._replace(measurements=rows, diverged=()), "Loss")
    cells = {name: row_of(table, name)[-1] for name in (*LOSSES, "rope-yarn")}
    assert cells == {
        "learned": "100.0",
        "rope": "62.50",
        "alibi": "reached in 1 of 2",
        "nope": "not reached",
        "lost": "–",
        "rope-yarn": "as rope",
    }
    assert "decay of the learning rate" in table.note


def test_the_longer_context_is_used_where_the_loss_gets_below_the_control() -> None:
    blocks = [block for section in compose(fake()).sections for block in section.blocks]
    title = "Loss with windows of 1024 tokens: differences of each arm to its control"
    table = next(block for block in blocks if isinstance(block, Table) and block.title == title)
    verdicts = {row[0].text: row[-1].text for row in table.rows}
    assert verdicts == {
        "rope": "higher than its control",
        "alibi": "lower than its control",
        "nope": "higher than its control",
        "lost": "1 of 5 diverged",
        "learned": "undefined",
    }


def test_heads_are_averaged_within_a_seed_before_seeds_are() -> None:
    rows = [
        Measurement("rope", 0, "distance_share", value, layer=0, head=head) for head, value in enumerate((0.1, 0.3))
    ]
    rows += [Measurement("rope", 1, "distance_share", 0.8, layer=0, head=0)]
    results = fake()._replace(measurements=tuple(rows), diverged=())
    assert Values(results).mean("rope", "distance_share", layer=0) == pytest.approx(0.5)
    row = row_of(table_of(results, "Share of the scores' variance that distance explains, by layer"), "rope")
    assert row == ["rope", "0.5 ± 3.8 (0.3000 to 0.4500)"]  # t(1) = 12.706, sd = .4243


def test_each_layer_is_compared_with_the_one_below_by_scipys_paired_test() -> None:
    values = Values(fake())
    outcome = to_layer_below(values, "alibi", "Share", "distance_share")
    by_layer = [values.by_seed("alibi", "distance_share", layer=layer) for layer in range(LAYERS)]
    assert [each.arm for each in outcome.found] == ["layer 1", "layer 2"]
    for found, (below, here) in zip(outcome.found, pairwise(by_layer), strict=True):
        test = stats.ttest_rel([here[seed] for seed in SEEDS], [below[seed] for seed in SEEDS])
        assert found.p == pytest.approx(test.pvalue)
        assert found.difference == pytest.approx(np.mean([here[seed] - below[seed] for seed in SEEDS]))


def test_tables_by_layer_have_an_interval_over_seeds() -> None:
    values = Values(fake())
    table = next(
        block for block in inside(values).blocks if isinstance(block, Table) and block.title.startswith("Share of the")
    )
    cell = next(row for row in table.rows if row[0].text == "rope")[1].text
    of_seeds = [value for value in values.by_seed("rope", "distance_share", layer=0).values() if value is not None]
    low, high = stats.t.interval(0.95, len(SEEDS) - 1, np.mean(of_seeds), stats.sem(of_seeds))
    mean, half = re.match(r"([\d.]+) ± ([\d.]+) \(", cell).groups()  # type: ignore[union-attr]
    assert float(mean) == pytest.approx(np.mean(of_seeds), abs=0.006)
    assert float(half) == pytest.approx((high - low) / 2, abs=0.006)


def test_words_tell_every_length_of_a_task_and_what_equal_arms_have() -> None:
    text = markdown(compose(fake()))
    assert all(f"Exact match of copy at length {length}" in text for length in (8, 16, 32))
    assert "exactly equal: rope (both 0.000), alibi (both 0.000), nope (both 0.000)" in text


def test_of_many_lengths_the_trained_one_the_next_and_the_last_are_told_in_words() -> None:
    assert told_lengths([6, 12, 18, 24, 48], 12) == [6, 12, 18, 24, 48]
    assert told_lengths([2, 4, 8, 12, 13, 14, 24, 48], 12) == [12, 13, 48]
    assert told_lengths([2, 3, 4, 5, 6, 7, 8], 7) == [7, 8]
    assert told_lengths([1, 2, 3, 4, 5, 6, 7], None) == [1, 2, 3, 4, 5, 6, 7]


def test_the_chosen_cell_of_the_grid_is_marked_and_the_edge_is_warned_of() -> None:
    document = compose(fake())
    tuning = next(section for section in document.sections if section.title == "Tuning")
    table, warning = tuning.blocks
    assert isinstance(table, Table)
    assert row_of(table, "rope") == ["rope", "3.200", "✓ 3.100", "3.150"]
    assert row_of(table, "alibi") == ["alibi", "3.200", "✓ 3.100", "diverged"]
    assert isinstance(warning, Words)
    assert warning.text.startswith("nope: the best (optimizer.lr: 0.004) lies at the edge")


def test_each_task_has_a_grid_of_its_own() -> None:
    trials = [
        Trial("rope", {"optimizer.lr": rate}, 100, 1.0, task) for task in ("copy", "sort") for rate in (1e-3, 2e-3)
    ]
    chosen = {"copy": {"optimizer.lr": 1e-3}, "sort": {"optimizer.lr": 2e-3}}
    results = fake()._replace(trials=tuple(trials), arms=(arm("rope", settings=chosen),))
    assert row_of(table_of(results, "Task copy"), "rope") == ["rope", "✓ 1.000", "1.000"]
    assert row_of(table_of(results, "Task sort"), "rope") == ["rope", "1.000", "✓ 1.000"]


@pytest.mark.parametrize("measure", sorted({row.measure for row in fake().measurements} | {""}))
def test_a_report_with_one_measure_or_none_is_whole(measure: str) -> None:
    results = fake()
    few = results._replace(measurements=tuple(row for row in results.measurements if row.measure == measure))
    document = compose(few._replace(lengths=() if measure == "test_loss" else LENGTHS, diverged=()))
    assert all(section.blocks and section.title for section in document.sections)
    assert document.sections[0].title == "In words"


def test_an_experiment_of_which_nothing_is_done_has_a_report(tmp_path: Path) -> None:
    empty = fake()._replace(measurements=(), trials=(), diverged=(), checks=(), samples=(), provenance={}, notes=())
    write_report(empty, tmp_path)
    assert "Nothing is measured yet" in (tmp_path / "report.md").read_text()


def test_more_than_eight_arms_differ_by_their_dashes() -> None:
    from experiments.report.axes import PALETTE, colour, dashes

    looks = {(colour(i), dashes(i)) for i in range(3 * len(PALETTE))}
    assert len(looks) == 3 * len(PALETTE)


# --- how numbers are written


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.14159, "3.142"),
        (-0.0123456, "−0.01235"),
        (0.0, "0.000"),
        (3_686_400.0, "3,686,000"),
        (45_123.4, "45,120"),
        (9_999.9, "10,000"),
        (1.5e-9, "1.500e-09"),
        (2.0e30, "2.000e+30"),
        (None, "–"),
    ],
)
def test_numbers_have_about_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_differences_carry_their_sign_and_the_precision_of_their_interval() -> None:
    assert change(-0.27134) == "−0.2713"
    assert change(0.0001234, 0.25) == "+0.0001"
    assert change(-0.00000123, 0.25) == "0.0000"
    assert change(None) == "–"
    assert bounds(-0.29, 0.0012) == "[−0.2900, +0.0012]"
    assert bounds(0.0, 0.0) == "[0.000, 0.000]"
    assert bounds(None, None) == "–"


def test_an_interval_gives_its_mean_the_digits_that_it_has() -> None:
    assert give_or_take(0.29113, 0.0648) == "0.291 ± 0.065"
    assert give_or_take(-7.192e-06, 0.0002294) == "−0.00001 ± 0.00023"
    assert give_or_take(31.57, 12.3) == "32 ± 12"
    assert give_or_take(0.5, None) == give_or_take(0.5, 0.0) == "0.5000"


def test_small_p_values_and_great_perplexities_are_bounded() -> None:
    assert [chance_of(p) for p in (0.0004, 0.0312, 1.0, None)] == ["< 0.001", "0.031", "1.000", "–"]
    assert [chance_of(p) for p in (0.04999, 0.0501)] == ["0.04999", "0.05010"]  # the verdicts differ
    assert [perplexity(loss) for loss in (0.0, math.log(23.5), 1e6, None)] == ["1.000", "23.50", "over 1e300", "–"]


def test_settings_are_written_as_a_person_types_them() -> None:
    given = {"a": "rope", "b": None, "c": True, "d": 0.002, "e": {"kind": "yarn"}, "f": [1, 2]}
    assert settings(given) == "a: rope, b: none, c: true, d: 0.002, e: (kind: yarn), f: [1, 2]"
    assert settings({}) == "–"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.1, 3.47), (0.0, 3.7e6), (-0.02, 0.013), (2.9999, 3.0)])
def test_ticks_are_few_round_and_within_the_range(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 3 <= len(found) <= 8
    assert all(low - 1e-9 * abs(low) <= tick <= high + 1e-9 * abs(high) for tick in found)
    assert np.diff(found) == pytest.approx(found[1] - found[0])


def test_ticks_are_written_short() -> None:
    assert [tick_text(tick) for tick in (0.0, 0.05, 128, 20_000, 3e6, -0.5)] == [
        "0",
        "0.05",
        "128",
        "20k",
        "3M",
        "−0.5",
    ]
