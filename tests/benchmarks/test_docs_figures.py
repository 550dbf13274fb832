"""Figures in README and docs are what benchmarks/results has; `python benchmarks/docs/figures.py --write` corrects them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.common import RESULTS
from benchmarks.docs import figures as docs_figures
from benchmarks.docs import writing as docs_writing
from benchmarks.docs.figures import FIGURES, MARKED, brought_up_to_date, documents

CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
MEASURED = re.compile(r"\d+\.\d+|\d+ %|\d(?:\.\d+)?x\b")
# Figures that a paragraph about benchmarks may have without a marker, with where they come from.
GIVEN = {
    "95 %": "the goal of a search",
    "98 %": "the goal of a search",
    "2 %": "noise that a replay adds",
    "30 %": "how wrong the misled predictor is made",
    "50 %": "how wrong the misled predictor is made",
}


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_the_documents_say_what_the_results_say(path: Path) -> None:
    text = path.read_text()
    assert text == brought_up_to_date(text), "python benchmarks/docs/figures.py --write"


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_every_marker_is_whole(path: Path) -> None:
    text = path.read_text()
    count = len(MARKED.findall(text))
    assert text.count("<!-- benchmark") == text.count("<!-- end -->") == count


def test_every_figure_stands_somewhere() -> None:
    names = {found["name"] for path in documents() for found in MARKED.finditer(path.read_text())}
    assert names == set(FIGURES)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_a_paragraph_about_a_benchmark_has_no_figure_without_a_marker(path: Path) -> None:
    marked = MARKED.sub("", path.read_text())
    for paragraph in re.split(r"\n\s*\n(?!\|)", marked):  # with the table that follows it
        if "benchmarks/" in paragraph:
            assert not set(MEASURED.findall(CODE.sub("", paragraph))) - set(GIVEN), paragraph


def test_another_result_makes_a_document_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(docs_writing, "RESULTS", tmp_path)
    text = (docs_figures.ROOT / "docs" / "predictor-figures.md").read_text()
    assert brought_up_to_date(text) == text
    rows = json.loads((tmp_path / "predictor.json").read_text())
    next(row for row in rows if row["measure"] == "Spearman" and row["part"] == "landscapes")["ours"] = "0.123"
    (tmp_path / "predictor.json").write_text(json.dumps(rows))
    assert "0.123" in brought_up_to_date(text)


def test_a_marker_of_no_figure_is_refused() -> None:
    with pytest.raises(KeyError, match="nothing"):
        brought_up_to_date("<!-- benchmark: nothing -->1<!-- end -->")


@pytest.mark.parametrize("name", FIGURES)
def test_what_a_figure_gives_ends_no_marker(name: str) -> None:
    text = FIGURES[name]()
    assert text
    assert "<!--" not in text
