import json
import subprocess
import sys
from pathlib import Path

from published_error import errors

from autotune.predict.known_error import JobKind

ROOT = Path(__file__).parents[2]
FULL, LORA = JobKind("full", 2, False, "one"), JobKind("lora", 3, True, "several")


def row(kind: JobKind, figure: str, predicted: float, measured: float, source: str = "a") -> dict[str, object]:
    interval = [0.9 * predicted, 1.1 * predicted]
    return {
        "kind": figure,
        "job_kind": vars(kind),
        "predicted": predicted,
        "measured": measured,
        "interval": interval,
        "source": source,
    }


def test_errors_are_medians_by_kind_and_of_all() -> None:
    rows = [
        row(FULL, "peak", 1.05, 1.0),
        row(FULL, "peak", 0.8, 1.0, "b"),
        row(FULL, "peak", 1.1, 1.0),
        row(LORA, "step", 2.0, 1.0),
        row(LORA, "decision", 1.0, 0.0),
    ]
    found = {(one["kind"] and JobKind(**one["kind"]), one["figure"]): one for one in errors(rows)}
    assert set(found) == {(FULL, "peak"), (None, "peak"), (LORA, "step"), (None, "step")}
    peak = found[FULL, "peak"]
    assert (peak["rows"], peak["sources"], peak["median"], peak["inside"]) == (3, 2, 0.1, 0.6667)
    assert (found[None, "step"]["median"], found[None, "step"]["inside"]) == (1.0, 0.0)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "benchmarks" / "published_error.py"), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_the_command_writes_what_a_plan_reads(tmp_path: Path) -> None:
    result = tmp_path / "published.json"
    result.write_text(json.dumps({"rows": {"uncalibrated": [row(FULL, "peak", 1.05, 1.0)]}}))
    done = command("--of", str(result), "--write", str(tmp_path / "errors.json"))
    assert done.returncode == 0, done.stderr
    assert [one["rows"] for one in json.loads((tmp_path / "errors.json").read_text())["errors"]] == [1, 1]


def test_no_result_is_said_in_one_line(tmp_path: Path) -> None:
    done = command("--of", str(tmp_path / "none.json"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no result of published.py" in done.stderr
