"""The report as Markdown: the same tables and words, and the plots as links."""

import re

from experiments.report.document import Block, Cell, Chart, Document, HeatMap, Items, Section, SideBySide, Table, Words


def markdown(document: Document) -> str:
    """Write a document."""
    parts = [f"# {_escaped(document.title)}", _escaped(document.question)]
    parts += [part for section in document.sections for part in _section(section)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(section: Section) -> list[str]:
    return [f"## {_escaped(section.title)}", *(part for block in section.blocks for part in _block(block))]


def _block(block: Block) -> list[str]:
    match block:
        case Table():
            return _table(block)
        case Words():
            return [_marked(block.text, block.mark)]
        case Items():
            return ["\n".join(f"- {_marked(item, block.mark)}" for item in block.items)]
        case Chart() | HeatMap():
            return [f"![{_escaped(block.title)}]({block.name}.png)", _escaped(block.note)]
        case SideBySide():
            return _samples(block)


def _table(table: Table) -> list[str]:
    head = [f"**{_escaped(table.title)}**"] if table.title else []
    lines = [
        _row([_escaped(name) for name in table.columns]),
        _row([":---" if table.is_words(i) else "---:" for i in range(len(table.columns))]),
        *(_row([_cell(cell) for cell in row]) for row in table.rows),
    ]
    return [*head, "\n".join(lines), _escaped(table.note)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    return _marked(cell.text, cell.mark)


def _marked(text: str, mark: str) -> str:
    bold = text and ("warning" in mark or "chosen" in mark)
    return f"**{_escaped(text)}**" if bold else _escaped(text)


def _samples(block: SideBySide) -> list[str]:
    head = f"Prompt, seed {block.seed}:"
    written = [part for each in block.writings for part in (f"**{_escaped(each.arm)}**", _fenced(each.text))]
    return [head, _fenced(block.prompt), *written]


def _fenced(text: str) -> str:
    """Put text between fences longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _escaped(text: str) -> str:
    """Keep text from being read as Markdown or HTML, on one line."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*|])", r"\\\1", " ".join(text.split()))
