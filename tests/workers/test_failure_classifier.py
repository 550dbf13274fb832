"""Classification, with texts as the libraries print them."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.problem.outcome import OutcomeKind, Phase, Source
from autotune.util.units import GIB, MIB
from autotune.workers.failure_classifier import FailureEvidence, classify_failure, is_memory_error
from autotune.workers.memory_peaks import FOREIGN_BYTES, MemoryPeaks
from tests.workers.failures import expected_outcome

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
        ("cuda", "torch.OutOfMemoryError", CUDA_OOM, OutcomeKind.OOM_DEVICE),
        ("cuda", "torch.AcceleratorError", "CUDA error: out of memory", OutcomeKind.OOM_DEVICE),
        (
            "cuda",
            "builtins.RuntimeError",
            "CUDA error: out of memory in cudaHostAlloc, CachingHostAllocator",
            OutcomeKind.OOM_HOST,
        ),
        ("cuda", "builtins.RuntimeError", CPU_OOM, OutcomeKind.OOM_HOST),
        ("cuda", "builtins.MemoryError", "", OutcomeKind.OOM_HOST),
        ("cpu", "builtins.RuntimeError", CPU_OOM, OutcomeKind.OOM_DEVICE),
        ("cpu", "builtins.RuntimeError", "could not create a primitive", OutcomeKind.OOM_DEVICE),
        ("cpu", "builtins.MemoryError", "Unable to allocate 3 MiB", OutcomeKind.OOM_DEVICE),
        (
            "cpu",
            "deepspeed.runtime.config.DeepSpeedConfigError",
            "Check batch related parameters.",
            OutcomeKind.INVALID,
        ),
        (
            "cpu",
            "pydantic_core._pydantic_core.ValidationError",
            "1 validation error for DeepSpeedZeroConfig",
            OutcomeKind.INVALID,
        ),
        (
            "cuda",
            "torch.distributed.DistStoreError",
            "Timed out after 61 seconds waiting for clients.",
            OutcomeKind.INFRASTRUCTURE,
        ),
        ("cuda", "torch.distributed.DistBackendError", "no words that are known", OutcomeKind.INFRASTRUCTURE),
        ("cpu", "builtins.OSError", "[Errno 28] No space left on device", OutcomeKind.INFRASTRUCTURE),
        ("cpu", "builtins.KeyError", "'labels'", OutcomeKind.CRASH),
    ],
)
def test_what_a_rank_reported(device: str, kind: str, text: str, expected: OutcomeKind) -> None:
    verdict = classify_failure(FailureEvidence(device, [error(kind, text)]))
    assert verdict.kind is expected
    assert verdict.evidence.startswith(f"exception {kind}")
    assert (verdict.phase, verdict.source, verdict.rank) == (Phase.FORWARD, Source.EXCEPTION, 0)
    name = kind.split(".")[-1]
    assert verdict.reason == f"{name}: {text or kind}"
    assert (verdict.missing_bytes is not None) == (expected.is_oom and "to allocate " in text)


@pytest.mark.parametrize("kinds", [[], None])
def test_an_error_of_which_nothing_is_known(kinds: list[str] | None) -> None:
    bare = {} if kinds is None else {"kinds": kinds, "phase": "nowhere"}
    assert classify_failure(FailureEvidence("cpu", [bare])) == expected_outcome(
        OutcomeKind.CRASH, Phase.INIT, "Exception: Exception", "exception Exception", Source.EXCEPTION
    )


def test_a_subclass_is_known_by_its_bases() -> None:
    own = {"kinds": ["mine.Error", "torch.OutOfMemoryError"], "text": "no"}
    assert classify_failure(FailureEvidence("cuda", [own])).kind is OutcomeKind.OOM_DEVICE
    assert (
        classify_failure(FailureEvidence("cuda", [{**own, "kinds": ["mine.Error", "builtins.MemoryError"]}])).kind
        is OutcomeKind.OOM_HOST
    )
    assert (
        classify_failure(FailureEvidence("cpu", [{**own, "kinds": ["mine.Error", "x.DeepSpeedConfigError"]}])).kind
        is OutcomeKind.INVALID
    )
    assert (
        classify_failure(FailureEvidence("cpu", [{**own, "kinds": ["mine.Error", "x.ZeRORuntimeException"]}])).kind
        is OutcomeKind.INVALID
    )
    assert (
        classify_failure(FailureEvidence("cpu", [{**own, "kinds": ["mine.Error", "x.DistNetworkError"]}])).kind
        is OutcomeKind.INFRASTRUCTURE
    )


def test_the_end_of_a_traceback_counts_where_the_text_is_silent() -> None:
    cause = {**error("builtins.RuntimeError", "failed"), "traceback": "bad_alloc" + "x" * 3991}
    verdict = classify_failure(FailureEvidence("cpu", [cause]))
    assert verdict.kind is OutcomeKind.OOM_DEVICE
    assert verdict.evidence == "exception builtins.RuntimeError with text 'bad_alloc'"
    assert (
        classify_failure(FailureEvidence("cpu", [{**cause, "traceback": "bad_alloc" + "x" * 3992}])).kind
        is OutcomeKind.CRASH
    )


def test_a_text_counts_more_than_where_it_was_raised_only_for_memory() -> None:
    file = "/site/deepspeed/runtime/engine.py"
    refused = error("builtins.ValueError", "Address already in use", "init", file)
    assert classify_failure(FailureEvidence("cpu", [refused])).kind is OutcomeKind.INVALID
    disk = error("builtins.OSError", "No space left on device", "init", file)
    verdict = classify_failure(FailureEvidence("cpu", [disk]))
    assert verdict.kind is OutcomeKind.INFRASTRUCTURE
    assert verdict.evidence == "exception builtins.OSError with text 'No space left on device'"
    assert (
        classify_failure(FailureEvidence("cpu", [error("builtins.ValueError", "std::bad_alloc", "init", file)])).kind
        is OutcomeKind.OOM_DEVICE
    )
    verdict = classify_failure(FailureEvidence("cpu", [error("builtins.ValueError", "Address already in use")]))
    assert verdict.kind is OutcomeKind.INFRASTRUCTURE
    assert verdict.evidence == "exception builtins.ValueError with text 'Address already in use'"
    assert (
        classify_failure(FailureEvidence("cpu", [error("builtins.OSError", "no such file")])).kind is OutcomeKind.CRASH
    )


@pytest.mark.parametrize(
    ("phase", "file", "expected"),
    [
        ("init", "/site/deepspeed/runtime/engine.py", OutcomeKind.INVALID),
        ("init", "/home/me/model.py", OutcomeKind.CRASH),
        ("init", "/site/deepspeed/ops/op_builder/builder.py", OutcomeKind.CRASH),  # a compiler, not a refusal
        ("step", "/site/deepspeed/runtime/engine.py", OutcomeKind.CRASH),
    ],
)
def test_deepspeeds_own_refusal_during_init_is_invalid(phase: str, file: str, expected: OutcomeKind) -> None:
    verdict = classify_failure(FailureEvidence("cpu", [error("builtins.AssertionError", "not supported", phase, file)]))
    assert verdict.kind is expected
    raised = " raised by deepspeed/runtime/engine.py during init" if expected is OutcomeKind.INVALID else ""
    assert verdict.evidence == f"exception builtins.AssertionError{raised}"
    nowhere = {"kinds": ["builtins.AssertionError"], "text": "", "phase": phase}
    assert classify_failure(FailureEvidence("cpu", [nowhere])).kind is OutcomeKind.CRASH


# -- several ranks -------------------------------------------------------------------------------------------------------

LOST = "Connection closed by peer [127.0.0.1]:39201"


def test_a_peers_broken_connection_is_not_the_cause() -> None:
    lost = error("builtins.RuntimeError", LOST, rank=0)
    cause = error("builtins.RuntimeError", CPU_OOM, rank=1)
    for errors in ([lost, cause], [cause, lost]):
        verdict = classify_failure(FailureEvidence("cpu", errors))
        assert (verdict.kind, verdict.rank) == (OutcomeKind.OOM_DEVICE, 1)
        assert verdict.missing_bytes == 16777216
    crash = error("builtins.KeyError", "'labels'", rank=1)
    assert classify_failure(FailureEvidence("cpu", [lost, crash])).rank == 1
    port = error("builtins.OSError", "Address already in use", rank=1)
    assert classify_failure(FailureEvidence("cpu", [lost, port])).rank == 1, (
        "the machine is a cause, a lost peer is none"
    )


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
    assert classify_failure(FailureEvidence("cuda", errors)).rank == 1
    invalid = error("x.DeepSpeedConfigError", "no", rank=2)
    assert classify_failure(FailureEvidence("cuda", [error("builtins.KeyError", "x"), invalid])).rank == 2
    assert (
        classify_failure(
            FailureEvidence("cuda", [invalid, error("builtins.RuntimeError", "cudaHostAlloc failed", rank=4)])
        ).rank
        == 4
    )


def test_a_death_is_the_cause_where_others_only_lost_a_peer() -> None:
    lost = error("builtins.RuntimeError", LOST, rank=0)
    verdict = classify_failure(FailureEvidence("cpu", [lost], {0: 1, 1: -signal.SIGSEGV}))
    assert (verdict.source, verdict.evidence, verdict.rank) == (Source.SIGNAL, "SIGSEGV", 1)
    verdict = classify_failure(FailureEvidence("cpu", [lost], {0: 1, 1: 0}))
    assert (verdict.source, verdict.rank) == (Source.EXCEPTION, 0), "nobody died: the error is all there is"
    both = [lost, error("builtins.KeyError", "'x'", rank=2)]
    assert classify_failure(FailureEvidence("cpu", both, {1: -signal.SIGSEGV})).rank == 2


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
            "exception builtins.RuntimeError with text 'CUDA error: out of memory'; "
            "NVML: other processes grew by 2.00 GiB meanwhile",
        ),
    ],
)
def test_a_foreign_process_is_blamed_by_nvml(kind: str, text: str, evidence: str) -> None:
    verdict = classify_failure(
        FailureEvidence("cuda", [error(kind, text)], peaks=MemoryPeaks(used=[5], foreign=2 * GIB))
    )
    assert verdict.kind is OutcomeKind.GPU_CONTENTION
    assert verdict.evidence == evidence
    assert verdict.missing_bytes is None
    within = classify_failure(
        FailureEvidence("cuda", [error(kind, text)], peaks=MemoryPeaks(used=[5], foreign=FOREIGN_BYTES))
    )
    assert within.kind is OutcomeKind.OOM_DEVICE
    host = classify_failure(
        FailureEvidence("cuda", [error("builtins.RuntimeError", CPU_OOM)], peaks=MemoryPeaks(used=[5], foreign=2 * GIB))
    )
    assert host.kind is OutcomeKind.OOM_HOST, "main memory is not the device's"


def test_what_others_took_must_have_been_enough() -> None:
    """A desktop that grew by 300 MiB does not excuse a candidate that lacked 4 GiB, nor one that our own cap refused."""
    grown = MemoryPeaks(used=[5], foreign=300 * MIB)
    lacks = "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.00 GiB is free."

    def kind(text: str) -> OutcomeKind:
        return classify_failure(FailureEvidence("cuda", [error("torch.OutOfMemoryError", text)], peaks=grown)).kind

    assert kind(lacks.format("5.00")) is OutcomeKind.OOM_DEVICE
    assert kind(lacks.format("1.20")) is OutcomeKind.GPU_CONTENTION
    capped = "; 20.00 GiB allowed; Of the allocated memory 19.90 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch"
    assert (
        kind(lacks.format("1.20").replace("1.00 GiB is free.", f"9.00 GiB is free. {capped}")) is OutcomeKind.OOM_DEVICE
    )


def test_a_foreign_process_is_blamed_by_what_it_holds() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 12.00 MiB. GPU 0 has a total capacity of 31.74 GiB of which 5.12 MiB is free. "
        "Process 7 has 30.97 GiB memory in use. Including non-PyTorch memory, this process has 764.00 MiB memory in use. Of "
        "the allocated memory 376.65 MiB is allocated by PyTorch, and 29.35 MiB is reserved by PyTorch but unallocated."
    )
    verdict = classify_failure(FailureEvidence("cuda", [error("torch.OutOfMemoryError", text)]))
    assert verdict.kind is OutcomeKind.GPU_CONTENTION
    assert verdict.evidence == "exception torch.OutOfMemoryError; other processes hold 30.99 GiB of the device"
    own = text.replace("764.00 MiB memory", "30.90 GiB memory")
    assert (
        classify_failure(FailureEvidence("cuda", [error("torch.OutOfMemoryError", own)])).kind is OutcomeKind.OOM_DEVICE
    )


@pytest.mark.parametrize(
    ("kinds", "text", "expected"),
    [
        (["builtins.MemoryError", "builtins.Exception"], "", True),
        (["mine.CudaOutOfMemoryError"], "", True),  # as some libraries name their own
        (["builtins.RuntimeError"], "CUDA out of memory", True),
        (["torch.AcceleratorError", "builtins.RuntimeError"], "CUDA driver error: out of memory", True),
        (
            ["builtins.RuntimeError"],
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            True,
        ),
        (["builtins.RuntimeError"], "CUDA was woken before the fork", False),
        (["builtins.RuntimeError"], "CUDA error: device-side assert triggered", False),
        (["builtins.ValueError"], "CUDA out of memory", False),  # a text that quotes one
        ([], "CUDA out of memory", False),
    ],
)
def test_an_exception_that_says_that_memory_ran_out(kinds: list[str], text: str, expected: bool) -> None:
    for device in ("cuda", "cpu"):
        assert is_memory_error({"kinds": kinds, "text": text}, device) is expected


def test_memory_that_others_hold_ends_a_rank_too() -> None:
    numbers = {"free_bytes": MIB, "total_bytes": 80 * GIB, "reserved_bytes": 2 * GIB}
    known = {"kinds": ["builtins.RuntimeError"], "text": "CUDA error: out of memory", "numbers": numbers}
    assert classify_failure(FailureEvidence("cuda", [known])).kind is OutcomeKind.GPU_CONTENTION
    assert is_memory_error(known, "cuda")


# -- numbers -------------------------------------------------------------------------------------------------------------


def test_what_was_counted_stands_beside_what_decided() -> None:
    numbers = {
        "free_bytes": 40 * GIB,
        "total_bytes": 80 * GIB,
        "reserved_bytes": 30 * GIB,
        "reserved_peak_bytes": 31 * GIB,
        "pinned_bytes": 60 * GIB,
        "host_available_bytes": 2 * GIB,
    }
    known = {**error("torch.AcceleratorError", "CUDA error: out of memory"), "numbers": numbers}
    verdict = classify_failure(FailureEvidence("cuda", [known]))
    assert verdict.kind is OutcomeKind.OOM_HOST, "the device is half empty and much is pinned"
    assert verdict.evidence == (
        "exception torch.AcceleratorError with text 'CUDA error: out of memory'; 40.00 GiB of the device's 80.00 GiB free, "
        "30.00 GiB reserved, 31.00 GiB at most, 60.00 GiB pinned, 2.00 GiB of main memory available"
    )
    assert verdict.missing_bytes is None, "what is counted afterwards is another state"
    crash = classify_failure(FailureEvidence("cuda", [{**known, "kinds": ["builtins.KeyError"], "text": "'x'"}]))
    assert crash.kind is OutcomeKind.CRASH
    assert crash.evidence.startswith("exception builtins.KeyError; 40.00 GiB of the device's 80.00 GiB free")


def test_a_host_that_ran_out_decides_what_cuda_leaves_open() -> None:
    numbers = {"free_bytes": 40 * GIB, "total_bytes": 80 * GIB, "host_available_bytes": 1 * GIB}
    known = {**error("torch.AcceleratorError", "CUDA error: out of memory"), "numbers": numbers}
    assert classify_failure(FailureEvidence("cuda", [known], host_total_bytes=100 * GIB)).kind is OutcomeKind.OOM_HOST
    assert classify_failure(FailureEvidence("cuda", [known], host_total_bytes=10 * GIB)).kind is OutcomeKind.OOM_DEVICE
    killed = FailureEvidence("cuda", [known], peaks=MemoryPeaks(oom_kills=1), host_total_bytes=10 * GIB)
    assert classify_failure(killed).kind is OutcomeKind.OOM_HOST


@given(st.text(max_size=80))
def test_any_text_has_a_verdict(text: str) -> None:
    verdict = classify_failure(FailureEvidence("cuda", [error("builtins.RuntimeError", text)], {0: 1}, logs={0: text}))
    assert len(verdict.reason) <= len("RuntimeError: ") + 300
    assert "\n" not in verdict.reason


def test_a_full_disk_is_the_machines_whatever_a_save_says() -> None:
    saving = 'File "/x/engine.py", line 5, in _save_checkpoint\n    write()\nRuntimeError: who knows'
    full = {**error("builtins.RuntimeError", "who knows"), "full_disk": "/out", "traceback": saving}
    verdict = classify_failure(FailureEvidence("cpu", [full]))
    assert (verdict.kind, verdict.reason) == (
        OutcomeKind.INFRASTRUCTURE,
        "RuntimeError: who knows (the disk of /out is full)",
    )
    assert classify_failure(FailureEvidence("cpu", [{**full, "full_disk": ""}])).kind is OutcomeKind.CRASH
    assert (
        classify_failure(FailureEvidence("cpu", [{**full, "traceback": saving.replace("_save_", "_make_")}])).kind
        is OutcomeKind.CRASH
    )
    assert classify_failure(FailureEvidence("cpu", [{**full, "text": "CUDA out of memory"}])).kind.is_oom
