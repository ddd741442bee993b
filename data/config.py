"""Where the text comes from and how it becomes tokens. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field

from model.settings import A_WORD_IS_A_KIND, Settings

Count = Annotated[int, Field(ge=1)]


class StdlibConfig(Settings):
    """The source of the interpreter's own standard library: real text that every Python brings along."""

    kind: Literal["stdlib"] = "stdlib"
    """Name of the kind of corpus."""


class FilesConfig(Settings):
    """Local files: .txt, .md and .py; each file is a document."""

    kind: Literal["files"] = "files"
    """Name of the kind of corpus."""
    paths: tuple[str, ...] = ()
    """Files, folders or globs."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """strict: a byte that is no UTF-8 stops with file and offset; replace: it becomes U+FFFD, and is counted."""


class HubConfig(Settings):
    """A data set that the `datasets` library loads by name; each row is a document."""

    kind: Literal["hub"] = "hub"
    """Name of the kind of corpus."""
    name: str = ""
    """Name of the data set, e.g. roneneldan/TinyStories."""
    subset: str | None = None
    """Name of its configuration, where it has several."""
    split: str = "train"
    """Split to read; train, validation and test are made from it here."""
    text_column: str | None = None
    """Column that holds the text; none: `text`, or the only column of strings."""
    limit: Count | None = None
    """Read at most this many documents."""


CorpusConfig = Annotated[StdlibConfig | FilesConfig | HubConfig, Field(discriminator="kind"), A_WORD_IS_A_KIND]


class DataConfig(Settings):
    """Where the text comes from and how it becomes tokens."""

    corpus: CorpusConfig = StdlibConfig()
    """Kind of corpus: stdlib, files or hub."""
    vocab_size: Annotated[int, Field(ge=260)] = 2048
    """Size of the SentencePiece vocabulary to train (256 bytes and 3 control symbols are always in it)."""
    folder: str = "prepared"
    """Folder that holds prepared data, one sub-folder a corpus and vocabulary."""
