"""Places of ranks: Python, hostfile, Slurm or Ray, up to the connected Cluster."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from autotune._version import install_command
from autotune.commands.request import LOCAL, SCHEDULERS, Request, flag_of, parse_nodes
from autotune.errors import UserError
from autotune.executors.cluster.cluster import Cluster, NodeRequirements
from autotune.executors.cluster.ray_transport import RayNodes, ray_address
from autotune.executors.cluster.transports import (
    JOB,
    Host,
    Peers,
    Srun,
    Ssh,
    Transport,
    allocated_hosts,
    check_time_left,
    evenly_filled_hosts,
    in_allocation,
    read_hostfile,
)
from autotune.problem.hardware import Hardware
from autotune.util import inquiry
from autotune.util.bounds import whole_number
from autotune.util.interpreter import OWN, Interpreter, interpreter_at, other_python
from autotune.util.units import parse_duration
from autotune.versions import complaint

# -- Python of the ranks -----------------------------------------------------------------------------------------------

OPTION, VARIABLE = "--python", "AUTOTUNE_PYTHON"
ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")  # set on activation of an environment
TRAINING = ("torch", "deepspeed")  # required by every rank
NAMED_MODEL = (*TRAINING, "transformers")


def ranks_python(
    typed: str | None, print_line: Callable[[str], None], *, needed: Sequence[str] = (), optional: bool = False
) -> Interpreter:
    """Select the ranks' Python.

    Args:
        typed: `--python`; without it AUTOTUNE_PYTHON counts, then the tuner's own, then an active one.
        print_line: receives a line about the chosen Python if the user has not named it.
        needed: packages that are required; without any, neither packages nor versions are checked.
        optional: the tuner's own Python will do, unchecked, unless the user has named another.

    Raises:
        UserError: it is no Python, does not answer, lacks a package, or has an unsupported version.
    """
    found, named_by = _found(typed, print_line)
    if not needed or (optional and not named_by):
        return found
    try:
        _check_packages(found, needed, named_by)
        check_versions(found, f"{named_by or found.path}: ")
    except UserError as error:
        if not optional or names_python(typed):
            raise
        print_line(f"{error}: it is not used")
        return OWN
    return found


def names_python(typed: str | None) -> bool:
    """Check that `--python` or AUTOTUNE_PYTHON names a Python."""
    return typed is not None or bool(os.environ.get(VARIABLE, "").strip())


def check_studys_python(study: str, measured_in: str | None, typed: str | None, found: Interpreter) -> None:
    """Check that a study was measured in the ranks' Python, or that the user typed another one.

    Args:
        measured_in: the study's Python; None if that was the tuner's own.

    Raises:
        UserError: the study names a Python that the command line does not. A study supplies none.
    """
    if measured_in not in (None, other_python(found)) and not names_python(typed):
        raise UserError(f"study {study} was measured in {measured_in}. Add {OPTION} {measured_in}, or another Python.")


def check_versions(interpreter: Interpreter, named_by: str = "") -> None:
    """Check that the versions of an interpreter's packages are supported.

    Args:
        named_by: beginning of the message.

    Raises:
        UserError: a version is not supported; the message names all such versions, and the expected ones.
    """
    if why := complaint({package: interpreter.version(package) for package in inquiry.PACKAGES}):
        raise UserError(f"{named_by}{why}: use another version there, or another environment")


def _found(typed: str | None, print_line: Callable[[str], None]) -> tuple[Interpreter, str]:
    """Return the interpreter and the option or variable that named it, empty if none did."""
    for given, name in ((typed, OPTION), (os.environ.get(VARIABLE), VARIABLE)):
        if given is not None and (given.strip() or given is typed):
            if not given.strip():
                raise UserError(f"{name} is empty: expected the Python of the environment that you train in")
            return interpreter_at(given, name), f"{name} {given}"
    if OWN.version("torch") is None and (active := _active()) is not None:
        print_line(f"ranks run in {active.path}, of the active environment; {OPTION} names another")
        return active, f"the active environment's {active.path}"
    return OWN, ""


def _active() -> Interpreter | None:
    """Return the Python of an activated environment that has torch and is not the tuner's, or None."""
    for variable in filter(os.environ.get, ACTIVE):
        with suppress(UserError):  # the tuner's own Python has no torch either
            found = interpreter_at(os.environ[variable], variable)
            if found.version("torch") is not None:
                return found
    return None


def _check_packages(found: Interpreter, needed: Sequence[str], named_by: str) -> None:
    missing = [package for package in needed if found.version(package) is None and not found.has(package)]
    if not missing:
        return
    lacking = " and no ".join(missing)
    if named_by:
        raise UserError(
            f"{named_by}: no {lacking} there; expected the Python of the environment that you train in "
            f"(`{shlex.join([str(found.path), '-m', 'pip', 'install', *missing])}` adds to it)"
        )
    raise UserError(
        f"no {lacking} in autotune's own environment ({sys.prefix}): give {OPTION} PATH of the environment that you train "
        f"in (or set {VARIABLE}), or install it here: {install_command('train')}"
    )


# -- nodes -------------------------------------------------------------------------------------------------------------

# arguments: number of nodes, devices on each, and kind of device
Placing = Callable[[int | None, int | None, str], Sequence[Host]]


# options that name several machines, as messages list them
SEVERAL_MACHINES = " or ".join(["--hostfile FILE", *(f"--executor {name}" for name in SCHEDULERS)])


def check_executor(executor: str) -> None:
    """Check the value of `--executor`, the same for all commands.

    Raises:
        UserError: there is no such executor; the message lists those that there are.
    """
    names = (LOCAL, *SCHEDULERS)
    if executor not in names:
        raise UserError(f"--executor {executor}: expected {' or '.join(names)}")


@dataclasses.dataclass
class Nodes:
    """The requested nodes, and after `reach` the cluster of them.

    Args:
        place: returns the hosts to use, given a number of nodes, of devices on each (None: all), and a device.
    """

    place: Placing
    transport: Transport
    folder: Path
    print_line: Callable[[str], None]
    request: Request
    interpreter: Interpreter  # of the ranks
    variables: Sequence[str] = ()  # variables of this process that a typed command sets; sent too
    cluster: Cluster | None = None

    def also_send(self, variables: dict[str, str]) -> None:
        """Send these variables of this process to the nodes, too."""
        self.variables = [*variables]

    def reach(
        self,
        device: str,
        per_node: int | None,
        memory_cap_bytes: int | None,
        headroom: float,
        path: str,
        count: int | None = None,
    ) -> Hardware:
        """Reach and compare all nodes, and return their joint hardware.

        Args:
            per_node: devices of each; None: all.
            path: folder that each must have; empty: none.
            count: number of nodes if the user named none; None: `place` decides.

        Raises:
            UserError: a node cannot be reached, lacks something, or differs from the others.
        """
        request = self.request
        typed = parse_nodes(request.nodes)[0] if request.nodes else count
        hosts = self.place(typed, per_node, device)
        requirements = NodeRequirements(
            device,
            headroom,
            memory_cap_bytes,
            path,
            request.interface,
            (*request.exports, *self.variables),
            self.interpreter,
        )
        self.cluster = Cluster(hosts, self.transport, requirements, self.folder, print_line=self.print_line)
        return self.cluster.reach()


@contextmanager
def named_nodes(
    named: Request, print_line: Callable[[str], None], interpreter: Interpreter = OWN, *, lasting: bool = False
) -> Iterator[Nodes | None]:
    """Yield the named nodes before any is reached, and end each agent at the end. None: this machine is used.

    Args:
        interpreter: of the ranks.
        lasting: for a training. Otherwise an allocation must last as long as the budget.

    Raises:
        UserError: the hostfile or a filter is wrong, or an option needs a hostfile.
    """
    scheduled = named.executor in SCHEDULERS
    peers = None if scheduled or named.hostfile else launched_peers(os.environ)
    if scheduled or peers:
        combined = f"cannot be combined with --executor {named.executor}"
        refuse(named, "hostfile", f"{combined}, which has its own nodes")
        refuse(named, "include exclude", f"filters a hostfile and {combined}")
    elif named.hostfile is None:
        refuse(named, "include exclude nodes interface exports", f"needs several machines: {SEVERAL_MACHINES}")
        yield None
        return
    with ExitStack() as kept:
        folder = Path(
            kept.enter_context(tempfile.TemporaryDirectory(prefix="autotune-nodes-", ignore_cleanup_errors=True))
        )
        transport: Transport
        place: Placing
        if named.executor == "ray":
            transport = kept.enter_context(closing(RayNodes(ray_address(), echo=lasting)))
            place = transport.place
        elif peers:
            print_line(
                f"rank {peers.rank} of the {peers.size} processes of a launcher (MASTER_ADDR): rank 0 tunes, the others are "
                "its agents"
            )
            if peers.rank:
                peers.join()
            transport = kept.enter_context(closing(peers))
            place = transport.place
        elif named.hostfile is not None:
            hosts = read_hostfile(named.hostfile, named.include, named.exclude)
            place, transport = partial(evenly_filled_hosts, hosts, str(named.hostfile)), Ssh()
        else:
            place, transport = partial(evenly_filled_hosts, *_allocated(named.gpus)), Srun(os.environ[JOB])
            if not lasting:
                check_time_left(parse_duration(named.budget))
        made = Nodes(place, transport, folder, print_line, named, interpreter)
        try:
            yield made
        finally:
            if made.cluster is not None:
                made.cluster.close()


# Variables of launchers: a process's rank and the number of processes, then where rank 0 is.
_RANKS = (
    ("PET_NODE_RANK", "PET_NNODES"),  # PyTorchJob, and Kubeflow's trainer
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun
    ("RANK", "WORLD_SIZE"),
)
_ADDRESSES = (("PET_MASTER_PORT", "PET_MASTER_ADDR"), ("MASTER_PORT", "MASTER_ADDR"))


def launched_peers(environment: MutableMapping[str, str]) -> Peers | None:
    """Return the processes of this one's launcher; None if it started only this one or names no address.

    Torchrun listens at the port itself, for its ranks. A variable that says so is removed, because trials are none.
    """
    known = [[pair for pair in pairs if environment.keys() >= {*pair}] for pairs in (_RANKS, _ADDRESSES)]
    if not all(known):
        return None
    (rank, size), (port, address) = known[0][0], known[1][0]
    number, count, at = (whole_number(environment[name], name) for name in (rank, size, port))
    if environment.pop("TORCHELASTIC_USE_AGENT_STORE", "") == "True":
        at += 1
    if count < 2:
        return None
    return Peers(number, count, (environment[address], at))


def refuse(request: Request, names: str, why: str) -> None:
    """Raise UserError for the first of these fields that was given.

    Args:
        names: separated by spaces.
    """
    for name in names.split():
        if getattr(request, name):
            raise UserError(f"{flag_of(name)} {why}. Remove {flag_of(name)}.")


def _allocated(gpus: int | None) -> tuple[list[Host], str]:
    """Return the hosts of Slurm's allocation, and a name for them."""
    if not in_allocation():
        raise UserError(
            "--executor slurm: this process is in no allocation. Call autotune in a batch script (sbatch) or in salloc."
        )
    return allocated_hosts(gpus), f"allocation {os.environ[JOB]}"
