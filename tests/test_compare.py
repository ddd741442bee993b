"""Whole experiments on a small text: what is trained, reused, gone on with, and found unfair."""

import json
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import compare
from experiments import collect, estimate
from experiments.campaign import Campaign, Shard
from experiments.collect import collected
from experiments.conduct import environments
from experiments.config import read_experiment
from experiments.rows import evaluation_name
from experiments.send import send
from experiments.store import Store
from model.errors import UserError
from tests.test_run import ROOT
from training.config import load, to_yaml
from training.trainer import Trainer

ARMS = """
  learned: {model.position: learned}
  rope: {model.position: rope}
  rope-linear: {train: rope, eval: {model.position.scaling: linear}}
"""
FIELDS = {
    "base": "base.yaml", "reference": "learned", "lengths": "[24, 48]", "seeds": "[0, 1]",
    "evaluation": "{test_windows: 8, spans: 3, window_spans: 2, control_every: 4, prompt: the, sample_tokens: 4}",
}  # fmt: skip


@pytest.fixture
def experiment(settings, tmp_path):
    """Return a function that writes an experiment of tiny runs and returns its campaign."""

    def of(arms=ARMS, **fields):
        settings["training"] |= {"steps": 4, "batch_size": 4}
        (tmp_path / "base.yaml").write_text(to_yaml(load(None, settings)))
        lines = [f"{name}: {value}\n" for name, value in (FIELDS | fields).items()]
        (tmp_path / "x.yaml").write_text("".join(lines) + f"arms:{arms}")
        file = read_experiment(tmp_path / "x.yaml")
        return Campaign(file, Store(tmp_path / "store"), tmp_path / "out")

    return of


def results(campaign):
    return collected(campaign, "the command")


def values(campaign, measure, **where):
    found = [m for m in results(campaign).measurements if m.measure == measure]
    return {(m.arm, m.seed): m.value for m in found if all(getattr(m, name) == want for name, want in where.items())}


def trained(monkeypatch):
    """Count the steps that are taken from here on."""
    steps = []
    real = Trainer.advance
    monkeypatch.setattr(Trainer, "advance", lambda self: steps.append(self.next_step) or real(self))
    return steps


def test_an_experiment_trains_measures_and_is_not_trained_again(experiment, monkeypatch):
    campaign = experiment()
    steps = trained(monkeypatch)
    campaign.go(Shard())
    assert len(steps) == 2 * 2 * 4
    first = results(campaign)
    assert first.missing == ()
    assert {(m.arm, m.seed) for m in first.measurements} == {
        (a, s) for a in ("learned", "rope", "rope-linear") for s in (0, 1)
    }
    assert all(check.holds in (True, None) or "third" in check.name for check in first.checks)
    again = experiment()
    again.go(Shard())
    assert len(steps) == 2 * 2 * 4
    assert results(again) == first


def test_a_learned_table_is_undefined_beyond_its_length_and_scaling_changes_evaluation_alone(experiment):
    campaign = experiment()
    campaign.go(Shard())
    beyond = values(campaign, "same_targets_loss", length=48)
    assert beyond["learned", 0] is None
    assert beyond["rope", 0] != beyond["rope-linear", 0]
    within = values(campaign, "same_targets_loss", length=24)
    assert within["rope", 0] == within["rope-linear", 0]
    assert values(campaign, "validation_loss").keys() == {("learned", 0), ("learned", 1), ("rope", 0), ("rope", 1)}


def test_the_same_scheme_under_two_names_is_trained_twice_and_comes_out_exactly_equal(experiment, monkeypatch):
    arms = "\n  learned: {model.position: learned}\n  twin: {model.position: {kind: learned, layers: first}}\n"
    campaign = experiment(arms=arms, key_by_name="true", lengths="[24]")
    steps = trained(monkeypatch)
    campaign.go(Shard())
    assert len(steps) == 2 * 2 * 4
    for measure in ("test_loss", "validation_loss", "control_loss"):
        found = values(campaign, measure)
        assert [found["twin", seed] - found["learned", seed] for seed in (0, 1)] == [0.0, 0.0]


def test_a_killed_experiment_goes_on_and_ends_with_the_same_figures(experiment, monkeypatch, tmp_path):
    campaign = experiment()
    real, steps = Trainer.advance, []

    def dying(self):
        steps.append(1)
        if len(steps) == 7:
            raise SystemError("killed")
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", dying)
        with pytest.raises(SystemError):
            campaign.go(Shard())
    assert results(campaign).missing
    campaign.go(Shard())
    interrupted = results(campaign)
    (tmp_path / "store").rename(tmp_path / "old")
    campaign.go(Shard())
    clocks = ("tokens_per_second", "training_seconds")
    assert interrupted.missing == ()
    assert [m for m in interrupted.measurements if m.measure not in clocks] == [
        m for m in results(campaign).measurements if m.measure not in clocks
    ]


def test_rows_that_came_from_elsewhere_count_as_finished_runs(experiment, monkeypatch, tmp_path):
    campaign = experiment()
    campaign.go(Shard())
    figures = results(campaign).measurements
    (tmp_path / "store" / "rows").rename(tmp_path / "committed")
    steps = trained(monkeypatch)
    other = Campaign(campaign.file, Store(tmp_path / "empty", (tmp_path / "committed",)), tmp_path / "out")
    other.go(Shard())
    assert steps == []
    assert results(other).measurements == figures


def test_a_row_without_the_weights_is_trained_again_where_something_new_is_measured(experiment, monkeypatch, tmp_path):
    experiment().go(Shard())
    (tmp_path / "store" / "rows").rename(tmp_path / "committed")
    campaign = experiment(lengths="[24, 36]", arms="\n  learned: {model.position: learned}\n", seeds="[1]")
    other = Campaign(campaign.file, Store(tmp_path / "empty", (tmp_path / "committed",)), tmp_path / "out")
    steps = trained(monkeypatch)
    other.go(Shard())
    assert len(steps) == 4
    assert results(other).missing == ()


def test_tuning_picks_each_arms_best_rate_on_seeds_of_its_own(experiment, tmp_path):
    campaign = experiment(tune="{optimizer.lr: [1.0e-3, 1.0e-2, 2.0e-2], seeds: [100]}", seeds="[0]")
    campaign.go(Shard())
    found = results(campaign)
    assert len(found.trials) == 6
    for arm in ("learned", "rope"):
        losses = {trial.settings["optimizer.lr"]: trial.loss for trial in found.trials if trial.arm == arm}
        settings = next(facts.settings for facts in found.arms if facts.name == arm)
        assert settings == {"optimizer.lr": min(losses, key=losses.get)}
        assert losses[1e-3] == max(losses.values())
    assert (tmp_path / "out" / "tuned.yaml").is_file()


def test_a_diverged_run_is_listed_and_the_others_go_on(experiment):
    arms = ARMS + "  wild: {model.position: nope, optimizer.lr: 1.0e+8, optimizer.clip_norm: 0}\n"
    campaign = experiment(arms=arms)
    campaign.go(Shard())
    found = results(campaign)
    assert {(each.arm, each.seed) for each in found.diverged} == {("wild", 0), ("wild", 1)}
    assert not [m for m in found.measurements if m.arm == "wild"]
    assert found.missing == ()


def checks_of(campaign):
    return {check.name: check for check in results(campaign).checks}


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        ({"hashes": {"weights": "x", "windows": "x"}}, "Equal seeds start from bitwise equal shared weights"),
        ({"hashes": {"weights": "x", "windows": "x"}}, "Equal seeds read the same windows in the same order"),
        ({"tokens": 1}, "Equal numbers of tokens in training"),
        ({"precision": "bf16"}, "Equal precision"),
        ({"seconds": 1e-9}, "Evaluation takes at most a third of the training time"),
    ],
)
def test_an_unfair_run_is_noticed(experiment, spoil, name, tmp_path):
    campaign = experiment()
    campaign.go(Shard())
    if "seconds" not in spoil:
        assert checks_of(campaign)[name].holds
    run = campaign.measured()[0]
    campaign.store.keep(run.key, campaign.store.row(run.key) | spoil)
    assert checks_of(campaign)[name].holds is False


def test_an_arm_that_is_scored_on_other_targets_is_noticed(experiment):
    campaign = experiment(seeds="[0]")
    campaign.go(Shard())
    name = "Equal numbers of scored targets"
    assert checks_of(campaign)[name].holds
    run = campaign.measured()[0]
    row = campaign.store.row(evaluation := evaluation_name(run, run.config.model.position, campaign.plan.experiment))
    row["measurements"][0]["count"] += 1
    campaign.store.keep(evaluation, row)
    assert checks_of(campaign)[name].holds is False


@pytest.mark.parametrize(("rates", "holds"), [("[1.0e-3, 1.0e-2]", False), ("[1.0e-2]", True)])
def test_a_grid_whose_best_is_at_its_edge_is_noticed(experiment, rates, holds):
    campaign = experiment("\n  learned: {model.position: learned}", seeds="[0]", tune=f"{{optimizer.lr: {rates}}}")
    campaign.go(Shard())
    assert checks_of(campaign)["No arm's best settings lie at the edge of the grid"].holds is holds


def test_settings_that_differ_without_being_declared_are_noticed(experiment, monkeypatch):
    campaign = experiment(seeds="[0]")
    name = "Arms differ from the base in the declared settings alone"
    assert checks_of(campaign)[name].holds
    real = collect.configured

    def other(file, arm, seed, settings):
        return real(file, arm, seed, {**settings, "model.dropout": 0.3} if arm == "rope" else settings)

    monkeypatch.setattr(collect, "configured", other)
    assert checks_of(campaign)[name] == (name, False, "undeclared: rope: model.dropout")


def test_an_experiment_that_was_changed_after_its_first_run_says_so(experiment):
    experiment(seeds="[0]").go(Shard())
    name = "The experiment was declared before its first run"
    assert checks_of(experiment(seeds="[0]"))[name].holds
    changed = experiment(seeds="[0, 1]")
    changed.declare()
    assert checks_of(changed)[name].holds is False


def test_runs_that_are_older_than_the_declaration_are_counted(experiment, tmp_path):
    name = "The experiment was declared before its first run"
    campaign = experiment(seeds="[0]")
    campaign.go(Shard())
    file = tmp_path / "out" / "declared.json"
    entry = json.loads(file.read_text())[0]
    file.write_text(json.dumps([entry | {"date": "2999-01-01 00:00"}]))
    assert checks_of(campaign)[name].holds is False
    assert "2 of 2 runs are older" in checks_of(campaign)[name].detail
    assert collect.is_older({"begun": "2026-01-02 10:00", "date": "2026-01-02"}, "2026-01-02 10:01")
    assert not collect.is_older({"begun": "2026-01-02 10:01", "date": "2026-01-02"}, "2026-01-02 10:01")
    assert collect.is_older({"date": "2026-01-02"}, "2026-01-02") is False
    assert collect.is_older({"date": "2026-01-02"}, "2026-01-02 10:01") is None
    assert collect.is_older({"date": "2026-01-01"}, "2026-01-02 10:01")


def test_a_published_declaration_counts_and_published_runs_of_other_data_are_told_of(experiment, tmp_path):
    name = "The experiment was declared before its first run"
    campaign = experiment(seeds="[0]")
    campaign.go(Shard())
    (tmp_path / "store" / "rows").rename(tmp_path / "docs-rows")
    (tmp_path / "x").mkdir()
    (tmp_path / "out" / "declared.json").rename(tmp_path / "x" / "declared.json")
    store = Store(tmp_path / "elsewhere", (tmp_path / "docs-rows",))
    reader = Campaign(campaign.file, store, tmp_path / "another")
    assert checks_of(reader)[name].holds
    assert reader.other_data() == ""
    reader.plan.facts = reader.plan.facts._replace(data="of another Python")
    reader.plan._runs.clear()
    assert reader.other_data().startswith("the published runs of x are of other data than those here")


def test_a_run_that_is_evaluated_twice_tells_the_time_of_both(experiment):
    campaign = experiment(seeds="[0]")
    campaign.go(Shard())
    trained_rows = [(run, campaign.store.row(run.key) | {"seconds": 100.0}) for run in campaign.measured()]
    evaluated = {
        (arm, "", 0): {"key": run.key, "seconds": seconds}
        for run, _ in trained_rows
        for arm, seconds in {"learned": [("learned", 10.0)], "rope": [("rope", 20.0), ("rope-linear", 30.0)]}[run.arm]
    }
    check = collect.short_evaluation(trained_rows, evaluated)
    assert check.holds
    assert check.detail == (
        "at most 30 %; where arms share a training, all their evaluations together at most 50 % of it"
    )


def test_equal_seeds_share_weights_and_windows_and_other_seeds_do_not(experiment):
    campaign = experiment()
    campaign.go(Shard())
    rows = {(run.arm, run.seed): campaign.store.row(run.key)["hashes"] for run in campaign.measured()}
    assert rows["learned", 0] == rows["rope", 0] != rows["rope", 1] == rows["learned", 1]
    assert len({rows[arm, seed]["weights"] for arm, seed in rows}) == 2


def test_two_shards_do_the_work_of_one(experiment, monkeypatch):
    steps = trained(monkeypatch)
    experiment().go(Shard(1, 2))
    assert len(steps) == 2 * 4
    assert len(results(experiment()).missing) == 4
    experiment().go(Shard(2, 2))
    assert len(steps) == 4 * 4
    assert results(experiment()).missing == ()


def test_arms_are_compared_on_tasks_one_by_one(experiment, monkeypatch):
    campaign = experiment(
        tasks="[copy, recall]", lengths="[6, 12]", seeds="[0]", tune="{optimizer.lr: [1.0e-3, 1.0e-2, 2.0e-2]}"
    )
    steps = trained(monkeypatch)
    campaign.go(Shard())
    assert len(steps) == 2 * 2 * (3 + 1) * 4
    found = results(campaign)
    assert found.missing == ()
    rows = {(m.arm, m.task, m.length): m.value for m in found.measurements if m.measure == "task_token_accuracy"}
    assert set(rows) == {
        (a, t, n) for a in ("learned", "rope", "rope-linear") for t in ("copy", "recall") for n in (6, 12)
    }
    assert rows["learned", "copy", 12] is None
    assert 0 <= rows["rope", "copy", 12] <= 1
    assert {(trial.arm, trial.task) for trial in found.trials} == {
        (a, t) for a in ("learned", "rope") for t in ("copy", "recall")
    }
    assert all(
        check.holds in (True, None) for check in found.checks if "third" not in check.name and "edge" not in check.name
    )
    campaign.go(Shard())
    assert len(steps) == 2 * 2 * (3 + 1) * 4


def test_wandb_gets_the_figures_of_the_report(experiment, tmp_path):
    campaign = experiment()
    campaign.go(Shard())
    send(results(campaign), load(tmp_path / "base.yaml"), "offline", tmp_path / "figures")
    rows = [json.loads(line) for line in (tmp_path / "figures" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    loss = values(campaign, "same_targets_loss", length=48)["rope", 1]
    assert rows[1]["rope/same_targets_loss@48"] == loss
    assert "learned/same_targets_loss@48" not in rows[1]
    assert list((tmp_path / "figures" / "wandb").glob("offline-run-*"))


# --- The command ---


def called(tmp_path, *flags):
    command = [sys.executable, "compare.py", str(tmp_path / "x.yaml"), "--store", str(tmp_path / "store")]
    return [*command, "--out", str(tmp_path / "out"), *flags]


def test_a_dry_run_tells_the_plan_and_the_time_and_trains_nothing(experiment, tmp_path, monkeypatch, capsys):
    experiment(tune="{optimizer.lr: [1.0e-3, 2.0e-3]}")
    monkeypatch.setattr("sys.argv", called(tmp_path, "--dry-run")[1:])
    compare.main()
    out = capsys.readouterr().out
    assert "4 runs of tuning, 4 runs that are measured: 8 of them are to be done" in out
    assert re.search(r"about \d+ min on cpu", out)
    assert "times the standard deviation of a paired difference" in out
    assert "nats of validation loss" not in out
    assert not (tmp_path / "store").exists()
    assert not (tmp_path / "out").exists()


def test_a_dry_run_counts_every_evaluation_and_says_what_the_finished_runs_let_see(experiment, monkeypatch):
    campaign = experiment(seeds="[0, 1, 2]")
    monkeypatch.setattr(estimate, "seconds_of_a_step", lambda *_: 1.0)
    learned, rope = (
        estimate.seconds_of_a_run(campaign, campaign.plan.run(arm, 0, {})) - estimate.SECONDS_TO_BEGIN - 4
        for arm in ("learned", "rope")
    )
    assert rope == pytest.approx(2 * learned)
    campaign.go(Shard())
    found = values(campaign, "validation_loss")
    spread = np.std([found["rope", seed] - found["learned", seed] for seed in (0, 1, 2)], ddof=1)
    line = next(line for line in estimate.told(campaign) if "nats of validation loss" in line)
    assert f"median over 1 arms: {spread:.4f}" in line
    # 80 % power of the paired t test at n = 3, by the noncentral t distribution of scipy.
    shift = float(re.search(r"that is (\S+) nats", line)[1]) / spread * 3**0.5
    assert stats.nct.sf(stats.t.ppf(0.975, 2), 2, shift) == pytest.approx(0.8, abs=0.02)


def test_workers_share_an_experiment_ctrl_c_saves_and_the_same_command_ends_it(experiment, tmp_path):
    campaign = experiment(tune="{optimizer.lr: [1.0e-3, 2.0e-3]}", lengths="[24, 48]")
    command = called(tmp_path, "--workers", "2")
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "store" / "rows").glob("*.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "the same command goes on" in err
    assert "Traceback" not in err
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert results(campaign).missing == ()
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_process_for_each_gpu_is_told_of_its_own_alone():
    arguments = SimpleNamespace(gpus="0, 3", workers=1)
    assert environments(arguments) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "3"}]


def test_a_worker_ends_when_the_process_that_started_it_is_gone():
    lines = "import time\nfrom experiments.conduct import end_with_parent\nend_with_parent()\ntime.sleep(100)"
    worker = subprocess.Popen([sys.executable, "-c", lines], cwd=ROOT, stdin=subprocess.PIPE)
    assert worker.stdin is not None
    worker.stdin.close()
    assert worker.wait(timeout=60) == -signal.SIGTERM


@pytest.mark.parametrize("kept", ["rows", "runs", "logs"])
def test_a_report_that_would_lie_among_the_runs_is_refused(experiment, tmp_path, kept):
    file = experiment().file
    arguments = compare.CompareArguments(
        experiment="x.yaml", store=str(tmp_path / "store"), out=str(tmp_path / "store" / kept)
    )
    with pytest.raises(UserError, match="--out"):
        arguments.folder(file)


@pytest.mark.parametrize(
    "flags", [["--workers", "2", "--shard", "1/2"], ["--gpus", "a"], ["--shard", "3/2"], ["--workers", "0"]]
)
def test_a_mistake_on_the_command_line_has_status_2_and_no_traceback(experiment, tmp_path, flags, monkeypatch, capsys):
    experiment()
    monkeypatch.setattr("sys.argv", called(tmp_path, *flags)[1:])
    with pytest.raises(SystemExit) as end:
        compare.main()
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
