"""The report as one HTML page that needs nothing but itself."""

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from experiments.report.document import Block, Chart, Document
from experiments.report.svg import chart_svg, heat_svg, key_svg


def page(document: Document) -> str:
    """Write a document; all text is escaped by the template."""
    here = files("experiments.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((here / "page.html.j2").read_text(encoding="utf-8"))
    css = Markup((here / "page.css").read_text(encoding="utf-8"))
    return template.render(document=document, css=css, kind=_kind, drawn=_drawn, key=_key, list=list) + "\n"


def _kind(block: Block) -> str:
    return type(block).__name__


def _drawn(block: Any) -> Markup:
    # Markup: what svg.py returns is escaped there.
    return Markup(chart_svg(block) if isinstance(block, Chart) else heat_svg(block))


def _key(index: int) -> Markup:
    return Markup(key_svg(index))
