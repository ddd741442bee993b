"""Which document goes into training, validation or test: decided by its content alone."""

from collections.abc import Iterator

from model.errors import UserError

SPLITS = ("train", "validation", "test")
HELD_OUT = 0.05
# Below this number of documents a twentieth of them is too few to measure anything on, so they are cut into pieces.
FEW_DOCUMENTS = 100
SHORTEST_PIECE = 1024


def pieces(text: str, size: int) -> Iterator[str]:
    """Cut a text after the first line end past `size` characters; after a space, or anywhere, where lines are long."""
    start = 0
    while start < len(text):
        end = _cut_after("\n", text, start + size, size) or _cut_after(" ", text, start + size, size) or start + size
        yield text[start:end]
        start = end


def _cut_after(mark: str, text: str, end: int, reach: int) -> int:
    return text.find(mark, end - 1, end + reach) + 1  # 0: there is none within reach


def size_of_pieces(characters: int) -> int:
    """Return how long the pieces of a few documents are: a hundredth of their text, and at least 1024 characters."""
    return max(SHORTEST_PIECE, characters // FEW_DOCUMENTS)


def ranges(documents: int, below_once: int, below_twice: int) -> dict[str, range]:
    """Return which places in the order of hashes each split holds: test first, then validation, then train.

    `below_once` and `below_twice` count the documents whose hash lies in the first 5 and 10 % of all hashes. So splits
    are 90/5/5, at least one document each, and a document stays in its split when others are added: a model never
    trains on what an earlier one was tested on.
    UserError: there are fewer than three documents.
    """
    if documents < len(SPLITS):
        raise UserError(
            f"the corpus has {documents} different documents or pieces, and train, validation and test need "
            "one each: bring more text"
        )
    test = _between(1, below_once, documents - 2)
    held_out = test + _between(1, below_twice - test, documents - test - 1)
    return {"train": range(held_out, documents), "validation": range(test, held_out), "test": range(test)}


def _between(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))


def shares(tokens: int) -> dict[str, int]:
    """Share a number of tokens out over the splits, 90/5/5."""
    held_out = int(tokens * HELD_OUT)
    return {"train": tokens - 2 * held_out, "validation": held_out, "test": held_out}
