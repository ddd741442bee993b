"""Synthetic tasks: right answers, strings that are in one split only, chance, and a loss that is the answer's alone."""

from collections import Counter

import numpy as np
import pytest
import torch

from data.tasks import (
    BOS,
    EOS,
    FIRST,
    MARK,
    PAD,
    TASKS,
    VOCAB_SIZE,
    Addition,
    Copy,
    Induction,
    Parity,
    Passkey,
    Recall,
    Reverse,
    Sort,
    TaskWindows,
    chance,
    has_few_strings,
    held_out,
    rows_of,
    split_of,
)
from experiments.tasks import answer_targets, measure_task, score, task_trainer, train_task
from model.checkpoint import load_model
from model.errors import UserError
from model.sampling import generate
from model.sampling_config import SamplingSettings
from model.transformer import IGNORED, Transformer, token_losses
from tests.conftest import loud_model, tiny_config
from training.config import Config, load
from training.hardware import Hardware
from training.tracking import read
from training.trainer import Trainer, next_tokens

CPU = Hardware(torch.device("cpu"), "fp32")
# Small enough that every string can be drawn, and every rule is still at work.
SMALL = {
    "copy": (Copy(4, unique=True), 3),
    "copy_repeated": (Copy(3), 3),
    "reverse": (Reverse(3), 3),
    "sort": (Sort(5, unique=True), 3),
    "addition": (Addition(), 1),
    "parity": (Parity(2), 5),
    "induction": (Induction(5, unique=True), 4),
    "recall": (Recall(keys=3, values=2), 2),
    "passkey": (Passkey(digits=1, fillers=2), 3),
}


# --- Independent rules: read off the prompt's symbols, as numbers from 0, with plain lists ----------------------------


def number(digits):
    return int("".join(map(str, digits)))


def sum_of(prompt):
    plus = prompt.index(10)
    total = number(prompt[:plus]) + number(prompt[plus + 1 :])
    return [int(digit) for digit in reversed(f"{total:0{plus + 1}d}")]


def rest_of_the_word(prompt):
    *word, cue = prompt
    assert word.count(cue) == 1
    return word[word.index(cue) + 1 :]


def value_of_key(prompt):
    *pairs, asked = prompt
    table = dict(zip(pairs[::2], pairs[1::2], strict=True))
    assert len(table) == len(pairs) // 2
    assert not set(table) & set(table.values())
    return [table[asked]]


RULES = {
    "copy": lambda prompt: list(prompt),
    "copy_repeated": lambda prompt: list(prompt),
    "reverse": lambda prompt: [prompt[-1 - i] for i in range(len(prompt))],
    "sort": lambda prompt: [symbol for symbol in range(max(prompt) + 1) if symbol in prompt],
    "addition": sum_of,
    "parity": lambda prompt: [1 if prompt.count(1) in range(1, len(prompt) + 1, 2) else 0],
    "induction": rest_of_the_word,
    "recall": value_of_key,
    "passkey": lambda prompt: [symbol for symbol in prompt if symbol < 10],
}


def symbols(ids):
    return (ids - FIRST).tolist()


def every_string(task, length):
    """Draw until nothing new has come for a long time: all prompts, and their answers."""
    rng, found, since = np.random.default_rng(0), {}, 0
    while since < 1000:
        prompt, answer = task.example(length, rng)
        since = since + 1 if tuple(prompt) in found else 0
        found[tuple(prompt)] = tuple(answer)
    return found


# --- Answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_every_answer_follows_the_rule_of_its_task(name):
    task, rng = TASKS[name], np.random.default_rng(1)
    for length in (task.shortest, 2, 3, 7, 16, 40, 64):
        for _ in range(20):
            prompt, answer = task.example(length, rng)
            assert symbols(answer) == RULES[name](symbols(prompt))
            assert (min(symbols(prompt)), max(prompt)) >= (0, 0)
            assert max(prompt.max(), answer.max()) < VOCAB_SIZE
            assert prompt.dtype == answer.dtype == np.int64


@pytest.mark.parametrize("name", TASKS)
def test_a_row_is_bos_prompt_mark_answer_eos_and_pads(name):
    task, rng = TASKS[name], np.random.default_rng(2)
    prompt, answer = task.example(5, rng)
    width = task.width(5)
    row = rows_of([(prompt, answer)], width + 3)[0]
    written = [BOS, *prompt, MARK, *answer, EOS]
    assert row.tolist() == written + [PAD] * (width + 3 - len(written))
    assert width == task.prompt_size(5) + len(task.choices(5)) + 3
    assert len(answer) in {len(form) for form in task.forms(5)}


def test_the_symbols_of_a_copied_word_are_different_or_repeat():
    rng = np.random.default_rng(3)
    assert all(len(set(TASKS["copy"].example(128, rng)[0].tolist())) == 128 for _ in range(5))
    assert all(len(set(TASKS["copy_repeated"].example(40, rng)[0].tolist())) <= 10 for _ in range(5))


def test_a_passkey_stands_at_every_place_of_the_filler():
    rng = np.random.default_rng(4)
    prompts = [symbols(TASKS["passkey"].example(6, rng)[0]) for _ in range(300)]
    assert {next(i for i, symbol in enumerate(prompt) if symbol < 10) for prompt in prompts} == set(range(7))


@pytest.mark.parametrize(("name", "length"), [("copy", 129), ("induction", 1), ("parity", 0), ("recall", 97)])
def test_a_length_that_a_task_has_not_is_refused(name, length):
    with pytest.raises(UserError, match=rf"length {length} does not exist in task {name}: give at least \d"):
        held_out(name, length, 4)


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="'copie' is not known; there are: copy, copy_repeated, "):
        TaskWindows("copie", 4, 0)


# --- Counting by enumeration ------------------------------------------------------------------------------------------


def seen_by_size(found):
    """Return, for each size of an answer, what ever stands at each of its places."""
    sizes = sorted({len(answer) for answer in found.values()})
    answers = {size: [answer for answer in found.values() if len(answer) == size] for size in sizes}
    return {size: [sorted(set(place)) for place in zip(*same, strict=True)] for size, same in answers.items()}


@pytest.mark.parametrize("name", TASKS)
def test_strings_and_choices_are_those_that_enumeration_finds(name):
    task, length = SMALL[name]
    found = every_string(task, length)
    assert task.strings(length) == len(found)
    assert task.forms(length) == tuple(tuple(map(len, seen)) for seen in seen_by_size(found).values())
    assert task.choices(length) == max(task.forms(length), key=len)


@pytest.mark.parametrize("name", TASKS)
def test_the_chance_of_exact_match_and_of_a_token_is_that_of_random_guessing(name):
    (task, length), rng, rounds = SMALL[name], np.random.default_rng(5), 1000
    seen = seen_by_size(every_string(task, length))
    exact = right = tokens = 0
    for _ in range(rounds):
        _, answer = task.example(length, rng)
        hits = [rng.choice(ids) == token for ids, token in zip(seen[len(answer)], answer, strict=True)] + [True]  # EOS
        exact, right, tokens = exact + all(hits), right + sum(hits), tokens + len(hits)
    guess = chance(task, length)
    assert exact / rounds == pytest.approx(guess.exact, abs=4 * (guess.exact * (1 - guess.exact) / rounds) ** 0.5)
    assert right / tokens == pytest.approx(guess.token, abs=2 / rounds**0.5)


def test_chance_has_its_textbook_values():
    assert chance(TASKS["parity"], 30) == (0.5, 0.75)
    assert chance(TASKS["copy"], 2) == (pytest.approx(128.0**-2), pytest.approx((1 + 2 / 128) / 3))
    assert chance(TASKS["addition"], 3).exact == pytest.approx(1 / 2000)
    assert chance(TASKS["passkey"], 99).exact == pytest.approx(1e-5)


# --- Splits -----------------------------------------------------------------------------------------------------------


def prompts_of(rows):
    """Return the prompt of each row as a tuple."""
    return [tuple(row[1 : row.index(MARK)]) for row in rows.tolist()]


@pytest.mark.parametrize(("name", "length"), [("copy_repeated", 2), ("addition", 1), ("copy", 1)])
def test_every_string_is_in_one_split_and_training_never_reads_a_test_string(name, length):
    everything = set(every_string(TASKS[name], length))
    trained = set(prompts_of(TaskWindows(name, length, 0).rows(np.arange(1500))))
    trained = {prompt for prompt in trained if len(prompt) == TASKS[name].prompt_size(length)}
    test, validation = (set(prompts_of(held_out(name, length, 100, split))) for split in ("test", "validation"))
    assert everything == trained | test | validation
    assert len(everything) == len(trained) + len(test) + len(validation)
    assert min(len(test), len(validation)) > 0


@pytest.mark.parametrize("name", TASKS)
def test_an_eighth_of_all_strings_is_for_the_test_and_another_for_validation(name):
    rng = np.random.default_rng(6)
    counts = Counter(split_of(name, 12, TASKS[name].example(12, rng)[0]) for _ in range(3000))
    assert counts["test"] / 3000 == pytest.approx(1 / 8, abs=0.025)
    assert counts["validation"] / 3000 == pytest.approx(1 / 8, abs=0.025)
    assert counts["train"] / 3000 == pytest.approx(3 / 4, abs=0.035)


def test_a_length_with_few_strings_is_trained_on_whole_and_not_tested():
    assert [length for length in range(1, 9) if has_few_strings("parity", length)] == [1, 2, 3, 4, 5]
    assert held_out("parity", 5, 100).shape == (0, 9)
    short = {prompt for prompt in prompts_of(TaskWindows("parity", 6, 0).rows(np.arange(1500))) if len(prompt) == 5}
    assert len(short) == 32


def test_a_test_holds_different_strings_and_says_how_many_there_are():
    for name in TASKS:
        prompts = prompts_of(held_out(name, 20, 100))
        assert len(prompts) == len(set(prompts)) == 100
        assert {split_of(name, 20, np.array(prompt)) for prompt in prompts} == {"test"}
    assert 0 < len(held_out("parity", 7, 100)) < 40


# --- Order of rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_a_training_row_depends_on_seed_and_number_alone(name):
    windows = TaskWindows(name, 9, 5)
    rows = windows.rows(np.arange(40))
    assert rows.shape == (40, windows.context + 1)
    np.testing.assert_array_equal(TaskWindows(name, 9, 5).rows(np.array([31, 7, 7])), rows[[31, 7, 7]])
    assert (TaskWindows(name, 9, 6).rows(np.arange(40)) != rows).any()
    np.testing.assert_array_equal(held_out(name, 9, 10), held_out(name, 9, 10))


def test_training_lengths_are_drawn_evenly_up_to_the_longest():
    for name, shortest in (("copy", 1), ("induction", 2), ("parity", 1)):
        sizes = Counter(map(len, prompts_of(TaskWindows(name, 8, 0).rows(np.arange(1500)))))
        longest = TASKS[name].prompt_size(8)
        assert sorted(sizes) == list(range(longest - 8 + shortest, longest + 1))
        expected = 1500 / len(sizes)
        assert all(abs(count - expected) < 5 * expected**0.5 for count in sizes.values())


# --- The loss is that of the answer -----------------------------------------------------------------------------------


def task_model(position="rope", **changes):
    return tiny_config(position, **{"vocab_size": VOCAB_SIZE, "context": 64, **changes})


@pytest.mark.parametrize("name", TASKS)
def test_targets_are_the_answer_and_its_end(name):
    rows = TaskWindows(name, 7, 0).rows(np.arange(30))
    for row, targets in zip(rows.tolist(), answer_targets(torch.from_numpy(rows)).tolist(), strict=True):
        mark, end = row.index(MARK), row.index(EOS)
        assert targets == [IGNORED] * mark + row[mark + 1 : end + 1] + [IGNORED] * (len(row) - 1 - end)


def gradients(trainer):
    seen = {}

    def keep(lr, loss):
        seen.update({name: p.grad.clone() for name, p in trainer.model.named_parameters()}, loss=loss)
        return torch.zeros(3)

    trainer.update = keep
    trainer.advance()
    return seen


def small_trainer(windows, targets_of=answer_targets, **training):
    config = Config.model_construct(
        model=task_model(context=windows.context),
        optimizer=Config().optimizer,
        training=Config().training.model_copy(update={"batch_size": 8, "compile": "off", **training}),
    )
    trainer = Trainer(config, windows, CPU, targets_of=targets_of)
    trainer.model.double()
    return trainer


def test_a_step_learns_from_the_answer_alone_whatever_the_micro_batches():
    windows = TaskWindows("copy", 6, 0)
    rows = torch.from_numpy(windows.rows(np.arange(8)))
    model = small_trainer(windows).model
    picked = []  # one row at a time, cut at its end: each answer token after the true ones before it
    for row in rows.tolist():
        mark, end = row.index(MARK), row.index(EOS)
        losses = token_losses(model(torch.tensor([row[:end]])), torch.tensor([row[1 : end + 1]]))
        picked.append(losses[0, mark:])
    expected = torch.cat(picked).mean()
    expected.backward()
    for rows_at_once in (8, 3, 1):
        found = gradients(small_trainer(windows, micro_batch_size=rows_at_once))
        assert found["loss"].item() == pytest.approx(expected.item(), abs=1e-6)  # a step adds its loss up in float32
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-9)


def test_changed_targets_of_the_prompt_change_no_gradient():
    def other_prompt_targets(rows):
        changed = rows.clone()
        mark = (rows == MARK).int().argmax(dim=1, keepdim=True)
        # Only what the targets see: a prompt in reverse order, in front of the same answer.
        changed[:, 1:] = torch.where(torch.arange(1, rows.shape[1]) < mark, rows[:, 1:].roll(1, 1), rows[:, 1:])
        changed[torch.arange(len(rows)), mark[:, 0]] = MARK
        return answer_targets(changed)

    windows = TaskWindows("reverse", 6, 0)
    one, other = gradients(small_trainer(windows)), gradients(small_trainer(windows, other_prompt_targets))
    assert all(torch.equal(one[name], other[name]) for name in one)
    everything = gradients(small_trainer(windows, next_tokens))
    assert not torch.allclose(one["embed_tokens.weight"], everything["embed_tokens.weight"])


@pytest.mark.parametrize("position", ["nope", "learned", "rope", "alibi", "t5", "cope"])
def test_pads_and_the_batch_size_change_nothing(position):
    model = loud_model(task_model(position, context=80))
    strings = held_out("copy_repeated", 6, 13)
    padded = np.pad(strings, ((0, 0), (0, 9)), constant_values=PAD)
    whole = score(model, strings, CPU, 13)
    for other in (score(model, strings, CPU, 1), score(model, strings, CPU, 5), score(model, padded, CPU, 13)):
        assert other == pytest.approx(whole, abs=1e-9)
    one_by_one = [token_losses(model(row[None, :-1]), row[None, 1:])[0, 7:] for row in torch.from_numpy(strings)]
    assert whole.loss == pytest.approx(torch.cat(one_by_one).mean().item(), abs=1e-9)


# --- Runs and scores --------------------------------------------------------------------------------------------------


def run_config(**changes):
    return load(
        "configs/base.yaml",
        {
            "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 2, "optimizer.lr": 1e-2,
            "optimizer.warmup_steps": 10, "training.steps": 150, "training.batch_size": 16, "training.eval_every": 60,
            "training.eval_windows": 32,
            "training.device": "cpu", "training.precision": "fp32", **changes,
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def copier(tmp_path_factory):
    """A run that has learnt to copy some of its words, and its folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("copier") / "run"
    return train_task(run_config(), "copy_repeated", 4, folder), folder


def test_exact_match_is_what_greedy_decoding_with_a_cache_gets_right(copier):
    run, _ = copier
    greedy = SamplingSettings(temperature=0)
    outcomes = set()
    for length in (2, 3, 4, 5):
        strings = held_out("copy_repeated", length, 12)
        right = 0
        for row in strings.tolist():
            cut = row.index(MARK) + 1
            answer = row[cut:]
            steps = generate(run.model, [row[:cut]], greedy, max_new_tokens=len(answer), stop_ids=[EOS])
            written = [step.tokens[0] for step in steps]
            right += written == answer
            outcomes.add(written == answer)
        assert score(run.model, strings, CPU, 7).exact == right / len(strings)
    assert outcomes == {True, False}  # else the comparison would show nothing


def test_token_accuracy_counts_each_token_after_the_true_ones_before_it(copier):
    run, _ = copier
    strings = held_out("copy_repeated", 4, 10)
    hits = [
        run.model(torch.tensor([row[:place]]))[0, -1].argmax().item() == row[place]
        for row in strings.tolist()
        for place in range(row.index(MARK) + 1, len(row))
    ]
    assert score(run.model, strings, CPU, 4).token == pytest.approx(sum(hits) / len(hits))


def test_a_run_learns_and_keeps_its_curve_its_settings_and_its_model(copier):
    run, folder = copier
    assert run.diverged is None
    assert [point.step for point in run.validation] == [60, 120, 150]
    assert run.validation[0].tokens == 60 * 16 * run.config.model.context
    assert run.validation_loss == run.validation[-1].loss < run.validation[0].loss < 2.4
    rows = read(folder / "metrics.jsonl")
    assert [row["validation_loss"] for row in rows if "validation_loss" in row] == [p.loss for p in run.validation]
    assert len([row for row in rows if "training_loss" in row]) == len(run.training) == 15
    loaded = load_model(folder / "model").model
    strings = held_out("copy_repeated", 4, 8)
    assert score(loaded, strings, CPU, 8) == score(run.model, strings, CPU, 8)
    final, *curve = run.measurements("rope", 3)
    assert final[:4] == ("rope", 3, "validation_loss", run.validation_loss)
    assert (final.length, final.task, final.count) == (4, "copy_repeated", 32)
    assert [point.x for point in curve] == [point.tokens for point in run.validation]


def test_equal_settings_give_equal_runs_and_another_seed_another():
    few = {"training.steps": 3, "training.eval_every": 3}
    one, same = (train_task(run_config(**few), "sort", 4).validation_loss for _ in "ab")
    assert one == same != train_task(run_config(**few, **{"training.seed": 1}), "sort", 4).validation_loss


def test_equal_seeds_train_every_scheme_on_the_same_rows():
    rows = [
        task_trainer(run_config(**{"model.position": position}), "recall", 5).batch(np.arange(6))
        for position in ("rope", "learned", "alibi")
    ]
    assert all(torch.equal(rows[0], other) for other in rows)


def test_a_scheme_that_ends_is_undefined_beyond_its_last_position():
    config = task_trainer(run_config(**{"model.position": "learned"}), "copy", 5).config.model
    assert config.context == 1 + 5 + 1 + 5
    scores = measure_task(Transformer(config), "copy", (3, 5, 6), 4, CPU)
    assert [score.examples for score in scores] == [4, 4, 0]
    assert [score.exact is None for score in scores] == [False, False, True]
    exact, token, chance_exact, chance_token = scores[2].measurements("learned", 0)
    assert (exact.measure, exact.value, exact.length, exact.task, exact.count) == (
        "task_exact_match",
        None,
        6,
        "copy",
        0,
    )
    assert (token.measure, token.value) == ("task_token_accuracy", None)
    assert (chance_exact.measure, chance_exact.value) == ("task_chance", chance(TASKS["copy"], 6).exact)
    assert (chance_token.measure, chance_token.value) == ("task_token_chance", chance(TASKS["copy"], 6).token)


def test_random_positions_are_undefined_beyond_their_range():
    config = task_model(random_positions=64, context=13)
    scores = measure_task(Transformer(config), "copy", (5, 31, 32), 4, CPU)
    assert [score.exact is None for score in scores] == [False, False, True]


def test_a_run_that_diverges_says_so_and_leaves_no_model(tmp_path):
    run = train_task(run_config(**{"optimizer.lr": 1e30, "optimizer.clip_norm": 0.0}), "copy", 4, tmp_path)
    assert run.diverged is not None
    assert "not finite" in run.diverged
    assert run.validation_loss is None
    assert run.measurements("rope", 0)[0].value is None
    assert not (tmp_path / "model").exists()


def test_a_stopped_run_leaves_no_model_and_a_new_one_begins_its_log_anew(tmp_path, monkeypatch):
    def interrupted(trainer):
        raise KeyboardInterrupt

    few = run_config(**{"training.steps": 20})
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "results", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_task(few, "copy", 4, tmp_path)
    assert not (tmp_path / "model").exists()
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "training_loss": 1.0}\n')
    train_task(few, "copy", 4, tmp_path)
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [10, 20, 20]
    with pytest.raises(UserError, match="holds a finished run: take its model, or give another folder"):
        train_task(few, "copy", 4, tmp_path)


def test_settings_that_mean_nothing_for_tasks_are_refused():
    with pytest.raises(UserError, match=r"training.max_minutes 2.0 is not for tasks"):
        train_task(run_config(**{"training.max_minutes": 2}), "copy", 4)
    with pytest.raises(UserError, match="task parity at length 5 has fewer than 64 strings"):
        train_task(run_config(), "parity", 5)


def test_what_text_learns_is_still_the_next_token():
    windows = torch.arange(12).view(2, 6)
    targets = next_tokens(windows)
    assert targets.tolist() == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]
    targets.zero_()
    assert windows[0].tolist() == [0, 1, 2, 3, 4, 5]
