"""Figures in README and docs are what benchmarks/results has; `python benchmarks/docs/figures.py --write` corrects them."""

import re
from pathlib import Path

import pytest

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
