import gzip
import json
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.executors.base import SEARCH, VERIFY
from autotune.problem.outcome import OutcomeKind
from autotune.util.units import GIB
from benchmarks.search.replay import OOM_SECONDS, ReplayExecutor, load_replay_table

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


def test_the_rules_of_a_replay() -> None:
    replay_table = load_replay_table(TABLE)
    executor = ReplayExecutor(replay_table, seed=1)
    family = {}
    for candidate, row in replay_table.rows.items():
        family.setdefault(candidate.family, []).append((candidate, row))
    rungs = next(
        group for group in family.values() if {row.kind for _, row in group} == {OutcomeKind.OK, OutcomeKind.OOM_DEVICE}
    )
    ok = [(c, row) for c, row in rungs if row.kind is OutcomeKind.OK]
    out, out_row = next((c, row) for c, row in rungs if row.kind is OutcomeKind.OOM_DEVICE)
    session = executor.session(ok[0][0], "")
    first = session.measure(ok[0][0], SEARCH, 1e9)
    row = ok[0][1]
    assert row.step_seconds is not None
    steps = min(4, 6 / ok[0][0].accumulation)
    assert executor.now() == pytest.approx(row.startup_seconds + steps * row.step_seconds)
    assert first.measurement is not None
    assert first.measurement.peak_bytes == int(row.peak_gib * GIB)  # memory is seen as it is
    assert first.measurement.step_seconds == pytest.approx(row.step_seconds, rel=0.1)  # time with 2 % of noise
    assert first.measurement.step_seconds != row.step_seconds
    before = executor.now()
    if len(ok) > 1:  # another rung starts no process
        session.measure(ok[1][0], SEARCH, 1e9)
        assert len(executor.log.process_starts) == 1
        before = executor.now()
    ended = session.measure(out, SEARCH, 1e9)
    assert executor.now() - before == pytest.approx(OOM_SECONDS)
    assert ended.kind is OutcomeKind.OOM_DEVICE
    short = min(out_row.peak_gib - replay_table.facts["gpu_memory_gib"], 0.25 * out_row.peak_gib)
    assert ended.missing_bytes == pytest.approx(short * GIB, rel=0.01)
    assert not session.alive
    other = next(c for c in replay_table.rows if c.family != out.family)
    with pytest.raises(ValueError, match="one family"):
        executor.session(out, "").measure(other, VERIFY, 1e9)


def test_a_deadline_ends_a_trial_at_the_second() -> None:
    executor = ReplayExecutor(load_replay_table(TABLE))
    candidate = next(iter(executor.replay_table.rows))
    outcome = executor.session(candidate, "").measure(candidate, SEARCH, 3.0)
    assert outcome.kind is OutcomeKind.INTERRUPTED
    assert executor.now() == 3.0


def write(folder: Path, text: str, **facts: object) -> Path:
    known = {
        "model": "tiny-llama",
        "seq_len": 32,
        "gpu": "rtx4090",
        "gpu_memory_gib": 24,
        "n_gpus": 2,
        "precision": "bf16",
    }
    (folder / "t.json").write_text(json.dumps({**known, **facts}))
    (folder / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    return folder / "t.csv.gz"


HEAD = "zero_stage,train_micro_batch_size_per_gpu,gradient_accumulation_steps,peak_gib,step_seconds,startup_seconds,outcome\n"


def test_small_tables_are_read(tmp_path: Path) -> None:
    replay_table = load_replay_table(write(tmp_path, HEAD + "0,1,1,1.5,0.5,3,ok\n2,4,1,30,,3,oom_device\n"))
    assert len(replay_table.rows) == 2
    assert replay_table.space().knobs["zero_stage"].values == (0, 2)
    assert replay_table.hardware().capacity_bytes == 24 * GIB
    assert replay_table.best_step_seconds == 0.25


@pytest.mark.parametrize(
    ("text", "facts", "said"),
    [
        (HEAD + "0,1,1,1.5,,3,ok\n", {}, "without step_seconds"),
        (HEAD + "x,1,1,1.5,0.5,3,ok\n", {}, "expected a number"),
        ("zero_stage,peak_gib\n0,1\n", {}, "no column 'step_seconds'"),
    ],
)
def test_bad_tables_are_said_in_one_line(tmp_path: Path, text: str, facts: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_replay_table(write(tmp_path, text, **facts))


def test_a_missing_or_damaged_table_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no table"):
        load_replay_table(tmp_path / "none.csv.gz")
    path = write(tmp_path, HEAD + "0,1,1,1.5,0.5,3,ok\n")
    path.write_bytes(b"not gzip")
    with pytest.raises(UserError, match="cannot be read"):
        load_replay_table(path)
    write(tmp_path, HEAD + "0,1,1,1.5,0.5,3,ok\n")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(UserError, match="no 'model'"):
        load_replay_table(path)
