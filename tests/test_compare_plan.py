"""What an experiment is made of: its runs, their keys, their settings, and what is refused before it begins."""

import re

import pytest
import yaml

from experiments.campaign import Shard, shard_from
from experiments.config import read_experiment
from experiments.plan import Facts, Plan, count
from experiments.results import Trial
from experiments.tuning import at_edge, chosen, publish, read_published, tuned_by, untuned
from model.errors import UserError
from tests.test_run import ROOT

BASE = "model: {n_layers: 2, d_model: 32, n_heads: 4, context: 24}\ndata: {vocab_size: 300}\ntraining: {steps: 6}\n"
ARMS = """
  learned: {model.position: learned}
  rope: {model.position: rope}
  rope-yarn: {train: rope, eval: {model.position.scaling: yarn}}
"""
FACTS = Facts("data", 300, "fp32")


def written(folder, arms=ARMS, base=BASE, **fields):
    lines = {"base": "base.yaml", "reference": "learned", "lengths": "[24, 48]", "seeds": "[0, 1]"} | fields
    (folder / "base.yaml").write_text(base)
    path = folder / "x.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in lines.items() if value) + f"arms:{arms}")
    return path


def plan_of(folder, facts=FACTS, **fields):
    return Plan(read_experiment(written(folder, **fields)), facts)


def test_every_trained_arm_runs_with_every_seed_and_eval_arms_take_weights(tmp_path):
    plan = plan_of(tmp_path)
    runs = plan.measured({("learned", ""): {}, ("rope", ""): {}})
    assert [(run.arm, run.seed) for run in runs] == [("learned", 0), ("rope", 0), ("learned", 1), ("rope", 1)]
    assert list(plan.evaluated_as(runs[1])) == ["rope", "rope-yarn"]
    assert plan.evaluated_as(runs[1])["rope-yarn"].scaling.kind == "yarn"


def test_the_grid_is_every_combination_for_every_arm(tmp_path):
    plan = plan_of(tmp_path, tune="{optimizer.lr: [1e-3, 2e-3], optimizer.weight_decay: [0.0, 0.1], seeds: [100, 101]}")
    runs = plan.tuning()
    assert len(runs) == len({run.key for run in runs}) == 2 * 2 * 2 * 2
    assert {run.config.optimizer.lr for run in runs} == {1e-3, 2e-3}
    assert {run.seed for run in runs} == {100, 101}


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ("model: {d_model: 64}", True),
        ("training: {steps: 7}", True),
        ("optimizer: {lr: 5e-3}", True),
        ("training: {eval_windows: 5}", True),  # the curve would be another
        ("training: {log_every: 3, keep: 5, wandb: offline, out: elsewhere}", False),
        ("data: {folder: elsewhere}", False),
    ],
)
def test_a_run_is_known_by_all_that_decides_what_it_learns_and_by_nothing_else(tmp_path, change, differs):
    before = plan_of(tmp_path).run("rope", 0, {}).key
    (tmp_path / "below.yaml").write_text(BASE)
    after = plan_of(tmp_path, base=f"extends: below.yaml\n{change}\n").run("rope", 0, {}).key
    assert (before != after) == differs


def test_data_precision_seed_task_and_settings_make_another_run(tmp_path):
    plan = plan_of(tmp_path)
    others = [
        plan.run("rope", 1, {}), plan.run("rope", 0, {"optimizer.lr": 1e-2}), plan.run("rope", 0, {}, "copy"),
        plan_of(tmp_path, FACTS._replace(data="other")).run("rope", 0, {}),
        plan_of(tmp_path, FACTS._replace(precision="bf16")).run("rope", 0, {}),
    ]  # fmt: skip
    assert len({run.key for run in [plan.run("rope", 0, {}), *others]}) == 6


def test_the_same_model_under_two_names_is_one_run_unless_names_are_in_the_key(tmp_path):
    arms = "\n  learned: {model.position: learned}\n  twin: {model.position: {kind: learned, layers: first}}\n"
    plan = plan_of(tmp_path, arms=arms)
    assert plan.run("learned", 0, {}).key == plan.run("twin", 0, {}).key
    plan = plan_of(tmp_path, arms=arms, key_by_name="true")
    assert plan.run("learned", 0, {}).key != plan.run("twin", 0, {}).key


def test_an_arm_may_have_more_seeds_and_the_arms_that_take_its_weights_have_them_too(tmp_path):
    arms = ARMS.replace("rope: {model.position: rope}", "rope: {model.position: rope, seeds: [0, 1, 2, 3]}")
    plan = plan_of(tmp_path, arms=arms)
    assert plan.seeds("learned") == (0, 1)
    assert plan.seeds("rope") == plan.seeds("rope-yarn") == (0, 1, 2, 3)


def test_a_control_is_widened_to_the_size_of_another_arm(tmp_path):
    arms = ARMS + "  wide: {model.position: nope, matched_to: learned}\n"
    plan = plan_of(tmp_path, arms=arms)
    sizes = {arm: count(plan.run(arm, 0, {}).config.model) for arm in ("learned", "wide", "rope")}
    assert sizes["learned"] - sizes["rope"] == 24 * 32
    assert abs(sizes["wide"] - sizes["learned"]) <= 3 * 32 * 2 / 2  # half of what one unit of width costs
    assert sizes["wide"] > sizes["rope"]


def test_what_is_declared_is_known_by_a_hash_that_the_base_is_part_of(tmp_path):
    first = read_experiment(written(tmp_path)).digest
    assert read_experiment(written(tmp_path)).digest == first
    assert read_experiment(written(tmp_path, seeds="[0, 2]")).digest != first
    assert read_experiment(written(tmp_path, base=BASE + "optimizer: {lr: 1e-2}\n")).digest != first


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"reference": "rop"}, "reference 'rop' is no arm"),
        ({"lengths": "[32, 64]"}, "must begin with the training length, model.context 24"),
        ({"arms": "\n  learned: {model.positon: learned}\n"}, "model.positon: unknown setting"),
        ({"arms": "\n  learned: {data.vocab_size: 500}\n"}, "data.vocab_size is the same for all arms"),
        ({"arms": "\n  learned: {train: nobody, eval: {}}\n"}, "train 'nobody' is no arm that is trained"),
        ({"arms": ARMS + "  odd: {train: rope, model.position: nope}\n"}, "takes weights as they are"),
        ({"arms": "\n  learned: {eval: {model.position.beyond: clamp}}\n"}, "`eval` needs `train`"),
        ({"arms": "\n  learned: rope\n"}, "must be settings"),
        ({"tune": "{optimizer.lr: [1e-3], seeds: [1]}"}, "tuning needs seeds of its own"),
        ({"tune": "{optimizer.lrr: [1e-3]}"}, "optimizer.lrr: unknown setting"),
        ({"base": BASE.replace("steps: 6", "steps: 6, max_minutes: 3")}, "max_minutes would give each run other steps"),
        ({"seeds": "[0, 0]"}, "each stand once"),
        ({"seedz": "[0]"}, "seedz: unknown setting"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_it(tmp_path, fields, told):
    with pytest.raises(UserError, match=re.escape(told)) as error:
        plan_of(tmp_path, **fields).tuning()
    assert "\n" not in str(error.value)


def test_an_arm_that_would_change_weights_after_training_is_refused(tmp_path):
    arms = ARMS + "  odd: {train: rope, eval: {model.position.fraction: 0.5}}\n"
    plan = plan_of(tmp_path, arms=arms)
    with pytest.raises(UserError, match="keeps its fraction"):
        plan.evaluated_as(plan.run("rope", 0, {}))


EXPERIMENTS = [file for file in (ROOT / "configs/compare").glob("*.yaml") if "arms:" in file.read_text()]


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_every_shipped_experiment_can_be_planned(file):
    plan = Plan(read_experiment(file), FACTS._replace(vocabulary=1024))
    runs = plan.measured({(arm, task): {} for arm in plan.trained for task in plan.tasks})
    assert {arm for run in runs for arm in plan.evaluated_as(run)} == set(plan.experiment.arms)
    assert len(plan.tuning()) == len({run.key for run in plan.tuning()})


# --- Tuning ---

GRID = [{"optimizer.lr": lr} for lr in (1e-3, 2e-3, 4e-3)]


def trials(*losses, seed=100):
    return tuple(Trial("rope", settings, seed, loss) for settings, loss in zip(GRID, losses, strict=True))


def test_the_settings_of_the_lowest_mean_loss_are_chosen():
    both = (*trials(3.0, 2.0, 2.5), *trials(2.0, 3.5, 2.4, seed=101))
    assert chosen(GRID, both).settings == {"optimizer.lr": 4e-3}  # means 2.5, 2.75, 2.45
    assert chosen(GRID, trials(3.0, 2.0, 2.5)).settings == {"optimizer.lr": 2e-3}


def test_settings_under_which_a_seed_diverged_are_not_chosen():
    both = (*trials(3.0, 2.0, 2.5), *trials(3.0, None, 2.5, seed=101))
    assert chosen(GRID, both).settings == {"optimizer.lr": 4e-3}


@pytest.mark.parametrize(("best", "edge"), [(0, True), (1, False), (2, True)])
def test_the_best_at_the_edge_of_the_grid_is_noticed(best, edge):
    losses = [3.0, 3.0, 3.0]
    losses[best] = 2.0
    assert chosen(GRID, trials(*losses)).at_edge == edge


def test_a_setting_with_one_value_has_no_edge():
    grid = [{"optimizer.lr": lr, "optimizer.weight_decay": 0.1} for lr in (1e-3, 2e-3, 4e-3)]
    assert not at_edge(grid[1], grid)
    assert at_edge(grid[0], grid)


def tuned_plan(folder, arms=ARMS, **fields):
    return plan_of(folder, arms=arms, tune="{optimizer.lr: [1e-3, 2e-3, 4e-3]}", tuned="tuned.yaml", **fields)


def test_a_published_tuning_is_not_run_again_on_other_data_but_is_for_another_arm(tmp_path):
    plan = tuned_plan(tmp_path)
    losses = {run.key: 3.0 + number % 2 for number, run in enumerate(plan.tuning())}
    rows = {key: {"status": "finished", "validation_loss": loss} for key, loss in losses.items()}
    publish(plan, tuned_by(plan, rows.get), tmp_path / "tuned.yaml")
    elsewhere = tuned_plan(tmp_path, facts=FACTS._replace(data="other"))
    assert untuned(elsewhere) == []
    assert read_published(elsewhere)["learned", ""] == tuned_by(plan, rows.get)["learned", ""]
    other = tuned_plan(tmp_path, arms=ARMS.replace("model.position: rope}", "model.position: {kind: rope, base: 500}}"))
    assert {run.arm for run in untuned(other)} == {"rope"}
    assert len(untuned(tuned_plan(tmp_path, base=BASE.replace("steps: 6", "steps: 7")))) == 6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda entry: entry["settings"].update({"optimizer.lr": 4e-3}), "its own trials say {'optimizer.lr': 0.002}"),
        (lambda entry: entry["trials"].pop(0), "lacks the trial of {'optimizer.lr': 0.001} with seed 100"),
        (lambda entry: entry["trials"][1].update({"loss": None}), "its own trials say {'optimizer.lr': 0.001}"),
    ],
)
def test_a_published_tuning_that_its_own_trials_do_not_bear_out_is_refused(tmp_path, change, said):
    plan = tuned_plan(tmp_path)
    losses = {1e-3: 3.0, 2e-3: 2.0, 4e-3: 3.5}
    rows = {
        run.key: {"status": "finished", "validation_loss": losses[run.settings["optimizer.lr"]]}
        for run in plan.tuning()
    }
    publish(plan, tuned_by(plan, rows.get), tmp_path / "tuned.yaml")
    content = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    change(content["found"][0])
    (tmp_path / "tuned.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=re.escape(said)):
        read_published(plan)


def test_tuning_is_open_until_all_of_its_runs_are_done(tmp_path):
    plan = tuned_plan(tmp_path)
    rows = {run.key: {"status": "finished", "validation_loss": 3.0} for run in plan.tuning()[:-1]}
    found = tuned_by(plan, rows.get)
    assert found["learned", ""] is not None
    assert found["rope", ""] is None


# --- Shards ---


def test_shards_share_the_runs_out_without_overlap(tmp_path):
    runs = plan_of(tmp_path, seeds="[0, 1, 2, 3, 4]").measured({("learned", ""): {}, ("rope", ""): {}})
    shares = [shard_from(f"{number}/3").of(runs) for number in (1, 2, 3)]
    assert sorted(run.key for share in shares for run in share) == sorted(run.key for run in runs)
    assert Shard().of(runs) == runs


@pytest.mark.parametrize("word", ["0/8", "9/8", "8", "a/b", "1/0", "-1/2", "1/2/3"])
def test_a_shard_that_is_none_is_refused(word):
    with pytest.raises(UserError, match="must be K/N"):
        shard_from(word)
