"""The report of an experiment: one folder that opens without network."""

from pathlib import Path

from experiments.report import record, sections
from experiments.report.document import Chart, Document, HeatMap
from experiments.report.files import csv_text, json_text
from experiments.report.markdown import markdown
from experiments.report.page import page
from experiments.report.plots import png
from experiments.report.values import Values
from experiments.report.words import in_words
from experiments.results import Results
from model.durable import write_bytes, write_text


def write_report(results: Results, folder: Path) -> None:
    """Write report.html, report.md, results.csv, results.json and a PNG a plot."""
    folder.mkdir(parents=True, exist_ok=True)
    document = compose(results)
    for block in drawings(document):
        write_bytes(folder / f"{block.name}.png", png(block))
    write_text(folder / "results.csv", csv_text(results))
    write_text(folder / "results.json", json_text(results))
    write_text(folder / "report.md", markdown(document))
    write_text(folder / "report.html", page(document))


def compose(results: Results) -> Document:
    """Put the sections in order, and leave out those that have nothing to show."""
    values = Values(results)
    every = (
        in_words(values),
        sections.arms(values),
        sections.training_length(values),
        sections.speed(values),
        sections.lengths(values),
        *sections.tasks(values),
        sections.inside(values),
        record.samples(results),
        record.fairness(results),
        record.tuning(results),
        record.gaps(results),
        record.provenance(results),
    )
    return Document(results.title, results.question, tuple(section for section in every if section.blocks))


def drawings(document: Document) -> list[Chart | HeatMap]:
    """Return the charts and heat maps of a document."""
    blocks = (block for section in document.sections for block in section.blocks)
    return [block for block in blocks if isinstance(block, Chart | HeatMap)]
