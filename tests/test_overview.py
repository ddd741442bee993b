"""The table of schemes and their pictures, and that docs/schemes.md says of each scheme what the code does."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.position import SCHEMES
from model.position.__main__ import main
from model.position.bias import alibi_slopes
from model.position.config import NoPEConfig, RoPEInputConfig, XPosConfig
from model.position.overview import (
    SCALINGS,
    base_config,
    overview,
    paper,
    scheme_row,
    score_curves,
    turn_report,
    with_scheme,
)
from model.position.rope import rope_frequencies
from model.position.scaling import RULES
from model.transformer import Transformer
from training.config import load

ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8")
FILES = {path.stem: path for path in (ROOT / "configs" / "position").glob("*.yaml")}

# Of 4 layers, 6 heads of 32 channels and 256 positions: learned 256 x 192; t5 32 buckets x 6; kerple 2 x 6;
# fire 32 x (1 weight, 1 offset, 6 weights out) + 2; shaw 4 x 17 x 32; cope 4 x 65 x 32.
ADDED = {"learned": "49,152", "t5": "192", "kerple": "12", "fire": "258", "shaw": "2,176", "cope": "8,320"}


# --- The table -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def printed():
    return overview(base_config())


@pytest.mark.parametrize("name", SCHEMES)
def test_the_table_says_of_each_scheme_its_place_its_parameters_its_limit_and_its_paper(name, printed):
    # xpos: 512 ln(1e30) / ln(1.4 / 0.4) positions before a factor leaves float32.
    limit = {"learned": "256", "xpos": "28,231"}.get(name, "none")
    cells = [name, SCHEMES[name].place, ADDED.get(name, "0"), limit, paper(SCHEMES[name].config)]
    assert re.search(r"^" + r" +".join(map(re.escape, cells)) + r"$", printed, re.MULTILINE)


@pytest.mark.parametrize("name", ADDED)
def test_parameters_are_those_of_a_model_that_is_built(name):
    config = with_scheme(base_config(), name)
    assert scheme_row(name, config)[2] == f"{Transformer(config).count_parameters().positional:,}"


def test_the_table_follows_the_context(capsys):
    main(["--context", "64"])
    assert re.search(r"^learned +input +12,288 +64 ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (NoPEConfig, "Haviv et al., 2022"),
        (XPosConfig, "Sun et al., 2022"),
        (SCHEMES["learned"].config, "Radford et al., 2018; Devlin et al., 2018"),
        (SCALINGS["ntk"], "bloc97, 2023"),
        (SCALINGS["linear"], "Chen et al., 2023"),
    ],
)
def test_the_paper_is_read_off_the_settings(config, words):
    assert paper(config) == words


def test_every_scheme_but_the_control_and_every_scaling_has_a_paper():
    configs = [entry.config for entry in SCHEMES.values()] + list(SCALINGS.values())
    assert [config for config in configs if not re.search(r", \d{4}$", paper(config))] == [RoPEInputConfig]


def test_the_scalings_are_shown_at_four_times_the_training_length(printed):
    # yarn 0.1 ln 4 + 1; longrope sqrt(1 + ln 4 / ln 256) = sqrt(1.25).
    rows = {
        "linear": "4.00 4.00 1.000", "ntk": "1.00 4.00 1.000", "dynamic_ntk": "1.00 4.00 1.000",
        "yarn": "1.00 4.00 1.139", "llama3": "1.00 4.00 1.000", "longrope": "4.00 4.00 1.118",
    }  # fmt: skip
    assert set(rows) == set(RULES) == set(SCALINGS)
    squeezed = re.sub(r" +", " ", printed)
    for name, numbers in rows.items():
        assert f"\n{name} {numbers} {paper(SCALINGS[name])}" in squeezed


# --- The warning -----------------------------------------------------------------------------------------------------


def test_the_pairs_that_never_complete_a_turn_are_counted_as_by_hand(printed):
    # Head width 32: pair i needs 2 pi 10000^(i/16) = 2 pi 10^(i/4) tokens. Pair 6: 2 pi 10^1.5 = 198.7, within 256;
    # pair 7: 2 pi 10^1.75 = 353.3. So pairs 7 to 15 are too slow: nine.
    words = "rope: 9 of 16 pairs never complete a turn in 256 tokens"
    assert turn_report(rope_frequencies(10000.0, 32), 256) == words
    assert printed.endswith(words)


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (6, "rope: 16 of 16 pairs never complete a turn in 6 tokens"),  # 2 pi is more than 6
        (7, "rope: 15 of 16 pairs never complete a turn in 7 tokens"),
        (36000, "rope: each of 16 pairs completes a turn in 36000 tokens"),  # pair 15: 2 pi 10^3.75 = 35333
    ],
)
def test_the_warning_follows_the_length(length, words):
    assert turn_report(rope_frequencies(10000.0, 32), length) == words


def test_a_pair_that_stands_still_never_completes_a_turn():
    assert turn_report(torch.tensor([1.0, 0.0]), 10**9).startswith("rope: 1 of 2 pairs")


# --- Curves and pictures ---------------------------------------------------------------------------------------------

SMALL = base_config(context=16)
CLOSE = {"rtol": 0, "atol": 1e-3}  # the epsilon of the norm takes a little off


@pytest.mark.parametrize("name", SCHEMES)
def test_curves_reach_to_twice_the_training_length_or_to_the_limit(name):
    curves = score_curves(name, SMALL)
    assert curves.scores.shape == (32, 6, 16 if name == "learned" else 32)
    assert curves.scores.isfinite().all()
    assert curves.by_head == (SCHEMES[name].place == "scores")


def test_without_position_the_score_of_equal_tokens_is_the_root_of_the_width():
    scores = score_curves("nope", SMALL).scores
    torch.testing.assert_close(scores, torch.full_like(scores, math.sqrt(32)), **CLOSE)


def test_the_curve_of_alibi_falls_by_the_slope_of_its_head():
    scores = score_curves("alibi", SMALL).scores
    expected = math.sqrt(32) - torch.tensor(alibi_slopes(6))[:, None] * torch.arange(32)
    torch.testing.assert_close(scores, expected.expand(32, -1, -1), **CLOSE)


def test_the_curve_of_rope_begins_at_the_score_without_position_and_falls():
    scores = score_curves("rope", SMALL).scores
    torch.testing.assert_close(scores[..., 0], torch.full_like(scores[..., 0], math.sqrt(32)), **CLOSE)
    assert scores[..., 1:].max() < scores[..., 0].min()


def test_a_picture_is_written_for_each_scheme_and_two_for_rope(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    main(["--plot", str(tmp_path / "new" / "folder"), "--context", "16"])
    names = {f"scores-{name}" for name in SCHEMES} | {"rope-wavelengths", "rope-scalings"}
    written = {path.stem: path.read_bytes() for path in (tmp_path / "new" / "folder").glob("*.png")}
    assert set(written) == names
    for picture in written.values():
        assert picture.startswith(b"\x89PNG")
        assert int.from_bytes(picture[16:20]) == 1000  # pixels wide
    assert f"15 pictures in {tmp_path / 'new' / 'folder'}" in capsys.readouterr().out


# --- The command -----------------------------------------------------------------------------------------------------


def test_without_matplotlib_one_line_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "model.position.pictures", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["--plot", str(tmp_path)])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "--plot needs matplotlib: pip install matplotlib\n"


def test_a_file_in_the_place_of_the_folder_is_told_in_one_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        main(["--plot", str(tmp_path / "file"), "--context", "16"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [["--context", "1"], ["--context", "x"], ["--base", "1"], ["--base", "nan"]])
def test_a_number_that_cannot_be_meant_is_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert f"argument {words[0]}" in capsys.readouterr().err


def test_help_does_not_load_torch():
    code = """if True:
        import sys
        from model.position.__main__ import main
        try:
            main(["--help"])
        finally:
            assert "torch" not in sys.modules and "matplotlib" not in sys.modules
    """
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--plot FOLDER" in result.stdout


# --- docs/schemes.md and configs/position ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SCHEMES, *RULES])
def test_every_scheme_and_scaling_has_its_paragraph_with_its_paper_and_its_file(name):
    found = re.search(rf"^### `{name}`\n(.*?)^#+ ", DOCS, re.DOTALL | re.MULTILINE)
    assert found
    paragraph = re.sub(r"\s+", " ", found[1])
    file = f"rope_{name}.yaml" if name in RULES else f"{name}.yaml"
    assert file in paragraph
    assert file.removesuffix(".yaml") in FILES
    config = SCALINGS[name] if name in RULES else SCHEMES[name].config
    for authors, year in re.findall(r"([A-Z]?\w+)[^;]*?, (\d{4})", paper(config)):
        assert authors in paragraph
        assert year in paragraph


@pytest.mark.parametrize("name", SCHEMES)
def test_the_opening_table_says_what_the_code_says(name):
    row = re.search(rf"^\| \[`{name}`\]\(#{name}\) \| (.*) \| (.*) \| (.*) \| (.*) \|$", DOCS, re.MULTILINE)
    assert row
    _, place, added, limit, by = scheme_row(name, base_config())
    assert row[1] == place
    assert row[2].split(" = ")[-1] == added
    assert (row[3] == "none") == (limit == "none")
    assert row[4] in (by, "a control, no paper")


@pytest.mark.parametrize("kind", RULES)
def test_the_file_of_a_scaling_switches_it_on(kind):
    position = load(FILES[f"rope_{kind}"]).model.position
    assert position.scaling.kind == kind


def test_every_file_of_a_position_is_named_in_the_docs_and_every_file_named_there_exists():
    named = set(re.findall(r"`(\w+)\.yaml`", DOCS))
    assert named == set(FILES)


def test_every_test_that_the_docs_name_exists():
    sections = re.split(r"^In `|is in `", DOCS, flags=re.MULTILINE)[1:]
    assert len(sections) == 2
    for section in sections:
        source = (ROOT / section.partition("`")[0]).read_text(encoding="utf-8")
        named = re.findall(r"`(test_\w+)`", section.split("is in `")[0])
        assert named
        assert all(f"def {name}(" in source for name in named)
