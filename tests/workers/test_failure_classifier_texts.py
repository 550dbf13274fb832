"""What one text says, by itself and with the numbers and the frames that come with it."""

from __future__ import annotations

import pytest

from autotune.problem.outcome import Kind
from autotune.util.units import GIB, MIB
from autotune.workers import failure_classifier
from autotune.workers.failure_classifier import Account, Scene, is_echo, is_secondary, recognise
from tests.conftest import made_anew

DEVICE = 80 * GIB
FULL = Account(free=DEVICE // 100, total=DEVICE, reserved=78 * GIB)
ROOMY = Account(free=DEVICE // 2, total=DEVICE, reserved=30 * GIB)
BETWEEN = Account(free=DEVICE // 20, total=DEVICE, reserved=74 * GIB)
UNKNOWN = Account()


def kind(text: str, account: Account = UNKNOWN, device: str = "cuda", host_ran_out: bool = False) -> Kind | None:
    found = recognise(text, Scene(device, account, host_ran_out))
    return found[0] if found else None


@pytest.mark.parametrize(
    ("text", "on_cuda", "on_cpu"),
    [
        # where CUDA says the same of both, the host's text decides
        ("CUDA error: out of memory in CachingHostAllocator", Kind.OOM_HOST, Kind.OOM_HOST),
        ("pin_memory: out of memory", Kind.OOM_HOST, Kind.OOM_HOST),
        ("DataLoader worker: Bus error. insufficient shared memory (shm)", Kind.OOM_HOST, Kind.OOM_HOST),
        ("/dev/shm/x: No space left on device", Kind.OOM_HOST, Kind.OOM_HOST),
        ("DataLoader worker (pid 7) is killed by signal: Killed.", Kind.OOM_HOST, Kind.OOM_HOST),
        ("HIP out of memory", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("CUDA out of memory. Tried to allocate 2.00 MiB", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("CUSOLVER_STATUS_ALLOC_FAILED", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("cudaErrorMemoryAllocation", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("NCCL WARN Cuda failure 2 'out of memory'", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("Triton Error [CUDA]: out of memory", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("CUDA driver error: out of memory", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("some library ran out of memory", Kind.OOM_DEVICE, Kind.OOM_DEVICE),
        ("cannot allocate memory", Kind.OOM_HOST, Kind.OOM_DEVICE),  # in any case of letters
        ("libgomp: Thread creation failed", Kind.OOM_HOST, Kind.OOM_DEVICE),
        ("std::bad_alloc", Kind.OOM_HOST, Kind.OOM_DEVICE),
        ("Too many open files", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("basic_ios::clear: iostream error", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("[enforce fail at inline_container.cc:672] . unexpected pos 3392 vs 3284", *[Kind.INFRASTRUCTURE] * 2),
        ("PytorchStreamWriter failed writing central directory: file close failed", *[Kind.INFRASTRUCTURE] * 2),
        ("PytorchStreamReader failed reading zip archive: failed finding central directory", None, None),
        ("Disk quota exceeded", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("GPU has fallen off the bus", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("NCCL error: unhandled system error", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("autotune: CUDA was woken before the fork", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("No CUDA GPUs are available", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("CUDA error: no kernel image is available for execution on the device", *[Kind.INFRASTRUCTURE] * 2),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", *[Kind.INFRASTRUCTURE] * 2),
        ("Watchdog caught collective operation timeout", Kind.INFRASTRUCTURE, Kind.INFRASTRUCTURE),
        ("CUDA error: peer access is not supported between these two devices", *[Kind.INFRASTRUCTURE] * 2),
        ("CUDA error: device-side assert triggered", Kind.CRASH, Kind.CRASH),
        ("CUDA error: an illegal memory access was encountered", Kind.CRASH, Kind.CRASH),
        ("OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376", *[Kind.CRASH] * 2),
        ("1 validation error for DeepSpeedZeroConfig", Kind.INVALID, Kind.INVALID),
        ("loss is nan", None, None),
        ("this may be caused by an out of memory of yours", None, None),  # a guess
    ],
)
def test_texts(text: str, on_cuda: Kind | None, on_cpu: Kind | None) -> None:
    for device, expected in (("cuda", on_cuda), ("cpu", on_cpu)):
        assert kind(f"before\n{text}\nafter", device=device) is expected


def test_faces_are_known_in_any_letters_over_lines_and_by_their_frames() -> None:
    made = made_anew(failure_classifier)

    def found(text: str, *files: str) -> Kind | None:
        kind_and_words = made.recognise(text, Scene("cuda"), list(files))
        return kind_and_words[0] if kind_and_words else None

    assert found("DISK QUOTA EXCEEDED") is Kind.INFRASTRUCTURE
    assert found("disk quota exceeded") is Kind.INFRASTRUCTURE
    assert found("nothing of the kind") is None
    assert (
        found("unhandled cuda error, NCCL version 2\nncclUnhandledCudaError\nlast error: out of memory")
        is Kind.OOM_DEVICE
    )
    for pins in ("/site/torch/utils/data/_utils/pin_memory.py", "/mine/Pin_Memory.py"):
        assert found("CUDA error: invalid argument", pins) is Kind.OOM_HOST
    assert found("CUDA error: invalid argument", "/mine/train.py") is None


_CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    ("text", "full", "between", "roomy", "unknown"),
    [
        (_CUBLAS, Kind.OOM_DEVICE, Kind.OOM_DEVICE, Kind.CRASH, Kind.OOM_DEVICE),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", Kind.OOM_DEVICE, Kind.OOM_DEVICE, Kind.CRASH, Kind.OOM_DEVICE),
        ("CUDNN_STATUS_INTERNAL_ERROR", Kind.OOM_DEVICE, Kind.CRASH, Kind.CRASH, Kind.CRASH),
        ("CUBLAS_STATUS_EXECUTION_FAILED", Kind.OOM_DEVICE, Kind.CRASH, Kind.CRASH, Kind.CRASH),
        ("ncclInternalError: Internal check failed.", Kind.OOM_DEVICE, *[Kind.INFRASTRUCTURE] * 3),
        ("ncclUnhandledCudaError: Call to CUDA function failed.", Kind.OOM_DEVICE, *[Kind.INFRASTRUCTURE] * 3),
        ("CUDA driver error: out of memory", *[Kind.OOM_DEVICE] * 2, Kind.INFRASTRUCTURE, Kind.OOM_DEVICE),
        ("CUDA error: out of memory", *[Kind.OOM_DEVICE] * 4),  # roomy, but nothing points to the host
        ("CUDA error: device-side assert triggered", *[Kind.CRASH] * 4),  # however full
        ("No CUDA GPUs are available", *[Kind.INFRASTRUCTURE] * 4),
        ("CUDA out of memory. Tried to allocate 90.00 GiB", *[Kind.OOM_DEVICE] * 4),  # of a device that is empty
        ("shapes do not match", *[None] * 4),
    ],
)
def test_where_a_text_is_in_doubt_the_devices_free_memory_decides(
    text: str, full: Kind, between: Kind, roomy: Kind, unknown: Kind
) -> None:
    accounts = (FULL, BETWEEN, ROOMY, UNKNOWN)
    assert [kind(text, account) for account in accounts] == [full, between, roomy, unknown]


def test_cuda_out_of_memory_with_a_roomy_device_is_the_hosts_where_the_host_is_the_one_in_want() -> None:
    text = "CUDA error: out of memory"
    pinning = Account(free=DEVICE // 2, total=DEVICE, pinned=40 * GIB)
    assert kind(text, pinning) is Kind.OOM_HOST
    assert kind(text, ROOMY, host_ran_out=True) is Kind.OOM_HOST
    assert kind(text, Account(free=DEVICE // 2, total=DEVICE, pinned=16 * MIB)) is Kind.OOM_DEVICE, "a loader's batches"
    assert kind(text, Account(free=GIB, total=DEVICE, pinned=40 * GIB)) is Kind.OOM_DEVICE
    assert kind(text, FULL, host_ran_out=True) is Kind.OOM_DEVICE
    assert kind("CUDA out of memory. Tried to allocate 2.00 GiB", pinning) is Kind.OOM_DEVICE, (
        "torch's own of the device"
    )


def test_killed_workers_are_memorys_where_the_host_ran_out() -> None:
    text = "RuntimeError: DataLoader worker (pid(s) 123) exited unexpectedly"
    assert kind(text) is None
    assert kind(text, host_ran_out=True) is Kind.OOM_HOST
    assert kind(text, host_ran_out=True, device="cpu") is Kind.OOM_DEVICE


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
        (PINS, Kind.OOM_HOST),
        (
            ("/site/torch/utils/data/_utils/pin_memory.py", "pin_memory", "return data.pin_memory(device)"),
            Kind.OOM_HOST,
        ),
        (("/site/deepspeed/runtime/zero/x.py", "f", "torch.empty(n, pin_memory=True)"), Kind.OOM_HOST),
        (("/site/torch/_tensor.py", "f", "grad.to('cpu', non_blocking=True)"), Kind.OOM_HOST),
        (("/site/deepspeed/ops/aio.py", "f", "self.handle.new_cpu_locked_tensor(n)"), Kind.OOM_HOST),
        (STAGE, Kind.OOM_DEVICE),
    ],
)
def test_cuda_out_of_memory_in_a_frame_that_pins_is_the_hosts(frame: tuple[str, str, str], expected: Kind) -> None:
    for text in ("CUDA error: out of memory", "HIP error: out of memory"):
        assert kind(traceback(TRAINS, frame, last=f"RuntimeError: {text}")) is expected
    assert kind(traceback(TRAINS, frame, last="RuntimeError: shapes do not match")) is None


def test_only_the_innermost_frames_count() -> None:
    for outer, expected in ((2, Kind.OOM_HOST), (3, Kind.OOM_DEVICE)):
        assert kind(traceback(PINS, *[STAGE] * outer)) is expected, "a loader's frame far out pins nothing now"


def test_of_two_tracebacks_each_texts_own_frames_count() -> None:
    """`During handling of the above exception`: what is pinned afterwards is not what failed."""
    text = f"{traceback(TRAINS, STAGE)}\nDuring handling of the above exception, another exception occurred:\n\n"
    assert kind(text + traceback(PINS, last="KeyError: 1")) is Kind.OOM_DEVICE


def test_files_serve_where_the_traceback_is_cut_off() -> None:
    text = "CUDA error: out of memory"
    files = ["/home/me/train.py", "/site/torch/utils/data/_utils/pin_memory.py"]
    assert recognise(text, Scene("cuda"), files) == (Kind.OOM_HOST, "CUDA error: out of memory in pin_memory")
    assert recognise(text, Scene("cuda"), files[:1]) == (Kind.OOM_DEVICE, "CUDA error: out of memory")


def test_a_full_disk_is_the_hosts_memory_where_processes_share_it() -> None:
    share = ("/usr/lib/python3.11/multiprocessing/heap.py", "__init__", "os.ftruncate(self.fd, size)")
    full = "OSError: [Errno 28] No space left on device"
    assert kind(traceback(TRAINS, share, last=full)) is Kind.OOM_HOST
    assert kind(traceback(TRAINS, last=full)) is Kind.INFRASTRUCTURE


# -- what is quoted, echoes ----------------------------------------------------------------------------------------------


def test_the_words_that_decided_are_quoted_shortly() -> None:
    found = recognise("unable to open shared memory; NCCL WARN " + "x" * 180 + " out of memory", Scene("cuda"))
    assert found == (Kind.OOM_HOST, "unable to open shared memory")
    found = recognise("NCCL WARN " + "x" * 180 + " out of memory", Scene("cuda"))
    assert found == (Kind.OOM_DEVICE, "NCCL WARN " + "x" * 110)


@pytest.mark.parametrize(
    ("text", "echo"),
    [
        ("Connection closed by peer [127.0.0.1]:39201", True),
        ("Connection reset", True),
        ("[Errno 32] Broken pipe", True),
        ("Socket Timeout", True),
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
    assert is_echo(text) is echo
    assert is_secondary({"text": text}) is echo
    assert not is_secondary({})
