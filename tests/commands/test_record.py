"""A study as a table, and the table searched in place of the machine."""

import dataclasses
import json
from pathlib import Path

import pytest

from autotune.executors.replay import load_landscape
from autotune.problem.outcome import Kind
from autotune.units import GIB
from tests.cli_call import call
from tests.conftest import make_candidate
from tests.studies import study_of_every_kind


def test_a_study_becomes_a_table_that_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = study_of_every_kind(tmp_path / "runs")
    assert call(monkeypatch, capsys, "export", "s")[0] == 0
    exported = Path("runs/s/s.json").read_text()
    code, out, _ = call(monkeypatch, capsys, "record", "s")
    assert code == 0
    assert Path("runs/s/s.json").read_text() == exported, "the winner's config is let alone"
    assert "(4 candidates)" in out, "two that ran, two that ran out of memory"
    landscape = load_landscape(Path("runs/s/s.table.csv.gz"))
    assert landscape.facts["recorded_from"] == "s"
    assert landscape.job() == store.job
    row = landscape.rows[make_candidate(0, 7)]
    assert (row.kind, row.step_seconds) == (Kind.OK, 2.0)
    ran_out = landscape.rows[make_candidate(1, 2)]
    assert ran_out.kind is Kind.OOM_DEVICE
    assert ran_out.peak_gib == pytest.approx((store.hardware.capacity_bytes + 5) / GIB, rel=1e-5)
    code, out, _ = call(monkeypatch, capsys, "record", "s", "--out", "elsewhere/t.csv.gz", "--json")
    assert json.loads(out) == {"table": "elsewhere/t.csv.gz", "facts": "elsewhere/t.json", "rows": 4}
    replay = ("run", "--executor", "replay:elsewhere/t.csv.gz", "--study", "again", "--budget", "5m", "--yes")
    code, out, err = call(monkeypatch, capsys, *replay)
    assert code == 0, err
    assert "winner: z0 mb7 ga1" in out, "2 ranks x 7 samples in 2 s against 2 x 1 in 1 s"


def test_nothing_measured_is_nothing_to_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    study_of_every_kind(tmp_path / "runs", kinds=(Kind.CRASH,))
    code, _, err = call(monkeypatch, capsys, "record", "s")
    assert (code, "has measured nothing" in err) == (2, True)
    code, _, err = call(monkeypatch, capsys, "record", "nothing")
    assert (code, "no study 'nothing'" in err) == (2, True)


def test_a_slice_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = study_of_every_kind(tmp_path / "runs")
    store._set("hardware", dataclasses.replace(store.hardware, nodes=2, count=4, sliced=True).to_json())
    code, _, err = call(monkeypatch, capsys, "record", "s")
    assert (code, "study s is of a slice" in err) == (2, True)
    assert not list(tmp_path.rglob("*.table.*"))
