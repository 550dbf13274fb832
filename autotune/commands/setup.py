"""Setups that `commands/request.py` makes from a request: frozen and complete, with nothing left to parse."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.executors.cluster.cluster import Cluster
from autotune.executors.machine import Slot
from autotune.executors.replay import Landscape
from autotune.problem.candidate import Candidate
from autotune.problem.gpu_specs import Price
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, Script
from autotune.problem.space import SearchSpace
from autotune.results.plan import TOKENS


@dataclass(frozen=True, kw_only=True)
class PlanSetup:
    """Setup of a plan: the job, the hardware and the space."""

    job: Job
    hardware: Hardware
    space: SearchSpace
    faults: tuple[str, ...] = ()  # known faults of the installed DeepSpeed that concern the job, for display
    tokens: float = TOKENS  # tokens of the whole training, for its hours and cost
    price: Price | None = None  # of one of these GPUs
    host_assumed: bool = False  # main memory was neither measured nor typed
    precision_typed: bool = False  # otherwise each card has its own default


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Setup of `run`, validated and complete.

    A script's job and candidates are stand-ins until the probe run; `commands.script_probe.after_probe` replaces them.
    """

    job: Job
    hardware: Hardware
    space: SearchSpace
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]  # for display, before the search
    warnings: tuple[str, ...] = ()  # known faults of the user's own config, for display before anything runs
    landscape: Landscape | None  # the recorded table to search; None: machines are used
    nodes: Cluster | None = None  # the machines, reached; None: this one
    slots: tuple[Slot, ...] = ()  # for parallel candidates, the first on `hardware`; empty: one candidate at a time
    parallel_offload: bool = False  # also candidates whose speed depends on the host
    name: str  # of the study
    folder: Path  # `runs/NAME`, not created yet
    storage: str | None  # the database's URL; None: a file in the folder
    out: Path | None  # the winner's path; None: in the folder
    found_no_gpu: bool  # CPU ranks were not requested
    global_batch_size: int | None  # samples per optimizer step, as requested
    free_batch: bool  # a script's own batch is not kept either
    budget_seconds: float
    max_trials: int | None
    tolerance: float  # share of the speed
    exhaustive: bool
    isolation: str
    seed: int
    force: bool
    unprotected: bool = False  # user code runs without a sandbox on machines that offer none
    gallery: bool = True  # the search may start from the gallery
    command: str = ""  # as typed, to repeat the call; empty if nothing was typed


@dataclass(frozen=True, kw_only=True)
class LaunchSetup:
    """A script to train, and the source of its configs: a study, or the plan for a model."""

    script: Script
    ranks: int | None  # from the script's command
    ranks_said: str  # the origin of `ranks`
    study: str | None
    storage: str | None
    plan: PlanSetup | None  # None if a study is named
    global_batch_size: int | str | None  # samples per optimizer step, as requested, or `free`
    folder: Path | None  # of a launch without a study, not created yet
    memory_cap_bytes: int | None
    max_restarts: int
    silent_seconds: float
    convert: bool
