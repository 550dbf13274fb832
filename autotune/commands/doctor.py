"""Checks of this machine for `autotune doctor`: each finding with its cost and its fix."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune._version import install_command
from autotune.commands.environment import check_versions
from autotune.errors import UNPROTECTED, UserError
from autotune.executors.machine import protection_of
from autotune.problem.faults import known_faults
from autotune.problem.gpu_specs import facts_for
from autotune.problem.hardware import usable_cpus
from autotune.problem.host_memory import host_available_bytes, host_total_bytes
from autotune.problem.nvml import (
    ARCHITECTURES,
    Gpu,
    GpuError,
    architectures_to_set,
    driver_failure,
    holders_text,
    nvml_errors,
    open_nvml,
    unreadable_architectures,
    unseen_gpu,
    visible_gpus,
)
from autotune.rank.sandbox import Protection
from autotune.util.file_systems import file_system_of
from autotune.util.interpreter import APART, OWN, Interpreter
from autotune.util.units import GIB, MIB, format_bytes
from autotune.versions import dotted, newer, release
from autotune.workers.gpu_locks import lock_holder
from autotune.workers.host_workers import LivenessCheck
from autotune.workers.launchers import MARK, trial_environment
from autotune.workers.process_tree import end_processes_with_variable

_LEAST_SHM_BYTES = 64 * MIB  # bytes for the shared segments of NCCL and gloo, and a data loader's batches
_SPARE_SHM_BYTES = GIB  # Docker's default for a container is 64 MiB
_IDLE_SECONDS = 120.0  # limit without any computation or I/O of the probe and its compilers


@dataclass(frozen=True)
class Finding:
    """Result of one check: `good`, `warn` (slower or fewer choices) or `bad` (a study cannot run)."""

    level: str
    what: str
    found: str
    cost: str = ""
    fix: str = ""


def examine(nvme_path: Path | None, doing: Callable[[str], None], interpreter: Interpreter = OWN) -> Iterator[Finding]:
    """Run all checks, and yield each finding as it is found. DeepSpeed's CPU Adam is built if it is missing.

    Args:
        nvme_path: folder that nvme offload would use.
        doing: receives the current slow operation.
        interpreter: of the ranks.
    """
    doing("looking at the driver, memory and disk")
    yield from _gpus()
    yield from _memory()
    yield from _disk(nvme_path)
    doing("checking how trials can be kept from changing your files")
    yield _protection(interpreter)
    doing("reading the versions of the ranks' packages")
    yield from _python(interpreter)
    yield from _libraries(doing, interpreter)


def _gpus() -> Iterator[Finding]:
    lib = open_nvml()
    if lib is None:
        yield _no_driver()
        return
    try:
        with nvml_errors("NVIDIA's driver"):
            version, cuda = lib.nvmlSystemGetDriverVersion(), lib.nvmlSystemGetCudaDriverVersion()
        visible = visible_gpus()
    except GpuError as error:
        yield Finding("bad", "driver", str(error), "no GPU can be tuned", "reboot, or reload its kernel module")
        return
    yield Finding("good", "driver", f"{version}, CUDA up to {cuda // 1000}.{cuda % 1000 // 10}")
    yield from map(_gpu, visible)
    if not visible:
        found = unseen_gpu() or "the driver finds none"
        fix = "set it to what `nvidia-smi -L` lists, or unset it; a card in MIG mode needs a slice"
        yield Finding("warn", "GPU", found, "only CPU ranks can be tuned", fix)
    if unreadable := unreadable_architectures():
        setting = " ".join(f"{key}={value}" for key, value in architectures_to_set().items())
        cost = f"DeepSpeed cannot read {', '.join(unreadable)}, so a training that builds or loads its ops fails"
        fix = f"set {setting or f'{ARCHITECTURES} to numbers like 9.0'} for your training, or unset it"
        fix += "; trials, `autotune launch` and the printed command set it" if setting else ""
        yield Finding("warn", "GPU architectures", f"{ARCHITECTURES}={os.environ[ARCHITECTURES]}", cost, fix)


def _no_driver() -> Finding:
    cost = "only CPU ranks can be tuned"
    trouble = driver_failure()
    if trouble:
        fix = "reboot, or reload its kernel module, which an update has left in its old version"
        return Finding("bad", "driver", f"NVIDIA's driver does not answer: {trouble}", cost, fix)
    fix = "install NVIDIA's driver, or run the container with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    return Finding("warn", "GPU", "NVML finds no driver", cost, fix)


def _gpu(gpu: Gpu) -> Finding:
    if gpu.trouble:
        fix = "`nvidia-smi -r`, or a reboot; `dmesg | grep Xid` shows the reason. Or hide it with CUDA_VISIBLE_DEVICES"
        return Finding("bad", gpu.label, f"does not answer: {gpu.trouble}", "a study that uses it cannot run", fix)
    whose = " of main memory" if gpu.unified else ""
    found = f"{gpu.name}, {format_bytes(gpu.total_bytes)}{whose}, of which a process can have {format_bytes(gpu.free_bytes)}"
    if gpu.reserved_bytes:
        found += f"; the driver keeps {format_bytes(gpu.reserved_bytes)}"
    if gpu.held_bytes >= MIB:
        unknown = "processes that NVML does not show" if gpu.reserved_bytes else "probably the driver and processes"
        found += f"; {format_bytes(gpu.held_bytes)} in use by {holders_text(gpu.holders) or unknown}"
    if holder := lock_holder(gpu.uuid):
        return Finding(
            "warn", gpu.label, f"{found}; held by autotune ({holder})", "a second study is refused", "wait for it"
        )
    if gpu.held_bytes > GIB:
        cost = "a study tunes for the free memory, so its winner is smaller than the card allows"
        fix = "end the other processes, or hide this GPU with CUDA_VISIBLE_DEVICES"
        return Finding("warn", gpu.label, found, cost, fix)
    if gpu.is_slice:
        cost = "one rank only, no MFU, and wider predictions: CUDA shows a process one slice"
        return Finding("warn", gpu.label, found, cost, "for the whole card turn MIG off: nvidia-smi -mig 0")
    if facts_for(gpu.name, gpu.total_bytes) is None:
        cost = "no MFU, and wider predictions: its rates are estimated"
        return Finding("warn", gpu.label, f"{found}; not in autotune's table", cost, "add it to data/gpus.json")
    return Finding("good", gpu.label, found)


def _memory() -> Iterator[Finding]:
    total, available = host_total_bytes(), host_available_bytes()
    found = f"{format_bytes(available)} free of {format_bytes(total)}"
    if available < 0.25 * total or available < 4 * GIB:
        yield Finding("warn", "main memory", found, "offload to the CPU runs out early", "end other programs")
    else:
        yield Finding("good", "main memory", found)
    yield from shared_memory()


def shared_memory() -> Iterator[Finding]:
    """Yield what is found of /dev/shm."""
    try:
        shared = shutil.disk_usage("/dev/shm")
    except OSError:
        yield Finding("warn", "shared memory", "no /dev/shm", "NCCL and data loaders fail", "mount a tmpfs there")
        return
    found = f"{format_bytes(shared.free)} free in /dev/shm"
    fix = "docker run --shm-size=8g (or --ipc=host)"
    if shared.free < _LEAST_SHM_BYTES:
        yield Finding("bad", "shared memory", found, "ranks die by SIGBUS or NCCL fails", fix)
    elif shared.free < _SPARE_SHM_BYTES:
        cost = "NCCL among many GPUs, or many workers of a data loader, may fail"
        yield Finding("warn", "shared memory", found, cost, fix)
    else:
        yield Finding("good", "shared memory", found)


def _disk(nvme_path: Path | None) -> Iterator[Finding]:
    runs = Path("runs") if Path("runs").is_dir() else Path()
    system = file_system_of(runs)
    free = shutil.disk_usage(runs).free
    found = f"{format_bytes(free)} free for runs/ ({system})"
    if free < GIB:
        yield Finding("warn", "disk", found, "a study's logs may not fit", "make room")
    elif system.on_network:
        yield Finding(
            "warn",
            "disk",
            found,
            "SQLite cannot lock there: new studies are kept in runs/NAME/study.journal, each write at the network's speed",
            "nothing needs to be done; a folder on a local disk is faster",
        )
    else:
        yield Finding("good", "disk", found)
    if nvme_path is not None:
        yield _nvme(nvme_path)


def _protection(interpreter: Interpreter) -> Finding:
    """Return how a trial of a script keeps its writes from the user's files."""
    with tempfile.TemporaryDirectory(dir="runs" if os.access("runs", os.W_OK) else None) as folder:
        found = protection_of(Path.cwd(), Path(folder), unprotected=True, interpreter=interpreter)
    if found is Protection.OVERLAY:
        return Finding("good", "your files", "trials write into an overlay, which is deleted with them")
    if found is Protection.LANDLOCK:
        cost = "a script that changes a file of yours by an absolute path fails with PermissionError in trials"
        fix = "allow user namespaces (sysctl kernel.unprivileged_userns_clone, user.max_user_namespaces) for an overlay"
        return Finding(
            "warn", "your files", "the kernel refuses changes outside of a trial's folder (Landlock)", cost, fix
        )
    fix = "a kernel with overlayfs and user namespaces, or with Landlock (Linux 6.2)"
    return Finding("warn", "your files", "no protection", f"{UNPROTECTED}; scripts need --unprotected", fix)


def _nvme(path: Path) -> Finding:
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Finding(
            "bad", "nvme path", f"{path} is no folder that can be written", "nvme offload fails", "make it writable"
        )
    system = file_system_of(path)
    found = f"{path} ({system.kind}), {format_bytes(shutil.disk_usage(path).free)} free"
    if system.on_network or system.kind in ("fuse", "overlay", "tmpfs"):
        return Finding("warn", "nvme path", found, "offload at the speed of that file system", "use a local NVMe drive")
    return Finding("good", "nvme path", found)


# A subprocess runs this: imports that take seconds, a CUDA context, and builds that may hang stay out of this process.
_EXAMINATION = """
import json, os, sys
out = {"errors": {}}
def attempt(name, work, doing=""):
    if doing:
        print("DOING" + doing, flush=True)
    try:
        out[name] = work()
    except Exception as error:
        out["errors"][name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
def torch_facts():
    import torch
    from autotune.rank import devices as cuda
    return {"version": torch.__version__, "cuda": torch.version.cuda, "available": cuda.available()}
attempt("torch", torch_facts, "importing torch")
def versions():
    import deepspeed
    return {"deepspeed": deepspeed.__version__}
attempt("versions", versions, "importing deepspeed")
def transformers():
    import transformers
    out["versions"]["transformers"] = transformers.__version__
    return True
attempt("transformers", transformers, "importing transformers")
def op(name):
    from deepspeed.accelerator import get_accelerator
    from autotune.util.linux import terminate_with_descendants
    from autotune.workers.jit_ops import load_ops
    if get_accelerator().create_op_builder(name) is None:
        raise RuntimeError("not for this device")
    with terminate_with_descendants():
        def tell(**said):
            if said["state"] == "waiting" and not said["seconds"]:
                print("DOINGwaiting for DeepSpeed's ops, which another process builds", flush=True)
        if why := load_ops([name], tell).get(name):
            raise RuntimeError(why)
    return True
for name in sys.argv[1:]:
    short = name.removesuffix("Builder")
    attempt(name, lambda: op(name), f"loading DeepSpeed's {short}; the first call builds it in a minute or two")
def context():  # torch has counted GPUs by NVML, which also answers if the driver is too old for torch's CUDA
    from autotune.rank import devices as cuda
    cuda.take(0)
if out.get("torch", {}).get("available"):  # last, because a context holds memory of a GPU that a study may use
    attempt("context", context, "starting CUDA")
print("FACTS" + json.dumps(out))
"""
_OPS = {  # the consequence if the op is missing, and the fix
    "CPUAdamBuilder": ("optimizer offload to the CPU cannot be tried", "pip install ninja, and install a C++ compiler"),
    "AsyncIOBuilder": ("nvme offload cannot be tried", "apt install libaio-dev"),
    "FusedAdamBuilder": (
        "--optimizer fused_adam cannot be tried",
        "set CUDA_HOME to a complete toolkit (`ls -d /usr/local/cuda*`), or install its missing packages",
    ),
}


_TRAIN_THERE = f"--python PATH of the environment that you train in, or {install_command('train')}"


def _python(ranks: Interpreter) -> Iterator[Finding]:
    """Check the Python of the ranks, and that the versions of its packages are supported."""
    found = f"{ranks.python} ({ranks.path})"
    if ranks.is_other:
        found += f", apart from autotune's own ({OWN.path})"
    try:
        check_versions(ranks)
    except UserError as error:
        yield Finding("bad", "Python", found, str(error), "--python PATH of an environment that has those")
    else:
        yield Finding("good", "Python", found)


def _libraries(doing: Callable[[str], None], interpreter: Interpreter) -> Iterator[Finding]:
    device = "cuda" if visible_gpus() else "cpu"
    facts, last = _examination(device, doing, interpreter)
    if facts is not None:
        yield from judge_libraries(facts, device)
    elif last is None:
        found = f"no compiler and nothing else worked for {_IDLE_SECONDS:.0f} s"
        fix = "try `ds_report`; its output shows where a build hangs"
        yield Finding("bad", "libraries", found, "nothing can be measured", fix)
    else:
        yield Finding("bad", "libraries", f"the probe died: {last[:160]}", "nothing can be measured", "reinstall torch")


def _examination(
    device: str, doing: Callable[[str], None], interpreter: Interpreter
) -> tuple[dict[str, Any] | None, str | None]:
    """Run the examination in the Python of the ranks.

    Args:
        device: "cuda" or "cpu".
        doing: receives each step as it begins.
        interpreter: of the ranks.

    Returns:
        The facts, or None; and the last line of its errors, or None if it hung.
    """
    mark, hung, over, facts = uuid.uuid4().hex, threading.Event(), threading.Event(), None

    def watch() -> None:
        check, progressed_at = LivenessCheck(), time.monotonic()
        while not over.wait(1.0):
            now = time.monotonic()
            if check.made_progress([child.pid]):
                progressed_at = now
            if now - progressed_at > _IDLE_SECONDS:
                hung.set()
                end_processes_with_variable(MARK, mark)  # its compilers too, which hold its output open
                return

    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            [interpreter.path, "-c", APART + _EXAMINATION, *_OPS],
            env={**trial_environment(device, usable_cpus(), interpreter), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            for line in child.stdout or ():
                if line.startswith("DOING"):
                    doing(line[5:].strip())
                elif line.startswith("FACTS"):
                    facts = json.loads(line[5:])
            child.wait()
        finally:
            over.set()
            watcher.join()
            end_processes_with_variable(MARK, mark)
            child.wait()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["no output"])[-1]
    return facts, None if hung.is_set() else last


def _known_faults(deepspeed: tuple[int, ...]) -> Iterator[Finding]:
    """Report the settings that a DeepSpeed computes wrongly; `autotune run` leaves them out if it can see their conditions."""
    named = [
        f"{fault.setting} (up to {fault.until})" if fault.until else fault.setting
        for fault in known_faults(deepspeed)
        if not fault.harmless
    ]
    if named:
        fix = "avoid them; `autotune run` leaves them out where it sees their conditions"
        what, cost = f"faults of deepspeed {dotted(deepspeed)}", "a wrong update, or none"
        yield Finding("warn", what, "; ".join(named), cost, fix)


def judge_libraries(facts: dict[str, Any], device: str) -> Iterator[Finding]:
    """Yield findings from the facts that the examination reported."""
    errors = facts["errors"]
    torch = facts.get("torch")
    if torch is None:
        yield Finding("bad", "torch", errors["torch"], "nothing can be measured", _TRAIN_THERE)
        return
    build = f"{torch['version']}, " + (f"CUDA {torch['cuda']}" if torch["cuda"] else "a CPU build")
    trouble = errors.get("context")
    if not torch["available"]:  # no context was started
        trouble = "no GPU, although the driver finds one"
    if device == "cuda" and trouble:
        fix = "end other processes on this GPU, or choose another with CUDA_VISIBLE_DEVICES"
        if "driver" in trouble:
            fix = "install the torch wheel whose CUDA version is at most the driver's (first line above)"
        yield Finding("bad", "torch", f"{build}, cannot use GPU 0: {trouble}", "no GPU can be tuned", fix)
    else:
        yield Finding("good", "torch", build)
    if "versions" in facts:
        versions = facts["versions"]
        found = ", ".join(f"{k} {v}" for k, v in versions.items())
        yield Finding("good", "libraries", found)
        for one in newer({**versions, "torch": torch["version"]}):
            yield Finding("warn", "libraries", one, "predictions are less certain", "look for a newer autotune")
        yield from _known_faults(release(versions["deepspeed"]))
    else:
        yield Finding("bad", "libraries", errors["versions"], "nothing can be measured", _TRAIN_THERE)
    if "transformers" in errors:
        cost = "--model cannot be tuned; scripts without transformers can"
        yield Finding("warn", "transformers", errors["transformers"], cost, "install transformers")
    for op, (cost, fix) in _OPS.items():
        name = f"DeepSpeed op {op.removesuffix('Builder')}"
        if op in facts:
            yield Finding("good", name, "built")
        else:
            found = f"cannot be built: {errors.get(op, 'unknown')}"
            yield Finding("warn", name, found, cost, f"{fix}, then call doctor again")
