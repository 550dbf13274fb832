"""Fork server: import torch, deepspeed and transformers once, then fork one child per rank (10 ms instead of seconds).

The server touches no device, opens no process group and runs no torch operation. OpenMP's threads and an initialized
CUDA driver would not survive a fork. Run as `python -m autotune.workers.fork_server FD`.

As the first process of a PID namespace (`util/linux.py: contain`) it ends everything that its ranks have started. It builds no
op there, because compilers of other processes cannot be seen from a namespace.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress

from autotune.util.interpreter import module_command
from autotune.util.linux import MACHINE_PROC, adopt_orphans, die_with_parent, pid_outside, terminate_with_descendants
from autotune.workers.jit_ops import FOLDER, load_ops, use_own_folder
from autotune.workers.protocol import Channel, Message

# ZeRO imports the second at stages 1 to 3, and that imports torch's compiler: 0.6 s of each rank on CPUs.
# Neither import calls cuInit or starts a thread (tests/workers/test_cuda_sleeps.py), so
# ranks of GPUs are forked after it, too.
PRELOADED = ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer")
_FORK_TEST_SECONDS = 120  # seconds; without persistence mode each of eight GPUs takes seconds to initialize
_PROCESSOR_SECONDS = 60.0  # after this time DeepSpeed queries the processor itself
_KILL_SECONDS = 5.0  # a process that SIGKILL does not end by then is kept by the kernel
_CUDA_ERROR_NOT_INITIALIZED = 3  # CUresult in a fork of a process that has used CUDA


def preload(model_type: str | None, modules: list[str]) -> None:
    """Import the modules that every rank needs."""
    gc.disable()  # the collector would repeatedly scan permanent objects, a fifth of the time
    processor = threading.Thread(target=_cache_cpuinfo)
    processor.start()
    import deepspeed  # noqa: F401

    with suppress(Exception):  # a script may not need it, and otherwise sees the error itself
        from transformers import AutoModelForCausalLM  # noqa: F401
    if model_type:
        with suppress(Exception):
            from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

            MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    for name in (*PRELOADED, *modules):
        with suppress(Exception):
            importlib.import_module(name)
    processor.join(_PROCESSOR_SECONDS)
    gc.freeze()  # children need not scan them either, which would copy the shared pages
    gc.enable()


def _cache_cpuinfo() -> None:
    """Cache py-cpuinfo's result for this process and all its forks, during the imports.

    DeepSpeed queries py-cpuinfo for each op it loads and each CPUAdam it makes. Each query starts an interpreter.
    """
    with suppress(Exception):
        import cpuinfo

        known = cpuinfo.get_cpu_info()
        cpuinfo.get_cpu_info = lambda: dict(known)


def serve_ops(channel: Channel, names: list[str], *, build: bool) -> None:
    """Load DeepSpeed's JIT ops, build the missing ones if `build`, and report progress.

    If the tuner dies during a build, the compilers die with this process.
    """
    with terminate_with_descendants():
        failed = load_ops(names, lambda **said: channel.send("op", **said), build=build)
    die_with_parent(os.getppid())  # no longer by SIGTERM
    _settle()
    fork_safe = os.environ.get("DS_ACCELERATOR") == "cpu" or cuda_survives_fork()
    channel.send("ops", failed=failed, folder=os.environ.get(FOLDER, ""), fork_safe=fork_safe)


def _settle() -> None:
    gc.collect()
    gc.freeze()  # keeps the children's collector from touching the shared pages


def cuda_survives_fork() -> bool:
    """Return True if a child of this process can use CUDA, tested in a forked child.

    torch's flags in this process are not sufficient, because other libraries may have initialized the driver.
    """
    import torch

    if torch.cuda.is_initialized():
        return False
    pid = os.fork()
    if pid == 0:
        signal.alarm(_FORK_TEST_SECONDS)  # its default action ends a child that hangs
        works = False
        try:
            works = not torch.cuda._is_in_bad_fork() and _driver_answers()
        finally:
            os._exit(int(not works))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _driver_answers() -> bool:
    """Return True if the CUDA driver can be initialized or is not installed."""
    try:
        return bool(ctypes.CDLL("libcuda.so.1").cuInit(0) != _CUDA_ERROR_NOT_INITIALIZED)
    except OSError:
        return True


def serve(sock: socket.socket) -> None:
    """Fork a rank for every `launch` message until the tuner closes the socket."""
    channel = Channel(sock)
    hello = channel.receive()
    if hello is None:
        return
    if not hello.get("cold"):
        preload(hello.get("model_type"), hello.get("modules", []))
    contained = MACHINE_PROC in os.environ
    channel.send("ready", pid=pid_outside(os.getpid()), contained=contained)
    wake_read, wake_write = os.pipe()
    watched: list[int] = [sock.fileno(), wake_read]
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    inherited = [sock.fileno(), wake_read, wake_write, *([int(os.environ[MACHINE_PROC])] if contained else [])]
    children: dict[int, int] = {}  # process id here -> for the tuner
    while not channel.closed:
        with suppress(InterruptedError):
            select.select(watched, [], [])
        with suppress(BlockingIOError):
            os.read(wake_read, 4096)
        _report_ended(channel, children)
        for message in channel.drain():
            if message["type"] == "ops":
                serve_ops(channel, message["names"], build=message["build"])
            elif message["type"] == "end":
                channel.send("ended", left=_end_all(channel, children))
            elif message["type"] == "launch":
                try:
                    pid = _fork(message, inherited)
                    children[pid] = pid_outside(pid)
                except OSError as error:  # no memory or no process is left; the server survives
                    channel.send("refused", ticket=message["ticket"], errno=error.errno, text=error.strerror)
                    continue
                channel.send("launched", pid=children[pid], ticket=message["ticket"])
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _report_ended(channel: Channel, children: dict[int, int]) -> bool:
    """Report ranks that have ended, and reap orphans. Return True if no child is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if not pid:
            return False
        if pid in children:  # excludes orphans
            channel.send("exited", pid=children.pop(pid), status=os.waitstatus_to_exitcode(status))


def _end_all(channel: Channel, children: dict[int, int]) -> bool:
    """Kill all other processes of this PID namespace. Return True if the kernel keeps any."""
    assert os.getpid() == 1, "outside of a namespace this would kill all processes of the user"
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    until = time.monotonic() + _KILL_SECONDS
    while not _report_ended(channel, children):
        if time.monotonic() > until:
            return True
        time.sleep(0.005)
    return False


def _fork(order: Message, inherited: list[int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    signal.set_wakeup_fd(-1)
    os.setsid()
    die_with_parent(server)
    for descriptor in inherited:
        os.close(descriptor)
    os.environ.pop(MACHINE_PROC, None)
    try:  # under no circumstances may the child continue as a second server
        entry, address, rank = order["entry"], order["address"], order["rank"]
        if order.get("cold"):
            os.execv(sys.executable, module_command(sys.executable, entry, address, str(rank)))
        importlib.import_module(entry).become(address, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def main() -> None:
    """Run the fork server on the socket whose descriptor is the first argument."""
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the tuner decides
    use_own_folder()  # for builds of its ranks too
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
