"""One machine: launcher, DeepSpeed ops, device slots and scratch folder."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from autotune.errors import MachineError, NotProtected, UserError
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, detect, threads_per_rank, usable_cpus
from autotune.problem.job import Job
from autotune.problem.nvml import ARCHITECTURES, unreadable_architectures, visible_gpus
from autotune.rank.ds_config import GROUP_OP, needed_ops
from autotune.rank.sandbox import Protection, Sandbox, remove
from autotune.script.argument_files import output_folder
from autotune.script.argument_writer import output_folders, write_trial_files
from autotune.util.entry_points import SANDBOX
from autotune.util.interpreter import OWN, Interpreter, bound_command
from autotune.util.units import counted, format_duration
from autotune.workers.jit_ops import FOLDER, NOT_BUILT, is_built, own_folder
from autotune.workers.launchers import ForkLauncher, Launcher, SpawnLauncher, training_environment, trial_environment
from autotune.workers.protocol import Message

# -- local machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankRequirements:
    """Requirements of a job's ranks on their machine."""

    device: str  # `cuda` or `cpu`
    threads: int  # CPU threads per rank
    isolation: str = "spawn"  # cold starts; `fork`: from a server that has imported everything
    modules: Sequence[str] = ()  # additional imports of the fork server
    model_type: str | None = None  # transformers model type, which the server also imports
    training: bool = False  # ranks train to the end in the user's own environment, instead of being measured
    cwd: str | None = None  # working directory of the ranks; None: this process's
    variables: Mapping[str, str] = field(default_factory=dict)  # additional environment variables of the ranks
    interpreter: Interpreter = OWN

    def environment(self) -> dict[str, str]:
        """Return a rank's initial environment."""
        make = training_environment if self.training else trial_environment
        return {**make(self.device, self.threads, self.interpreter), **self.variables}


class LocalMachine:
    """Starts ranks on this machine. The local executor has one, and so has the agent of every node (`cluster/agent.py`).

    Args:
        folder: for the logs of the fork server or of cold starts.
        cancelled: polled several times a second while a server imports and builds.
    """

    _needs: RankRequirements  # of `open`

    def __init__(self, folder: Path, ops: Ops, cancelled: Callable[[], bool]) -> None:
        self.folder, self.ops, self.cancelled = folder, ops, cancelled
        self.opened_launcher: Launcher | None = None
        self._begun: tuple[RankRequirements, ForkLauncher] | None = None

    @property
    def launcher(self) -> Launcher:
        """Return the launcher, after `open`."""
        assert self.opened_launcher is not None
        return self.opened_launcher

    def begin(self, needs: RankRequirements) -> None:
        """Start the fork server that `open` waits for, so that its imports run in the background."""
        self.close()
        if not needs.training:
            self.folder.mkdir(parents=True, exist_ok=True)
            server = ForkLauncher(
                needs.environment(),
                self.folder / "server.log",
                cancelled=self.cancelled,
                python=needs.interpreter.path,
                cold=needs.isolation == "spawn",
                model_type=needs.model_type,
                modules=list(needs.modules),
            )
            server.begin()
            self._begun = needs, server

    def open(self, needs: RankRequirements) -> None:
        """Create the launcher.

        Raises:
            UserError: the fork server died, or hangs.
            Stopped: the user cancelled.
        """
        self._needs = needs
        if self._begun is None or self._begun[0] != needs:
            self.begin(needs)
        if self._begun is not None:
            server, self._begun = self._begun[1], None
            server.open()
            self.opened_launcher = server
        else:
            self.opened_launcher = SpawnLauncher(needs.environment(), None, needs.cwd, needs.interpreter.path)

    def load_ops(self, names: Sequence[str]) -> bool:
        """Build and load DeepSpeed's ops; return whether ranks may still be forked. See `Ops.load`.

        A training's ranks load built ops themselves. The folder of the ops is known for this process's environment only.
        """
        needs = self._needs
        if needs.training and not needs.interpreter.is_other:
            folder = Path(os.environ.get(FOLDER) or own_folder(needs.device))
            names = [name for name in names if not is_built(name, folder)]
        log, python = self.folder / "server.log", needs.interpreter.path
        return self.ops.load(self.launcher, names, needs.environment(), log, self.cancelled, python)

    @property
    def broken(self) -> bool:
        """True if the fork server was killed or could not be restarted."""
        return self.opened_launcher is None or (
            isinstance(self.opened_launcher, ForkLauncher) and not self.opened_launcher.alive
        )

    def reconnect(self) -> None:
        """Close the launcher; `open` creates another."""
        self.close()

    def is_shared_path(self, path: Path) -> bool:
        """Return True, because all ranks are on this machine."""
        return True

    def close(self) -> None:
        """Stop the launcher, also one that is still starting."""
        begun, opened = self._begun, self.opened_launcher
        self._begun = self.opened_launcher = None
        if begun:
            begun[1].close()
        if opened:
            opened.close()


# -- ops ---------------------------------------------------------------------------------------------------------------


class Ops:
    """DeepSpeed's ops of one study or training, which are built before a rank needs them.

    Args:
        print_line: receives lines for the user.
        show: receives the current operation for a live view; empty when it is done.
    """

    def __init__(self, print_line: Callable[[str], None], show: Callable[[str], None] = lambda text: None) -> None:
        self._print_line, self._show = print_line, show
        self._names: list[str] = []  # builders requested so far
        self._server: ForkLauncher | None = None  # the server that has loaded them
        self.failed: dict[str, str] = {}  # reason by builder
        self.folder = ""  # this environment's own folder of ops; empty if TORCH_EXTENSIONS_DIR is set
        self.build_seconds = 0.0
        self._building_since: float | None = None  # None while nothing is built

    @property
    def all_build_seconds(self) -> float:
        """Return the seconds of all builds, waits for those of other processes included, and one that is going on."""
        now = time.monotonic()
        return self.build_seconds + (now - self._building_since if self._building_since is not None else 0.0)

    def load(
        self,
        launcher: Launcher,
        names: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cancelled: Callable[[], bool] = lambda: False,
        python: str = OWN.path,
    ) -> bool:
        """Make the ops of these builders and the earlier ones available to the launcher's ranks.

        A separate process builds missing ops, before a trial and outside of the ranks' namespace. It has the given environment,
        log file and Python. A fork server loads them, and cold ranks load them themselves.

        Returns:
            True if a fork server may still be forked.

        Raises:
            UserError: that process or the server died, or a build hangs.
            MachineError: the op cannot be built that every rank loads.
            Stopped: the user cancelled.
        """
        new = [name for name in dict.fromkeys(names) if name not in self._names]
        unreadable = unreadable_architectures() if ARCHITECTURES in env else []
        if new and unreadable and not self._names:
            done = f"ranks and builds get {ARCHITECTURES}={env[ARCHITECTURES]}"
            self._print_line(f"{done}: DeepSpeed cannot read {', '.join(unreadable)}")
        server = launcher if isinstance(launcher, ForkLauncher) and not launcher.cold else None
        fork_safe, missing = True, new
        if server and server is not self._server:  # another one loaded the earlier ops
            fork_safe, missing = self._load(server, [*self._names, *new])
        elif server and new:
            fork_safe, missing = self._load(server, new)
        if missing:
            made = ForkLauncher(
                env, log, cancelled=cancelled, python=python, contained=False, model_type=None, modules=[]
            )
            with closing(made) as builder:
                builder.open()
                self._load(builder, missing)
        built = [name for name in missing if name not in self.failed]
        if server and built:
            fork_safe, _ = self._load(server, built)
        self._names, self._server = [*self._names, *new], server
        return fork_safe

    def _load(self, server: ForkLauncher, names: list[str]) -> tuple[bool, list[str]]:
        """Return whether the server may still be forked, and the ops that are not built yet."""
        try:
            answer = server.load_ops(names, self._report)
        finally:
            self.build_seconds, self._building_since = self.all_build_seconds, None  # a stopped build counts, too
            self._show("")
        self.folder = "" if FOLDER in os.environ else answer["folder"]
        failed = {builder: why for builder, why in answer["failed"].items() if why != NOT_BUILT}
        if GROUP_OP in failed:
            raise MachineError(
                f"no rank can start: DeepSpeed's {op_name(GROUP_OP)} cannot be built ({failed[GROUP_OP]})"
            )
        for builder, why in failed.items():
            if builder not in self.failed:
                self._print_line(f"DeepSpeed's {op_name(builder)} cannot be built ({why})")
            self.failed[builder] = why
        return bool(answer["fork_safe"]), [name for name in answer["failed"] if name not in failed]

    def _report(self, message: Message) -> None:
        op, state, seconds = op_name(message["op"]), message["state"], message.get("seconds", 0.0)
        if state in ("done", "failed"):
            built = bool(message.get("built"))  # also while it was loaded, if it was out of date
            if built or state == "failed" or self._building_since is not None:
                self.build_seconds += seconds
            self._building_since = None
            if built:
                self._print_line(f"built DeepSpeed's {op} in {format_duration(seconds)}")
            return
        text = {
            "loading": f"loading DeepSpeed's {op}",
            "waiting": f"waiting for DeepSpeed's {op}: another process builds ops",
            "building": f"building DeepSpeed's {op} (once for this environment, maybe minutes; outside the budget)",
        }[state]
        if seconds:  # so long has a wait lasted
            self._show(f"{text} ({format_duration(seconds)})")
            return
        if state != "loading":
            self._building_since = self._building_since or time.monotonic()
            self._print_line(text)
        self._show(text)

    def buildable(self, candidates: Sequence[Candidate], job: Job, device: str) -> tuple[list[Candidate], list[str]]:
        """Return the candidates that need no failed op, and one line per failed op that excludes some.

        Raises:
            UserError: no candidate is left.
        """
        if not self.failed or not candidates:
            return list(candidates), []
        missing = {one: set(needed_ops([one], job, device)).intersection(self.failed) for one in candidates}
        left = [one for one in candidates if not missing[one]]
        lines = []
        for builder in sorted(set().union(*missing.values())):
            count = sum(builder in needed for needed in missing.values())
            of = f"{count} of {len(candidates)} candidates need it"
            lines.append(f"DeepSpeed's {op_name(builder)} cannot be built ({self.failed[builder]}): {of}")
        if not left:
            raise UserError(f"{'; '.join(lines)}; `autotune doctor` says what is missing")
        return left, [f"{line}: left out" for line in lines]


def op_name(builder: str) -> str:
    """Return `CPUAdam` for `CPUAdamBuilder`."""
    return builder.removesuffix("Builder")


# -- device slots ------------------------------------------------------------------------------------------------------

CPUS = "AUTOTUNE_CPUS"  # environment variable with the CPUs of a rank's job


@dataclass(frozen=True)
class Slot:
    """Devices of one job."""

    hardware: Hardware
    variables: Mapping[str, str]  # environment of its ranks


def slots(
    parallel: int, device: str, ranks: int | None, *, memory_cap_bytes: int | None = None, headroom: float = 0.05
) -> tuple[Slot, ...]:
    """Divide this machine's GPUs or CPUs equally between `parallel` jobs.

    Args:
        device: `auto`, `cuda` or `cpu`.
        ranks: ranks per job.
        memory_cap_bytes: limit per rank.
        headroom: share of capacity left free.

    Raises:
        UserError: there are too few devices, or they differ.
    """
    if ranks is None:
        raise UserError(f"--parallel {parallel}: say with --gpus how many devices each of the {parallel} jobs has")
    gpus = visible_gpus() if device != "cpu" else []
    if not gpus:
        return _on_cpus(parallel, detect(device, ranks, headroom=headroom), memory_cap_bytes)
    if len(gpus) < parallel * ranks:
        raise _too_many(parallel, f"{len(gpus)} GPUs", ranks, len(gpus) // ranks)
    count = parallel * ranks
    whole = detect(device, count, memory_cap_bytes=memory_cap_bytes, headroom=headroom)
    if " + " in whole.name:
        raise UserError(
            f"--parallel {parallel}: these GPUs are unlike ({whole.name}), and so would be what they measure; choose alike ones "
            "with CUDA_VISIBLE_DEVICES"
        )
    places = [whole.gpus[at : at + ranks] for at in range(0, parallel * ranks, ranks)]
    return tuple(
        Slot(dataclasses.replace(whole, count=ranks, gpus=place), {"CUDA_VISIBLE_DEVICES": ",".join(place)})
        for place in places
    )


def _on_cpus(parallel: int, machine: Hardware, memory_cap_bytes: int | None) -> tuple[Slot, ...]:
    """Divide CPUs and main memory equally. Ranks keep the smaller number of threads also in verification."""
    ranks, cpus = machine.count, usable_cpus()
    threads = threads_per_rank(ranks * parallel)
    if cpus < parallel * ranks * threads:
        raise _too_many(parallel, f"{cpus} CPUs", ranks, cpus // (ranks * threads), threads)
    share = dataclasses.replace(machine, memory_bytes=machine.memory_bytes // parallel, threads=threads)
    share, ours, each = share.capped(memory_cap_bytes), sorted(os.sched_getaffinity(0)), ranks * threads
    places = [ours[at : at + each] for at in range(0, parallel * each, each)]
    return tuple(Slot(share, {CPUS: ",".join(map(str, place))}) for place in places)


def _too_many(parallel: int, there: str, ranks: int, most: int, threads: int = 1) -> UserError:
    what = counted(ranks, "rank") + (f" with {threads} threads each" if threads > 1 else "")
    hold = f"hold {counted(most, 'job')} of {what}; try --parallel {most}" if most else f"hold no job of {what}"
    return UserError(f"--parallel {parallel}: {there} {hold}")


# -- scratch folder ----------------------------------------------------------------------------------------------------

_SCRATCH = "scratch"


def protection_of(cwd: Path, folder: Path, *, unprotected: bool, interpreter: Interpreter = OWN) -> Protection:
    """Return the protection of trials whose script runs in `cwd` and whose folders are in `folder`.

    Raises:
        NotProtected: the machine has none, and `unprotected` is false.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = _available(cwd, folder.resolve(), interpreter)
    if found is Protection.NONE and not unprotected:
        raise NotProtected
    return found


@cache
def _available(cwd: Path, folder: Path, interpreter: Interpreter) -> Protection:
    """Return the best mechanism that this machine offers, by entering a sandbox in a separate process."""
    words, aside = bound_command(interpreter.path, SANDBOX, str(folder)), subprocess.DEVNULL
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(
            words,
            cwd=cwd,
            env=interpreter.environment(),
            stdin=aside,
            stdout=subprocess.PIPE,
            stderr=aside,
            encoding="utf-8",
            timeout=60,
        )
        return Protection((done.stdout.splitlines() or [""])[-1])  # a sitecustomize may print lines before
    return Protection.NONE


def trial_sandbox(
    folder: Path, job: Job, candidate: Candidate, study: Path, *, unprotected: bool, kept: Sequence[str] = ()
) -> Sandbox:
    """Create a trial's sandbox, with copies of argument files that carry the candidate.

    All trials of an executor use one folder, one after the other. Libraries that cache by file path, such as
    `datasets`, therefore find their caches in the next trial.

    Args:
        study: the study's folder, which a view of the user's folder leaves out.
        kept: folders whose content outlives the trial; created if missing.

    Raises:
        NotProtected: this machine offers no protection, and `unprotected` is false.
        OSError: the disk is full, or the folder cannot be written.
    """
    cwd = Path(job.script.cwd if job.script else os.getcwd())
    protection = protection_of(cwd, folder, unprotected=unprotected, interpreter=job.interpreter)
    kept = [*kept, *_swap_folders(job, candidate)]
    for one in kept:
        os.makedirs(one, exist_ok=True)
    sandbox = Sandbox(folder.resolve() / _SCRATCH, cwd, protection, tuple(kept))
    sandbox.create(study)
    if job.script is not None:
        overlaid = protection is Protection.OVERLAY  # with an overlay the script uses its own output folders
        write_trial_files(job, candidate, sandbox.files, quiet=not overlaid)
        for theirs in () if overlaid else output_folders(job.script):
            if theirs.is_dir():
                output_folder(sandbox.files, theirs)
    return sandbox


def _swap_folders(job: Job, candidate: Candidate) -> Iterator[str]:
    """Yield DeepSpeed's NVMe swap folders, which a sandbox layer would move to another drive."""
    own = job.profile.config or {}
    for config in (own, candidate.ds_config(job)):
        zero = config.get("zero_optimization")
        for name in ("offload_optimizer", "offload_param"):
            part = zero.get(name) if isinstance(zero, dict) else None
            if isinstance(part, dict) and os.path.isdir(path := str(part.get("nvme_path", ""))):
                yield os.path.join(os.path.abspath(path), "zero_stage_3")


def remove_scratch(folder: Path) -> None:
    """Remove the files of an executor's last trial."""
    remove(folder.resolve() / _SCRATCH)
