"""Ranks that die or leave without a word: signals, exit statuses, silence."""

import signal
from pathlib import Path

import pytest

from autotune.problem.outcome import OutcomeKind, Phase, Source
from autotune.util.units import GIB, MIB
from autotune.workers.failure_classifier import UNEQUAL_COLLECTIVES, FailureEvidence, classify_failure, log_tail
from autotune.workers.memory_peaks import MemoryPeaks
from tests.workers.failures import expected_outcome
from tests.workers.test_failure_classifier import CPU_OOM, CUDA_OOM, error


@pytest.mark.parametrize(
    ("number", "peaks", "log", "kind", "reason", "evidence"),
    [
        (
            signal.SIGKILL,
            MemoryPeaks(oom_kills=1),
            "",
            OutcomeKind.OOM_HOST,
            "killed by the kernel for want of main memory",
            "SIGKILL, oom_kill counter rose",
        ),
        (
            signal.SIGKILL,
            MemoryPeaks(host_low=1 * MIB),
            "",
            OutcomeKind.OOM_HOST,
            "killed, with main memory used up",
            "SIGKILL with 1.0 MiB of main memory left",
        ),
        (
            signal.SIGKILL,
            MemoryPeaks(host_low=3 * GIB),  # of 100: not used up
            CPU_OOM,  # what stands in a log says nothing of a SIGKILL
            OutcomeKind.CRASH,
            "killed from outside (SIGKILL)",
            "SIGKILL, oom_kill counter unchanged",
        ),
        (signal.SIGBUS, MemoryPeaks(), "", OutcomeKind.OOM_HOST, "shared memory ran out (SIGBUS)", "SIGBUS"),
        (signal.SIGSEGV, MemoryPeaks(oom_kills=1), "", OutcomeKind.CRASH, "died by SIGSEGV", "SIGSEGV"),
        (
            signal.SIGABRT,
            MemoryPeaks(),
            "Address already in use\nterminate called after throwing an instance of 'c10::Error'\n  what():  Unknown\nmore",
            OutcomeKind.CRASH,
            "died by SIGABRT",
            "SIGABRT",
        ),
        (
            signal.SIGABRT,  # what killed it, as C++ says it last
            MemoryPeaks(),
            "terminate called after throwing an instance of 'c10::DistBackendError'\n"
            "  what():  [Rank 3] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error",
            OutcomeKind.INFRASTRUCTURE,
            "died by SIGABRT: [Rank 3] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error",
            "SIGABRT, log text 'uncorrectable ECC'",
        ),
        (
            signal.SIGABRT,  # a vision-language model at stage 3 whose second rank has no image
            MemoryPeaks(),
            "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  op.preamble.length <= op.nbytes. "
            "37632 vs 4096. Received data size doesn't match expected size. Is there a distributed collective mismatch in your",
            OutcomeKind.CRASH,
            f"died by SIGABRT: {UNEQUAL_COLLECTIVES}",
            "SIGABRT, log text 'collective mismatch'",
        ),
        (
            signal.SIGABRT,
            MemoryPeaks(),
            "terminate called after throwing an instance of 'std::bad_alloc'",
            OutcomeKind.OOM_DEVICE,
            "died by SIGABRT after running out of memory",
            "SIGABRT, log text 'std::bad_alloc'",
        ),
    ],
)
def test_death_by_signal(
    number: int, peaks: MemoryPeaks, log: str, kind: OutcomeKind, reason: str, evidence: str
) -> None:
    known = FailureEvidence(
        "cpu", statuses={1: -number}, phase=Phase.STEP, peaks=peaks, host_total_bytes=100 * GIB, logs={1: log}
    )
    assert classify_failure(known) == expected_outcome(kind, Phase.STEP, reason, evidence, Source.SIGNAL, 1)


def test_of_a_machine_of_unknown_size_a_kill_says_nothing() -> None:
    assert (
        classify_failure(FailureEvidence("cpu", statuses={0: -signal.SIGKILL}, peaks=MemoryPeaks(host_low=1))).kind
        is OutcomeKind.CRASH
    )


def test_the_first_rank_that_died_is_named_and_its_log_is_read() -> None:
    logs = {1: "KeyError", 2: "std::bad_alloc"}
    evidence = FailureEvidence("cpu", statuses={2: -signal.SIGABRT, 0: 1, 1: -signal.SIGSEGV}, logs=logs)
    assert (classify_failure(evidence).rank, classify_failure(evidence).kind) == (1, OutcomeKind.CRASH)


def test_the_exceptions_type_outranks_a_signal_and_a_text() -> None:
    evidence = FailureEvidence(
        "cuda",
        [error("builtins.KeyError", "'x'")],
        {0: -signal.SIGKILL},
        peaks=MemoryPeaks(oom_kills=1),
        logs={0: CUDA_OOM},
    )
    assert classify_failure(evidence).kind is OutcomeKind.CRASH


def test_silence() -> None:
    silent = FailureEvidence("cpu", statuses={0: 1}, silence="forward: nothing heard for 9 s", phase=Phase.FORWARD)
    assert classify_failure(silent) == expected_outcome(
        OutcomeKind.TIMEOUT,
        Phase.FORWARD,
        "no rank got on: forward: nothing heard for 9 s",
        "deadline: forward: nothing heard for 9 s",
        Source.SILENCE,
    )
    died = FailureEvidence("cpu", statuses={0: -signal.SIGSEGV}, silence="forward: nothing heard for 9 s")
    assert classify_failure(died).kind is OutcomeKind.CRASH, "a death explains the silence"


@pytest.mark.parametrize(
    ("log", "kind", "reason", "evidence"),
    [
        (f"RuntimeError: {CPU_OOM}\n\n", OutcomeKind.OOM_DEVICE, f"RuntimeError: {CPU_OOM}", "exit 7, log text "),
        ("Traceback\nKeyError: 'x'\n \n", OutcomeKind.CRASH, "KeyError: 'x'", "exit 7"),
        (f"a\n{'y' * 400}", OutcomeKind.CRASH, "y" * 300, "exit 7"),
        ("", OutcomeKind.CRASH, "exit status 7", "exit 7"),
        ("Address already in use\nbye", OutcomeKind.INFRASTRUCTURE, "bye", "exit 7, log text 'Address already in use'"),
    ],
)
def test_exit_status(log: str, kind: OutcomeKind, reason: str, evidence: str) -> None:
    verdict = classify_failure(FailureEvidence("cpu", statuses={0: 0, 2: 7, 1: 7}, phase=Phase.INIT, logs={1: log}))
    assert (verdict.kind, verdict.reason, verdict.rank) == (kind, reason, 1)
    assert (verdict.source, verdict.phase) == (Source.EXIT, Phase.INIT)
    assert verdict.evidence.startswith(evidence)
    assert classify_failure(FailureEvidence("cpu", statuses={5: 1})).rank == 5


def test_nothing_at_all() -> None:
    for statuses in ({}, {0: 0, 1: 0}):
        assert classify_failure(FailureEvidence("cpu", statuses=statuses, phase=Phase.SAVE)) == expected_outcome(
            OutcomeKind.CRASH,
            Phase.SAVE,
            "the ranks ended without a result",
            "channel closed, exit status 0",
            Source.EXIT,
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
