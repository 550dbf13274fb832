"""Ranks that die or leave without a word: signals, exit statuses, silence."""

import signal
from pathlib import Path

import pytest

from autotune.problem.outcome import Kind, Phase, Source
from autotune.util.units import GIB, MIB
from autotune.workers.failure_classifier import Evidence, Verdict, judge, log_tail
from autotune.workers.memory_monitor import Peaks
from tests.workers.test_failure_classifier import CPU_OOM, CUDA_OOM, error


@pytest.mark.parametrize(
    ("number", "peaks", "log", "kind", "reason", "evidence"),
    [
        (
            signal.SIGKILL,
            Peaks(oom_kills=1),
            "",
            Kind.OOM_HOST,
            "killed by the kernel for want of main memory",
            "SIGKILL, oom_kill counter rose",
        ),
        (
            signal.SIGKILL,
            Peaks(host_low=1 * MIB),
            "",
            Kind.OOM_HOST,
            "killed, with main memory used up",
            "SIGKILL with 1.0 MiB of main memory left",
        ),
        (
            signal.SIGKILL,
            Peaks(host_low=3 * GIB),  # of 100: not used up
            CPU_OOM,  # what stands in a log says nothing of a SIGKILL
            Kind.CRASH,
            "killed from outside (SIGKILL)",
            "SIGKILL, oom_kill counter unchanged",
        ),
        (signal.SIGBUS, Peaks(), "", Kind.OOM_HOST, "shared memory ran out (SIGBUS)", "SIGBUS"),
        (signal.SIGSEGV, Peaks(oom_kills=1), "", Kind.CRASH, "died by SIGSEGV", "SIGSEGV"),
        (signal.SIGABRT, Peaks(), "Address already in use", Kind.CRASH, "died by SIGABRT", "SIGABRT"),
        (
            signal.SIGABRT,
            Peaks(),
            "Address already in use\nterminate called after throwing an instance of 'c10::Error'\n  what():  Unknown\nmore",
            Kind.CRASH,
            "died by SIGABRT",
            "SIGABRT",
        ),
        (
            signal.SIGABRT,  # what killed it, as C++ says it last
            Peaks(),
            "terminate called after throwing an instance of 'c10::DistBackendError'\n"
            "  what():  [Rank 3] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error",
            Kind.INFRASTRUCTURE,
            "died by SIGABRT: [Rank 3] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error",
            "SIGABRT, log text 'uncorrectable ECC'",
        ),
        (99, Peaks(), "", Kind.CRASH, "died by signal 99", "signal 99"),
        (
            signal.SIGABRT,
            Peaks(),
            "terminate called after throwing an instance of 'std::bad_alloc'",
            Kind.OOM_DEVICE,
            "died by SIGABRT after running out of memory",
            "SIGABRT, log text 'std::bad_alloc'",
        ),
    ],
)
def test_death_by_signal(number: int, peaks: Peaks, log: str, kind: Kind, reason: str, evidence: str) -> None:
    known = Evidence(
        "cpu", statuses={1: -number}, phase=Phase.STEP, peaks=peaks, host_total_bytes=100 * GIB, logs={1: log}
    )
    assert judge(known) == Verdict(kind, Phase.STEP, reason, evidence, Source.SIGNAL, 1, signal=number)


def test_of_a_machine_of_unknown_size_a_kill_says_nothing() -> None:
    assert judge(Evidence("cpu", statuses={0: -signal.SIGKILL}, peaks=Peaks(host_low=1))).kind is Kind.CRASH


def test_the_first_rank_that_died_is_named_and_its_log_is_read() -> None:
    logs = {1: "KeyError", 2: "std::bad_alloc"}
    evidence = Evidence("cpu", statuses={2: -signal.SIGABRT, 0: 1, 1: -signal.SIGSEGV}, logs=logs)
    assert (judge(evidence).rank, judge(evidence).kind) == (1, Kind.CRASH)


def test_the_exceptions_type_outranks_a_signal_and_a_text() -> None:
    evidence = Evidence(
        "cuda", [error("builtins.KeyError", "'x'")], {0: -signal.SIGKILL}, peaks=Peaks(oom_kills=1), logs={0: CUDA_OOM}
    )
    assert judge(evidence).kind is Kind.CRASH


def test_silence() -> None:
    silent = Evidence("cpu", statuses={0: 1}, timed_out="forward: nothing heard for 9 s", phase=Phase.FORWARD)
    assert judge(silent) == Verdict(
        Kind.TIMEOUT,
        Phase.FORWARD,
        "no rank got on: forward: nothing heard for 9 s",
        "deadline: forward: nothing heard for 9 s",
        Source.SILENCE,
    )
    died = Evidence("cpu", statuses={0: -signal.SIGSEGV}, timed_out="forward: nothing heard for 9 s")
    assert judge(died).kind is Kind.CRASH, "a death explains the silence"


@pytest.mark.parametrize(
    ("log", "kind", "reason", "evidence"),
    [
        (f"RuntimeError: {CPU_OOM}\n\n", Kind.OOM_DEVICE, f"RuntimeError: {CPU_OOM}", "exit 7, log text "),
        ("Traceback\nKeyError: 'x'\n \n", Kind.CRASH, "KeyError: 'x'", "exit 7"),
        (f"a\n{'y' * 400}", Kind.CRASH, "y" * 300, "exit 7"),
        ("", Kind.CRASH, "exit status 7", "exit 7"),
        ("Address already in use\nbye", Kind.INFRASTRUCTURE, "bye", "exit 7, log text 'Address already in use'"),
    ],
)
def test_exit_status(log: str, kind: Kind, reason: str, evidence: str) -> None:
    verdict = judge(Evidence("cpu", statuses={0: 0, 2: 7, 1: 7}, phase=Phase.INIT, logs={1: log}))
    assert (verdict.kind, verdict.reason, verdict.rank) == (kind, reason, 1)
    assert (verdict.source, verdict.phase) == (Source.EXIT, Phase.INIT)
    assert verdict.evidence.startswith(evidence)
    assert judge(Evidence("cpu", statuses={5: 1})).rank == 5


def test_nothing_at_all() -> None:
    for statuses in ({}, {0: 0, 1: 0}):
        assert judge(Evidence("cpu", statuses=statuses, phase=Phase.SAVE)) == Verdict(
            Kind.CRASH, Phase.SAVE, "the ranks ended without a result", "channel closed, exit status 0", Source.EXIT
        )


# -- logs ----------------------------------------------------------------------------------------------------------------


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert log_tail(log) == ""
    log.write_bytes(b"start \xff end")
    assert log_tail(log) == "start \ufffd end", "whatever bytes it holds"
    assert log_tail(log, 4) == " end"
    log.write_bytes(b"x" * 100_000 + b" end")
    assert len(log_tail(log)) == 16384
    assert log_tail(log).endswith("x end")
