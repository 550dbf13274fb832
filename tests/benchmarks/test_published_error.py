import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from autotune.predict.what_if import JobKind
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.job import parse_lora
from benchmarks.predict.published.error import errors
from benchmarks.predict.published.rows import Row
from benchmarks.predict.published.scores import Scored
from tests.conftest import make_job

ROOT = Path(__file__).parents[2]
FULL, LORA = JobKind("full", 2, False, "one"), JobKind("lora", 3, True, "several")


def scored(kind: JobKind, predicted: float, measured: float, source: str = "QwenLM/Qwen") -> Scored:
    job = make_job(ranks=1 if kind.devices == "one" else 4, lora=parse_lora("r=4") if kind.training == "lora" else None)
    candidate = Candidate.of({"zero_stage": kind.stage, **({"offload_param": "cpu"} if kind.offloaded else {})})
    row = Row(2, {"source_repo_or_url": f"github:{source}"})
    case = SimpleNamespace(
        job=job, candidate=candidate, hardware=named_hardware("t4", job.ranks), value=measured, row=row
    )
    return Scored(case, predicted, 0.9 * predicted, 1.1 * predicted)  # type: ignore[arg-type]


def test_errors_are_medians_by_kind_and_of_all() -> None:
    rows = [
        ("peak", scored(FULL, 1.05, 1.0)),
        ("peak", scored(FULL, 0.8, 1.0, "pytorch/torchtune")),
        ("peak", scored(FULL, 1.15, 1.0)),
        ("step", scored(LORA, 2.0, 1.0)),
        ("decision", scored(LORA, 1.0, 0.0)),
    ]
    found = {(one["kind"] and JobKind(**one["kind"]), one["figure"]): one for one in errors(rows)}
    assert set(found) == {(FULL, "peak"), (None, "peak"), (LORA, "step"), (None, "step")}
    peak = found[FULL, "peak"]
    assert (peak["rows"], peak["sources"], peak["median"], peak["inside"]) == (3, 2, 0.15, 0.3333)
    assert (found[None, "step"]["median"], found[None, "step"]["inside"]) == (1.0, 0.0)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "benchmarks" / "predict" / "published" / "error.py"), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_the_command_writes_what_a_plan_reads(tmp_path: Path) -> None:
    result = tmp_path / "published.json"
    result.write_text(json.dumps({"by_kind": errors([("peak", scored(FULL, 1.05, 1.0))])}))
    done = command("--of", str(result), "--write", str(tmp_path / "errors.json"))
    assert done.returncode == 0, done.stderr
    assert [one["rows"] for one in json.loads((tmp_path / "errors.json").read_text())["errors"]] == [1, 1]


def test_no_result_is_said_in_one_line(tmp_path: Path) -> None:
    done = command("--of", str(tmp_path / "none.json"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no result of published.py" in done.stderr
