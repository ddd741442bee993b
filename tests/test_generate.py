"""The sampling command: from a run folder and a prompt to text on the terminal."""

import io
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import DataConfig
from data.tokenizer import Tokenizer
from generate import GrowingText, StopStrings, main, read_arguments, take_texts
from model.checkpoint import load_model, save_model
from model.decoding import build
from model.sampling import Reader
from tests.conftest import loud_model, tiny_config
from training.config import Config, to_yaml
from training.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
VOCAB, CONTEXT = 300, 24
TEXT = "def hello(world):\n    return 'the cat sat on the mat: 你好 🎉'\n\n\nclass Cat:\n    pass\n"
ODD_PROMPTS = [
    "",
    " ",
    "  two  spaces ",
    "\t\n\r\n",
    "\u2581",
    "naïve 🎉 你好",
    "a\0b",
    "--temperature",
    "</s><s>",
    "x" * 900,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT], VOCAB)


def make_run(path: Path, tokenizer: Tokenizer, scheme: str = "rope", end: bool = False) -> Path:
    """Write a run folder with one checkpoint of a loud model; with `end`, its text ends within 9 tokens."""
    data = DataConfig(vocab_size=VOCAB)
    config = Config(data=data, model=tiny_config(scheme, vocab_size=VOCAB, context=CONTEXT, tie_embeddings=False))
    model = loud_model(config.model, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[[tokenizer.bos, tokenizer.eos]] = 0  # among large logits, never drawn
        if end:
            model.lm_head.weight[tokenizer.bos] = 1.01 * model.lm_head.weight[greedy(model, tokenizer, "def ", 9)[-1]]
    run = RunFolder(path)
    run.checkpoints.mkdir(parents=True)
    text = to_yaml(config)
    save_model(run.step_folder(500), model, text, tokenizer.model_bytes)
    run.config.write_text(text)
    run.point("last", 500)
    run.point("best", 500)
    return path


def greedy(model, tokenizer: Tokenizer, prompt: str, count: int) -> list[int]:
    """The ids of a greedy continuation, by whole passes without a cache, up to the end of the document."""
    ids, new = [tokenizer.bos, *tokenizer.encode(prompt)], []
    for _ in range(count):
        with torch.no_grad():
            token = int(model(torch.tensor([ids + new]))[0, -1].argmax())
        if token in (tokenizer.bos, tokenizer.eos):
            break
        new.append(token)
    return new


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer) -> str:
    return str(make_run(tmp_path_factory.mktemp("runs") / "rope", tokenizer))


@pytest.fixture(scope="module")
def learned_run(tmp_path_factory, tokenizer) -> str:
    return str(make_run(tmp_path_factory.mktemp("runs") / "learned", tokenizer, "learned"))


@pytest.fixture
def command(capsys):
    """Run the command here; returns its exit status, its text and its remarks."""

    def call(*words: str) -> tuple[int, str, str]:
        status = 0
        try:
            main(words)
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call


def checkpoint(run: str) -> Path:
    return RunFolder(run).checkpoint("best")


def wanted(run: str, prompt: str, count: int) -> str:
    """The whole text of a greedy continuation, decoded at once."""
    loaded = load_model(checkpoint(run))
    tokenizer = Tokenizer.from_bytes(loaded.tokenizer)
    return tokenizer.decode(tokenizer.encode(prompt) + greedy(loaded.model, tokenizer, prompt, count))


def line(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


# --- Stop strings ---


def cut(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first; the longest of those that end there."""
    for end in range(len(text) + 1):
        here = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if here:
            return text[: end - max(here)]
    return text


@given(
    chunks=st.lists(st.text("ab\n", max_size=4)), stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)
)
@settings(max_examples=200, deadline=None)
def test_a_stream_with_stop_strings_equals_the_whole_text_cut(chunks, stops):
    stream = StopStrings(stops)
    assert "".join(map(stream.push, chunks)) + stream.flush() == cut("".join(chunks), stops)
    assert stream.met == (cut("".join(chunks), stops) != "".join(chunks))


def test_only_a_possible_beginning_of_a_stop_string_is_held_back():
    stream = StopStrings(["###", "\n\n"])
    assert [stream.push(chunk) for chunk in ["ab#", "c", "d##", "e\n", "f\n", "\ng"]] == [
        "ab",
        "#c",
        "d",
        "##e",
        "\nf",
        "",
    ]
    assert stream.met


@given(
    prompt=st.text(max_size=8),
    new=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    stops=st.lists(st.sampled_from(["a", "t", "\ufffd", "the", "\n "]), max_size=2),
    end=st.sampled_from(["length", "stop"]),
)
@settings(max_examples=100, deadline=None)
def test_chunks_put_together_are_the_decoded_whole_cut(tokenizer, prompt, new, stops, end):
    text = GrowingText(tokenizer, stops)
    ended = [None] * (len(new) - 1) + [end]
    chunks = [text.begin(tokenizer.encode(prompt)), *map(text.add, new, ended)]
    document = new[:-1] if end == "stop" else new  # the last one only marks the end
    assert "".join(chunks) == prompt + cut(tokenizer.decode(document), stops)


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    text = GrowingText(tokenizer, [])
    ids = tokenizer.encode("\N{OLD PERSIAN SIGN A}")
    assert [text.add(token, None) for token in ids] == [""] * 3 + ["\N{OLD PERSIAN SIGN A}"]


def test_an_unfinished_character_is_not_lost_at_the_end(tokenizer):
    text = GrowingText(tokenizer, [])
    first, *_ = tokenizer.encode("\N{OLD PERSIAN SIGN A}")
    assert text.add(first, "length") == "\ufffd"


# --- Arguments ---


def test_text_on_the_command_line_may_look_like_a_flag():
    arguments = read_arguments(["--stop", "--", "RUN", "--prompt", "--help", "--stop=-x", "--top-k", "3"]).arguments
    assert (arguments.prompt, arguments.stop, arguments.run, arguments.top_k) == ("--help", ("--", "-x"), "RUN", 3)


def test_a_text_flag_with_nothing_behind_it_is_left_to_the_parser():
    assert take_texts(["run", "--prompt"]) == ({"prompt": "", "stop": ()}, ["run", "--prompt"])


def test_help_and_mistakes_do_not_wait_for_torch(tmp_path):
    code = """
import sys, generate
for words in ["--help"], [], ["no/run"], ["x", "--temperature", "-1"], ["x", "--stop", ""], ["x", "--nonsense"]:
    try:
        generate.main(words)
    except SystemExit as end:
        assert end.code == (0 if "--help" in words else 2), (words, end.code)
    else:
        raise AssertionError(words)
assert not {"torch", "numpy", "sentencepiece"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


# --- One prompt ---


@pytest.mark.parametrize("cache", ["--cache", "--no-cache"])
def test_greedy_text_equals_passes_without_a_cache(command, run, cache):
    words = ("--prompt", "def ", "--temperature", "0", "--max-new-tokens", "40", cache)
    assert command(run, *words) == (0, line(wanted(run, "def ", 40)), "")


def test_cache_and_no_cache_are_told_to_the_reader(command, run, monkeypatch):
    told = []

    class Spy(Reader):
        def __init__(self, model, length, keep, decoder):
            told.append(keep)
            super().__init__(model, length, keep, decoder)

    monkeypatch.setattr("model.sampling.Reader", Spy)
    for words in [], ["--cache"], ["--no-cache"]:
        command(run, "--max-new-tokens", "1", *words)
    assert told == [True, True, False]


@pytest.mark.parametrize("prompt", ODD_PROMPTS)
def test_an_odd_prompt_comes_back_as_it_is_with_a_continuation(command, run, prompt):
    status, text, remarks = command(run, "--prompt", prompt, "--max-new-tokens", "5", "--temperature", "0")
    assert (status, text, remarks) == (0, line(wanted(run, prompt, 5)), "")
    assert text.startswith(prompt)


def test_a_prompt_may_come_from_a_file_with_every_byte_of_it(command, run, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes("a\r\n\té\n".encode())
    status, text, _ = command(run, "--prompt-file", str(path), "--max-new-tokens", "3")
    assert status == 0
    assert text.startswith("a\r\n\té\n")


def test_a_checkpoint_is_found_by_name_and_by_its_own_folder(command, run):
    words = ("--prompt", "def ", "--max-new-tokens", "5")
    once = command(run, *words)
    for other in (run, "--checkpoint", "step-000500"), (run, "--checkpoint", "last"), (str(checkpoint(run)),):
        assert command(*other, *words) == once


def test_seeds_decide_the_text(command, run):
    texts = [command(run, "--seed", seed, "--temperature", "3", "--max-new-tokens", "9")[1] for seed in ("0", "0", "1")]
    assert texts[0] == texts[1] != texts[2]


def test_several_samples_stand_apart_and_differ(command, run):
    hot = ("--temperature", "3", "--prompt", "def ", "--max-new-tokens", "12")
    _, one, _ = command(run, *hot)
    _, text, _ = command(run, *hot, "--samples", "3")
    _, *samples = text.split("--- sample ")
    assert [sample[:10] for sample in samples] == ["1 of 3 ---", "2 of 3 ---", "3 of 3 ---"]
    assert samples[0][11:] == one
    assert len({sample[10:] for sample in samples}) == 3
    assert all(sample[11:].startswith("def ") for sample in samples)


def test_text_ends_before_a_stop_string_also_within_and_across_tokens(command, run):
    words = ("--prompt", "def ", "--temperature", "0", "--max-new-tokens", "40")
    whole = wanted(run, "def ", 40)
    for start, end in (10, 11), (9, 14), (20, 28):
        stop = whole[start:end]
        status, text, _ = command(run, *words, "--stop", "no such text", "--stop", stop)
        assert (status, text) == (0, line("def " + cut(whole[4:], [stop])))


def test_a_stop_string_in_the_prompt_ends_nothing(command, run):
    words = ("--temperature", "0", "--max-new-tokens", "5")
    assert command(run, "--prompt", "###", *words, "--stop", "###")[1] == command(run, "--prompt", "###", *words)[1]


def test_text_ends_where_the_document_ends(command, tmp_path, tokenizer):
    run = str(make_run(tmp_path / "run", tokenizer, end=True))
    _, text, _ = command(run, "--prompt", "def ", "--temperature", "0", "--max-new-tokens", "40")
    assert text == line(wanted(run, "def ", 40))
    loaded = load_model(checkpoint(run))
    assert len(greedy(loaded.model, tokenizer, "def ", 40)) < 9


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("decoder", ["auto", "model", "eager"])
def test_weights_of_fewer_bits_are_a_choice(command, run, precision, decoder):
    words = ("--precision", precision, "--decoder", decoder, "--prompt", "def ", "--max-new-tokens", "5")
    status, text, remarks = command(run, *words)
    assert (status, remarks) == (0, "")
    assert text.startswith("def ")


@pytest.mark.parametrize("decoder", ["auto", "model", "eager"])
def test_every_decoder_writes_the_same_greedy_text(command, run, learned_run, decoder):
    words = ("--prompt", "def ", "--temperature", "0", "--max-new-tokens", "40", "--decoder", decoder)
    assert command(run, *words) == (0, line(wanted(run, "def ", 40)), "")
    several = command(learned_run, *words, "--samples", "3", "--past-context", "reread")
    assert several == command(learned_run, *words[:-1], "model", "--samples", "3", "--past-context", "reread")


def test_a_decoder_that_cannot_be_had_is_replaced_and_said_in_one_line(command, run, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no/such/compiler")
    build.load.cache_clear()
    words = ("--prompt", "def ", "--temperature", "0", "--max-new-tokens", "9")
    status, text, remarks = command(run, *words, "--decoder", "native")
    assert (status, text) == (0, line(wanted(run, "def ", 9)))
    assert remarks == "note: no native decoder, the eager one goes on: there is no C++ compiler (no/such/compiler)\n"


# --- Past the context ---


def test_a_limited_scheme_ends_in_one_line_or_goes_on_by_reading_again(command, learned_run):
    words = (learned_run, "--prompt", "def ", "--max-new-tokens", "60", "--temperature", "0")
    for cache in ("--cache", "--no-cache"):
        status, short, remarks = command(*words, cache)
        assert status == 0
        assert remarks.count("\n") == 1
        assert "'learned' is defined for 24 positions" in remarks
        status, long, remarks = command(*words, cache, "--past-context", "reread")
        assert (status, remarks) == (0, "")
        assert len(long) > len(short)
        assert long.startswith(short.removesuffix("\n"))
    assert command(*words, "--past-context", "reread")[1] == long


def test_a_limited_scheme_refuses_a_longer_prompt_or_reads_its_end(command, learned_run):
    words = (learned_run, "--prompt", "word " * 40, "--max-new-tokens", "5")
    status, text, remarks = command(*words)
    assert (status, text, remarks.count("\n")) == (2, "", 1)
    status, text, remarks = command(*words, "--past-context", "reread")
    assert status == 0
    assert text.startswith("word " * 40)
    assert "only the last 12 are read" in remarks


# --- Wrong input ---


def damaged(run: str, tmp_path: Path, name: str, change) -> str:
    """A copy of a run, one file of whose checkpoint has changed."""
    source, target = checkpoint(run), tmp_path / "damaged"
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    change(target / name)
    return str(target)


@pytest.mark.parametrize("name", ["model.safetensors", "config.yaml", "tokenizer.model", "manifest.json"])
@pytest.mark.parametrize(
    "change",
    [
        Path.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-7]),
        lambda path: path.write_bytes(path.read_bytes()[:40] + b"\xff" + path.read_bytes()[41:]),
    ],
    ids=["missing", "empty", "short", "changed"],
)
def test_a_damaged_checkpoint_is_one_line(command, run, tmp_path, name, change):
    status, text, remarks = command(damaged(run, tmp_path, name, change))
    assert (status, text, remarks.count("\n")) == (2, "", 1)
    assert "damaged" in remarks


def test_a_run_without_checkpoint_is_one_line(command, tmp_path):
    (tmp_path / "config.yaml").write_text("model: {}\n")
    status, text, remarks = command(str(tmp_path))
    assert (status, text, remarks.count("\n")) == (2, "", 1)
    assert "none yet" in remarks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--checkpoint", "step-000007"], "step-000500"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-k", "-1"], "top_k"),
        (["--top-p", "2"], "top_p"),
        (["--min-p", "-0.5"], "min_p"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--samples", "0"], "samples"),
        (["--stop", ""], "stop"),
        (["--prompt", "caf\udce9"], "'caf\\udce9': character 3 is not valid UTF-8"),
        (["--prompt-file", "no/such/file"], "no/such/file"),
        (["--prompt-file", "."], "Is a directory"),
        (["--prompt", "x", "--interactive"], "give one of them"),
    ],
)
def test_a_mistake_is_one_line(command, run, words, said):
    status, text, remarks = command(run, *words)
    assert (status, text, remarks.count("\n")) == (2, "", 1)
    assert said in remarks


def test_a_prompt_file_that_is_no_utf8_is_one_line(command, run, tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    status, text, remarks = command(run, "--prompt-file", str(path))
    assert (status, text, remarks.count("\n")) == (2, "", 1)
    assert "latin.txt: byte 3" in remarks


# --- Interactive ---


def typed(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


@pytest.mark.parametrize("end", [b"", b"\n\nignored\n"])
def test_every_line_is_a_prompt_with_the_next_seed_until_one_is_empty(command, run, monkeypatch, end):
    hot = ("--temperature", "3", "--max-new-tokens", "6")
    alone = [command(run, "--prompt", "def ", "--seed", seed, *hot)[1] for seed in ("4", "5")]
    typed(monkeypatch, b"def \ndef " + end)
    assert command(run, "--interactive", "--seed", "4", *hot) == (0, "".join(alone), "")


def test_a_line_that_cannot_be_read_is_reported_and_the_next_one_continued(command, learned_run, monkeypatch):
    typed(monkeypatch, b"caf\xe9\n" + b"word " * 40 + b"\ndef \n")
    status, text, remarks = command(learned_run, "--interactive", "--max-new-tokens", "3")
    assert status == 0
    assert text.startswith("def ")
    assert [remark.split(":")[0] for remark in remarks.splitlines()] == ["error", "error"]


def read_until(stream, wanted: bytes, length: int) -> None:
    """Read a pipe that a running command writes to; a text that never comes fails the test."""
    seen, deadline = b"", time.monotonic() + 60
    while wanted not in seen or len(seen) < length:
        assert select.select([stream], [], [], max(0, deadline - time.monotonic()))[0], seen
        chunk = os.read(stream.fileno(), 100)
        assert chunk, seen
        seen += chunk


def test_ctrl_c_cuts_a_text_and_gives_the_prompt_back(run):
    words = [sys.executable, "generate.py", run, "--interactive", "--max-new-tokens", "1000000", "--decoder", "eager"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, cwd=ROOT, **pipes) as process:
        try:
            for prompt in (b"first ", b"second "):
                process.stdin.write(prompt + b"\n")
                process.stdin.flush()
                read_until(process.stdout, prompt, 100)  # it streams: text is here long before the end
                process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, b"")


def test_a_reader_that_leaves_ends_the_command_quietly(run):
    words = [sys.executable, "generate.py", run, "--max-new-tokens", "1000000", "--decoder", "eager"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            read_until(process.stdout, b"", 10)
            process.stdout.close()
            assert process.stderr.read() == b""
            process.wait(60)
        finally:
            process.kill()
