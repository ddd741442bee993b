"""The benchmarks run, their tables are whole, and what is computed from measurements is right. Nothing is timed."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks.cost import Cell, kinks, neighbours
from benchmarks.processes import Process, revision
from benchmarks.report import THIS, Table, against
from benchmarks.rounds import Case, Result, measure, share
from benchmarks.training_speed import with_adamw
from benchmarks.workloads import ROOT, WORKLOADS, model_of, tiny
from model.errors import UserError
from model.flops import matmul_parameters
from training.config import Config

# Not a dependency: in float32, bfloat16 and int8 where somebody has installed it, else one row that says so.
LLAMA_CPP_ROWS = 3 if find_spec("llama_cpp") else 1


def run(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def rows_of(markdown):
    """Return the tables of a report by title, each as a list of rows of cells, without header and rule."""
    tables = {}
    for part in markdown.split("## ")[1:]:
        lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
        tables[part.splitlines()[0]] = lines[2:]
    return tables


def is_figure(cell):
    return re.fullmatch(r"[\d,.]+( %)?", cell) is not None


@pytest.fixture(scope="module")
def smoke_run():
    return run("benchmarks", "--quick", "--decoders", "model", "eager")


def test_one_run_measures_every_topic(smoke_run):
    assert smoke_run.returncode == 0, smoke_run.stderr
    assert "Machine: " in smoke_run.stdout
    assert "torch 2." in smoke_run.stdout
    tables = rows_of(smoke_run.stdout)
    assert list(tables) == ["What the machine can do", "Training", "Decoding, tiny", "Tokenising"]
    assert [len(rows) for rows in tables.values()] == [5, 3, 3 + LLAMA_CPP_ROWS, 4]


def test_every_cell_of_a_run_is_filled_with_a_figure_or_a_reason(smoke_run):
    tables = rows_of(smoke_run.stdout)
    assert all(is_figure(row[1]) or row[1] == "-" for row in tables["What the machine can do"])
    for row in tables["Training"]:
        assert all(is_figure(cell) for cell in row[2:]), row
    for row in tables["Decoding, tiny"]:
        if row[0] == "llama.cpp" and LLAMA_CPP_ROWS == 1:
            assert row[2] == row[5] == "not there: No module named 'llama_cpp'"
        else:
            assert all(is_figure(cell) for cell in row[2:]), row
    for row in tables["Tokenising"]:
        assert all(is_figure(cell) for cell in row[1:]), row


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["benchmarks", "gpu"], "topic 'gpu' is not one of limits, training, decoding, tokenising"),
        (["benchmarks", "--rounds", "0"], "--rounds 0 leaves nothing to measure"),
        (["benchmarks", "--quick", "--write"], "--write keeps whole measurements only"),
        (["benchmarks", "--baseline", "no-such-revision"], "--baseline no-such-revision cannot be read"),
        (["benchmarks.schemes", "--schemes", "nope"], "--schemes nope: rope must be among them"),
        (["benchmarks.cost", "--tokens", "1000"], "--tokens 1000 is not a multiple of every context"),
    ],
)
def test_a_mistake_is_one_line(arguments, said):
    result = run(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


# --- Workloads -------------------------------------------------------------------------------------------------------


def test_a_workload_with_another_optimizer_is_also_trained_with_adamw_as_others_do():
    both = with_adamw({name: WORKLOADS[name]() for name in ("12m", "demo")})
    assert list(both) == ["12m", "demo", "demo, AdamW"]
    plain, other = (Config.model_validate(both[name]) for name in ("demo", "demo, AdamW"))
    assert (plain.optimizer.method, other.optimizer.method) == ("muon", "adamw")
    assert other.model_copy(update={"optimizer": plain.optimizer}) == plain


def test_the_12m_workload_has_12_million_weights_and_the_demo_is_that_of_its_file():
    assert round(matmul_parameters(model_of(WORKLOADS["12m"]())) / 1e6) == 12
    demo = model_of(WORKLOADS["demo"]())
    assert (demo.d_model, demo.n_layers, demo.vocab_size) == (128, 4, 1024)
    for workload in WORKLOADS.values():
        Config.model_validate(workload())


# --- Processes and other revisions -----------------------------------------------------------------------------------


@pytest.fixture
def another_tree(tmp_path):
    """A project in which a step of training is another one, and decoding is missing."""
    for name, text in {
        "model/__init__.py": "",
        "training/__init__.py": "",
        "training/config.py": "class Config:\n    def model_validate(workload): raise TypeError('an\\nold one')",
        "training/loop.py": "make_trainer = None",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_another_tree_is_measured_with_its_own_code_and_what_it_cannot_do_is_said(another_tree):
    training = Case("train", "benchmarks.measured.training:steps", {"workload": tiny(), "seconds": 0.0}, "train")
    decoding = Case("decode", "benchmarks.measured.decoding:ours", {}, "decode")
    results = measure([training, decoding], {THIS: ROOT, "old": another_tree}, 1, "test")
    assert results[THIS, "train"].error is None
    assert len(results[THIS, "train"].rates) == 1
    assert results["old", "train"].error == "TypeError: an old one"
    assert results["old", "decode"].error is not None
    assert results["old", "decode"].error.startswith("not there: ")
    assert against(results, "old", "train") == ["TypeError: an old one"]


def test_what_another_tree_lacks_is_not_taken_from_this_one(another_tree):
    process = Process(another_tree)
    answer = process.ask("model.flops:training_flops", {})
    process.close()
    assert answer == {"error": "not there: No module named 'model.flops'"}


def test_a_process_that_dies_says_so_in_its_cell_and_leaves_nothing():
    process = Process(ROOT)
    folder = process.folder.name
    answer = process.ask("os:_exit", {"status": 7})
    process.close()
    assert answer["error"].startswith("the process ended with status 7")
    assert not os.path.exists(folder)


def test_a_revision_is_laid_out_and_gone_afterwards():
    with revision("HEAD") as folder:
        assert (folder / "model/config.py").is_file()
    assert not folder.exists()
    with pytest.raises(UserError, match="cannot be read"), revision("no-such-revision"):
        pass


# --- Figures ---------------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_ratios_within_rounds():
    # In the second round something disturbed the first of the two; the ratio of medians would be 1.2.
    assert share(Result(rates=[10, 60, 100]), Result(rates=[5, 100, 50])) == 2.0


def test_a_table_with_a_short_row_is_refused():
    with pytest.raises(AssertionError, match="not whole"):
        str(Table("title", ["a", "b"], [["1"]]))


def cells(utilisations):
    """Make cells of d_model 1 .. n and context 1 .. m from a matrix of FLOP/s."""
    made = {}
    for width, row in enumerate(utilisations, 1):
        for context, value in enumerate(row, 1):
            cell = Cell({"model": {"d_model": 8, "n_heads": 1, "vocab_size": 8, "context": 4}})
            cell.rates = [value / cell.flops]
            made[width, context] = cell
    return made


def test_a_kink_is_a_cell_more_than_a_quarter_below_the_mean_of_its_neighbours():
    assert not kinks(cells([[1.0, 1.0, 1.0], [1.0, 0.76, 1.0], [1.0, 1.0, 1.0]]))
    assert list(kinks(cells([[1.0, 1.0, 1.0], [1.0, 0.74, 1.0], [1.0, 1.0, 1.0]]))) == [(2, 2)]
    assert list(kinks(cells([[1.0, 1.0, 0.7]]))) == [(1, 3)], "the end of a row has one neighbour"
    assert not kinks(cells([[0.8, 0.9, 1.0]])), "a slope is no kink"


def test_the_neighbours_of_the_middle_are_four_and_the_narrowest_has_none_along_the_widths():
    grid = cells([[1.0] * 3] * 3)
    assert list(neighbours((1, 1), grid)) == [[(1, 2)]]
    assert list(neighbours((2, 2), grid)) == [[(1, 2), (3, 2)], [(2, 1), (2, 3)]]
