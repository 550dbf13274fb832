"""Texts of failures that libraries print, with the outcome class of each.

The first match decides, so certain texts precede general ones. The patterns come from real failures, which
`tests/data/failures.yaml` lists with their threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from autotune.group.account import Account
from autotune.problem.outcome import Kind

_FRAMES = 3  # number of innermost frames, because pinning passes through an accelerator's wrappers
_WORDS = 120  # longest quote of a match


@dataclass(frozen=True)
class Scene:
    """Circumstances of a text, which decide ambiguous ones."""

    device: str
    account: Account = field(default_factory=Account)
    host_ran_out: bool = False  # True if the kernel killed for lack of main memory, or almost none is left


def _memory(scene: Scene) -> Kind:
    """Classify an OOM of main memory, which is the device's memory on a CPU rank."""
    return Kind.OOM_DEVICE if scene.device == "cpu" else Kind.OOM_HOST


def _allocation(scene: Scene) -> Kind:
    """Classify CUDA's text, which is identical for device memory and pinned memory.

    torch's own allocator prints another text. The remaining device allocations (contexts, modules, streams, workspaces)
    are small.
    """
    if scene.account.is_roomy and (scene.account.pins_much or scene.host_ran_out):
        return Kind.OOM_HOST
    return Kind.OOM_DEVICE


def _mapping(scene: Scene) -> Kind:
    """Classify a failure of the driver's virtual memory (`expandable_segments`).

    torch prints another text when the device is full. Some machines (Jetson, vGPU, WSL) have too little of it, or none.
    """
    return Kind.INFRASTRUCTURE if scene.account.is_roomy else Kind.OOM_DEVICE


def _handle(scene: Scene) -> Kind:
    """Classify a library's failure to create a handle: an OOM, or a consequence of a failed kernel."""
    return Kind.CRASH if scene.account.is_roomy else Kind.OOM_DEVICE


def _internal(scene: Scene) -> Kind:
    """Classify a library's internal error, which a full device explains."""
    return Kind.OOM_DEVICE if scene.account.is_full else Kind.CRASH


def _communicator(scene: Scene) -> Kind:
    """Classify a failure of NCCL, whose buffers (0.2-1.5 GiB) are outside torch's allocator."""
    return Kind.OOM_DEVICE if scene.account.is_full else Kind.INFRASTRUCTURE


def _lost(scene: Scene) -> Kind | None:
    """Classify a killed process: a host OOM if main memory had run out, otherwise unknown."""
    return _memory(scene) if scene.host_ran_out else None


@dataclass(frozen=True)
class Face:
    """Pattern of one failure text."""

    points_to: Kind | Callable[[Scene], Kind | None]  # None makes the search continue with the next pattern
    text: re.Pattern[str]
    frames: re.Pattern[str] | None = None  # an innermost frame must match too: file, function, source


def _faces(points_to: Kind | Callable[[Scene], Kind | None], *texts: str, frames: str | None = None) -> list[Face]:
    where = re.compile(frames, re.IGNORECASE) if frames else None
    return [Face(points_to, re.compile(text, re.IGNORECASE | re.DOTALL), where) for text in texts]


# Errors that a peer reports after another rank's failure. They describe connections or waits, never a cause.
_ECHO = (
    r"Connection (?:closed|reset|refused)|closed by (?:remote )?peer|Broken pipe|Socket (?:closed|Timeout)"
    r"|application timeout caused pair closure|Timed out waiting \d+ms for|remote process exited|ncclRemoteError"
    r"|caught collective operation timeout|communicator was aborted"
)

# Texts that always name a cause, so that no consequential error hides it.
_CERTAIN = (
    # A kernel's failure is sticky: every later call fails too, with its own text.
    *_faces(
        Kind.CRASH,
        r"device-side assert triggered|Assertion `[^`\n]*` failed",
        r"illegal memory access|misaligned address|illegal instruction|unspecified launch (?:failure|error)",
        r"CUDA_ERROR_ILLEGAL_ADDRESS|an illegal address",
        r"out of resources?: (?:shared|tensor) memory|OutOfResources",  # Triton's block resources, not device memory
    ),
    *_faces(
        Kind.INFRASTRUCTURE,
        r"uncorrectable ECC|fallen off(?: of)? the bus|GPU is lost|DEVICE_LOST|\bXid\b|NVLink error|NVML_ERROR_GPU_IS_LOST",
        r"No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver|NVIDIA driver on your system is too old",
        r"driver version is insufficient|invalid device ordinal|system not yet initialized|CUDA unknown error",
        r"CUDA(?: runtime)? error[^\n]{0,10}: (?:unknown error|initialization error|invalid device function)",
        r"launch timed out and was terminated|or a hardware error",
        r"no kernel image is available|unsupported toolchain|kernel image is invalid|not compiled with CUDA enabled",
        r"Duplicate GPU detected|device unavailable|busy or unavailable|peer access is not supported|peer mapping",
        r"CUDA was woken before the fork|nccl-shm|shared memory segment /dev/shm/nccl|extend /dev/shm/nccl",
    ),
)

_FACES = (
    *_CERTAIN,
    # Pinned or shared main memory. CUDA's text does not name it, but the frames do.
    *_faces(
        Kind.OOM_HOST,
        r"(?:CUDA|HIP) error: (?:out of memory|invalid argument|resource already mapped)|cudaErrorMemoryAllocation",
        r"out of memory|ENOMEM",
        frames=r"pin_(?:memory|empty)|pinned|cudaHost|locked_tensor|\.to\(\W*cpu\b.{0,80}non_blocking\s*=\s*True",
    ),
    *_faces(
        Kind.OOM_HOST,
        r"No space left on device",
        frames=r"multiprocessing/(?:heap|synchronize|shared_memory|reductions)\.py|_share_(?:fd|filename)",
    ),
    *_faces(
        Kind.OOM_HOST,
        r"cuda(?:HostAlloc|HostRegister|MallocHost)\b(?!.{0,80}AlreadyRegistered)|Failed to CUDA host alloc",
        r"could not allocate pinned|bytes on host\b[^\n]{0,40}OUT_OF_MEMORY",
        r"out of memory.*CachingHostAllocator|CachingHostAllocator.*out of memory",
        r"(?:pin(?:ned)?[ _]memory|page-?locked)\b[^\n]{0,200}out of memory|error while trying to pin memory|mlock failed",
        r"in pin memory thread for device.{0,6000}out of memory",
        r"unable to (?:mmap|open shared memory|write to file </torch_|resize file </torch_|allocate shared memory)",
        r"(?<!PCIe )Bus error|shared memory \(shm\)|/dev/shm.*No space left|out of shared memory|signal SIGBUS|exit ?code:? -7\b",
        r"killed by signal: Killed|oom[-_]kill|Out of memory: Kill|low on memory|out-of-memory handler",
    ),
    *_faces(
        Kind.OOM_DEVICE,
        r"(?:CUDA|HIP|XPU|NPU|MLU|MUSA|GCU) out of memory|MPS backend out of memory|Triton Error.{0,20}out of memory",
        r"\b\w+_STATUS_ALLOC(?:ATION)?_FAILED|CUFFT_ALLOC_FAILED|would exceed allowed memory",
        r"OUT_OF_DEVICE_MEMORY|UR_RESULT_ERROR_OUT_OF_RESOURCES|hipErrorOutOfMemory|HIP_ERROR_OutOfMemory",
        r"RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)",
        r"failed to alloc[^\n]{0,80} from device|unable to allocate (?:CUDA|ROCm)\d* buffer",
        r"No available memory for the cache blocks|Free memory on device[^\n]{0,80}is less than|enough GPU RAM",  # vLLM; HF
        r"NCCL WARN.{0,200}out of memory|Cuda failure[^\n]{0,20}out of memory|Failed to CUDA (?:m|c)alloc",
        r"unhandled cuda error.{0,400}out of memory",
    ),
    *_faces(_mapping, r"(?:CUDA|HIP) driver error: out of memory"),
    *_faces(
        _allocation,
        r"(?:CUDA|HIP)(?: runtime)? error[^\n]{0,200}out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
        r"cu(?:da)?M(?:em)?alloc[^\n]{0,200}out of memory",
        r"(?:CUDA|HIP) failed with error[^\n]{0,20}out of memory|Error out of memory at line \d+ in file",  # bitsandbytes
    ),
    *_faces(
        _memory,
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
        r"could not create a (?:primitive(?! descriptor)|memory)|could not execute a primitive",
        r"(?:std::)?bad_alloc|\bMemoryError\b|memory allocation of \d+ bytes failed|malloc of size \d+ failed|memalign",
        r"unable to allocate \w+ buffer",
        r"Cannot allocate memory|can't allocate region|mmap failed|out of memory trying to allocate|ENOMEM",
        r"can't start new thread|pthread_create|libgomp: Thread creation failed",
        r"\b(?:CPU|host|system|RAM)\b[^\n]{0,40}out of memory|out of (?:CPU|host|system|main|RAM)\b(?: memory)?",
    ),
    *_faces(
        _lost,
        r"workers? \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly|process pool was terminated abruptly",
        r"subprocesses has abruptly died|exit ?code:? (?:-9|137)\b|exit(?:ed with)? status 137|signal 9\b|SIGKILL",
    ),
    *_faces(
        _handle,
        r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_STATUS_NOT_INITIALIZED",
        r"when calling `?(?:cublas|cusolver|cudnn|cusparse)\w*Create",
        r"unable to find an engine to execute|valid (?:cuDNN|convolution) algorithm",
    ),
    *_faces(_internal, r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(?:INTERNAL_ERROR|EXECUTION_FAILED)"),
    *_faces(
        Kind.INFRASTRUCTURE,
        r"Address already in use|EADDRINUSE",
        r"No space left on device|Disk quota exceeded|Read-only file system|Stale file handle|file write failed",
        r"PytorchStreamWriter failed|inline_container\.cc:\d+\] \. unexpected pos|basic_ios::clear: iostream error",  # torch.save
        r"Too many open files|Input/output error",
        _ECHO,
        r"Timed out initializing process group|client socket has timed out|wait timeout after \d+ ?ms",
        r"NCCL operations have failed or timed out|watchdog got stuck|heartbeat monitor",
        r"CUDA driver|CUDA initialization|cannot re-initialize CUDA in forked subprocess",
        r"Unable to find address for|No socket interface found|Name or service not known|name resolution",
        r"couldn't connect to .{0,3}https?:|Max retries exceeded with url|HTTPSConnectionPool",
    ),
    *_faces(
        _communicator,
        r"nccl(?:System|Internal|Remote|UnhandledCuda)Error|NCCL error|NCCL WARN",
        r"unhandled (?:cuda|system) error",
    ),
    *_faces(Kind.INVALID, r"correct the following DeepSpeed config values|validation errors? for DeepSpeed\w*Config"),
    # Any other text about an OOM, except lines that only guess ("may be caused by ...").
    *_faces(
        _allocation,
        r"(?:^|\n)(?![^\n]*\b(?:may|might|could|possibl[ey]|probably|likely|if)\b)[^\n]*\bout[ -]of[ -]memory\b",
    ),
)


def recognise(text: str, scene: Scene, files: list[str] | None = None) -> tuple[Kind, str] | None:
    """Return the outcome class of a text and the words that decided it, or None if no pattern matches.

    Args:
        text: an error's text, preceded by its traceback if there is one.
        files: files of the frames that raised it, the innermost last, for a truncated traceback.
    """
    for face in _FACES:
        match = face.text.search(text)
        if match is None:
            continue
        seen = _frame_match(face.frames, text[: match.start()], files or []) if face.frames else match[0]
        if seen is not None:
            kind = face.points_to if isinstance(face.points_to, Kind) else face.points_to(scene)
            if kind is not None:
                words = seen if face.frames is None else f"{match[0]} in {seen}"
                return kind, words.strip()[:_WORDS]
    return None


def _frame_match(pattern: re.Pattern[str], before: str, files: list[str]) -> str | None:
    """Return the match in one of the innermost frames, which are printed last before a text."""
    frames = before.split('File "')[1:] or files
    for frame in frames[-_FRAMES:]:
        if match := pattern.search(frame):
            return match[0]
    return None


def is_echo(text: str) -> bool:
    """Return True if a text only states that a peer is gone."""
    if re.search(_ECHO, text, re.IGNORECASE) is None or any(face.text.search(text) for face in _CERTAIN):
        return False
    found = recognise(text, Scene("cuda"))
    return found is None or not found[0].is_oom
