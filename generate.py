"""Sample from a run: python generate.py runs/demo --prompt "def "

Standard output carries the text and nothing else; remarks and errors go to standard error. This file reads its
arguments without torch, so that `--help` and most errors are instant.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro
from pydantic import Field, model_validator

from model.errors import UserError
from model.position import PositionConfig
from model.position.config import SchemeConfig, refuse_changes_of_weights
from model.sampling_config import DecoderName, PastContext, Precision, SamplingSettings
from model.settings import Settings
from training.command_line import exit_on_user_error, parse, split_file
from training.config import load
from training.run_folder import checkpoint_folder
from training.settings_tree import build

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer
    from model.decoding.decoder import Decoder
    from model.sampling import Step
    from model.transformer import Transformer

Count = Annotated[int, Field(ge=1)]


class Source(Settings):
    """Which model continues which text."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, such as runs/demo, or the folder of one checkpoint."""
    checkpoint: str = "best"
    """Which of the run's checkpoints: best, last, or one by name, such as step-000500."""
    prompt: str = ""
    """Text to continue; empty: a new document."""
    prompt_file: str | None = None
    """File (UTF-8) that holds the text to continue."""
    interactive: bool = False
    """Continue each line of standard input, with the next seed each time. An empty line ends; Ctrl-C cuts a text."""


class GenerateArguments(SamplingSettings, Source):  # pydantic takes the fields of the last base first
    """Sample text from a run.

    What the scheme's settings allow to change after training goes by --position: --position.scaling.kind yarn
    --position.scaling.factor 4, --position.base 500000, --position.log-n, --position.beyond clamp.
    """

    max_new_tokens: Count = 256
    """Length of the new text, in tokens, where nothing ends it before."""
    samples: Count = 1
    """Texts to draw for a prompt, in one batch; a single one is written as it comes."""
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="STR")] = ()
    """End before this string, should the new text come to it; may be given several times."""
    past_context: PastContext = "stop"
    """Where a scheme has no more positions: stop, or read the last half of the context afresh (reread)."""
    cache: bool = True
    """Keep keys and values of what was read; without (--no-cache) the same text comes more slowly."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda, else mps, else cpu."""
    precision: Precision = "fp32"
    """Precision of the weights. On a CPU, bf16 and int8 (one scale a row) are faster with the native decoder."""
    decoder: DecoderName = "auto"
    """How new tokens are read; the text is the same up to rounding. model: as in training, the definition; eager: fewer
    operations; compiled: by torch.compile, after a long wait; native: a C++ kernel for the CPU, built once. auto:
    native where it is built or the text is long enough to pay for building it, else eager."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "GenerateArguments":
        if bool(self.prompt) + (self.prompt_file is not None) + self.interactive > 1:
            raise ValueError("prompt, prompt_file and interactive are three sources of one text: give one of them")
        if "" in self.stop:
            raise ValueError("stop: an empty string would end every text before it begins")
        return self


# --- From tokens to text ---


class StopStrings:
    """Cuts a text that comes in chunks before the first of some strings, wherever the chunks begin and end.

    The first is the one that is complete first; of two that end together, the longer one. The end of a chunk that may
    be the beginning of a stop string is held back until that is known.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = ""
        self.met = False

    def push(self, chunk: str) -> str:
        """Take in a chunk and return the text that is certain by now."""
        if self.met:
            return ""
        text = self.held + chunk
        ends = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        self.met = bool(ends)
        certain = min(ends)[1] if ends else len(text) - self.may_begin(text)
        self.held = "" if self.met else text[certain:]
        return text[:certain]

    def may_begin(self, text: str) -> int:
        """Return the length of the longest end of `text` that is the beginning of a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)

    def flush(self) -> str:
        """Return what was held back, now that nothing follows."""
        held, self.held = self.held, ""
        return held


class GrowingText:
    """One text: its prompt, then what the model adds; every method returns the next chunk of it."""

    def __init__(self, tokenizer: "Tokenizer", stops: Sequence[str]) -> None:
        self.decoder = tokenizer.stream_decoder()
        self.stops = StopStrings(stops)
        self.ended: str | None = None

    def begin(self, prompt: list[int]) -> str:
        """Return the prompt as the model reads it; a stop string in it ends nothing."""
        return self.decoder.push(prompt)

    def add(self, token: int | None, ended: str | None) -> str:
        """Add one token, or the end of the text."""
        if self.ended or token is None:
            return ""
        self.ended = ended
        # A token that marks the end of the document is no text.
        chunk = self.stops.push("" if ended == "stop" else self.decoder.push([token]))
        if ended:
            chunk += self.stops.push(self.decoder.flush()) + self.stops.flush()
        if self.stops.met:
            self.ended = "stop"
        return chunk


def grow(texts: list[GrowingText], steps: Iterable["Step"]) -> Iterator[list[str]]:
    """Return the chunk that each step adds to each text, until all texts have ended."""
    for step in steps:
        yield [text.add(*new) for text, new in zip(texts, zip(step.tokens, step.ended, strict=True), strict=True)]
        if all(text.ended for text in texts):
            return


# --- One prompt ---


@dataclass(frozen=True)
class Sampler:
    """A model with its tokenizer, and how to sample from it."""

    model: "Transformer"
    tokenizer: "Tokenizer"
    arguments: GenerateArguments
    decoder: "Decoder | None" = None

    def chunks(self, prompt: str, texts: list[GrowingText], seed: int) -> Iterator[list[str]]:
        """Return the chunks of one prompt's texts, the prompt itself first."""
        from model.sampling import generate

        ids = self.tokenizer.encode(prompt)
        # Every document of the corpus stands behind BOS, so its first words are learned behind BOS; BOS or EOS ends it.
        steps = generate(
            self.model,
            [[self.tokenizer.bos, *ids]] * len(texts),
            self.arguments.model_copy(update={"seed": seed}),
            self.arguments.max_new_tokens,
            stop_ids=(self.tokenizer.bos, self.tokenizer.eos),
            past_context=self.arguments.past_context,
            cache=self.arguments.cache,
            decoder=self.decoder,
        )
        self.remark_on_prompt(len(ids) + 1)
        yield [text.begin(ids) for text in texts]
        yield from grow(texts, steps)

    def write(self, prompt: str, seed: int) -> None:
        """Write the texts of one prompt: a single one as it comes, several one after the other."""
        texts = [GrowingText(self.tokenizer, self.arguments.stop) for _ in range(self.arguments.samples)]
        chunks = self.chunks(prompt, texts, seed)
        if len(texts) == 1:
            write_lines(chunk for (chunk,) in chunks)
        else:
            for number, parts in enumerate(zip(*chunks, strict=True), start=1):
                write_lines([f"--- sample {number} of {len(texts)} ---\n"])
                write_lines(parts)
        self.remark_on_end(texts)

    def remark_on_prompt(self, length: int) -> None:
        """Say what is not read of a prompt longer than the context."""
        limit = self.model.position.max_positions
        if limit is not None and length > limit:
            remark(f"the prompt has {length} tokens: only the last {max(1, limit // 2)} are read")

    def remark_on_end(self, texts: list[GrowingText]) -> None:
        """Say which texts could not go on."""
        cut = sum(text.ended == "context" for text in texts)
        if cut:
            which = "the text ends here" if len(texts) == 1 else f"{cut} of {len(texts)} texts end early"
            kind, limit = self.model.config.position.kind, self.model.position.max_positions
            remark(f"{which}: position {kind!r} is defined for {limit} positions; --past-context reread goes on")


def write_lines(chunks: Iterable[str]) -> None:
    """Write chunks as they come, and begin a new line behind the last one."""
    last = ""
    for chunk in chunks:
        last = chunk or last
        print(chunk, end="", flush=True)
    print(end="" if last.endswith("\n") else "\n", flush=True)


def remark(text: str) -> None:
    """Say something that is no part of the text."""
    print("note:", text, file=sys.stderr, flush=True)


# --- The command ---


class Request(NamedTuple):
    """What the command was asked for: its arguments, and the words that change the scheme's settings."""

    arguments: GenerateArguments
    position: list[str]


class PositionArguments(Settings):
    """The settings of the run's positional scheme."""

    position: PositionConfig
    """The scheme that the run was trained with."""


def read_arguments(words: Sequence[str]) -> Request:
    """Read and check the command line (UserError)."""
    refuse_broken_text(words, "argument")
    texts, rest = take_texts(words)
    position, rest = take_position(rest)
    given = parse(GenerateArguments, rest, prog="python generate.py")
    return Request(build(GenerateArguments, given.model_dump() | texts), position)


def take_position(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take `--position...` with the words behind it out of the arguments: what they mean depends on the run."""
    taken: list[str] = []
    rest: list[str] = []
    into = rest
    for word in words:
        if word.startswith("--"):
            into = taken if word.partition("=")[0].partition(".")[0] == "--position" else rest
        into.append(word)
    # The word that no flag of the scheme has a claim to is the run: `--position.log-n runs/demo`.
    run, taken = split_file(PositionArguments, taken)
    return taken, rest if run is None else [*rest, run]


def position_asked(folder: Path, words: list[str]) -> SchemeConfig | None:
    """Return the run's scheme with the asked changes; None where nothing is asked."""
    if not words:
        return None
    trained = load(folder / "config.yaml").model.position
    start = PositionArguments.model_construct(position=trained)
    asked = parse(PositionArguments, words, start, prog=f"python generate.py {folder}").position
    refuse_changes_of_weights(trained, asked)
    return asked


def take_texts(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Take the flags that hold text out of the arguments: their value may begin with a hyphen, and `--stop` repeats.

    The parser would read `--prompt "-- x"` as a flag without a value, and remember the last `--stop` alone.
    """
    values: dict[str, list[str]] = {"--prompt": [], "--stop": []}
    rest, waiting = [], iter(words)
    for word in waiting:
        flag, joined, value = word.partition("=")
        text = value if joined else next(waiting, None) if flag in values else None
        if flag in values and text is not None:
            values[flag].append(text)
        else:
            rest.append(word)  # a flag with nothing behind it is the parser's to explain
    return {"prompt": "".join(values["--prompt"][-1:]), "stop": tuple(values["--stop"])}, rest


def load_sampler(request: Request) -> Sampler:
    """Load the model that the arguments name; torch is imported here, once the arguments are known to be right."""
    arguments = request.arguments
    folder = checkpoint_folder(Path(arguments.run), arguments.checkpoint)
    position = position_asked(folder, request.position)

    from data.tokenizer import Tokenizer
    from model.checkpoint import load_model
    from model.decoding.choose import choose_decoder
    from training.hardware import choose_device

    loaded = load_model(folder, choose_device(arguments.device), position)
    # Without a cache there is no single token to read. How often a person at the keyboard will ask is not known.
    kind = arguments.decoder if arguments.cache else "model"
    asked = arguments.max_new_tokens * (20 if arguments.interactive else 1)
    reading = choose_decoder(loaded.model, kind, arguments.precision, arguments.samples, asked, remark)
    return Sampler(reading.model, Tokenizer.from_bytes(loaded.tokenizer), arguments, reading.decoder)


def read_text(path: Path) -> str:
    """Read a prompt from a file, with every byte of it."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not valid UTF-8; save the file as UTF-8") from None


def refuse_broken_text(words: Iterable[str], where: str) -> None:
    """Refuse text that came from bytes which are no UTF-8: Python keeps such a byte as a lone surrogate."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            shown = ascii(word) if len(word) <= 60 else f"{ascii(word)[:57]}..."
            raise UserError(f"{where} {shown}: character {error.start} is not valid UTF-8") from None


def converse(sampler: Sampler) -> None:
    """Continue every line of standard input, until one is empty."""
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # so that one wrong byte is one line
    for seed in count(sampler.arguments.seed):
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        prompt = sys.stdin.readline().removesuffix("\n")
        if not prompt:
            return
        try:
            refuse_broken_text([prompt], "prompt")
            sampler.write(prompt, seed)
        except UserError as error:  # one wrong line is no reason to leave
            print("error:", error, file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            write_lines([""])


@exit_on_user_error()
def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments, load the model, and write."""
    request = read_arguments(sys.argv[1:] if argv is None else argv)
    arguments = request.arguments
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack a character
    prompt = arguments.prompt if arguments.prompt_file is None else read_text(Path(arguments.prompt_file))
    sampler = load_sampler(request)
    if arguments.interactive:
        converse(sampler)
    else:
        sampler.write(prompt, arguments.seed)


if __name__ == "__main__":
    main()
