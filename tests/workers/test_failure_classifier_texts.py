"""What one text says, by itself and with the numbers and the frames that come with it."""

from __future__ import annotations

import pytest

from autotune.problem.outcome import OutcomeKind
from autotune.util.units import GIB, MIB
from autotune.workers import failure_classifier
from autotune.workers.failure_classifier import (
    FailureContext,
    MemorySnapshot,
    classify_text,
    is_peer_gone,
    is_secondary,
)
from tests.conftest import made_anew

DEVICE = 80 * GIB
FULL = MemorySnapshot(free=DEVICE // 100, total=DEVICE, reserved=78 * GIB)
ROOMY = MemorySnapshot(free=DEVICE // 2, total=DEVICE, reserved=30 * GIB)
BETWEEN = MemorySnapshot(free=DEVICE // 20, total=DEVICE, reserved=74 * GIB)
UNKNOWN = MemorySnapshot()


def kind(
    text: str, account: MemorySnapshot = UNKNOWN, device: str = "cuda", host_ran_out: bool = False
) -> OutcomeKind | None:
    found = classify_text(text, FailureContext(device, account, host_ran_out))
    return found[0] if found else None


@pytest.mark.parametrize(
    ("text", "on_cuda", "on_cpu"),
    [
        # where CUDA says the same of both, the host's text decides
        ("CUDA error: out of memory in CachingHostAllocator", OutcomeKind.OOM_HOST, OutcomeKind.OOM_HOST),
        ("DataLoader worker: Bus error. insufficient shared memory (shm)", OutcomeKind.OOM_HOST, OutcomeKind.OOM_HOST),
        ("DataLoader worker (pid 7) is killed by signal: Killed.", OutcomeKind.OOM_HOST, OutcomeKind.OOM_HOST),
        ("HIP out of memory", OutcomeKind.OOM_DEVICE, OutcomeKind.OOM_DEVICE),
        ("CUDA out of memory. Tried to allocate 2.00 MiB", OutcomeKind.OOM_DEVICE, OutcomeKind.OOM_DEVICE),
        ("CUSOLVER_STATUS_ALLOC_FAILED", OutcomeKind.OOM_DEVICE, OutcomeKind.OOM_DEVICE),
        ("Triton Error [CUDA]: out of memory", OutcomeKind.OOM_DEVICE, OutcomeKind.OOM_DEVICE),
        ("cannot allocate memory", OutcomeKind.OOM_HOST, OutcomeKind.OOM_DEVICE),  # in any case of letters
        ("libgomp: Thread creation failed", OutcomeKind.OOM_HOST, OutcomeKind.OOM_DEVICE),
        ("std::bad_alloc", OutcomeKind.OOM_HOST, OutcomeKind.OOM_DEVICE),
        ("Too many open files", OutcomeKind.INFRASTRUCTURE, OutcomeKind.INFRASTRUCTURE),
        ("[enforce fail at inline_container.cc:672] . unexpected pos 3392 vs 3284", *[OutcomeKind.INFRASTRUCTURE] * 2),
        ("PytorchStreamReader failed reading zip archive: failed finding central directory", None, None),
        ("Disk quota exceeded", OutcomeKind.INFRASTRUCTURE, OutcomeKind.INFRASTRUCTURE),
        ("No CUDA GPUs are available", OutcomeKind.INFRASTRUCTURE, OutcomeKind.INFRASTRUCTURE),
        ("CUDA error: no kernel image is available for execution on the device", *[OutcomeKind.INFRASTRUCTURE] * 2),
        ("Watchdog caught collective operation timeout", OutcomeKind.TIMEOUT, OutcomeKind.TIMEOUT),
        ("CUDA error: peer access is not supported between these two devices", *[OutcomeKind.INFRASTRUCTURE] * 2),
        ("CUDA error: device-side assert triggered", OutcomeKind.CRASH, OutcomeKind.CRASH),
        ("CUDA error: an illegal memory access was encountered", OutcomeKind.CRASH, OutcomeKind.CRASH),
        (
            "OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376",
            *[OutcomeKind.CRASH] * 2,
        ),
        ("1 validation error for DeepSpeedZeroConfig", OutcomeKind.INVALID, OutcomeKind.INVALID),
        ("loss is nan", None, None),
        ("this may be caused by an out of memory of yours", None, None),  # a guess
    ],
)
def test_texts(text: str, on_cuda: OutcomeKind | None, on_cpu: OutcomeKind | None) -> None:
    for device, expected in (("cuda", on_cuda), ("cpu", on_cpu)):
        assert kind(f"before\n{text}\nafter", device=device) is expected


def test_faces_are_known_in_any_letters_over_lines_and_by_their_frames() -> None:
    made = made_anew(failure_classifier)

    def found(text: str, *files: str) -> OutcomeKind | None:
        kind_and_words = made.classify_text(text, FailureContext("cuda"), list(files))
        return kind_and_words[0] if kind_and_words else None

    assert found("DISK QUOTA EXCEEDED") is OutcomeKind.INFRASTRUCTURE
    assert found("disk quota exceeded") is OutcomeKind.INFRASTRUCTURE
    assert found("nothing of the kind") is None
    assert (
        found("unhandled cuda error, NCCL version 2\nncclUnhandledCudaError\nlast error: out of memory")
        is OutcomeKind.OOM_DEVICE
    )
    for pins in ("/site/torch/utils/data/_utils/pin_memory.py", "/mine/Pin_Memory.py"):
        assert found("CUDA error: invalid argument", pins) is OutcomeKind.OOM_HOST
    assert found("CUDA error: invalid argument", "/mine/train.py") is None


_CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    ("text", "full", "between", "roomy", "unknown"),
    [
        (_CUBLAS, OutcomeKind.OOM_DEVICE, OutcomeKind.OOM_DEVICE, OutcomeKind.CRASH, OutcomeKind.OOM_DEVICE),
        (
            "CUDNN_STATUS_INTERNAL_ERROR",
            OutcomeKind.OOM_DEVICE,
            OutcomeKind.CRASH,
            OutcomeKind.CRASH,
            OutcomeKind.CRASH,
        ),
        ("ncclInternalError: Internal check failed.", OutcomeKind.OOM_DEVICE, *[OutcomeKind.INFRASTRUCTURE] * 3),
        (
            "CUDA driver error: out of memory",
            *[OutcomeKind.OOM_DEVICE] * 2,
            OutcomeKind.INFRASTRUCTURE,
            OutcomeKind.OOM_DEVICE,
        ),
        ("CUDA error: out of memory", *[OutcomeKind.OOM_DEVICE] * 4),  # roomy, but nothing points to the host
        ("CUDA error: device-side assert triggered", *[OutcomeKind.CRASH] * 4),  # however full
        ("CUDA out of memory. Tried to allocate 90.00 GiB", *[OutcomeKind.OOM_DEVICE] * 4),  # of a device that is empty
        ("shapes do not match", *[None] * 4),
    ],
)
def test_where_a_text_is_in_doubt_the_devices_free_memory_decides(
    text: str, full: OutcomeKind, between: OutcomeKind, roomy: OutcomeKind, unknown: OutcomeKind
) -> None:
    accounts = (FULL, BETWEEN, ROOMY, UNKNOWN)
    assert [kind(text, account) for account in accounts] == [full, between, roomy, unknown]


def test_cuda_out_of_memory_with_a_roomy_device_is_the_hosts_where_the_host_is_the_one_in_want() -> None:
    text = "CUDA error: out of memory"
    pinning = MemorySnapshot(free=DEVICE // 2, total=DEVICE, pinned=40 * GIB)
    assert kind(text, pinning) is OutcomeKind.OOM_HOST
    assert kind(text, ROOMY, host_ran_out=True) is OutcomeKind.OOM_HOST
    assert kind(text, MemorySnapshot(free=DEVICE // 2, total=DEVICE, pinned=16 * MIB)) is OutcomeKind.OOM_DEVICE, (
        "a loader's batches"
    )
    assert kind(text, MemorySnapshot(free=GIB, total=DEVICE, pinned=40 * GIB)) is OutcomeKind.OOM_DEVICE
    assert kind(text, FULL, host_ran_out=True) is OutcomeKind.OOM_DEVICE
    assert kind("CUDA out of memory. Tried to allocate 2.00 GiB", pinning) is OutcomeKind.OOM_DEVICE, (
        "torch's own of the device"
    )


def test_killed_workers_are_memorys_where_the_host_ran_out() -> None:
    text = "RuntimeError: DataLoader worker (pid(s) 123) exited unexpectedly"
    assert kind(text) is None
    assert kind(text, host_ran_out=True) is OutcomeKind.OOM_HOST
    assert kind(text, host_ran_out=True, device="cpu") is OutcomeKind.OOM_DEVICE


# -- frames --------------------------------------------------------------------------------------------------------------


def traceback(*frames: tuple[str, str, str], last: str = "RuntimeError: CUDA error: out of memory") -> str:
    shown = "".join(f'  File "{file}", line 1, in {function}\n    {source}\n' for file, function, source in frames)
    return f"Traceback (most recent call last):\n{shown}{last}\n"


TRAINS = ("/home/me/train.py", "<module>", "engine = deepspeed.initialize(...)")
# deepspeed 0.19.8
PINS = ("/site/deepspeed/accelerator/abstract_accelerator.py", "_torch_pin_memory", "return tensor.pin_memory()")
STAGE = ("/site/deepspeed/runtime/zero/stage_1_and_2.py", "__init__", "self.fp32.append(x.to('cuda'))")


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (PINS, OutcomeKind.OOM_HOST),
        (
            ("/site/torch/utils/data/_utils/pin_memory.py", "pin_memory", "return data.pin_memory(device)"),
            OutcomeKind.OOM_HOST,
        ),
        (("/site/deepspeed/runtime/zero/x.py", "f", "torch.empty(n, pin_memory=True)"), OutcomeKind.OOM_HOST),
        (("/site/torch/_tensor.py", "f", "grad.to('cpu', non_blocking=True)"), OutcomeKind.OOM_HOST),
        (("/site/deepspeed/ops/aio.py", "f", "self.handle.new_cpu_locked_tensor(n)"), OutcomeKind.OOM_HOST),
        (STAGE, OutcomeKind.OOM_DEVICE),
    ],
)
def test_cuda_out_of_memory_in_a_frame_that_pins_is_the_hosts(
    frame: tuple[str, str, str], expected: OutcomeKind
) -> None:
    for text in ("CUDA error: out of memory", "HIP error: out of memory"):
        assert kind(traceback(TRAINS, frame, last=f"RuntimeError: {text}")) is expected
    assert kind(traceback(TRAINS, frame, last="RuntimeError: shapes do not match")) is None


def test_only_the_innermost_frames_count() -> None:
    for outer, expected in ((2, OutcomeKind.OOM_HOST), (3, OutcomeKind.OOM_DEVICE)):
        assert kind(traceback(PINS, *[STAGE] * outer)) is expected, "a loader's frame far out pins nothing now"


def test_of_two_tracebacks_each_texts_own_frames_count() -> None:
    """`During handling of the above exception`: what is pinned afterwards is not what failed."""
    text = f"{traceback(TRAINS, STAGE)}\nDuring handling of the above exception, another exception occurred:\n\n"
    assert kind(text + traceback(PINS, last="KeyError: 1")) is OutcomeKind.OOM_DEVICE


def test_files_serve_where_the_traceback_is_cut_off() -> None:
    text = "CUDA error: out of memory"
    files = ["/home/me/train.py", "/site/torch/utils/data/_utils/pin_memory.py"]
    assert classify_text(text, FailureContext("cuda"), files) == (
        OutcomeKind.OOM_HOST,
        "CUDA error: out of memory in pin_memory",
    )
    assert classify_text(text, FailureContext("cuda"), files[:1]) == (
        OutcomeKind.OOM_DEVICE,
        "CUDA error: out of memory",
    )


def test_a_full_disk_is_the_hosts_memory_where_processes_share_it() -> None:
    share = ("/usr/lib/python3.11/multiprocessing/heap.py", "__init__", "os.ftruncate(self.fd, size)")
    full = "OSError: [Errno 28] No space left on device"
    assert kind(traceback(TRAINS, share, last=full)) is OutcomeKind.OOM_HOST
    assert kind(traceback(TRAINS, last=full)) is OutcomeKind.INFRASTRUCTURE


# -- what is quoted, echoes ----------------------------------------------------------------------------------------------


def test_the_words_that_decided_are_quoted_shortly() -> None:
    found = classify_text(
        "unable to open shared memory; NCCL WARN " + "x" * 180 + " out of memory", FailureContext("cuda")
    )
    assert found == (OutcomeKind.OOM_HOST, "unable to open shared memory")
    found = classify_text("NCCL WARN " + "x" * 180 + " out of memory", FailureContext("cuda"))
    assert found == (OutcomeKind.OOM_DEVICE, "NCCL WARN " + "x" * 110)


@pytest.mark.parametrize(
    ("text", "echo"),
    [
        ("Connection closed by peer [127.0.0.1]:39201", True),
        ("application timeout caused pair closure", True),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)", True),
        ("NCCL error: remote process exited or there was a network error, ncclRemoteError", True),
        ("peer access is not supported between these two devices", False),
        ("[Errno 104] CONNECTION RESET BY PEER", True),  # in any letters
        ("peer mapping resources exhausted", False),
        ("NCCL watchdog thread terminated with exception: CUDA error: out of memory. Socket closed", False),
        ("CUDA error: device-side assert triggered. Connection closed by peer", False),
        ("shapes do not match", False),
        ("", False),
    ],
)
def test_what_is_only_a_lost_peer(text: str, echo: bool) -> None:
    assert is_peer_gone(text) is echo
    assert is_secondary({"text": text}) is echo
    assert not is_secondary({})
