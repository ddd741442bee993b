"""The tokenizer: every text comes back byte for byte, nothing is lost in training, streams equal the whole."""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.tokenizer import CUT_LINES, LONGEST_LINE, StreamDecoder, Tokenizer, training_lines
from model.errors import UserError

TEXT = """def area(width, height):
    \"\"\"Return the area; width and height are numbers.\"\"\"
    return width * height  # 12345

class Thing:
    def __init__(self, name):
        self.name = name
        self.names = [name for name in range(100)]
"""
TOKENIZER = Tokenizer.train([TEXT * 3, "the cat and the hat and the rat\n" * 5], 400)
VOCABULARY = TOKENIZER.vocab_size

any_text = st.text(st.characters(exclude_categories=["Cs"]))
any_ids = st.lists(st.integers(0, VOCABULARY - 1))
byte_ids = st.lists(st.sampled_from([*range(131, 259), 1, 0, 300]))  # bytes over 127 alone, mostly invalid


@settings(deadline=None)
@given(any_text)
@example("")
@example("  two\n\n\ttabs \r\n and  spaces  ")
@example("e\u0301 \ufb01 \ufeff \u00a0 \u2028 \ufffd 🎉 你好 \ue000 \ufdd0")
@example("\0\x01\x7f")
@example("<s>a</s><unk><0x0A>")
@example("▁ a▁▁b ▁")
@example("\u2585 \u2047 ")
def test_any_text_comes_back_byte_for_byte(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(deadline=None)
@given(any_text)
def test_the_bytes_of_the_ids_add_up_to_the_bytes_of_the_text(text: str) -> None:
    assert TOKENIZER.token_bytes()[TOKENIZER.encode(text)].sum() == len(text.encode())


@settings(deadline=None)
@given(any_text)
def test_sentencepiece_itself_gives_the_same_ids_and_text_where_it_can(text: str) -> None:
    text = text.replace("▁", "")
    processor = sentencepiece.SentencePieceProcessor(model_proto=TOKENIZER.model_bytes)
    assert TOKENIZER.encode(text) == processor.encode(text)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == processor.decode(processor.encode(text))


def test_control_symbols_stand_for_no_text() -> None:
    assert TOKENIZER.token_bytes()[:3].tolist() == [0, 0, 0]
    assert TOKENIZER.decode([1, *TOKENIZER.encode("a b"), 2, 0]) == "a b"


def test_the_names_of_control_symbols_in_a_text_are_plain_text() -> None:
    assert not {0, 1, 2} & set(TOKENIZER.encode("<unk><s></s>"))


def test_digits_are_split_and_nothing_is_put_before_a_text() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("12345")[:2]) == "12"
    assert TOKENIZER.encode("x") + TOKENIZER.encode("y") == TOKENIZER.encode("xy")


def test_half_a_surrogate_pair_is_refused_with_its_place() -> None:
    with pytest.raises(UserError, match=r"character 2 \(U\+D83C\)"):
        TOKENIZER.encode("a▁\ud83c")


@pytest.mark.parametrize("index", [-1, 400])
def test_an_id_outside_the_vocabulary_is_no_text(index: int) -> None:
    with pytest.raises(IndexError):
        TOKENIZER.decode([index])


def test_the_number_of_threads_changes_no_id() -> None:
    texts = [TEXT[start:] for start in range(40)]
    one, four = TOKENIZER.encode_batch(texts, 1), TOKENIZER.encode_batch(texts, 4)
    assert [ids.tolist() for ids in one] == [ids.tolist() for ids in four] == [TOKENIZER.encode(text) for text in texts]


# --- Streams ---------------------------------------------------------------------------------------------------------


def streamed(ids: list[int], size: int = 1) -> list[str]:
    decoder = StreamDecoder(TOKENIZER)
    chunks = [decoder.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    return [*chunks, decoder.flush()]


@settings(deadline=None)
@given(any_ids | byte_ids, st.integers(1, 5))
def test_the_chunks_of_a_stream_are_the_decoded_whole(ids: list[int], size: int) -> None:
    assert "".join(streamed(ids, size)) == TOKENIZER.decode(ids)


def test_a_stream_keeps_spaces_and_holds_back_unfinished_characters() -> None:
    chunks = streamed(TOKENIZER.encode("the cat 🎉 你"))
    assert "".join(chunks) == "the cat 🎉 你"
    assert "\ufffd" not in "".join(chunks)
    assert "🎉" in chunks


def test_what_never_becomes_a_character_is_flushed_as_a_replacement() -> None:
    assert streamed(TOKENIZER.encode("🎉")[:2]) == ["", "", "\ufffd"]


def test_a_token_costs_a_stream_the_same_however_long_the_text() -> None:
    read = []

    class Spy(Tokenizer):
        def to_bytes(self, ids: object) -> bytes:
            read.append(len(ids))  # type: ignore[arg-type]
            return super().to_bytes(ids)  # type: ignore[arg-type]

    decoder = StreamDecoder(Spy(TOKENIZER.model_bytes))
    read.clear()
    for index in range(300):
        decoder.push([index])
    assert read == [1] * 300


# --- Training --------------------------------------------------------------------------------------------------------


def test_the_same_texts_give_the_same_file() -> None:
    again = Tokenizer.train([TEXT * 3, "the cat and the hat and the rat\n" * 5], 400)
    assert again.model_bytes == TOKENIZER.model_bytes
    assert again.digest == hashlib.sha256(TOKENIZER.model_bytes).hexdigest()


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from("ab é🎉▁\u2585\n\r\0"), max_size=60)), st.integers(1, 400))
def test_lines_for_training_lose_nothing_but_marks_and_line_ends(texts: list[str], times: int) -> None:
    texts = [text * times for text in texts]
    lines = list(training_lines(texts, Counter()))
    kept = "".join(texts).translate({ord(mark): None for mark in "▁\u2585\n"})
    assert "".join(lines) == kept
    assert all(0 < len(line.encode()) <= LONGEST_LINE for line in lines)


def test_a_line_over_the_trainers_limit_is_learnt_from_and_counted() -> None:
    counts: Counter[str] = Counter()
    long = "the rare word zyzzyva is in a long line. " * 200  # 8,200 bytes
    tokenizer = Tokenizer.train([long, "short\n" * 3], 290, counts=counts)
    assert counts[CUT_LINES] == 1
    assert len(tokenizer.encode("zyzzyva")) < len("zyzzyva")


@pytest.mark.parametrize(("size", "cut"), [(LONGEST_LINE - 1, 0), (LONGEST_LINE, 0), (LONGEST_LINE + 1, 1)])
def test_the_limit_is_counted_in_bytes(size: int, cut: int) -> None:
    counts: Counter[str] = Counter()
    line = "é" * (size // 2) + "x" * (size % 2)
    assert "".join(training_lines([line], counts)) == line
    assert counts[CUT_LINES] == cut


def test_a_line_that_holds_the_trainers_own_marker_is_learnt_from() -> None:
    tokenizer = Tokenizer.train(["alpha beta \u2585 alpha beta alpha beta\n" * 20], 272)
    assert len(tokenizer.encode("alpha")) < len("alpha")
    assert tokenizer.decode(tokenizer.encode("\u2585")) == "\u2585"


def test_a_vocabulary_too_large_is_refused_with_the_largest_possible() -> None:
    texts = ["a short line\n", "and another one\n", "and a third\n"]
    with pytest.raises(UserError, match=r"vocab_size 4000 is too large .* at most (\d+) is possible") as caught:
        Tokenizer.train(texts, 4000)
    largest = int(str(caught.value).split("at most ")[1].split()[0])
    assert Tokenizer.train(texts, largest).vocab_size == largest
    with pytest.raises(UserError, match=f"at most {largest}"):
        Tokenizer.train(texts, largest + 1)


def test_a_vocabulary_too_small_for_the_characters_is_refused_with_the_smallest_possible() -> None:
    with pytest.raises(UserError, match=r"vocab_size 260 is too small .* at least (\d+)") as caught:
        Tokenizer.train([TEXT], 260)
    smallest = int(str(caught.value).rsplit(maxsplit=1)[1])
    assert Tokenizer.train([TEXT], smallest).vocab_size == smallest


@pytest.mark.parametrize("texts", [[], [""], ["\n\n"]])
def test_no_text_is_told_in_one_line(texts: list[str]) -> None:
    with pytest.raises(UserError, match="no text to train on"):
        Tokenizer.train(texts, 300)


# --- Files -----------------------------------------------------------------------------------------------------------


def test_a_saved_tokenizer_is_the_same_one(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    trained = Tokenizer.train([TEXT], 320, path)
    for other in (Tokenizer.load(path), Tokenizer.from_bytes(path.read_bytes())):
        assert other.digest == trained.digest
        assert other.encode(TEXT) == trained.encode(TEXT)
        assert np.array_equal(other.token_bytes(), trained.token_bytes())


@pytest.mark.parametrize("content", [b"", b"garbage", TOKENIZER.model_bytes[:-2000]])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.model"):
        Tokenizer.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.model is missing"):
        Tokenizer.load(tmp_path / "nowhere.model")


def test_a_model_by_other_rules_is_refused(tmp_path: Path) -> None:
    prefix = str(tmp_path / "other")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")),
        model_prefix=prefix,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(UserError, match="not one that gives text back"):
        Tokenizer.load(prefix + ".model")
