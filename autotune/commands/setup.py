"""What `commands/request.py` makes of a request: frozen and complete, with nothing left to parse."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.executors.nodes.cluster import Cluster
from autotune.executors.replay import Landscape
from autotune.executors.slots import Slot
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, Script
from autotune.problem.prices import Price
from autotune.problem.space import SearchSpace
from autotune.results.plan import TOKENS


@dataclass(frozen=True, kw_only=True)
class PlanSetup:
    """What would be trained, on what, in which space."""

    job: Job
    hardware: Hardware
    space: SearchSpace
    tokens: float = TOKENS  # of the whole training, to say hours and cost for
    price: Price | None = None  # of one of these GPUs
    host_assumed: bool = False  # main memory was neither measured nor typed
    precision_typed: bool = False  # else each card has its own default


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What `run` was asked, checked and complete.

    A script's job and candidates are stand-ins until its first run; `commands.probe.after_probe` replaces them.
    """

    job: Job
    hardware: Hardware
    space: SearchSpace
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]  # for people, before it begins
    landscape: Landscape | None  # the recorded table that is searched; None: machines are
    nodes: Cluster | None = None  # the machines, reached; None: this one
    slots: tuple[Slot, ...] = ()  # for candidates beside each other, the first on `hardware`; none: one at a time
    parallel_offload: bool = False  # also of what the host's speed decides
    name: str  # of the study
    folder: Path  # `runs/NAME`, not made yet
    storage: str | None  # the database's URL; None: a file in the folder
    out: Path | None  # where the winner goes; None: into the folder
    found_no_gpu: bool  # CPU ranks were not asked for
    global_batch_size: int | None  # samples an optimizer step, as asked for
    free_batch: bool  # a script's own is not kept either
    budget_seconds: float
    max_trials: int | None
    tolerance: float  # a share of the speed
    exhaustive: bool
    isolation: str
    seed: int
    force: bool
    unprotected: bool = False  # user code runs without a sandbox on machines that offer none
    gallery: bool = True  # whether the search may begin with what others found
    command: str = ""  # as typed, for whoever does it again; empty where nothing was typed


@dataclass(frozen=True, kw_only=True)
class LaunchSetup:
    """A script to train, and where its configs come from: a study, or the plan for a model."""

    script: Script
    ranks: int | None  # as the script's command says
    ranks_said: str  # where it says so
    study: str | None
    storage: str | None
    plan: PlanSetup | None  # None where a study is named
    global_batch_size: int | str | None  # samples an optimizer step, as asked for, or `free`
    folder: Path | None  # of a launch without a study, not made yet
    memory_cap_bytes: int | None
    max_restarts: int
    silent_seconds: float
    convert: bool
