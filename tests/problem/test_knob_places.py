"""Every place that `CONTRIBUTING.md` ("How to add a knob") names knows each knob of the table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autotune.predict.features import columns_of
from autotune.predict.zero_memory import unread_knobs
from autotune.problem import knobs as table
from autotune.problem.candidate import TRACED_KNOBS, Candidate
from autotune.problem.job import Lora
from autotune.problem.knobs import (
    ACCUMULATION,
    KNOBS,
    MICRO_BATCH,
    MODEL_KNOBS,
    OFFLOADING,
    Knob,
    Knobs,
    ReadCondition,
    Share,
    Value,
    is_read,
    short_name,
)
from autotune.problem.space import load_space, shipped_spaces
from autotune.recovery.ladder import CROSSED
from autotune.results.export import training_changes
from tests.conftest import make_job

ROOT = Path(__file__).parents[2]
_FEW = {bool: (False, True), Share: (0.5, True), float: (0.25, 0.5), int: (2, 4), Lora: ("none", "r=8")}


def values_of(knob: Knob) -> tuple[Value, ...]:
    """Two or more values of a knob."""
    if isinstance(knob.kind, tuple):
        return knob.kind
    return _FEW[knob.kind] if knob.kind is not int or knob.high > 3 else (1, 2)


def settings(name: str, knob: Knob) -> Iterator[Knobs]:
    """Settings of the other knobs under which DeepSpeed reads this one."""
    above: list[Knobs] = [{}]
    if (of := knob.read.of) is not None:
        above = [{**one, of: value} for one in settings(of, KNOBS[of]) for value in values_of(KNOBS[of])]
    for stage, *offloaded in itertools.product(range(4), ("none", "cpu", "nvme"), ("none", "cpu", "nvme")):
        places = {what: place for what, place in zip(OFFLOADING, offloaded, strict=True) if place != "none"}
        for more in above:
            found = {what: value for what, value in {"zero_stage": stage, **places, **more}.items() if what != name}
            if all(is_read(one, found) for one in (name, *found)):
                yield found


def pairs(name: str, knob: Knob) -> list[tuple[Candidate, Candidate]]:
    """Candidates that differ in this knob alone."""
    found = []
    for setting in itertools.islice(settings(name, knob), 24):
        made = [Candidate.of({MICRO_BATCH: 2, ACCUMULATION: 2, **setting, name: value}) for value in values_of(knob)]
        found += [(a, b) for a, b in itertools.combinations(made, 2) if a != b]
    return found


@dataclass(frozen=True)
class Row:
    """A knob in the table of docs/knobs.md."""

    text: str
    predicted: str


@cache
def rows() -> dict[str, Row]:
    """Rows of the hand-written table, by the name of the knob."""
    text = (ROOT / "docs" / "knobs.md").read_text().partition("## Purpose of each knob")[2].partition("\n## ")[0]
    found = {}
    for line in re.findall(r"^\| `.*$", text, re.MULTILINE):
        names, *_, predicted = (cell.strip() for cell in line.strip("|").split(" | "))
        found |= {short_name(name): Row(line, predicted.strip(" |")) for name in re.findall(r"`([^`]+)`", names)}
    return found


@cache
def shipped_knobs() -> frozenset[str]:
    spaces = map(load_space, shipped_spaces())
    return frozenset(name for space in spaces for name in (*space.knobs, *space.levers))


def _is_predicted(a: Candidate, b: Candidate) -> bool:
    job = make_job(precision="bf16", lengths=((8, 8), (32, 32)))
    columns = astuple(columns_of([a, b], job))
    traced = any(a.get(name) != b.get(name) for name in TRACED_KNOBS)
    return traced or any(not np.array_equal(column[:1], column[1:]) for column in columns)


def _is_unread(a: Candidate, b: Candidate) -> bool:
    return bool(unread_knobs(a) or unread_knobs(b))


def _is_exported(a: Candidate, b: Candidate) -> bool:
    job = make_job(lengths=((8, 8), (32, 32)))
    return a.ds_config(job) != b.ds_config(job) or training_changes(a, job, a.environment({})) != training_changes(
        b, job, b.environment({})
    )


def missing_places(name: str, knob: Knob) -> list[str]:
    """Places of the how-to that do not know a knob."""
    two, row = pairs(name, knob), rows().get(name)
    if not two:
        return ["problem/knobs.py: no setting under which it is read"]
    found = []
    if row is None:
        found.append("docs/knobs.md")
    if name not in shipped_knobs() and (row is None or "in no shipped space" not in row.text):
        found.append("search_spaces/")
    is_known = any(_is_predicted(a, b) or _is_unread(a, b) for a, b in two)
    if not is_known and (row is None or row.predicted != "-"):
        found.append("predict/features.py")
    if not any(_is_exported(a, b) for a, b in two):
        found.append("results/export.py")
    if name in table.FIRST_ORDER and name not in MODEL_KNOBS and name not in CROSSED:
        found.append("recovery/ladder.py")
    return found


@pytest.mark.parametrize("name", KNOBS)
def test_every_place_knows_the_knob(name: str) -> None:
    assert missing_places(name, KNOBS[name]) == []


FAKE = "zero_optimization.fake"


@pytest.mark.parametrize(
    ("name", "knob", "first_order", "missing"),
    [
        (FAKE, Knob(int, path=FAKE), False, ["docs/knobs.md", "search_spaces/"]),  # its predictions are less certain
        (FAKE, Knob(int, path=FAKE), True, ["docs/knobs.md", "search_spaces/", "recovery/ladder.py"]),
        ("fake", Knob(bool, path="fake"), False, ["docs/knobs.md", "search_spaces/", "predict/features.py"]),
        (
            "fake",
            Knob(bool, path=None),
            False,
            ["docs/knobs.md", "search_spaces/", "predict/features.py", "results/export.py"],
        ),
        (
            "fake",
            Knob(bool, ReadCondition(lambda knobs: False), "fake"),
            False,
            ["problem/knobs.py: no setting under which it is read"],
        ),
    ],
)
def test_a_new_knob_misses_the_places_that_do_not_know_it(
    name: str, knob: Knob, first_order: bool, missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOBS, name, knob)
    monkeypatch.setattr(table, "FIRST_ORDER", (*table.FIRST_ORDER, *[name] * first_order))
    assert missing_places(name, knob) == missing


def test_each_row_of_the_document_is_a_knob() -> None:
    assert [name for name in rows() if name not in KNOBS] == []
