"""Which document goes into training, validation or test: decided by its content alone."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator

from data.corpus import Document
from model.errors import UserError

SPLITS = ("train", "validation", "test")
HELD_OUT = 0.05
# Below this number of documents a twentieth of them is too few to measure anything on, so they are cut into pieces.
FEW_DOCUMENTS = 100
SHORTEST_PIECE = 1024

DUPLICATES = "duplicates dropped"
CUT = "documents cut into pieces of {} characters or up to twice that"
REPEATED_PIECES = "repeated pieces dropped"

Unique = dict[str, Document]
"""Documents by the SHA-256 of their content."""


def content_hash(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def unique(documents: Iterable[Document], counts: Counter[str], phrase: str = DUPLICATES) -> Unique:
    """Keep the first document of each content, and count the others under `phrase`."""
    found: Unique = {}
    for document in documents:
        key = content_hash(document.text)
        counts[phrase] += key in found
        found.setdefault(key, document)
    return found


def enough_documents(documents: Unique, counts: Counter[str]) -> Unique:
    """Cut documents into pieces where they are few, so that one file alone can be split three ways too.

    A piece has about a hundredth of the whole text, at least 1024 characters, and ends where a line ends.
    """
    if len(documents) >= FEW_DOCUMENTS:
        return documents
    size = max(SHORTEST_PIECE, sum(len(document.text) for document in documents.values()) // FEW_DOCUMENTS)
    cut = {key: list(pieces(document.text, size)) for key, document in documents.items()}
    counts[CUT.format(size)] += sum(len(texts) > 1 for texts in cut.values())
    named = (
        Document(f"{documents[key].name}#{number}" if len(texts) > 1 else documents[key].name, text)
        for key, texts in cut.items()
        for number, text in enumerate(texts)
    )
    return unique(named, counts, REPEATED_PIECES)


def pieces(text: str, size: int) -> Iterator[str]:
    """Cut a text after the first line end past `size` characters; after a space, or anywhere, where lines are long."""
    start = 0
    while start < len(text):
        end = _cut_after("\n", text, start + size, size) or _cut_after(" ", text, start + size, size) or start + size
        yield text[start:end]
        start = end


def _cut_after(mark: str, text: str, end: int, reach: int) -> int:
    return text.find(mark, end - 1, end + reach) + 1  # 0: there is none within reach


def split_by_content(documents: Unique) -> dict[str, Unique]:
    """Split documents 90/5/5 by the size of their hash, at least one each: the order they come in changes nothing.

    A document stays in its split when others are added, so a model never trains on what an earlier one was tested on.
    UserError: there are fewer than three.
    """
    if len(documents) < len(SPLITS):
        raise UserError(
            f"the corpus has {len(documents)} different documents or pieces, and train, validation and test need "
            "one each: bring more text"
        )
    order = sorted(documents)
    test = _between(1, sum(_share(key) < HELD_OUT for key in order), len(order) - 2)
    validation = _between(1, sum(_share(key) < 2 * HELD_OUT for key in order) - test, len(order) - test - 1)
    parts = order[test + validation :], order[test : test + validation], order[:test]
    return {name: {key: documents[key] for key in keys} for name, keys in zip(SPLITS, parts, strict=True)}


def _between(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))


def _share(key: str) -> float:
    return int(key[:13], 16) / 16**13
