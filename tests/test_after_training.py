"""What may be done to a run when it is over: other settings of its scheme, and another run from its weights."""

import math

import pytest
import torch
from safetensors.torch import load_file

import generate
from model.checkpoint import load_model
from model.config import ModelConfig
from model.errors import UserError
from model.position.config import LearnedConfig, RoPEConfig, may_change_after_training, refuse_changes_of_weights
from tests.conftest import random_tokens
from tests.test_run import killed_at, results, run, same
from training.run_folder import RunFolder


def with_position(settings, position, **training):
    return {
        **settings,
        "model": {**settings["model"], "position": position, "dropout": 0.0},
        "training": {**settings["training"], **training},
    }


def sampled(folder, capsys, *words):
    """The text that generate.py writes for a greedy continuation, and its remarks."""
    capsys.readouterr()
    generate.main([str(folder), "--prompt", "the", "--temperature", "0", "--max-new-tokens", "60", *words])
    return capsys.readouterr()


# --- Other settings ---------------------------------------------------------------------------------------------------


def test_only_settings_that_touch_no_weight_may_change():
    assert may_change_after_training(RoPEConfig) == ["base", "scaling", "log_n"]
    assert may_change_after_training(LearnedConfig) == ["beyond"]
    refuse_changes_of_weights(RoPEConfig(), RoPEConfig(base=5e5, scaling="yarn", log_n=True))
    with pytest.raises(
        UserError, match=r"keeps its fraction \(run: 1.0, asked: 0.5\); after training may change: base"
    ):
        refuse_changes_of_weights(RoPEConfig(), RoPEConfig(fraction=0.5))
    with pytest.raises(UserError, match="'learned': the run was trained with 'rope', and its weights fit no other"):
        refuse_changes_of_weights(RoPEConfig(), LearnedConfig())


@pytest.mark.parametrize(
    "words",
    [
        ["--position.scaling.kind", "yarn", "--position.scaling.factor", "4"],
        ["--position.scaling", "linear", "--position.scaling.factor=8"],
        ["--position.scaling", "dynamic_ntk"],
        ["--position.base", "500000"],
        ["--position.log-n"],
    ],
)
def test_a_run_is_sampled_with_another_scaling_without_retraining(tmp_path, settings, capsys, words):
    run(tmp_path / "r", with_position(settings, "rope"), steps=20)
    before = sampled(tmp_path / "r", capsys).out
    after = sampled(tmp_path / "r", capsys, *words)
    assert after.out.startswith("the")
    assert after.err == ""
    assert sampled(tmp_path / "r", capsys, *words, "--no-cache").out == after.out
    asked = generate.position_asked(RunFolder(tmp_path / "r").checkpoint(), words)
    tokens = random_tokens(1, 60, 300)
    checkpoint = RunFolder(tmp_path / "r").checkpoint()
    assert not torch.equal(load_model(checkpoint).model(tokens), load_model(checkpoint, position=asked).model(tokens))
    assert before.startswith("the")


def test_the_run_may_stand_behind_the_settings(tmp_path, settings, capsys):
    run(tmp_path / "r", with_position(settings, "rope"), steps=2)
    generate.main(["--position.log-n", str(tmp_path / "r"), "--prompt", "the", "--max-new-tokens", "2"])
    assert "the" in capsys.readouterr().out


def test_a_learned_table_is_outlived_by_a_named_way_to_go_on(tmp_path, settings, capsys):
    run(tmp_path / "r", with_position(settings, "learned"), steps=2)
    assert "the text ends here" in sampled(tmp_path / "r", capsys).err
    for beyond in ("clamp", "wrap", "interpolate"):
        assert sampled(tmp_path / "r", capsys, "--position.beyond", beyond).err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--position.layout", "half"], "keeps its layout (run: interleaved, asked: half)"),
        (["--position", "alibi"], "position 'alibi': the run was trained with 'rope'"),
        (["--position.scaling", "jarn"], "perhaps you meant yarn"),
        (["--position.scaling.kind", "yarn", "--position.scaling.factor", "0.5"], "factor"),
    ],
)
def test_every_other_change_is_refused_in_one_line(tmp_path, settings, capsys, words, message):
    run(tmp_path / "r", with_position(settings, "rope"), steps=2)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        generate.main([str(tmp_path / "r"), *words])
    errors = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in errors
    assert "Traceback" not in errors


def test_the_stored_checkpoint_stays_what_it_was(tmp_path, settings):
    run(tmp_path / "r", with_position(settings, "rope"), steps=2)
    checkpoint = RunFolder(tmp_path / "r").checkpoint()
    load_model(checkpoint, position=RoPEConfig(base=5e5))
    assert load_model(checkpoint).model.config.position == RoPEConfig()


# --- Another run from its weights -------------------------------------------------------------------------------------


def test_a_run_goes_on_from_another_runs_weights_without_its_positions(tmp_path, settings, capsys):
    run(tmp_path / "rope", with_position(settings, "rope"))
    run(tmp_path / "drope", with_position(settings, "nope", init_from=str(tmp_path / "rope")), steps=1)
    out = capsys.readouterr().out
    assert f"weights   from {tmp_path / 'rope'}" in out
    begun = load_file(RunFolder(tmp_path / "rope").checkpoint("best") / "model.safetensors")
    moved = load_file(RunFolder(tmp_path / "drope").checkpoint("last") / "model.safetensors")
    fresh_run = with_position(settings, "nope", steps=1)
    run(tmp_path / "fresh", fresh_run)
    fresh = load_file(RunFolder(tmp_path / "fresh").checkpoint("last") / "model.safetensors")
    for name, weight in begun.items():
        if weight.dim() == 2:
            assert (moved[name] - weight).abs().max() < 0.05 * weight.abs().max() + 0.02, name
            assert not torch.equal(moved[name], fresh[name])


def test_positional_weights_that_only_one_of_the_two_has_begin_anew_and_are_named(tmp_path, settings, capsys):
    run(tmp_path / "t5", with_position(settings, "t5"), steps=2)
    run(tmp_path / "learned", with_position(settings, "learned", init_from=str(tmp_path / "t5")), steps=2)
    assert "but for position.table" in capsys.readouterr().out


def test_a_killed_run_from_another_runs_weights_goes_on_as_if_never_interrupted(tmp_path, settings, monkeypatch):
    run(tmp_path / "rope", with_position(settings, "rope"), steps=5)
    drope = with_position(settings, "nope", init_from=str(tmp_path / "rope"))
    run(tmp_path / "whole", drope)
    for died_at in (3, 9):
        folder = tmp_path / f"killed-{died_at}"
        killed_at(died_at, monkeypatch, folder, drope)
        run(folder, drope, resume=True)
        assert same(results(folder)[:3], results(tmp_path / "whole")[:3])


def test_another_shape_or_tokenizer_is_refused(tmp_path, settings):
    run(tmp_path / "a", with_position(settings, "rope"), steps=2)
    wider = with_position(settings, "rope", init_from=str(tmp_path / "a"))
    wider["model"]["d_model"] = 48
    with pytest.raises(UserError, match="does not fit this model"):
        run(tmp_path / "b", wider)
    other = with_position(settings, "rope", init_from=str(tmp_path / "a"))
    other["data"] = {**other["data"], "vocab_size": 290}
    with pytest.raises(UserError, match="another tokenizer"):
        run(tmp_path / "c", other)
    with pytest.raises(UserError, match="does not exist"):
        run(tmp_path / "d", with_position(settings, "rope", init_from=str(tmp_path / "nowhere")))
    assert not (tmp_path / "b").exists()


def test_yarn_on_a_trained_model_changes_scores_by_the_square_of_its_temperature():
    model = ModelConfig(vocab_size=10, position={"kind": "rope", "scaling": {"kind": "yarn", "factor": 4.0}})
    from model.position.rope import RoPE

    rotation = RoPE(model).rotation(torch.zeros(1, 1), 256, torch.float64)
    assert rotation.q_cos[0, 0, 0] * rotation.k_cos[0, 0, 0] == pytest.approx((0.1 * math.log(4) + 1) ** 2)
