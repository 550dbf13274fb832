"""A script that cannot be tuned is refused in one line that says what to do, not with the end of a log."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.commands.script_probe import _in_one_line, _limits, _profile, _refuse_unless_run, least_memory_candidate
from autotune.errors import MachineError, ScriptFails, UserError
from autotune.executors.local import failed_outcome
from autotune.problem.job import ScriptProfile
from autotune.problem.outcome import Outcome, OutcomeKind, Phase, Source
from autotune.rank.base import errnos
from autotune.workers.failure_classifier import FailureEvidence
from autotune.workers.memory_peaks import MemoryPeaks

BUSY = "The server socket has failed to listen on any local network address. port: 29511, code: -98, name: EADDRINUSE"
CASES = [
    (OutcomeKind.CRASH, "EOF when reading a line", "builtins.EOFError", "asks for input"),
    (OutcomeKind.CRASH, "BdbQuit", "bdb.BdbQuit", "stops at a breakpoint"),
    (OutcomeKind.CRASH, "[Errno 98] Address already in use", "builtins.OSError", "opens a port that is taken"),
    (OutcomeKind.CRASH, "[Errno 2] No such file or directory: 'ds.json'", "builtins.FileNotFoundError", "'ds.json'"),
    (OutcomeKind.CRASH, "<urlopen error [Errno 111]>", "urllib.error.URLError", "over the network"),
    (OutcomeKind.INFRASTRUCTURE, BUSY, "torch.distributed.DistNetworkError", "port: 29511"),
]


@pytest.mark.parametrize(("kind", "reason", "exception", "line"), CASES)
def test_what_is_known_is_said_in_one_line(kind: OutcomeKind, reason: str, exception: str, line: str) -> None:
    outcome = Outcome(
        kind, Phase.INIT, reason=reason, exceptions=(exception,), source=Source.EXCEPTION, log="runs/s/1", rank=1
    )
    said = _in_one_line(outcome, "train.py", "use --budget 60s", reached=False)
    assert said.startswith("train.py ")
    assert line in said
    assert "runs/s/1/rank1.log" in said
    assert "\n" not in said


def test_a_script_that_never_gets_to_deepspeed() -> None:
    for kind, source in ((OutcomeKind.INTERRUPTED, Source.BUDGET), (OutcomeKind.TIMEOUT, Source.SILENCE)):
        outcome = Outcome(kind, Phase.INIT, reason="its share of the budget ended", source=source, seconds=90.0)
        said = _in_one_line(outcome, "train.py", "use --budget 60s", reached=False)
        assert said.startswith("train.py had not called deepspeed.initialize after 1m30s")
        assert not _in_one_line(outcome, "train.py", "use --budget 60s", reached=True), (
            "then it is slow, not another sort of script"
        )


def test_any_other_error_is_the_scripts_own() -> None:
    outcome = Outcome(OutcomeKind.CRASH, Phase.INIT, reason="no such column", exceptions=("builtins.KeyError",))
    assert not _in_one_line(outcome, "train.py", "use --budget 60s", reached=False)


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        (OutcomeKind.CRASH, ScriptFails, "the script fails by itself"),
        (
            OutcomeKind.INFRASTRUCTURE,
            MachineError,
            "the machine failed before the script was measured (node b is down)",
        ),
    ],
)
def test_a_machine_that_fails_in_the_first_run_is_no_fault_of_the_script(
    tmp_path: Path, kind: OutcomeKind, error: type[Exception], says: str
) -> None:
    (tmp_path / "rank0.log").write_text("last words\n")
    job = SimpleNamespace(script=SimpleNamespace(target="train.py"))
    executor: Any = SimpleNamespace(job=job, hardware=SimpleNamespace(limit_bytes=None), ops=SimpleNamespace(failed={}))
    outcome = Outcome(kind, Phase.INIT, reason="node b is down", source=Source.NODE, log=str(tmp_path))
    with pytest.raises(error) as raised:
        _refuse_unless_run(executor, outcome, {}, 60.0, SimpleNamespace(seconds=60.0))  # type: ignore[arg-type]
    assert str(raised.value).startswith(says)
    assert "last words" in str(raised.value)


def test_marks_below_the_lines_of_a_traceback_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text('File "x.py", line 3\n  a = b[c]\n      ~^^^\nIndexError: at ^c\n')
    executor: Any = SimpleNamespace(
        job=SimpleNamespace(script=SimpleNamespace(target="x.py")),
        hardware=SimpleNamespace(limit_bytes=None),
        ops=SimpleNamespace(failed={}),
    )
    outcome = Outcome(
        OutcomeKind.CRASH, Phase.INIT, reason="no c", exceptions=("builtins.KeyError",), log=str(tmp_path)
    )
    with pytest.raises(UserError) as caught:
        _refuse_unless_run(executor, outcome, {"micros": 1}, 60.0, SimpleNamespace(seconds=60.0))  # type: ignore[arg-type]
    said = str(caught.value).splitlines()
    assert [line.strip() for line in said[1:-1]] == ['File "x.py", line 3', "a = b[c]", "IndexError: at ^c"]


@pytest.mark.parametrize(
    ("optimizer", "device", "offloads"),
    [("", "cuda", True), ("DeepSpeedCPUAdam", "cuda", True), ("FusedAdam", "cuda", False), ("FusedAdam", "cpu", True)],
)
def test_what_takes_least_memory_keeps_a_fused_optimizer_where_it_steps(
    optimizer: str, device: str, offloads: bool
) -> None:
    candidate = least_memory_candidate(optimizer, device)
    assert (candidate.offload_optimizer == "cpu") is offloads
    assert (candidate.stage, candidate.micro_batch, candidate.checkpointing) == (3, 1, True)
    assert candidate.offload_param == "cpu"


def test_how_torchs_optimizer_steps_is_kept_where_the_script_makes_it() -> None:
    def kept(**facts: Any) -> ScriptProfile:
        return _profile({"micro_batch": 1, "accumulation": 1, **facts}, own=True)

    told = {"class": "AdamW", "fused": None, "foreach": None}
    assert kept(torch_optimizer=told).torch_optimizer == told
    assert kept(torch_optimizer={}) == kept()


def chained(first: BaseException, second: BaseException) -> BaseException:
    second.__cause__ = first
    return second


CAP = "--memory-cap"
PROTECTION = "--unprotected"


@pytest.mark.parametrize(
    ("error", "log", "cap_bytes", "remedy"),
    [
        (RuntimeError("generation failed"), "", 1200 << 20, CAP),  # near its peak
        (RuntimeError("generation failed"), "", 2000 << 20, ""),
        (RuntimeError("cannot start"), "OpenBLAS: pthread_create: Resource temporarily unavailable", 2000 << 20, CAP),
        (chained(OSError(errno.ENOMEM, "mmap"), ImportError("libx.so")), "", 2000 << 20, CAP),
        (chained(OSError(errno.ENOMEM, "mmap"), ImportError("libx.so")), "", None, ""),
        (None, "", 2000 << 20, CAP),  # killed by a signal
        (KeyError("no such column"), "", 2000 << 20, ""),
        (RuntimeError("setup failed"), "mkdir: cannot create directory: Operation not permitted", None, PROTECTION),
        (chained(PermissionError(errno.EACCES, "no"), RuntimeError("setup failed")), "", None, PROTECTION),
        (OSError(errno.EROFS, "Read-only file system", "/data/x"), "", None, PROTECTION),
        (chained(OSError("no", "room"), OSError(errno.EROFS, "Read-only file system")), "", None, PROTECTION),
        (OSError(errno.EIO, "Input/output error"), "", None, ""),
    ],
)
def test_a_limit_that_may_be_the_cause_is_named(error: Any, log: str, cap_bytes: int | None, remedy: str) -> None:
    error = error() if callable(error) else error
    described = {
        "kinds": [f"builtins.{type(error).__name__}"],
        "text": str(error),
        "errnos": sorted(errnos(error)) if error else [],
    }
    peaks = MemoryPeaks(used=[1000 << 20])
    evidence = FailureEvidence(
        "cpu", [described] if error else [], {} if error else {0: -11}, logs={0: log}, peaks=peaks
    )
    said = _limits(failed_outcome(evidence, greeted=True, server_lives=True), cap_bytes)
    assert bool(said) == bool(remedy)
    assert remedy in said
