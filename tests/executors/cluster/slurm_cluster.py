"""A real Slurm for tests: a controller and two slurmd's on this machine, `n1` and `n2`, with keys and folders of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

NEEDED = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "salloc")
_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
_MISSING = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
WHY_NOT = "no Slurm on this machine: `make cluster-tests` installs one" if _MISSING else ""
if not WHY_NOT and os.geteuid() != 0:
    WHY_NOT = "Slurm's daemons need root"
_CONFIG = """\
ClusterName=t
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES MaxTime=60 DefaultTime=30 State=UP
"""


@dataclass
class Slurm:
    """The running one."""

    folder: Path
    environment: dict[str, str]

    def call(self, *words: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=seconds
        )

    @contextmanager
    def allocation(self, nodes: int = 2) -> Iterator[dict[str, str]]:
        """The variables of a job that holds so many nodes."""
        done = self.call("salloc", "--no-shell", f"--nodes={nodes}", "--time=10")
        job = next(word for word in done.stderr.split() if word.isdigit())
        names = self.call("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()
        try:
            yield {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": names}
        finally:
            self.call("scancel", job)

    def processes(self) -> list[psutil.Process]:
        """What jobs run."""
        found = []
        for file in self.folder.glob("slurmd.n*.pid"):
            with suppress(psutil.Error, ValueError):
                found += psutil.Process(int(file.read_text())).children(recursive=True)
        steps = [process for process in psutil.process_iter() if _is_step(process, self.folder)]
        below = [child for step in steps for child in step.children(recursive=True)]
        return [process for process in {*found, *below} if _runs(process) and not _name(process).startswith("slurm")]


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_step(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):
        return process.name() == "slurmstepd" and process.environ().get("SLURM_CONF", "").startswith(str(folder))
    return False


def _ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    found = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return found


@contextmanager
def made_slurm(folder: Path) -> Iterator[Slurm]:
    """A Slurm of two nodes for as long as the `with` lasts."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(folder=folder, ports=_ports(3)))
    made = Slurm(folder, {"SLURM_CONF": str(config), "PATH": _PATH})
    env = {**os.environ, **made.environment}
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/key"]
    munge += [f"--{what}-file={folder}/munge.{what}" for what in ("log", "pid", "seed")]
    commands = [munge, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in ("n1", "n2"))]
    processes = []
    try:
        for words in commands:
            with (folder / f"{words[0]}.out").open("ab") as out:
                processes.append(
                    subprocess.Popen(
                        words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                    )
                )
            time.sleep(0.5 if words[0] != "slurmd" else 0.0)
        until = time.monotonic() + 60
        while made.call("sinfo", "-h", "-o", "%T").stdout.split() != ["idle"]:
            logs = "\n".join(file.read_text()[-600:] for file in folder.glob("*.log") if file.is_file())
            assert time.monotonic() < until, f"{made.call('sinfo').stdout}\n{logs}"
            time.sleep(0.2)
        yield made
    finally:
        with suppress(subprocess.SubprocessError):
            made.call("scancel", "--user=root")
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            if process.poll() is None:
                process.kill()
                process.wait()
