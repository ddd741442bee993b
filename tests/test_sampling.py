"""From logits to the next token, and from prompts to text."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from model.cache import Cache
from model.errors import UserError
from model.sampling import (
    Reader,
    Row,
    apply_temperature,
    evaluating,
    filtered,
    generate,
    gumbel_noise,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    left_padded,
    penalise_repetition,
    pick,
)
from model.sampling_config import SamplingSettings
from model.transformer import Transformer
from tests.conftest import ARMS, loud_model, tiny_config

GREEDY = SamplingSettings(temperature=0)
PLAIN = SamplingSettings(temperature=1, top_p=1)
CONTEXT = 24
UNLIMITED = [name for name in ARMS if name not in ("learned", "learned_all")]


def model_of(arm: str = "rope", **changes) -> Transformer:
    """A float64 model whose weights are so large that a token, or its position, changes what comes next."""
    return loud_model(tiny_config(arm, vocab_size=40, context=CONTEXT, tie_embeddings=False, **changes), seed=1)


def logits_alone(model: Transformer, tokens: list[int], length: int) -> torch.Tensor:
    """The logits after one text read whole, in a call of this declared length: some schemes' angles depend on it."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), None, Cache(model.config, 1, length, torch.float64))[0, -1]


def greedy_alone(
    model: Transformer, prompt: list[int], count: int, limit: int | None = None, length: int | None = None
) -> list[int]:
    """Continue one prompt by whole passes without what was read; past `limit` its last half is read afresh."""
    window, new = list(prompt), []
    length = length or len(prompt) + count
    for _ in range(count):
        if limit and len(window) > limit:
            window = window[-(limit // 2) :]
        new.append(int(logits_alone(model, window, length).argmax()))
        window.append(new[-1])
    return new


def texts(model: Transformer, prompts: list[list[int]], *args, **kwargs) -> list[list[int]]:
    """The new tokens of each row."""
    steps = list(generate(model, prompts, *args, **kwargs))
    return [[step.tokens[row] for step in steps if step.tokens[row] is not None] for row in range(len(prompts))]


def endings(model: Transformer, prompts: list[list[int]], *args, **kwargs) -> list[str | None]:
    return list(generate(model, prompts, *args, **kwargs))[-1].ended


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(40, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def kept(logits: Tensor) -> list[int]:
    return logits.isfinite().nonzero().flatten().tolist()


# --- Settings ---


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 2},
        {"top_p": -0.1},
        {"top_p": math.nan},
        {"min_p": 1.5},
        {"min_p": -1},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.3},
        {"repetition_penalty": math.nan},
        {"seed": -1},
        {"temprature": 1},
    ],
)
def test_a_setting_out_of_bounds_is_refused(wrong):
    with pytest.raises(ValidationError):
        SamplingSettings(**wrong)


# --- Filters ---


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_tiny_temperature_draws_the_most_likely_token_in_every_precision(temperature, dtype):
    logits = torch.tensor([[-3.0, 60000.0, 59000.0, float("-inf")]]).to(dtype)
    settings = SamplingSettings(temperature=temperature, top_k=3, top_p=0.9, min_p=0.1)
    left = filtered(logits, None, settings)
    assert left.dtype == torch.promote_types(dtype, torch.float32)
    assert not left.isnan().any()
    assert pick(left, torch.zeros(1, 4)) == [1]


def test_temperature_divides_the_logits():
    logits = torch.tensor([1.0, 3.0, 2.0])
    torch.testing.assert_close(apply_temperature(logits, 0.5).softmax(-1), (logits * 2).softmax(-1))


@pytest.mark.parametrize(
    ("k", "ids"), [(0, [0, 1, 2, 3]), (1, [2]), (2, [2, 3]), (4, [0, 1, 2, 3]), (100000, [0, 1, 2, 3])]
)
def test_top_k_keeps_k_tokens_and_all_when_off_or_beyond_the_vocabulary(k, ids):
    logits = torch.tensor([[0.0, -1.0, 5.0, 2.0]])
    left = keep_top_k(logits, k)
    assert kept(left[0]) == ids
    assert torch.equal(left[0, ids], logits[0, ids])


def test_top_k_keeps_every_token_that_equals_the_last_one():
    assert kept(keep_top_k(torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0]), 2)) == [0, 2, 3, 4]


@pytest.mark.parametrize(("p", "count"), [(0, 1), (0.5, 1), (0.8, 2), (0.9, 3), (1, 4)])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_top_p_keeps_the_token_that_crosses_p(p, count, order):
    likely = torch.tensor([0.5, 0.35, 0.1, 0.05])
    left = keep_top_p(likely[order].log(), p)
    assert sorted(order[i] for i in kept(left)) == list(range(count))


@pytest.mark.parametrize("p", [0.05, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.1, 1, 4])
@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 700, 5000])
def test_top_p_keeps_what_a_sum_over_the_likelier_ones_says_however_many_that_are(p, spread, vocabulary):
    logits = spread * torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    for row, left in zip(logits.double(), keep_top_p(logits, p), strict=True):
        likely = row.softmax(-1)
        likelier = torch.stack([likely[likely > own].sum() for own in likely])
        wrong = (likelier < p) != (left > -math.inf)
        assert (likelier[wrong] - p).abs().lt(1e-5).all()  # but where rounding decides
        assert wrong.sum() <= 1


def test_top_p_keeps_every_token_that_is_as_likely_as_the_last_one():
    assert kept(keep_top_p(torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0]), 0.6)) == [0, 2, 3, 4]
    assert kept(keep_top_p(torch.tensor([1.0, 1.0, 0.0]), 0)) == [0, 1]
    assert len(kept(keep_top_p(torch.zeros(200), 0.5))) == 200


def test_top_p_of_1_keeps_the_whole_tail():
    logits = torch.cat((torch.zeros(1), torch.full((50000,), -25.0)))
    assert len(kept(keep_top_p(logits, 1))) == 50001


def test_top_p_judges_what_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()  # of the first two, 4/7 and 3/7
    assert kept(filtered(logits, None, SamplingSettings(temperature=1, top_k=2, top_p=0.5))) == [0]
    assert kept(filtered(logits, None, SamplingSettings(temperature=1, top_k=0, top_p=0.5))) == [0, 1]


def test_top_p_judges_what_temperature_left():
    logits = torch.tensor([0.5, 0.35, 0.1, 0.05]).log()
    assert len(kept(filtered(logits, None, SamplingSettings(temperature=0.2, top_p=0.8)))) == 1
    assert len(kept(filtered(logits, None, SamplingSettings(temperature=5, top_p=0.8)))) == 3


@pytest.mark.parametrize(("min_p", "count"), [(0, 4), (0.05, 4), (0.15, 3), (0.25, 2), (0.75, 1), (1, 1)])
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(min_p, count):
    likely = torch.tensor([0.5, 0.35, 0.1, 0.05])
    assert kept(keep_min_p(likely.log(), min_p)) == list(range(count))


def test_a_repetition_penalty_makes_a_negative_logit_smaller():
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0])
    seen = torch.tensor([True, True, False, False])
    torch.testing.assert_close(penalise_repetition(logits, seen, 1.3), torch.tensor([1.538462, -2.6, 2.0, -2.0]))


@given(
    values=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=12),
    temperature=st.floats(1e-7, 1e7),
    k=st.integers(0, 15),
    p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    penalty=st.floats(0.1, 10),
)
@settings(max_examples=100, deadline=None)
def test_filters_always_leave_the_likeliest_token_and_no_nan(values, temperature, k, p, min_p, penalty):
    logits = torch.tensor([values])
    seen = torch.arange(len(values))[None] % 2 == 0
    rules = SamplingSettings(temperature=temperature, top_k=k, top_p=p, min_p=min_p, repetition_penalty=penalty)
    left = filtered(logits, seen, rules)
    penalised = penalise_repetition(logits, seen, penalty)
    # Two logits closer than the temperature can tell are equally likely: either may be the one that is left.
    assert left.max() == 0
    assert penalised[0, left.argmax()] >= penalised.max() - 1e-30
    assert not left.isnan().any()
    assert (left <= 0).all()


# --- The draw ---


def test_draws_have_the_frequencies_of_the_softmax():
    likely = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor(pick(likely.log().expand(20000, 5), gumbel_noise([generator] * 20000, 5)))
    torch.testing.assert_close(drawn.bincount(minlength=5) / 20000, likely, atol=0.012, rtol=0)
    assert (drawn != 4).all()


def test_the_noise_is_finite_even_where_the_generator_draws_0(monkeypatch):
    monkeypatch.setattr("torch.rand", lambda size, **kwargs: torch.zeros(size, dtype=torch.float64))
    only_the_last = torch.tensor([[float("-inf")] * 4 + [0.0]])
    assert pick(only_the_last, gumbel_noise([torch.Generator()], 5)) == [4]


def test_a_model_whose_output_is_nan_is_reported_in_words():
    model = model_of()
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    for rules in (GREEDY, PLAIN):
        with pytest.raises(UserError, match="not a number"):
            texts(model, [[1, 2]], rules, 4)


def test_temperature_0_is_the_argmax_whatever_the_seed():
    model = model_of()
    greedy = [texts(model, [[1, 5, 3]], SamplingSettings(temperature=0, seed=seed), 12) for seed in range(3)]
    assert greedy == [[greedy_alone(model, [1, 5, 3], 12)]] * 3


# --- The seed ---


def test_equal_seeds_give_equal_text_and_other_seeds_other_text():
    model, prompts = model_of(), [[1, 2, 3]] * 3
    hot = PLAIN.model_copy(update={"temperature": 3.0})
    once, again = (texts(model, prompts, hot, 10) for _ in range(2))
    assert once == again
    assert once != texts(model, prompts, hot.model_copy(update={"seed": 1}), 10)


def test_sixteen_samples_do_not_all_begin_alike():
    step = next(generate(model_of(), [[1, 2, 3]] * 16, SamplingSettings(temperature=3.0, top_p=1)))
    assert len(set(step.tokens)) > 1


def test_a_row_does_not_depend_on_how_many_rows_there_are():
    model, hot = model_of(), SamplingSettings(temperature=3.0)
    many = texts(model, [[1, 2, 3], [4], [5, 6]], hot, 10)
    assert texts(model, [[1, 2, 3]], hot, 10) == many[:1]
    assert texts(model, [[1, 2, 3], [4]], hot, 10) == many[:2]


def test_a_longer_text_begins_with_the_shorter_one():
    model = model_of()
    assert texts(model, [[1, 2]], PLAIN, 20)[0][:7] == texts(model, [[1, 2]], PLAIN, 7)[0]


def test_sampling_leaves_the_global_random_state_alone_and_does_not_read_it():
    model = model_of()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = texts(model, [[1, 2]], PLAIN, 6)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    assert texts(model, [[1, 2]], PLAIN, 6) == first


# --- What the model and the caller notice ---


def test_the_model_reads_without_dropout_and_every_module_keeps_its_mode():
    model, still = model_of(dropout=0.5), model_of()
    model.train()
    model.layers[1].eval()
    before = [module.training for module in model.modules()]
    steps = generate(model, [[1, 2, 3]], GREEDY, 8)
    new = []
    for step in steps:
        new += step.tokens
        assert [module.training for module in model.modules()] == before
        assert not torch.is_inference_mode_enabled()
    assert new == greedy_alone(still, [1, 2, 3], 8)


def test_every_module_keeps_its_mode_when_the_pass_fails():
    model = model_of().train()
    with pytest.raises(RuntimeError), evaluating([*model.modules()]):
        raise RuntimeError
    assert model.training


def test_training_goes_on_after_sampling():
    model = model_of("learned")
    texts(model, [[1, 2]], PLAIN, 3)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- Batches and the cache ---


def test_a_short_prompt_beside_a_long_one_gives_the_text_it_gives_alone(arm):
    model, prompts = model_of(arm), [tokens_of(2), tokens_of(14, seed=1), tokens_of(1, seed=2)]
    alone = [greedy_alone(model, prompt, 10, length=24) for prompt in prompts]
    assert len({tuple(text) for text in alone}) == 3
    assert texts(model, prompts, GREEDY, 10) == alone
    assert texts(model, prompts, GREEDY, 10, cache=False) == alone


def test_logits_of_a_padded_row_equal_those_of_the_row_alone_at_every_step(arm):
    model = model_of(arm)
    rows = [Row(tokens_of(2)), Row(tokens_of(14, seed=1))]
    reader = Reader(model, length=24, keep=True)
    with torch.inference_mode():
        for token in tokens_of(8, seed=3):
            logits = reader.read(rows, afresh=False)
            for row, got in zip(rows, logits, strict=True):
                torch.testing.assert_close(got, logits_alone(model, row.tokens, 24), atol=1e-10, rtol=0)
                row.tokens.append(token)


def test_random_text_is_the_same_with_and_without_cache(arm):
    model, prompts = model_of(arm), [tokens_of(2), tokens_of(9, seed=1)]
    hot = SamplingSettings(temperature=2.0, repetition_penalty=1.3, top_k=20, min_p=0.01)
    assert texts(model, prompts, hot, 12) == texts(model, prompts, hot, 12, cache=False)


def test_a_long_prompt_is_read_in_pieces_that_change_nothing(monkeypatch):
    monkeypatch.setattr("model.sampling.PIECE", 5)
    model, prompts = model_of(), [tokens_of(23), tokens_of(3, seed=1)]
    assert texts(model, prompts, GREEDY, 6) == [greedy_alone(model, prompt, 6) for prompt in prompts]


def test_pads_stand_on_the_left_at_position_minus_1():
    tokens, positions = left_padded([[7, 8, 9], [5], []], [3, 1, 0], torch.device("cpu"))
    assert tokens.tolist() == [[7, 8, 9], [0, 0, 5], [0, 0, 0]]
    assert positions.tolist() == [[0, 1, 2], [-1, -1, 0], [-1, -1, -1]]


# --- Ends ---


def test_a_row_that_met_a_stop_token_gets_no_more_and_the_others_go_on_unchanged():
    model, prompts = model_of(), [tokens_of(3), tokens_of(6, seed=1)]
    free = [greedy_alone(model, prompt, 12) for prompt in prompts]
    stop = next(token for token in free[0][2:6] if token not in free[1])
    cut = free[0][: free[0].index(stop) + 1]
    for cache in (True, False):
        steps = list(generate(model, prompts, GREEDY, 12, stop_ids=[stop], cache=cache))
        assert [step.tokens[0] for step in steps] == cut + [None] * (12 - len(cut))
        assert [step.tokens[1] for step in steps] == free[1]
        assert [step.ended[0] for step in steps] == [None] * (len(cut) - 1) + ["stop"] * (13 - len(cut))
        assert steps[-1].ended == ["stop", "length"]


def test_generation_ends_when_every_row_has_ended():
    model = model_of()
    first = greedy_alone(model, [1, 2], 3)
    steps = list(generate(model, [[1, 2]] * 2, GREEDY, 100, stop_ids=first))
    assert len(steps) == 1
    assert steps[0].ended == ["stop", "stop"]


def test_no_prompt_and_no_new_token_give_no_step():
    assert list(generate(model_of(), [], GREEDY, 5)) == []
    assert list(generate(model_of(), [[1]], GREEDY, 0)) == []


def test_a_large_limit_on_new_tokens_costs_nothing_until_it_is_used():
    steps = generate(model_of(), [[1]], GREEDY, 10**12)
    assert next(steps).ended == [None]


@pytest.mark.parametrize(
    ("prompts", "more", "words"),
    [
        ([[1], []], {}, "prompt 1 has no token"),
        ([[1, 40]], {}, "outside 0 .. 39"),
        ([[-1]], {}, "outside 0 .. 39"),
        ([[1]], {"max_new_tokens": -1}, "negative"),
        ([[1]], {"past_context": "crop"}, "'crop' is neither"),
    ],
)
def test_what_cannot_be_continued_is_refused_before_any_token(prompts, more, words):
    with pytest.raises(UserError, match=words):
        generate(model_of(), prompts, GREEDY, **more)


# --- Repetition ---


def repeats_nothing(arm: str, **more) -> tuple[list[int], list[int]]:
    prompt = [3, 4, 5]
    strict = SamplingSettings(temperature=0, repetition_penalty=1e6)
    return prompt, texts(model_of(arm), [prompt], strict, 20, **more)[0]


def test_the_prompt_and_the_new_text_count_as_repetition():
    prompt, new = repeats_nothing("rope")
    assert len({*prompt, *new}) == len(prompt) + len(new)


def test_a_repetition_penalty_looks_at_the_whole_text_also_after_a_reread():
    prompt, new = repeats_nothing("learned", past_context="reread")
    assert len({*prompt, *new}) == len(prompt) + len(new)


def test_pads_and_other_rows_do_not_count_as_repetition():
    model, strict = model_of(), SamplingSettings(temperature=0, repetition_penalty=1.5)
    prompts = [tokens_of(2), tokens_of(14, seed=1)]
    alone = [texts(model, [prompt], strict, 12)[0] for prompt in prompts]
    assert texts(model, prompts, strict, 12) == alone
    with torch.no_grad():  # token 0 stands in the pads: make it what the short row wants most
        model.lm_head.weight[0] = model.lm_head.weight[alone[0][0]] * 1.01
    assert texts(model, prompts, strict, 1)[0] == [0]


def test_a_token_that_ends_a_text_is_never_penalised():
    model = model_of()
    strict = SamplingSettings(temperature=0, repetition_penalty=1e6)
    with torch.no_grad():
        model.lm_head.weight[7] = 2 * model.lm_head.weight[greedy_alone(model, [7, 3, 4], 1)[0]]
    assert texts(model, [[7, 3, 4]], strict, 1) != [[7]]
    assert texts(model, [[7, 3, 4]], strict, 1, stop_ids=[7]) == [[7]]


# --- Past the context ---


@pytest.mark.parametrize("arm", UNLIMITED)
def test_an_unlimited_scheme_goes_on_past_the_context(arm):
    model, prompt = model_of(arm), tokens_of(10)
    alone = [greedy_alone(model, prompt, 2 * CONTEXT)]
    assert texts(model, [prompt], GREEDY, 2 * CONTEXT) == alone
    assert texts(model, [prompt], GREEDY, 2 * CONTEXT, cache=False) == alone


@pytest.mark.parametrize("cache", [True, False])
def test_under_stop_a_row_ends_when_its_newest_token_has_no_position(cache):
    model, prompts = model_of("learned"), [tokens_of(20), tokens_of(3, seed=1)]
    long, short = (greedy_alone(model, prompt, CONTEXT + 1 - len(prompt)) for prompt in prompts)
    assert texts(model, prompts, GREEDY, 60, cache=cache) == [long, short]
    assert endings(model, prompts, GREEDY, 60, cache=cache) == ["context", "context"]
    assert endings(model, prompts, GREEDY, 6, cache=cache) == ["context", "length"]
    assert endings(model, prompts, GREEDY, 5, cache=cache) == ["length", "length"]


def test_a_prompt_that_fills_the_context_is_continued_by_one_token():
    model, prompt = model_of("learned"), tokens_of(CONTEXT)
    assert texts(model, [prompt], GREEDY, 9) == [greedy_alone(model, prompt, 1)]


def test_a_prompt_beyond_the_context_is_refused_under_stop_before_any_token():
    with pytest.raises(UserError, match="25 tokens, but position 'learned' is defined for 24"):
        generate(model_of("learned"), [[1], tokens_of(CONTEXT + 1)], GREEDY)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("lengths", [[CONTEXT], [CONTEXT + 1], [3, 20, 100], [24, 23, 12]])
def test_under_reread_the_last_half_of_the_context_is_read_afresh(lengths, cache):
    model = model_of("learned")
    prompts = [tokens_of(length, seed) for seed, length in enumerate(lengths)]
    alone = [greedy_alone(model, prompt, 30, limit=CONTEXT) for prompt in prompts]
    assert texts(model, prompts, GREEDY, 30, past_context="reread", cache=cache) == alone


def test_reread_means_nothing_to_an_unlimited_scheme():
    model, prompt = model_of(), tokens_of(30)
    assert texts(model, [prompt], GREEDY, 30, past_context="reread") == texts(model, [prompt], GREEDY, 30)


def test_a_limit_of_one_position_reads_one_token_at_a_time():
    model = model_of("learned")
    model.position.max_positions = 1
    assert len(texts(model, [[1]], GREEDY, 5, past_context="reread")[0]) == 5
