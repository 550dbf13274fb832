"""A study as a table, and the table searched in place of the machine."""

import errno
import json
import os
from pathlib import Path

import pytest

from autotune.errors import MachineError
from autotune.executors.replay import Row, load_replay_table, write_replay_table
from autotune.problem.candidate import Value
from autotune.problem.outcome import Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.util.units import GIB
from tests.cli_call import call
from tests.conftest import make_candidate
from tests.studies import study_of_every_kind


@pytest.mark.slow
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
    replay_table = load_replay_table(Path("runs/s/s.table.csv.gz"))
    assert replay_table.facts["recorded_from"] == "s"
    assert replay_table.job() == store.job
    row = replay_table.rows[make_candidate(0, 7)]
    assert (row.kind, row.step_seconds) == (OutcomeKind.OK, 2.0)
    ran_out = replay_table.rows[make_candidate(1, 2)]
    assert ran_out.kind is OutcomeKind.OOM_DEVICE
    assert ran_out.peak_gib == pytest.approx((store.hardware.capacity_bytes + 5) / GIB, rel=1e-5)
    code, out, _ = call(monkeypatch, capsys, "record", "s", "--out", "elsewhere/t.csv.gz", "--json")
    assert json.loads(out) == {"table": "elsewhere/t.csv.gz", "facts": "elsewhere/t.json", "rows": 4}
    replay = ("run", "--executor", "replay:elsewhere/t.csv.gz", "--study", "again", "--budget", "5m", "--yes")
    code, out, err = call(monkeypatch, capsys, *replay)
    assert code == 0, err
    assert "  config: z0 mb7 ga1 (" in out, "2 ranks x 7 samples in 2 s against 2 x 1 in 1 s"


def test_what_ran_out_of_less_memory_is_not_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it fits into the memory that the table is of is not known."""
    monkeypatch.chdir(tmp_path)
    store = study_of_every_kind(tmp_path / "runs")
    capacity, space = store.hardware.capacity_bytes, load_space("cpu_demo")
    for micro_batch, then in ((16, capacity // 2), (32, capacity)):
        outcome = Outcome(OutcomeKind.OOM_DEVICE, capacity_bytes=then)
        store.finish(store.start(make_candidate(0, micro_batch), space), outcome)
    assert call(monkeypatch, capsys, "record", "s", "--out", "t.csv")[0] == 0
    rows = load_replay_table(Path("t.csv")).rows
    assert (make_candidate(0, 16) in rows, make_candidate(0, 32) in rows) == (False, True)


def test_a_table_is_never_written_over_a_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    study_of_every_kind(tmp_path / "runs")
    assert call(monkeypatch, capsys, "export", "s")[0] == 0
    exported = Path("runs/s/s.json").read_text()
    for out in ("runs/s/s.csv", "runs/s/s.csv.gz", "runs/s/s.json", "runs/s/s.meta.csv"):
        code, _, err = call(monkeypatch, capsys, "record", "s", "--out", out)
        assert (code, "is of no table" in err) == (2, True), out
    assert Path("runs/s/s.json").read_text() == exported
    assert not list(Path("runs/s").glob("*.csv*"))
    for _ in range(2):
        assert call(monkeypatch, capsys, "record", "s", "--out", "t.csv")[0] == 0, "a table of before is written anew"
    Path("a-file").touch()
    code, _, err = call(monkeypatch, capsys, "record", "s", "--out", "a-file/t.csv")
    assert (code, err.count("\n")) == (2, 1)


def test_nothing_measured_is_nothing_to_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    study_of_every_kind(tmp_path / "runs", kinds=(OutcomeKind.CRASH,))
    code, _, err = call(monkeypatch, capsys, "record", "s")
    assert (code, "has measured nothing" in err) == (2, True)
    code, _, err = call(monkeypatch, capsys, "record", "nothing")
    assert (code, "no study 'nothing'" in err) == (2, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora", "none"),
        ("lora", "r=16"),
        ("lora", "r=8,targets=q_proj+v_proj,alpha=32,dropout=0.05"),
        ("attention", "sdpa"),
        ("packing", True),
        ("compile", False),
        ("zero_optimization.offload_optimizer.ratio", 0.25),
        ("communication_data_type", "bf16"),
        ("reduce_bucket_size", 5 * 10**8),
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


@pytest.mark.parametrize("file", ["t.csv.gz", "t.json"])
def test_a_table_that_cannot_be_written_leaves_the_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    facts = {"model": "m", "seq_len": 8, "gpu": "x", "gpu_memory_gib": 1, "n_gpus": 2, "precision": "bf16"}
    first, second = (make_candidate(stage) for stage in (0, 1))
    write_replay_table(tmp_path / "t", facts, {first: Row(1.0, 2.0, 3.0, OutcomeKind.OK)})
    replace = os.replace

    def full(source: str, target: Path) -> None:
        if Path(target).name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(MachineError, match="No space left"):
        write_replay_table(tmp_path / "t", facts, {second: Row(1.0, 2.0, 3.0, OutcomeKind.OK)})
    assert list(load_replay_table(tmp_path / "t.csv.gz").rows) == [first if file == "t.csv.gz" else second]
    monkeypatch.undo()
    write_replay_table(tmp_path / "t", facts, {second: Row(1.0, 2.0, 3.0, OutcomeKind.OK)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv.gz", "t.json"]


def test_facts_of_another_machine_stand_beside_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"model": "m", "seq_len": 8, "gpu": "x", "gpu_memory_gib": 1, "n_gpus": 2, "precision": "bf16"}
    kept, rows = tmp_path / "kept.json", {make_candidate(0): Row(1.0, 2.0, 3.0, OutcomeKind.OK)}
    (tmp_path / "t.json").symlink_to(kept)
    write_replay_table(tmp_path / "t", facts, rows)

    def full(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(MachineError, match="No space left"):
        write_replay_table(tmp_path / "t", {**facts, "n_gpus": 4}, rows)
    assert not kept.exists()
    monkeypatch.undo()
    write_replay_table(tmp_path / "t", {**facts, "n_gpus": 4}, rows)
    assert (tmp_path / "t.json").is_symlink()
    assert json.loads(kept.read_text())["n_gpus"] == 4
