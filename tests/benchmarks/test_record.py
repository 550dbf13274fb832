"""A study as a table, and the table searched in place of the machine."""

from pathlib import Path

import pytest

from autotune.problem.candidate import Value
from autotune.problem.outcome import OutcomeKind
from autotune.util.units import GIB
from benchmarks.search.record import record
from benchmarks.search.replay import Row, load_replay_table, write_replay_table
from tests.cli_call import replay
from tests.conftest import make_candidate
from tests.studies import study_of_every_kind


@pytest.mark.slow
def test_a_study_becomes_a_table_that_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = study_of_every_kind(tmp_path / "runs")
    assert record(store, Path("t.csv.gz")) == 4, "two that ran, two that ran out of memory"
    replay_table = load_replay_table(Path("t.csv.gz"))
    assert replay_table.facts["recorded_from"] == "s"
    assert replay_table.job() == store.job
    row = replay_table.rows[make_candidate(0, 7)]
    assert (row.kind, row.step_seconds) == (OutcomeKind.OK, 2.0)
    ran_out = replay_table.rows[make_candidate(1, 2)]
    assert ran_out.kind is OutcomeKind.OOM_DEVICE
    assert ran_out.peak_gib == pytest.approx((store.hardware.capacity_bytes + 5) / GIB, rel=1e-5)
    code, out, err = replay(monkeypatch, capsys, Path("t.csv.gz"), "--study", "again", "--budget", "5m")
    assert code == 0, err
    assert "(z0 mb7 ga1)" in out, "2 ranks x 7 samples in 2 s against 2 x 1 in 1 s"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora", "r=8,targets=q_proj+v_proj,alpha=32,dropout=0.05"),
        ("compile", False),
        ("zero_optimization.offload_optimizer.ratio", 0.25),
        ("optimizer.type", "Lion"),
    ],
)
def test_a_table_gives_back_every_kind_of_knob(tmp_path: Path, name: str, value: Value) -> None:
    candidate = make_candidate(3, **{"zero_stage": 3, "offload_optimizer": "cpu", name: value})
    facts = {"model": "m", "seq_len": 8, "gpu": "x", "gpu_memory_gib": 1, "n_gpus": 2, "precision": "bf16"}
    write_replay_table(tmp_path / "t.csv.gz", facts, {candidate: Row(1.0, 2.0, 3.0, OutcomeKind.OK)})
    (read,) = load_replay_table(tmp_path / "t.csv.gz").rows
    assert read == candidate
    assert read.get(name) == value
    assert type(read.get(name)) is type(value)
