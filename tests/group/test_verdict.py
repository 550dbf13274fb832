"""Classification, with texts as the libraries print them."""

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.group.gauge import FOREIGN_BYTES, Peaks
from autotune.group.verdict import (
    Evidence,
    Verdict,
    classify_text,
    is_memory_error,
    is_secondary,
    judge,
    log_tail,
    missing_bytes,
)
from autotune.problem.outcome import Kind, Phase, Source
from autotune.units import GIB, KIB, MIB

CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.93 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.21 GiB is free. "
    "Including non-PyTorch memory, this process has 22.47 GiB memory in use."
)
CPU_OOM = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "16777216 bytes. Error code 12 (Cannot allocate memory)"
)


def error(kind: str, text: str, phase: str = "forward", file: str = "/x/model.py", rank: int = 0) -> dict:
    return {"kinds": [kind, "builtins.RuntimeError"], "text": text, "phase": phase, "file": file, "rank": rank}


@pytest.mark.parametrize(
    ("device", "kind", "text", "expected"),
    [
        ("cuda", "torch.OutOfMemoryError", CUDA_OOM, Kind.OOM_DEVICE),
        (
            "cuda",
            "builtins.RuntimeError",
            "Worker failed: CUDA out of memory. Tried to allocate 20 MiB",
            Kind.OOM_DEVICE,
        ),
        (
            "cuda",
            "builtins.RuntimeError",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            Kind.OOM_DEVICE,
        ),
        ("cuda", "builtins.RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", Kind.OOM_DEVICE),
        ("cuda", "torch.AcceleratorError", "CUDA error: out of memory", Kind.OOM_DEVICE),
        (
            "cuda",
            "torch.distributed.DistBackendError",
            "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error. Last error: Cuda failure 'out of memory'",
            Kind.OOM_DEVICE,
        ),
        (
            "cuda",
            "builtins.RuntimeError",
            "CUDA error: out of memory in cudaHostAlloc, CachingHostAllocator",
            Kind.OOM_HOST,
        ),
        ("cuda", "builtins.RuntimeError", CPU_OOM, Kind.OOM_HOST),
        ("cuda", "builtins.MemoryError", "", Kind.OOM_HOST),
        (
            "cuda",
            "builtins.RuntimeError",
            "unable to mmap 1024 bytes from file </torch_1>: Cannot allocate memory (12)",
            Kind.OOM_HOST,
        ),
        ("cpu", "builtins.RuntimeError", CPU_OOM, Kind.OOM_DEVICE),
        ("cpu", "builtins.RuntimeError", "could not create a primitive", Kind.OOM_DEVICE),
        ("cpu", "builtins.RuntimeError", "could not create a memory object", Kind.OOM_DEVICE),
        ("cpu", "builtins.RuntimeError", "std::bad_alloc", Kind.OOM_DEVICE),
        ("cpu", "builtins.MemoryError", "Unable to allocate 3 MiB", Kind.OOM_DEVICE),
        ("cpu", "builtins.RuntimeError", "can't start new thread", Kind.OOM_DEVICE),
        ("cpu", "deepspeed.runtime.config.DeepSpeedConfigError", "Check batch related parameters.", Kind.INVALID),
        (
            "cpu",
            "pydantic_core._pydantic_core.ValidationError",
            "1 validation error for DeepSpeedZeroConfig",
            Kind.INVALID,
        ),
        (
            "cuda",
            "torch.distributed.DistStoreError",
            "Timed out after 61 seconds waiting for clients.",
            Kind.INFRASTRUCTURE,
        ),
        ("cuda", "torch.distributed.DistBackendError", "ncclSystemError: System call failed", Kind.INFRASTRUCTURE),
        ("cuda", "torch.distributed.DistBackendError", "no words that are known", Kind.INFRASTRUCTURE),
        ("cpu", "builtins.OSError", "[Errno 28] No space left on device", Kind.INFRASTRUCTURE),
        ("cpu", "builtins.OSError", "[Errno 98] Address already in use", Kind.INFRASTRUCTURE),
        ("cpu", "builtins.KeyError", "'labels'", Kind.CRASH),
        ("cpu", "builtins.ValueError", "shapes do not match", Kind.CRASH),
    ],
)
def test_what_a_rank_reported(device: str, kind: str, text: str, expected: Kind) -> None:
    verdict = judge(Evidence(device, [error(kind, text)]))
    assert verdict.kind is expected
    assert verdict.evidence.startswith(f"exception {kind}")
    assert (verdict.phase, verdict.source, verdict.rank) == (Phase.FORWARD, Source.EXCEPTION, 0)
    name = kind.split(".")[-1]
    assert verdict.reason == f"{name}: {text or kind}"
    assert (verdict.missing_bytes is not None) == (expected.is_oom and "ried to allocate" in text)


def test_a_verdict_whole() -> None:
    assert judge(
        Evidence("cuda", [error("torch.OutOfMemoryError", f"\n  {CUDA_OOM}\nmore", "backward", rank=3)])
    ) == Verdict(
        Kind.OOM_DEVICE,
        Phase.BACKWARD,
        f"OutOfMemoryError: {CUDA_OOM}",
        "exception torch.OutOfMemoryError",
        Source.EXCEPTION,
        rank=3,
        missing_bytes=int(2.93 * GIB) - int(1.21 * GIB),
    )
    assert judge(Evidence("cpu", [error("builtins.KeyError", "x" * 400 + " tried to allocate 5 bytes")])) == Verdict(
        Kind.CRASH, Phase.FORWARD, f"KeyError: {'x' * 300}", "exception builtins.KeyError", Source.EXCEPTION, rank=0
    )


@pytest.mark.parametrize("kinds", [[], None])
def test_an_error_of_which_nothing_is_known(kinds: list[str] | None) -> None:
    bare = {} if kinds is None else {"kinds": kinds, "phase": "nowhere"}
    assert judge(Evidence("cpu", [bare])) == Verdict(
        Kind.CRASH, Phase.INIT, "Exception: Exception", "exception Exception", Source.EXCEPTION
    )


def test_a_subclass_is_known_by_its_bases() -> None:
    own = {"kinds": ["mine.Error", "torch.OutOfMemoryError"], "text": "no"}
    assert judge(Evidence("cuda", [own])).kind is Kind.OOM_DEVICE
    assert judge(Evidence("cuda", [{**own, "kinds": ["mine.Error", "builtins.MemoryError"]}])).kind is Kind.OOM_HOST
    assert judge(Evidence("cpu", [{**own, "kinds": ["mine.Error", "x.DeepSpeedConfigError"]}])).kind is Kind.INVALID
    assert judge(Evidence("cpu", [{**own, "kinds": ["mine.Error", "x.ZeRORuntimeException"]}])).kind is Kind.INVALID
    assert judge(Evidence("cpu", [{**own, "kinds": ["mine.Error", "x.DistNetworkError"]}])).kind is Kind.INFRASTRUCTURE


def test_the_end_of_a_traceback_counts_where_the_text_is_silent() -> None:
    cause = {**error("builtins.RuntimeError", "failed"), "traceback": "bad_alloc" + "x" * 3991}
    verdict = judge(Evidence("cpu", [cause]))
    assert verdict.kind is Kind.OOM_DEVICE
    assert verdict.evidence == "exception builtins.RuntimeError with text 'bad_alloc'"
    assert judge(Evidence("cpu", [{**cause, "traceback": "bad_alloc" + "x" * 3992}])).kind is Kind.CRASH


def test_a_text_counts_more_than_where_it_was_raised_only_for_memory() -> None:
    file = "/site/deepspeed/runtime/engine.py"
    refused = error("builtins.ValueError", "Address already in use", "init", file)
    assert judge(Evidence("cpu", [refused])).kind is Kind.INVALID
    disk = error("builtins.OSError", "No space left on device", "init", file)
    verdict = judge(Evidence("cpu", [disk]))
    assert verdict.kind is Kind.INFRASTRUCTURE
    assert verdict.evidence == "exception builtins.OSError with text 'No space left on device'"
    assert (
        judge(Evidence("cpu", [error("builtins.ValueError", "std::bad_alloc", "init", file)])).kind is Kind.OOM_DEVICE
    )
    verdict = judge(Evidence("cpu", [error("builtins.ValueError", "Address already in use")]))
    assert verdict.kind is Kind.INFRASTRUCTURE
    assert verdict.evidence == "exception builtins.ValueError with text 'Address already in use'"
    assert judge(Evidence("cpu", [error("builtins.OSError", "no such file")])).kind is Kind.CRASH


@pytest.mark.parametrize(
    ("phase", "file", "expected"),
    [
        ("init", "/site/deepspeed/runtime/engine.py", Kind.INVALID),
        ("init", "/home/me/model.py", Kind.CRASH),
        ("init", "/site/deepspeed/ops/op_builder/builder.py", Kind.CRASH),  # a compiler, not a refusal
        ("step", "/site/deepspeed/runtime/engine.py", Kind.CRASH),
    ],
)
def test_deepspeeds_own_refusal_during_init_is_invalid(phase: str, file: str, expected: Kind) -> None:
    verdict = judge(Evidence("cpu", [error("builtins.AssertionError", "not supported", phase, file)]))
    assert verdict.kind is expected
    raised = " raised by deepspeed/runtime/engine.py during init" if expected is Kind.INVALID else ""
    assert verdict.evidence == f"exception builtins.AssertionError{raised}"
    nowhere = {"kinds": ["builtins.AssertionError"], "text": "", "phase": phase}
    assert judge(Evidence("cpu", [nowhere])).kind is Kind.CRASH


# -- several ranks -------------------------------------------------------------------------------------------------------

LOST = "Connection closed by peer [127.0.0.1]:39201"


def test_a_peers_broken_connection_is_not_the_cause() -> None:
    lost = error("builtins.RuntimeError", LOST, rank=0)
    cause = error("builtins.RuntimeError", CPU_OOM, rank=1)
    for errors in ([lost, cause], [cause, lost]):
        verdict = judge(Evidence("cpu", errors))
        assert (verdict.kind, verdict.rank) == (Kind.OOM_DEVICE, 1)
        assert verdict.missing_bytes == 16777216
    crash = error("builtins.KeyError", "'labels'", rank=1)
    assert judge(Evidence("cpu", [lost, crash])).rank == 1
    port = error("builtins.OSError", "Address already in use", rank=1)
    assert judge(Evidence("cpu", [lost, port])).rank == 1, "the machine is a cause, a lost peer is none"


def test_of_equal_errors_the_lowest_rank_is_named() -> None:
    errors = [error("builtins.KeyError", "'x'", rank=rank) for rank in (3, 1, 2)]
    assert judge(Evidence("cpu", errors)).rank == 1
    unknown = {"kinds": ["builtins.KeyError"], "text": "'x'"}
    assert judge(Evidence("cpu", [*errors, unknown])).rank is None


@pytest.mark.parametrize(
    ("greater", "lesser"),
    [
        ("CUDA out of memory", "cudaHostAlloc failed"),
        ("cudaHostAlloc failed", "shapes do not match"),
        ("shapes do not match", "Address already in use"),
    ],
)
def test_what_one_rank_says_before_what_another_does(greater: str, lesser: str) -> None:
    errors = [error("builtins.RuntimeError", lesser, rank=0), error("builtins.RuntimeError", greater, rank=1)]
    assert judge(Evidence("cuda", errors)).rank == 1
    invalid = error("x.DeepSpeedConfigError", "no", rank=2)
    assert judge(Evidence("cuda", [error("builtins.KeyError", "x"), invalid])).rank == 2
    assert judge(Evidence("cuda", [invalid, error("builtins.RuntimeError", "cudaHostAlloc failed", rank=4)])).rank == 4


@pytest.mark.parametrize(
    ("text", "secondary"),
    [
        (LOST, True),
        ("Connection reset", True),
        ("[Errno 32] Broken pipe", True),
        ("Socket Timeout", True),
        ("application timeout caused pair closure", True),
        ("shapes do not match", False),
        ("", False),
    ],
)
def test_what_is_only_a_lost_peer(text: str, secondary: bool) -> None:
    assert is_secondary({"text": text}) is secondary
    assert not is_secondary({})


def test_a_death_is_the_cause_where_others_only_lost_a_peer() -> None:
    lost = error("builtins.RuntimeError", LOST, rank=0)
    verdict = judge(Evidence("cpu", [lost], {0: 1, 1: -signal.SIGSEGV}))
    assert (verdict.source, verdict.signal, verdict.rank) == (Source.SIGNAL, signal.SIGSEGV, 1)
    verdict = judge(Evidence("cpu", [lost], {0: 1, 1: 0}))
    assert (verdict.source, verdict.rank) == (Source.EXCEPTION, 0), "nobody died: the error is all there is"
    both = [lost, error("builtins.KeyError", "'x'", rank=2)]
    assert judge(Evidence("cpu", both, {1: -signal.SIGSEGV})).rank == 2


# -- memory that another process took ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "evidence"),
    [
        (
            "torch.OutOfMemoryError",
            CUDA_OOM,
            "exception torch.OutOfMemoryError; NVML: other processes grew by 2.00 GiB meanwhile",
        ),
        (
            "builtins.RuntimeError",
            "CUDA error: out of memory",
            "text 'CUDA error: out of memory'; NVML: other processes grew meanwhile",
        ),
    ],
)
def test_a_foreign_process_is_blamed_by_nvml(kind: str, text: str, evidence: str) -> None:
    verdict = judge(Evidence("cuda", [error(kind, text)], peaks=Peaks(used=[5], foreign=2 * GIB)))
    assert verdict.kind is Kind.FOREIGN
    assert verdict.evidence == evidence
    assert verdict.missing_bytes is None
    within = judge(Evidence("cuda", [error(kind, text)], peaks=Peaks(used=[5], foreign=FOREIGN_BYTES)))
    assert within.kind is Kind.OOM_DEVICE
    host = judge(Evidence("cuda", [error("builtins.RuntimeError", CPU_OOM)], peaks=Peaks(used=[5], foreign=2 * GIB)))
    assert host.kind is Kind.OOM_HOST, "main memory is not the device's"


# -- signals, exits, silence ---------------------------------------------------------------------------------------------


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


# -- texts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "on_cuda", "on_cpu"),
    [
        # where CUDA says the same of both, the host's text decides
        ("CUDA error: out of memory in CachingHostAllocator", Kind.OOM_HOST, Kind.OOM_HOST),
        ("pin_memory: out of memory", Kind.OOM_HOST, Kind.OOM_HOST),
        ("DataLoader worker: Bus error. insufficient shared memory (shm)", Kind.OOM_HOST, Kind.OOM_HOST),
        ("/dev/shm/x: No space left on device", Kind.OOM_HOST, Kind.OOM_HOST),
        ("HIP out of memory", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("CUSOLVER_STATUS_ALLOC_FAILED", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("cudaErrorMemoryAllocation", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("NCCL WARN Cuda failure 2 'out of memory'", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("cannot allocate memory", Kind.OOM_HOST, Kind.OOM_DEVICE),  # in any case of letters
        ("libgomp: Thread creation failed", Kind.OOM_HOST, Kind.OOM_DEVICE),
        ("Too many open files", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("Disk quota exceeded", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("GPU has fallen off the bus", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("NCCL error: unhandled system error", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("loss is nan", None, None),
    ],
)
def test_texts_of_running_out(text: str, on_cuda: Kind | None, on_cpu: Kind | None) -> None:
    for device, kind in (("cuda", on_cuda), ("cpu", on_cpu)):
        found = classify_text(f"before\n{text}\nafter", device)
        assert (found[0] if found else None) is kind


def test_the_words_that_decided_are_quoted_shortly() -> None:
    found = classify_text("unable to open shared memory; NCCL " + "x" * 200 + " out of memory", "cuda")
    assert found == (Kind.OOM_HOST, "unable to open shared memory")
    found = classify_text("NCCL " + "x" * 200 + " out of memory", "cuda")
    assert found == (Kind.OOM_DEVICE, "NCCL " + "x" * 115)


class CudaOutOfMemoryError(Exception):
    """As some libraries name their own."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (CudaOutOfMemoryError(), True),
        (RuntimeError("CUDA out of memory"), True),
        (OSError("Cannot allocate memory"), True),
        (RuntimeError("Address already in use"), False),
        (RuntimeError("shapes do not match"), False),
        (ValueError("CUDA out of memory"), False),  # a text that quotes one
    ],
)
def test_an_exception_that_says_that_memory_ran_out(error: BaseException, expected: bool) -> None:
    assert is_memory_error(error) is expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (CUDA_OOM, int(2.93 * GIB) - int(1.21 * GIB)),
        (CPU_OOM, 16777216),
        ("Tried to allocate 20.00 MiB", 20 * MIB),
        ("Tried to allocate 3 KiB. 1 KiB is free", 2 * KIB),
        ("tried to allocate 7 bytes. 2 bytes is free", 5),
        ("trying to allocate 3.", 3),  # bytes, at the end of a sentence
        ("trying to allocate 3.0.", 3),
        ("Tried to allocate 2 GB", 2 * 10**9),
        ("Tried to allocate 2 MB", 2 * 10**6),
        ("Tried to allocate 2 KB", 2000),
        ("Tried to allocate 2.00 MiB. 5.00 MiB is free", 1),  # in pieces too small: something is missing
        ("no", None),
        ("1 GiB is free", None),
    ],
)
def test_bytes_missing(text: str, size: int | None) -> None:
    assert missing_bytes(text) == size


@given(st.text(max_size=80))
def test_any_text_has_a_verdict(text: str) -> None:
    verdict = judge(Evidence("cuda", [error("builtins.RuntimeError", text)], {0: 1}, logs={0: text}))
    assert len(verdict.reason) <= len("RuntimeError: ") + 300
    assert "\n" not in verdict.reason


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
