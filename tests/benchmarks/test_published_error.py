import json
import subprocess
import sys
from pathlib import Path

from autotune.predict.what_if import JobKind, PublishedRow, published_rows
from benchmarks.predict.published.error import planned

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "benchmarks" / "predict" / "published" / "error.py"), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_the_command_writes_what_a_plan_reads(tmp_path: Path) -> None:
    kind = vars(JobKind("full", 2, False, "one"))
    text = {
        "id": "7",
        "source": "a",
        "quantity": "allocated",
        "model": "llama-7b",
        "gpu": "t4",
        "candidate": "z2",
        "doubts": "",
    }
    sizes = {"parameters": 7, "gpus": 1, "nodes": 1, "seq_len": 64, "micro_batch": 1, "checkpointing": False}
    one = {**text, **sizes, "figure": "peak", "kind": kind, "step_tokens": 64.0, "measured": 1.23456, "predicted": 1.0}
    one |= {"interval": [0.9, 1.1], "calibrated": None, "calibrated_interval": None}
    result, written = tmp_path / "published.json", tmp_path / "errors.json"
    result.write_text(json.dumps({"rows": [one, {**one, "figure": "decision"}]}))
    done = command("--of", str(result), "--write", str(written))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(written.read_text())["rows"]
    read = PublishedRow(**{**row, "kind": JobKind(**row["kind"])})
    assert (read.measured, read.low, read.high, read.kind.stage) == (1.235, 0.9, 1.1, 2)


def test_no_result_is_said_in_one_line(tmp_path: Path) -> None:
    done = command("--of", str(tmp_path / "none.json"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no result of published.py" in done.stderr


def test_rows_of_all_sources_in_turn_are_held_as_a_plan_says() -> None:
    found = planned(len(published_rows()))
    assert len(found) == len(published_rows())
    for one, row in zip(found, sorted(published_rows(), key=lambda row: row.source), strict=True):
        assert one["source"].startswith(row.source)
    assert sum(one["held"] == "in" for one in found) >= 0.9 * len(found)
    few = planned(20)
    assert len({one["source"].rsplit(" ", 1)[0] for one in few}) == min(20, len({r.source for r in published_rows()}))
