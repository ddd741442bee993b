"""Where the text comes from and how it becomes tokens. Torch-free."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from model.settings import A_WORD_IS_A_KIND, Settings

Count = Annotated[int, Field(ge=1)]


def _is_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"'{text}' is no regular expression: {error}") from error
    return text


class StdlibConfig(Settings):
    """The source of the interpreter's own standard library: real text that every Python brings along."""

    kind: Literal["stdlib"] = "stdlib"
    """Name of the kind of corpus."""


class _Limited(Settings):
    """How much of a corpus is read; of several limits the first that is reached counts."""

    limit: Count | None = None
    """Read at most this many documents."""
    limit_bytes: Count | None = None
    """Read at most this many bytes of text (UTF-8)."""
    limit_tokens: Count | None = None
    """Keep at most this many tokens, shared out over the splits; 8 characters a token are read to choose from."""


class FilesConfig(_Limited):
    """Local files: each .txt, .md and .py is a document; each row of a .jsonl, .csv and .parquet is one."""

    kind: Literal["files"] = "files"
    """Name of the kind of corpus."""
    paths: tuple[str, ...] = ()
    """Files, folders or globs; their order changes nothing."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """Of .txt, .md and .py. strict: a byte that is no UTF-8 stops with file and offset; replace: U+FFFD, counted."""
    text_column: str | None = None
    """Column of .jsonl, .csv and .parquet with the text; none: text, content, story, or the only one of strings."""


class HubConfig(_Limited):
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
    """Column that holds the text; none: text, content, story, or the only one of strings."""
    document_start: Annotated[str, AfterValidator(_is_pattern)] | None = None
    """Where rows are lines: a regular expression for the first line of a document; none: each row is a document."""
    streaming: bool = False
    """Read over the network without a copy on the disk; with a limit it is always read so."""


CorpusConfig = Annotated[StdlibConfig | FilesConfig | HubConfig, Field(discriminator="kind"), A_WORD_IS_A_KIND]


class DataConfig(Settings):
    """Where the text comes from and how it becomes tokens."""

    corpus: CorpusConfig = StdlibConfig()
    """Kind of corpus: stdlib, files or hub."""
    vocab_size: Annotated[int, Field(ge=260)] = 2048
    """Size of the SentencePiece vocabulary to train (256 bytes and 3 control symbols are always in it)."""
    folder: str = "prepared"
    """Folder that holds prepared data, one sub-folder a corpus and vocabulary."""
    processes: Count | None = None
    """Processes that turn text into tokens; changes no token; none: one a core, at most 16."""
