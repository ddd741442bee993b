"""Every way to decode against the definition: `Transformer.forward`."""

import multiprocessing
import subprocess
import sys

import pytest
import torch

from model.cache import Cache
from model.decoding import build
from model.decoding.agreement import cost_of_rounding, greedy_agreement
from model.decoding.ahead import LOOK_AHEAD, Ahead
from model.decoding.choose import choose_decoder, seconds_saved
from model.decoding.compiled import CompiledDecoder
from model.decoding.eager import EagerDecoder, in_pieces, whole
from model.decoding.native import NativeDecoder, in_words
from model.decoding.weights import Matrix, decode_weights, int8_rows, rounded
from model.errors import UserError
from model.sampling import Reader, Row, generate
from model.sampling_config import SamplingSettings
from model.transformer import Transformer
from tests.conftest import ARMS, loud_model, tiny_config

CONTENT = ("shaw", "cope")
GREEDY = SamplingSettings(temperature=0)
UNLIKE = {"qk_norm": True, "tie_embeddings": False}  # what the plain configuration has not


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """A folder of its own with the kernel, built once for the session."""
    if not build.has_compiler():
        pytest.skip("no C++ compiler on this machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("kernels")))
        build.load.cache_clear()
        build.load()
        yield build.folder()
        build.load.cache_clear()


@pytest.fixture(params=["eager", "native"])
def kind(request):
    """The class of each way that is quick to make."""
    if request.param == "native":
        request.getfixturevalue("kernels")
    return {"eager": EagerDecoder, "native": NativeDecoder}[request.param]


@pytest.fixture(params=[name for name in ARMS if name not in CONTENT])
def served(request):
    """The name of each arm that decoders serve."""
    return request.param


def tokens_of(count: int, seed: int = 0, vocabulary: int = 61) -> list[int]:
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def worst_error(
    model: Transformer, decoder, lengths: list[int], steps: int, declared: int = 64, end=(), seed=0
) -> float:
    """The largest error of a logit over a few forced tokens of rows that begin with so many, beside the largest one.

    The rows in `end` end halfway.
    """
    rows = [Row(tokens_of(length, seed + number)) for number, length in enumerate(lengths)]
    plain, fast = Reader(model, declared, keep=True), Reader(model, declared, True, decoder)
    worst = 0.0
    for step in range(steps):
        wanted, found = plain.read(rows, afresh=False), fast.read(rows, afresh=False)
        going = [number for number, row in enumerate(rows) if not row.ended]
        assert found.shape == wanted.shape
        worst = max(worst, float((wanted - found)[going].abs().max() / wanted[going].abs().max()))
        for number, row in enumerate(rows):
            if step == steps // 2 and number in end:
                row.ended = "stop"
            row.tokens.append((7 * step + 5 * number + 3) % 61)
    return worst


def model_of(arm, dtype=torch.float32, **changes) -> Transformer:
    return loud_model(tiny_config(arm, **changes), dtype=dtype)


# --- Logits ---


@pytest.mark.parametrize("changes", [{}, UNLIKE])
@pytest.mark.parametrize("lengths", [[3], [2, 2, 2], [2, 9, 1, 14, 5]])
def test_logits_of_every_token_equal_those_of_the_model(served, kind, lengths, changes):
    model = model_of(served, **changes)
    assert worst_error(model, kind(model), lengths, steps=12) < 1e-5


@pytest.mark.parametrize("lengths", [[3], [2, 9, 1]])
def test_in_float64_nothing_but_rounding_differs(served, lengths):
    model = model_of(served, dtype=torch.float64, **UNLIKE)
    assert worst_error(model, EagerDecoder(model), lengths, steps=12) < 1e-12


@pytest.mark.parametrize("position", ["rope", "rope_half", "alibi", "learned_all"])
@pytest.mark.parametrize("heads", [(6, 6), (6, 1), (1, 1)])
def test_keys_may_belong_to_one_query_head_or_to_all(kind, position, heads):
    model = model_of(position, n_heads=heads[0], n_kv_heads=heads[1])
    assert worst_error(model, kind(model), [3, 5], steps=8) < 1e-5


@pytest.mark.parametrize("layers", ["first", "all but every 2nd"])
def test_a_bias_that_some_layers_have_not_is_left_out_there(kind, layers):
    model = model_of({"kind": "alibi", "layers": layers})
    assert worst_error(model, kind(model), [3], steps=8) < 1e-5
    assert worst_error(model, kind(model), [3, 5], steps=8) < 1e-5


@pytest.mark.parametrize("width", [30, 42, 90])
def test_widths_that_fill_no_vector_register_are_right_to_the_last_channel(kind, width):
    model = model_of("rope", n_heads=3, n_kv_heads=1, d_model=width, d_ff=width + 7, vocab_size=61)
    assert worst_error(model, kind(model), [3], steps=8) < 1e-5


@pytest.mark.parametrize("position", ["rope", "alibi", "fire", "sinusoidal_all", "nope"])
def test_a_long_text_outgrows_the_cache_and_what_was_looked_up(kind, position, monkeypatch):
    monkeypatch.setattr("model.sampling.ROOM", 4)
    model = model_of(position)
    assert worst_error(model, kind(model), [5, 2], steps=2 * LOOK_AHEAD + 10, declared=400) < 1e-5


def test_a_row_that_ends_halfway_leaves_the_others_as_they_were(served, kind):
    model = model_of(served)
    assert worst_error(model, kind(model), [4, 4, 7], steps=12, end=[1]) < 1e-5


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 26])
def test_threads_and_rows_may_be_more_than_there_is_to_share(kernels, threads, rows):
    model = model_of("alibi")
    torch.set_num_threads(threads)
    assert worst_error(model, NativeDecoder(model), [1 + n % 5 for n in range(rows)], steps=5) < 1e-5


def test_texts_at_random_positions_stay_where_they_were(kind):
    model = model_of("learned", random_positions=200)
    assert worst_error(model, kind(model), [3, 9], steps=12) < 1e-5


def test_a_decoder_serves_one_text_then_many_then_one(kind):
    model = model_of("rope")
    decoder = kind(model)
    for lengths in ([3], [2, 5, 3], [4]):
        assert worst_error(model, decoder, lengths, steps=4) < 1e-5


def test_random_positions_of_a_model_in_training_are_those_of_evaluation(kind):
    model = model_of("learned", random_positions=200)
    wanted = text(model, [[1, 2]], None, settings=GREEDY, max_new_tokens=9)
    assert text(model, [[1, 2]], kind(model.train()), settings=GREEDY, max_new_tokens=9) == wanted


def test_a_dropped_cache_is_noticed_though_the_positions_fit(kind):
    model = model_of("rope")
    decoder = kind(model)
    assert worst_error(model, decoder, [3], steps=6) < 1e-5
    assert worst_error(model, decoder, [3], steps=6, seed=5) < 1e-5


# --- Whole texts ---


def text(model, prompts, decoder, **more) -> list[list[int | None]]:
    return [step.tokens for step in generate(model, prompts, decoder=decoder, **more)]


@pytest.mark.parametrize("position", ["rope", "xpos", "t5", "learned_all"])
def test_the_greedy_text_is_that_of_the_definition_over_256_tokens(kind, position):
    model = model_of(position, context=300)
    found = greedy_agreement(model, kind(model), [1, 2, 3])
    assert found.widest_tie < 1e-4
    assert found.largest_error < 1e-4
    assert found.tokens == 256


def test_the_check_of_the_greedy_text_sees_a_decoder_that_is_wrong():
    model = model_of("rope")
    decoder = EagerDecoder(model)
    decoder.weights.blocks[1].qkv.values.mul_(1.05)  # a copy: the model keeps its own
    found = greedy_agreement(model, decoder, [1, 2, 3], tokens=60)
    assert found.widest_tie > 1e-4
    assert found.different > 0


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_a_matrix_in_pieces_for_each_thread_multiplies_as_it_did_and_can_be_made_whole(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    decoder = EagerDecoder(model_of("rope"))
    for rows, columns in ((40, 12), (12, 40), (7, 16), (16, 7)):
        values = torch.randn(rows, columns, dtype=torch.float64)
        matrix, x = in_pieces(Matrix(values)), torch.randn(1, columns, dtype=torch.float64)
        assert len(matrix.values) == max(n for n in range(1, threads + 1) if rows % n == 0)
        decoder.for_one_row = True
        assert torch.equal(whole(matrix).values, values)
        torch.testing.assert_close(decoder.times(x, matrix), x @ values.T)


def test_the_eager_decoder_serves_one_text_then_many_then_one():
    model = model_of("rope")
    decoder = EagerDecoder(model)
    prompts = [tokens_of(5), tokens_of(2, seed=1), tokens_of(9, seed=2)]
    for some in (prompts[:1], prompts, prompts[2:], prompts[:1]):
        for settings in (SamplingSettings(temperature=0), SamplingSettings(temperature=2.0)):
            how = {"settings": settings, "max_new_tokens": 20}
            assert text(model, some, decoder, **how) == text(model, some, None, **how)


@pytest.mark.parametrize("stops", [(), (3, 17, 29)])
def test_drawn_texts_of_a_padded_batch_are_the_same(served, kind, stops):
    model = model_of(served)
    prompts = [tokens_of(2), tokens_of(14, seed=1), tokens_of(1, seed=2)]
    hot = {"settings": SamplingSettings(temperature=2.0, repetition_penalty=1.3), "max_new_tokens": 30}
    decoder = kind(model)
    for _ in range(2):  # a decoder may serve many texts
        assert text(model, prompts, decoder, stop_ids=stops, **hot) == text(model, prompts, None, stop_ids=stops, **hot)


@pytest.mark.parametrize("past_context", ["stop", "reread"])
@pytest.mark.parametrize("position", ["learned", "learned_all"])
def test_a_limited_scheme_stops_or_is_read_afresh(kind, position, past_context):
    model = model_of(position, context=24)
    prompts = [tokens_of(20), tokens_of(3, seed=1), tokens_of(23, seed=2)]
    told = {"settings": GREEDY, "max_new_tokens": 60, "past_context": past_context}
    assert text(model, prompts, kind(model), **told) == text(model, prompts, None, **told)


@pytest.mark.parametrize("lengths", [[1], [8], [4, 4], [9], [3, 3, 3], [2, 3]])
def test_a_prompt_of_a_few_tokens_is_read_by_the_kernel_and_others_by_the_model(kernels, monkeypatch, lengths):
    model, asked = model_of("rope"), []
    real = Transformer.hidden
    monkeypatch.setattr(Transformer, "hidden", lambda *given: asked.append(1) or real(*given))
    text(model, [tokens_of(length) for length in lengths], NativeDecoder(model), settings=GREEDY, max_new_tokens=3)
    assert len(asked) == (len(set(lengths)) > 1 or sum(lengths) > 8)


def test_a_model_in_training_is_decoded_without_dropout_and_keeps_its_mode(kind):
    model = model_of("rope", dropout=0.5)
    wanted = text(model, [[1, 2]], None, settings=GREEDY, max_new_tokens=9)
    decoder = kind(model.train())
    assert text(model, [[1, 2]], decoder, settings=GREEDY, max_new_tokens=9) == wanted
    assert model.training


def test_weights_that_are_no_numbers_are_reported_in_words(kind):
    for break_it in (lambda model: model.norm.weight, lambda model: model.layers[1].self_attn.q_proj.weight):
        model = model_of("rope")
        with torch.no_grad():
            break_it(model).fill_(torch.nan)
        with pytest.raises(UserError, match="not a number"):
            text(model, [[1, 2]], kind(model), settings=GREEDY, max_new_tokens=4)


def test_a_score_that_is_no_number_is_not_taken_for_a_key_that_nobody_sees(kernels):
    model = model_of("rope")
    decoder = NativeDecoder(model)
    qkv = decoder.blocks[1].matrices[0]
    qkv.words[0] = torch.nan  # of the decoder's own copy
    with pytest.raises(UserError, match="not a number"):
        text(model, [[1, 2]], decoder, settings=GREEDY, max_new_tokens=4)


# --- Looking ahead ---


def test_looking_ahead_stops_at_the_scheme_s_limit_and_the_declared_length():
    for position, limit in (("learned", 24), ("rope", 30)):
        model = model_of(position, context=24)
        cache = Cache(model.config, 1, 30, torch.float32)
        cache.append_positions(torch.arange(20)[None])
        assert Ahead(model, cache, [20]).count == limit - 20


def test_rows_that_stand_alike_share_one_table():
    model = model_of("alibi")
    cache = Cache(model.config, 3, 64, torch.float32)
    cache.append_positions(torch.arange(5)[None].expand(3, -1))
    assert Ahead(model, cache, [5, 5, 5]).bias.shape[0] == 1
    assert Ahead(model, cache, [5, -1, 5]).bias.shape[0] == 3


# --- Fewer bits ---


def test_int8_rounds_each_row_to_half_a_step_and_twice_is_as_once():
    weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    once = int8_rows(weight)
    assert ((once.dequantised() - weight).abs() <= once.scales[:, None] * 0.5001).all()
    assert (once.values.abs().amax(dim=1)[weight.abs().amax(dim=1) > 0] == 127).all()
    assert torch.equal(int8_rows(once.dequantised()).values, once.values)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("changes", [{}, UNLIKE])
def test_packed_weights_are_those_of_the_rounded_model(precision, changes):
    original = model_of("learned", **changes)
    before = {name: parameter.clone() for name, parameter in original.named_parameters()}
    model = rounded(original, precision)
    assert all(torch.equal(parameter, before[name]) for name, parameter in original.named_parameters())
    weights = decode_weights(model, precision)
    attention, mlp = model.layers[1].self_attn, model.layers[1].mlp
    pairs = [
        (weights.blocks[1].qkv, torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])),
        (weights.blocks[1].gate_up, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
        (weights.blocks[1].o, attention.o_proj.weight),
        (weights.blocks[1].down, mlp.down_proj.weight),
        (weights.head, model.lm_head.weight),
    ]
    for packed, weight in pairs:
        torch.testing.assert_close(packed.dequantised(), weight, rtol=3e-7, atol=0)
    assert torch.equal(model.position.table, original.position.table)
    assert not torch.equal(model.embed_tokens.weight, original.embed_tokens.weight)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("position", ["rope", "rope_half", "alibi", "learned_all"])
@pytest.mark.parametrize("lengths", [[3], [2, 9, 1, 14, 5]])
def test_fewer_bits_give_the_logits_of_the_rounded_model(kind, position, precision, lengths):
    model = model_of(position, **UNLIKE)
    decoder = kind(model, precision)
    assert worst_error(decoder.model, decoder, lengths, steps=10) < 1e-5
    assert worst_error(model, decoder, lengths, steps=10) > 1e-4  # against the weights before they were rounded


def test_the_cost_of_rounding_is_a_share_of_the_loss():
    model = Transformer(tiny_config("rope")).eval()
    windows = [torch.randint(61, (4, 20), generator=torch.Generator().manual_seed(0))]
    assert cost_of_rounding(model, "fp32", windows) == 0
    assert 0 < abs(cost_of_rounding(model, "int8", windows)) < 1e-3


@pytest.mark.parametrize(("dtype", "in_word"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.int8, 4)])
def test_a_word_of_the_kernel_holds_neighbouring_columns_of_one_row(dtype, in_word):
    values = torch.arange(18 * 10).view(18, 10).sub(90).to(dtype)
    words = in_words(values)
    assert words.shape == (2, 12 // in_word, 16, in_word)
    assert words.is_contiguous()
    for row in range(32):
        for column in range(12):
            wanted = int(values[row, column]) if row < 18 and column < 10 else 0
            assert words[row // 16, column // in_word, row % 16, column % in_word] == wanted


@pytest.mark.parametrize("lanes", [4, 16])
def test_vector_registers_of_every_width_give_the_same(kernels, monkeypatch, lanes):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, f"-DROPELAB_LANES={lanes}"))
    build.load.cache_clear()
    model = model_of("rope", n_heads=3, n_kv_heads=1, d_model=42, d_ff=49)
    for precision in ("fp32", "bf16", "int8"):
        decoder = NativeDecoder(model, precision)
        for rows in (1, 2, 7, 13, 26):
            assert worst_error(decoder.model, decoder, [3] * rows, steps=3) < 1e-5
    build.load.cache_clear()


# --- Compiled ---


def test_a_compiled_block_serves_a_whole_text():
    if not build.has_compiler():
        pytest.skip("no C++ compiler on this machine")
    model = model_of("rope_partial", n_layers=2, qk_norm=True)
    decoder = CompiledDecoder(model, "int8")
    assert worst_error(decoder.model, decoder, [2], steps=3) < 1e-5
    with torch.compiler.set_stance("fail_on_recompile"):  # no other graph for later tokens, tables or texts
        assert worst_error(decoder.model, decoder, [2], steps=12) < 1e-5


# --- Choosing ---


class Said(list):
    """What was said, a line a call."""

    __call__ = list.append


def chosen(model, *args, **kwargs):
    said = Said()
    reading = choose_decoder(model, *args, say=said, **kwargs)
    return reading.decoder and reading.decoder.name, said


@pytest.fixture
def no_kernel(monkeypatch, tmp_path):
    """A machine on which nothing was built yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    build.load.cache_clear()
    yield tmp_path / "ropelab"
    build.load.cache_clear()


def test_the_kernel_saves_more_for_longer_and_for_more_texts():
    model = model_of("rope")
    assert seconds_saved(model, 1, 200) == pytest.approx(2 * seconds_saved(model, 1, 100))
    assert seconds_saved(model, 1, 100) < seconds_saved(model, 2, 100) < 2 * seconds_saved(model, 1, 100)


def test_a_short_text_is_not_worth_a_build_and_a_long_one_is(no_kernel, monkeypatch):
    monkeypatch.setattr("model.decoding.choose.seconds_saved", lambda model, rows, tokens: rows * tokens)
    model = model_of("rope")
    assert chosen(model, new_tokens=0.5) == ("eager", [])
    assert len(chosen(model, new_tokens=0.5, rows=6)[1]) == 1  # many texts save more
    kind, said = chosen(model, new_tokens=3)
    assert (kind, len(said)) == ("eager", 1)
    assert "--decoder native" in said[0]
    if build.has_compiler():
        kind, said = chosen(model, new_tokens=1000)
        assert (kind, len(said)) == ("native", 1)
        assert "building" in said[0]
        assert chosen(model, new_tokens=1000) == ("native", [])


@pytest.mark.parametrize("rows", [1, 32])
def test_what_is_built_is_used(kernels, rows):
    assert chosen(model_of("rope"), rows=rows) == ("native", [])


def test_the_kernel_is_for_float32(kernels):
    model = model_of("rope", dtype=torch.float64)
    assert chosen(model) == ("eager", [])
    kind, said = chosen(model, "native")
    assert (kind, len(said)) == ("eager", 1)
    assert "float64" in said[0]


@pytest.mark.parametrize("arm", CONTENT)
@pytest.mark.parametrize("asked", ["eager", "compiled", "native"])
def test_a_scheme_that_reads_content_is_decoded_by_the_model(arm, asked):
    kind, said = chosen(model_of(arm), asked, "int8")
    assert (kind, len(said)) == (None, 1)
    assert f"position '{arm}' reads content" in said[0]
    assert chosen(model_of(arm)) == (None, [])
    assert chosen(model_of("rope"), "model") == (None, [])


@pytest.mark.parametrize("asked", ["native", "compiled"])
@pytest.mark.parametrize("wrong", ["no/such/compiler", "false", f"{sys.executable} -c 1/0"])
def test_without_a_working_compiler_the_eager_way_goes_on_after_one_line(no_kernel, monkeypatch, asked, wrong):
    monkeypatch.setenv("CXX", wrong)
    if asked == "compiled":
        monkeypatch.setattr(
            "model.decoding.compiled.torch.compile",
            lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no\ncompiler")),
        )
    model = model_of("rope")
    kind, said = chosen(model, asked)
    assert kind == "eager"
    assert f"no {asked} decoder, the eager one goes on" in said[-1]
    assert not any("\n" in line for line in said)
    assert not list(no_kernel.glob("*")) if no_kernel.exists() else True


def test_a_folder_that_cannot_be_written_is_one_line(no_kernel):
    if not build.has_compiler():
        pytest.skip("no C++ compiler on this machine")
    no_kernel.write_text("a file stands in the way")
    kind, said = chosen(model_of("rope"), "native")
    assert kind == "eager"
    assert "cannot be written" in said[-1]


def test_a_damaged_library_is_one_line_and_built_anew_by_the_next_run(kernels, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    build.load.cache_clear()
    build.library().parent.mkdir(parents=True)
    build.library().write_bytes(b"no library")
    kind, said = chosen(model_of("rope"), "native")
    assert (kind, len(said)) == ("eager", 1)
    assert "cannot be loaded" in said[0]
    assert not build.is_built()
    build.load.cache_clear()


def test_int8_is_refused_where_the_model_is_on_another_device():
    with pytest.raises(UserError, match="int8 is for a CPU, the model is on meta"):
        choose_decoder(model_of("rope").to("meta"), precision="int8")


# --- Building ---


def test_two_processes_that_build_at_once_both_get_a_kernel(no_kernel):
    if not build.has_compiler():
        pytest.skip("no C++ compiler on this machine")
    words = [sys.executable, "-c", "from model.decoding import build; print(build.load().ropelab_sizes() > 0)"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=300)[0] for process in both] == ["True\n"] * 2
    assert [path.suffix for path in no_kernel.iterdir()] == [".so"]


def test_a_process_killed_while_it_builds_stops_no_other(no_kernel, monkeypatch, tmp_path):
    if not build.has_compiler():
        pytest.skip("no C++ compiler on this machine")
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    target = no_kernel / "decode-x.so"
    with monkeypatch.context() as patch:
        patch.setenv("CXX", str(sleeper))
        process = multiprocessing.get_context("fork").Process(target=build.build, args=(target,))
        process.start()
        while not list(no_kernel.glob("building-*")):
            process.join(0.05)
        process.kill()
        process.join()
    build.build(target)
    assert target.exists()
