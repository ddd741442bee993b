"""RoPE beyond its training length: each scaling against its paper, Hugging Face's functions and golden values."""

import math

import pytest
import torch

from model.attention import attention_scores
from model.cache import Cache
from model.config import ModelConfig
from model.position import build_scheme
from model.position.rope import rope_frequencies, rotate
from model.transformer import Transformer
from tests.conftest import loud_model, random_tokens, tiny_config

transformers = pytest.importorskip("transformers", reason="a test dependency: pip install -e .[dev]")
rope_utils = pytest.importorskip("transformers.modeling_rope_utils")

KINDS = ["linear", "ntk", "dynamic_ntk", "yarn", "llama3", "longrope"]
WIDTHS, BASES, FACTORS = [32, 64, 128], [1e4, 5e5], [1.0, 2.0, 4.0, 8.0]
TRAINED = 2048
LENGTHS = [17, TRAINED - 1, TRAINED, TRAINED + 1, 5000, 4 * TRAINED]


def scheme(width: int, base: float = 1e4, trained: int = TRAINED, **scaling):
    """RoPE in a model of one head of this width, trained at this length."""
    position = {"kind": "rope", "base": base, "scaling": scaling or None}
    return build_scheme(ModelConfig(n_heads=1, d_model=width, context=trained, position=position))


def divisors(width: int, longest: float) -> list[float]:
    """A divisor a pair that grows, not evenly, from 1 to the longest."""
    pairs = width // 2
    return [1 + (longest - 1) * (i / (pairs - 1)) ** 1.5 for i in range(pairs)]


def settings_of(kind: str, width: int, factor: float) -> dict:
    if kind != "longrope":
        return {"kind": kind, "factor": factor}
    short, long = divisors(width, 1 + factor / 10), divisors(width, 1.5 * factor)
    return {"kind": kind, "factor": factor, "short_factor": short, "long_factor": long}


def linear_of_the_paper(D, b, s, L, n):
    """Chen et al. (2023): f'(x, m) = f(x, m L / L')."""
    return [b ** (-2 * i / D) / s for i in range(D // 2)], 1.0


def ntk_of_the_post(D, b, s, L, n):
    """bloc97 (2023): b' = b s^(D/(D-2))."""
    larger = b * s ** (D / (D - 2))
    return [larger ** (-2 * i / D) for i in range(D // 2)], 1.0


def dynamic_ntk_of_the_post(D, b, s, L, n):
    """emozilla (2023): b' = b (s n / L - (s - 1))^(D/(D-2)) once n > L."""
    larger = b * (s * n / L - (s - 1)) ** (D / (D - 2)) if n > L else b
    return [larger ** (-2 * i / D) for i in range(D // 2)], 1.0


def yarn_of_the_authors(D, b, s, L, n):
    """Peng et al. (2023): (1 - g) theta / s + g theta, g a ramp over the pairs between the two numbers of turns."""

    def pair_that_turns(times):
        return D * math.log(L / (times * 2 * math.pi)) / (2 * math.log(b))

    low, high = max(math.floor(pair_that_turns(32)), 0), min(math.ceil(pair_that_turns(1)), D - 1)
    frequencies = []
    for i in range(D // 2):
        theta, g = b ** (-2 * i / D), 1 - min(max((i - low) / (high - low), 0), 1)
        frequencies.append((1 - g) * theta / s + g * theta)
    return frequencies, 0.1 * math.log(s) + 1


def llama3_of_meta(D, b, s, L, n):
    """Grattafiori et al. (2024) and Meta's published code, factors 1 and 4."""
    frequencies = []
    for i in range(D // 2):
        theta = b ** (-2 * i / D)
        wavelength = 2 * math.pi / theta
        if wavelength < L / 4:
            frequencies.append(theta)
        elif wavelength > L / 1:
            frequencies.append(theta / s)
        else:
            smooth = (L / wavelength - 1) / (4 - 1)
            frequencies.append((1 - smooth) * theta / s + smooth * theta)
    return frequencies, 1.0


def longrope_of_the_paper(D, b, s, L, n):
    """Ding et al. (2024): theta_i / lambda_i; the factor on cos and sin is that of Phi-3, the authors' model."""
    lambdas = divisors(D, 1.5 * s) if n > L else divisors(D, 1 + s / 10)
    return [b ** (-2 * i / D) / lambdas[i] for i in range(D // 2)], math.sqrt(1 + math.log(s) / math.log(L))


PAPERS = {
    "linear": linear_of_the_paper,
    "ntk": ntk_of_the_post,
    "dynamic_ntk": dynamic_ntk_of_the_post,
    "yarn": yarn_of_the_authors,
    "llama3": llama3_of_meta,
    "longrope": longrope_of_the_paper,
}


def assert_frequencies(found: torch.Tensor, expected: list[float], rtol: float) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=0.0)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_scaling_is_the_formula_of_its_paper(kind, width, base, factor):
    rope = scheme(width, base, **settings_of(kind, width, factor))
    for length in LENGTHS:
        frequencies, temperature = PAPERS[kind](width, base, factor, TRAINED, length)
        found = rope.frequencies(length)
        assert_frequencies(found.frequencies, frequencies, rtol=1e-12)
        assert found.temperature == pytest.approx(temperature, abs=1e-12)


HUGGING_FACE = {
    "linear": "linear",
    "dynamic_ntk": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
}


def rope_parameters(kind: str, base: float, settings: dict, trained: int = TRAINED) -> dict:
    """Our settings under Hugging Face's names."""
    named = {name: value for name, value in settings.items() if name != "kind"}
    parameters = {"rope_type": HUGGING_FACE[kind], "rope_theta": base, **named}
    if kind in ("yarn", "llama3", "longrope"):
        parameters["original_max_position_embeddings"] = trained
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return parameters


def hugging_faces_config(kind: str, width: int, base: float, settings: dict):
    # Dynamic NTK reads the trained length off max_position_embeddings.
    longest = TRAINED if kind == "dynamic_ntk" else int(TRAINED * settings["factor"])
    return transformers.LlamaConfig(
        hidden_size=width,
        num_attention_heads=1,
        max_position_embeddings=longest,
        rope_parameters=rope_parameters(kind, base, settings),
    )


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_a_scaling_is_that_of_hugging_face_in_float32(kind, width, base, factor):
    settings = settings_of(kind, width, factor)
    rope, config = scheme(width, base, **settings), hugging_faces_config(kind, width, base, settings)
    for length in LENGTHS:
        theirs, temperature = rope_utils.ROPE_INIT_FUNCTIONS[HUGGING_FACE[kind]](config, "cpu", seq_len=length)
        found = rope.frequencies(length)
        torch.testing.assert_close(found.frequencies.float(), theirs, rtol=2e-6, atol=0.0)
        assert found.temperature == pytest.approx(temperature, abs=1e-12)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_still_pairs_are_those_of_hugging_faces_proportional_rope(share):
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        rope_parameters={"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": share},
    )
    theirs, _ = rope_utils.ROPE_INIT_FUNCTIONS["proportional"](config, "cpu")
    position = {"kind": "rope", "base": 5e5, "turning_pairs": share}
    ours = build_scheme(ModelConfig(n_heads=1, d_model=64, position=position)).frequencies(10).frequencies
    torch.testing.assert_close(ours.float(), theirs, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize(("width", "base"), [(64, 41829.366), (128, 40889.942)])
def test_the_base_of_ntk_at_factor_4_is_the_published_one(width, base):
    second = scheme(width, kind="ntk", factor=4).frequencies(1).frequencies[1].item()
    assert second ** (-width / 2) == pytest.approx(base, abs=6e-4)


def test_a_changed_base_is_ntk_scaling_by_another_name():
    by_factor = scheme(64, kind="ntk", factor=4).frequencies(1).frequencies
    by_base = scheme(64, base=1e4 * 4 ** (64 / 62)).frequencies(1).frequencies
    torch.testing.assert_close(by_factor, by_base, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(("factor", "temperature"), [(4, 1.138629), (8, 1.207944), (16, 1.277259), (40, 1.368888)])
def test_the_temperature_of_yarn_is_the_published_one(factor, temperature):
    assert scheme(64, kind="yarn", factor=factor).frequencies(1).temperature == pytest.approx(temperature, abs=5e-7)


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
@pytest.mark.parametrize("given", [1.0, 0.7, 1.138629])
def test_an_explicit_attention_factor_is_used_verbatim(kind, given):
    assert scheme(64, kind=kind, factor=4, attention_factor=given).frequencies(9000).temperature == given


def test_the_ramp_of_yarn_runs_from_pair_8_to_pair_21():
    ratio = scheme(64, kind="yarn", factor=4).frequencies(1).frequencies / rope_frequencies(1e4, 64)
    expected = [1, 1, 0.53846, 0.25, 0.25]
    assert ratio[[0, 8, 16, 24, 31]].tolist() == pytest.approx(expected, abs=5e-6)
    blended = ((ratio > 0.25 + 1e-9) & (ratio < 1 - 1e-9)).nonzero().flatten().tolist()
    assert blended == list(range(9, 21))


def test_yarn_leaves_every_pair_alone_where_all_of_them_turn_often():
    # The slowest of 4 pairs of base 10 turns once in 35 tokens, so 28000 times in a million.
    fast = scheme(8, base=10.0, trained=10**6, kind="yarn", factor=4).frequencies(1).frequencies
    torch.testing.assert_close(fast, rope_frequencies(10.0, 8), rtol=1e-15, atol=0.0)


def test_linear_scaling_by_2_puts_position_10_where_position_5_was():
    positions = torch.tensor([[5, 10]])
    plain = scheme(64).rotation(positions, 20, torch.float64)
    halved = scheme(64, kind="linear", factor=2).rotation(positions, 20, torch.float64)
    for before, after in zip(plain[:4], halved[:4], strict=True):
        assert torch.equal(after[:, 1], before[:, 0])
        assert not torch.equal(after[:, 0], before[:, 0])


LENGTHS_UNTOUCHED = {"dynamic_ntk": [1, 17, TRAINED]}  # beyond, its base grows with the length even at factor 1


@pytest.mark.parametrize("width", [32, 48, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_factor_1_is_bitwise_unscaled(kind, width):
    plain, one = scheme(width), scheme(width, kind=kind, factor=1)
    for length in LENGTHS_UNTOUCHED.get(kind, LENGTHS):
        found = one.frequencies(length)
        assert torch.equal(found.frequencies, plain.frequencies(length).frequencies)
        assert found.temperature == 1.0
        tables, unscaled = (rope.rotation(torch.arange(50)[None], length, torch.float32) for rope in (one, plain))
        assert all(torch.equal(*pair) for pair in zip(tables[:4], unscaled[:4], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_within_the_trained_one_is_bitwise_unscaled_by_default(kind):
    plain, automatic = loud_model(tiny_config("rope")), loud_model(tiny_config({"kind": "rope", "scaling": kind}))
    tokens = random_tokens(1, 64)
    assert torch.equal(automatic(tokens), plain(tokens))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dynamic_ntk"])
def test_the_automatic_factor_is_the_declared_length_over_the_trained_one_and_at_least_1(kind):
    automatic = scheme(64, kind=kind)
    for length, factor in [(5, 1.0), (TRAINED, 1.0), (3 * TRAINED, 3.0), (5000, 5000 / TRAINED)]:
        given = scheme(64, kind=kind, factor=factor).frequencies(length)
        found = automatic.frequencies(length)
        assert torch.equal(found.frequencies, given.frequencies)
        assert found.temperature == given.temperature


@pytest.mark.parametrize("kind", KINDS)
def test_the_trained_length_may_be_another_than_the_context(kind):
    factor = {} if kind == "dynamic_ntk" else {"factor": 4.0}
    here = scheme(64, trained=TRAINED, kind=kind, **factor).frequencies(5000)
    elsewhere = scheme(64, trained=77, kind=kind, trained_length=TRAINED, **factor).frequencies(5000)
    assert torch.equal(here.frequencies, elsewhere.frequencies)
    assert here.temperature == elsewhere.temperature


def test_dynamic_ntk_at_factor_1_is_ntk_by_the_length_over_the_trained_one():
    dynamic = scheme(64, kind="dynamic_ntk", factor=1).frequencies(3 * TRAINED).frequencies
    torch.testing.assert_close(
        dynamic, scheme(64, kind="ntk", factor=3).frequencies(1).frequencies, rtol=1e-12, atol=0.0
    )


def test_a_part_of_the_head_is_scaled_as_a_head_of_that_width():
    for kind in KINDS:
        settings = {"kind": kind, "factor": 4.0}
        position = {"kind": "rope", "fraction": 0.25, "scaling": settings}
        part = build_scheme(ModelConfig(n_heads=1, d_model=128, context=TRAINED, position=position)).frequencies(5000)
        assert torch.equal(part.frequencies, scheme(32, **settings).frequencies(5000).frequencies)


@pytest.mark.parametrize("settings", [{"kind": "yarn"}, {"kind": "longrope", "long_factor": [1.0, 1.5, 3.0, 4.0]}])
def test_the_temperature_stands_once_on_queries_and_once_on_keys(settings):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 6, 8, dtype=torch.float64, generator=generator) for _ in "qk")
    positions = torch.tensor([[0, 1, 5, 63, 64, 200]])

    def scores(attention_factor):
        rope = scheme(8, trained=64, factor=4, attention_factor=attention_factor, **settings)
        q_cos, q_sin, k_cos, k_sin, layout = rope.rotation(positions, 256, torch.float64)
        return attention_scores(rotate(q, q_cos, q_sin, layout), rotate(k, k_cos, k_sin, layout))

    temperature = {"yarn": 0.1 * math.log(4) + 1, "longrope": math.sqrt(1 + math.log(4) / math.log(64))}
    squared = temperature[settings["kind"]] ** 2
    torch.testing.assert_close(scores(None), squared * scores(1.0), rtol=1e-12, atol=1e-14)
    assert scores(None)[0, 0, 0, 0].item() == pytest.approx(squared * (q[0, 0, 0] @ k[0, 0, 0]).item() / 8**0.5)


def half_layout(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder each head's output rows from neighbouring pairs (2i, 2i+1) to halves (i, i + D/2)."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def llama_with_the_weights_of(model, parameters: dict, longest: int):
    config = model.config
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.hidden_width,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=longest,
            rms_norm_eps=config.norm_eps,
            rope_parameters=parameters,
            tie_word_embeddings=True,
        )
    ).eval()
    state = {f"model.{name}": value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    for name, value in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            state[name] = half_layout(value, config.head_dim)
    llama.load_state_dict({**state, "lm_head.weight": model.embed_tokens.weight})
    return llama


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_logits_past_the_trained_length_equal_those_of_hugging_faces_llama(kind):
    """The scaled tables reach every layer once: what the functions above return is also what attention uses."""
    settings = settings_of(kind, 16, 3.0)
    trained, length = 48, 144
    position = {"kind": "rope", "scaling": settings}
    shape = {"d_model": 96, "context": trained}
    model, plain = (loud_model(tiny_config(p, **shape), dtype=torch.float32, gain=5.0) for p in (position, "rope"))
    parameters = rope_parameters(kind, 1e4, settings, trained)
    llama = llama_with_the_weights_of(model, parameters, trained if kind == "dynamic_ntk" else length)
    tokens = random_tokens(1, length)
    with torch.no_grad():
        theirs = llama(tokens).logits
        torch.testing.assert_close(model(tokens), theirs, rtol=0, atol=2e-5)
        assert (plain(tokens) - theirs).abs().max() > 0.1, "the scaling changes too little to tell a fault"


def test_a_base_changed_at_inference_turns_by_the_new_one_in_every_layer():
    tokens = random_tokens(1, 20)
    trained = loud_model(tiny_config("rope"))
    changed = Transformer(tiny_config({"kind": "rope", "base": 5e5})).double().eval()
    changed.load_state_dict(trained.state_dict())
    assert torch.equal(changed(tokens)[:, 0], trained(tokens)[:, 0])
    assert (changed(tokens) - trained(tokens))[:, 1:].abs().amax(-1).min() > 1e-6
    expected = torch.tensor([5e5 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    torch.testing.assert_close(changed.position.frequencies(20).frequencies, expected, rtol=1e-12, atol=0.0)


BY_LENGTH = {
    "linear": "linear",
    "ntk": "ntk",
    "dynamic_ntk": {"kind": "dynamic_ntk", "factor": 2.0},
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": {"kind": "longrope", "short_factor": [1, 1, 1.1, 1.2], "long_factor": [1, 1.5, 3, 4]},
}


def scaled_model(kind):
    return loud_model(tiny_config({"kind": "rope", "scaling": BY_LENGTH[kind]}))


def read_in_pieces(model, tokens, sizes, declared):
    cache = Cache(model.config, 1, declared, torch.float64, capacity=8)
    places = torch.arange(tokens.shape[1])[None].split(sizes, 1)
    return torch.cat([model(some, at, cache) for some, at in zip(tokens.split(sizes, 1), places, strict=True)], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_read_past_the_trained_length_in_pieces_equals_one_read_at_once(kind):
    model, tokens = scaled_model(kind), random_tokens(1, 100)
    pieces = read_in_pieces(model, tokens, [30, 20, *[1] * 8, 34, *[1] * 8], declared=100)
    torch.testing.assert_close(pieces, model(tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_declared_length_decides_not_the_one_read_so_far(kind):
    model, tokens = scaled_model(kind), random_tokens(1, 20)
    for_long = read_in_pieces(model, tokens, [20], declared=150)
    assert (for_long - model(tokens)).abs().max() > 1e-3
    filled = torch.cat((tokens, random_tokens(1, 130, seed=1)), dim=1)
    torch.testing.assert_close(for_long, model(filled)[:, :20], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_text_after_a_long_one_is_read_as_in_a_fresh_process(kind):
    short, long = random_tokens(1, 20), random_tokens(1, 200, seed=1)
    used, fresh = scaled_model(kind), scaled_model(kind)
    used(long)
    assert torch.equal(used(short), fresh(short))
