"""Classification, with texts as the libraries print them."""

import signal

import pytest

from autotune.group.gauge import Peaks
from autotune.group.verdict import Evidence, classify_text, judge, log_tail, missing_bytes
from autotune.problem.outcome import Kind, Phase
from autotune.units import GIB, MIB

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
        ("cpu", "builtins.OSError", "[Errno 28] No space left on device", Kind.INFRASTRUCTURE),
        ("cpu", "builtins.OSError", "[Errno 98] Address already in use", Kind.INFRASTRUCTURE),
        ("cpu", "builtins.KeyError", "'labels'", Kind.CRASH),
        ("cpu", "builtins.ValueError", "shapes do not match", Kind.CRASH),
    ],
)
def test_what_a_rank_reported(device: str, kind: str, text: str, expected: Kind) -> None:
    verdict = judge(Evidence(device, [error(kind, text)]))
    assert verdict.kind is expected
    assert verdict.evidence.startswith("exception") or "text" in verdict.evidence
    assert verdict.phase is Phase.FORWARD


def test_deepspeeds_own_refusal_during_init_is_invalid() -> None:
    refused = error("builtins.AssertionError", "not supported", "init", "/site/deepspeed/runtime/engine.py")
    assert judge(Evidence("cpu", [refused])).kind is Kind.INVALID
    ours = error("builtins.AssertionError", "not supported", "init", "/home/me/model.py")
    assert judge(Evidence("cpu", [ours])).kind is Kind.CRASH


def test_a_peers_broken_connection_is_not_the_cause() -> None:
    lost = error("builtins.RuntimeError", "Connection closed by peer [127.0.0.1]:39201", rank=0)
    cause = error("builtins.RuntimeError", CPU_OOM, rank=1)
    verdict = judge(Evidence("cpu", [lost, cause]))
    assert (verdict.kind, verdict.rank) == (Kind.OOM_DEVICE, 1)
    assert verdict.missing_bytes == 16777216


def test_a_foreign_process_is_blamed_by_nvml() -> None:
    peaks = Peaks(used=[5], foreign=2 * GIB)
    verdict = judge(Evidence("cuda", [error("torch.OutOfMemoryError", CUDA_OOM)], peaks=peaks))
    assert verdict.kind is Kind.FOREIGN
    assert "NVML" in verdict.evidence


@pytest.mark.parametrize(
    ("number", "peaks", "log", "expected"),
    [
        (signal.SIGKILL, Peaks(oom_kills=1), "", Kind.OOM_HOST),
        (signal.SIGKILL, Peaks(host_low=1 * MIB), "", Kind.OOM_HOST),
        (signal.SIGKILL, Peaks(host_low=20 * GIB), "", Kind.CRASH),
        (signal.SIGBUS, Peaks(), "", Kind.OOM_HOST),
        (signal.SIGSEGV, Peaks(), "", Kind.CRASH),
        (signal.SIGABRT, Peaks(), "terminate called after throwing an instance of 'std::bad_alloc'", Kind.OOM_DEVICE),
    ],
)
def test_death_by_signal(number: int, peaks: Peaks, log: str, expected: Kind) -> None:
    evidence = Evidence("cpu", statuses={1: -number}, peaks=peaks, host_total_bytes=24 * GIB, logs={1: log})
    verdict = judge(evidence)
    assert verdict.kind is expected
    assert verdict.rank == 1
    assert signal.Signals(number).name in verdict.evidence


def test_the_exceptions_type_outranks_a_signal_and_a_text() -> None:
    evidence = Evidence(
        "cuda", [error("builtins.KeyError", "'x'")], {0: -signal.SIGKILL}, peaks=Peaks(oom_kills=1), logs={0: CUDA_OOM}
    )
    assert judge(evidence).kind is Kind.CRASH


def test_silence_exit_status_and_nothing_at_all() -> None:
    assert judge(Evidence("cpu", timed_out="forward: nothing heard for 9 s")).kind is Kind.TIMEOUT
    assert judge(Evidence("cpu", statuses={0: 1}, logs={0: f"RuntimeError: {CPU_OOM}"})).kind is Kind.OOM_DEVICE
    crash = judge(Evidence("cpu", statuses={0: 1}, logs={0: "Traceback\nKeyError: 'x'\n"}))
    assert crash.kind is Kind.CRASH
    assert crash.reason == "KeyError: 'x'"
    assert judge(Evidence("cpu")).kind in (Kind.CRASH, Kind.INFRASTRUCTURE)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (CUDA_OOM, int(2.93 * GIB) - int(1.21 * GIB)),
        (CPU_OOM, 16777216),
        ("Tried to allocate 20.00 MiB", 20 * MIB),
        ("no", None),
    ],
)
def test_bytes_missing(text: str, size: int | None) -> None:
    assert missing_bytes(text) == size


def test_texts_that_say_nothing_and_logs_that_are_not_there(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert classify_text("loss is nan", "cuda") is None
    assert log_tail(tmp_path / "none.log") == ""
    (tmp_path / "a.log").write_bytes(b"x" * 100_000 + b"\xff end")
    assert log_tail(tmp_path / "a.log").endswith("end")
