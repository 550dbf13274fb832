"""Conversion of a typed request to a frozen setup. Only this module parses the texts of options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from autotune.commands.early import check_bounds, check_early
from autotune.commands.global_batch import FREE, batch_note, kept_batch, parse_global_batch
from autotune.commands.nodes import SCHEDULERS, Nodes
from autotune.commands.plan_hardware import planned_hardware, roomy, slice_of
from autotune.commands.precision import precision_of
from autotune.commands.seq_len import seq_len_of
from autotune.commands.setup import LaunchSetup, PlanSetup, Setup
from autotune.commands.study_names import name_since_edits, study_folder, study_name
from autotune.commands.typed_command import own_variables_note, ranks_asked_for, typed_command
from autotune.errors import UserError
from autotune.executors.replay import Landscape, load_landscape
from autotune.executors.slots import Slot, slots
from autotune.problem.candidate import Candidate
from autotune.problem.fitting import fitted
from autotune.problem.hardware import Hardware, detect
from autotune.problem.job import Job, Script, load_lengths, parse_lora
from autotune.problem.models import ModelSpec, resolve_model, workload_spec
from autotune.problem.needs import missing_package
from autotune.problem.own_config import load_ds_config
from autotune.problem.prices import Price, price_table
from autotune.problem.script_job import first_candidates, unknown_job
from autotune.problem.space import SearchSpace
from autotune.problem.space_file import load_space
from autotune.problem.tasks import image_size_of, task_of
from autotune.units import parse_count, parse_duration, parse_memory, parse_share

DEFAULT_HEADROOM = "5%"


@dataclass
class Request:
    """Options of `run`, `plan` or `launch`, one per field, with texts as typed."""

    model: str | None = None
    gpus: int | None = None
    budget: str = "30m"
    device: str = "auto"
    seq_len: int | str | None = None  # tokens; `max`: the model's longest
    precision: str | None = None
    optimizer: str = "adamw"
    global_batch_size: int | str | None = None  # sequences; `free`: the fastest
    ds_config: Path | None = None
    space: str | None = None
    memory_cap: str | None = None
    headroom: str | None = None
    study: str | None = None
    storage: str | None = None
    parallel: int = 1  # jobs that are measured in parallel
    parallel_offload: bool = False  # also jobs whose speed depends on the host
    seed: int = 0
    max_trials: int | None = None
    out: Path | None = None
    force: bool = False
    unprotected: bool = False
    isolation: str = "fork"
    trust_remote_code: bool = False
    trust: bool = False  # trust the things that a study or a table names
    tolerance: str = "1%"
    exhaustive: bool = False
    executor: str = "local"
    ray_address: str | None = None
    script: list[str] = field(default_factory=list)  # words typed after `--`
    maps: list[str] = field(default_factory=list)
    worst_case: bool = False
    lora: str | None = None
    attention: str | None = None
    nodes: int | None = None  # machines; None: one, or all of the hostfile
    tokens: str | None = None
    price: float | None = None
    host_memory: str | None = None
    compiled: bool = False
    lengths: Path | None = None
    packed: bool = False
    workload: str | None = None
    task: str | None = None  # None: the task of the model's configuration
    image_size: int | None = None
    max_restarts: int = 10
    hang_timeout: str = "30m"
    convert: bool = False
    python: str | None = None  # the environment where ranks run
    hostfile: Path | None = None
    include: str | None = None
    exclude: str | None = None
    interface: str | None = None  # network interface between nodes
    sync: bool = False
    exports: list[str] = field(default_factory=list)  # variables that nodes are sent, besides the usual ones
    no_gallery: bool = False
    runs: Path = Path("runs")
    command: str = ""  # the whole command as typed

    def __post_init__(self) -> None:
        check_bounds(vars(self))


def run_setup(request: Request, nodes: Nodes | None = None) -> Setup:
    """Return the Setup of `autotune run`, on this machine or on `nodes`, which are reached first.

    Raises:
        UserError: the request is wrong, or not possible here.
    """
    from autotune.search.clock import too_short  # imports optuna, which is slow and not needed for a plan

    budget_seconds = parse_duration(request.budget)
    if why := too_short(budget_seconds):
        raise UserError(why)
    check_early(request.seed, request.out, request.max_trials)
    if request.isolation not in ("fork", "spawn"):
        raise UserError(f"--isolation {request.isolation}: expected fork or spawn")
    batch = parse_global_batch(request.global_batch_size)
    tuned = _what_is_tuned(request, nodes)
    asked_batch = FREE if request.global_batch_size == FREE else batch
    name, edits = request.study or study_name(tuned.job, tuned.hardware, asked_batch), list[str]()
    if not (request.study or request.force):
        name, edits = name_since_edits(name, request.runs, tuned.job)
    return Setup(
        job=tuned.job,
        hardware=tuned.hardware,
        space=tuned.space,
        candidates=tuple(tuned.candidates),
        notes=(*tuned.notes, *edits),
        landscape=tuned.landscape,
        nodes=nodes.cluster if nodes is not None else None,
        name=name,
        folder=study_folder(request.runs, name),
        storage=request.storage or None,
        slots=tuple(tuned.slots),
        parallel_offload=request.parallel_offload,
        out=request.out,
        command=request.command,
        found_no_gpu=tuned.hardware.device == "cpu" and request.device == "auto" and tuned.landscape is None,
        global_batch_size=batch,
        free_batch=request.global_batch_size == FREE,
        budget_seconds=budget_seconds,
        max_trials=request.max_trials,
        tolerance=parse_share(request.tolerance),
        exhaustive=request.exhaustive,
        isolation=request.isolation,
        seed=request.seed,
        force=request.force,
        unprotected=request.unprotected,
        gallery=not request.no_gallery and tuned.landscape is None,  # an entry may be from the same table
    )


def plan_setups(request: Request, gpus: Sequence[str | None]) -> list[PlanSetup]:
    """Return the setup of `autotune plan` for each named GPU; None is the machine's own.

    Raises:
        UserError: bad input.
    """
    per_node = (1 if request.gpus is None else request.gpus, 1 if request.nodes is None else request.nodes)
    headroom = parse_share(request.headroom or DEFAULT_HEADROOM)
    host = parse_memory(request.host_memory, "--host-memory") if request.host_memory else None
    cap = _cap(request)
    tokens = parse_count(request.tokens, "--tokens") if request.tokens is not None else PlanSetup.tokens
    if request.price is not None and not 0 < request.price <= 10_000:
        raise UserError(f"--price {request.price:g}: expected dollars of one GPU and hour, above 0")
    if request.price is not None and len(gpus) > 1:
        raise UserError("--price is of one card: leave it out with --compare")
    setups = []
    for name in gpus:
        hardware = planned_hardware(name, *per_node, headroom, host, cap)
        job = _named_job(request, hardware)
        space = fitted(load_space(request.space or "default"), job, hardware).space
        known = price_table().get(hardware.facts or "")
        setups.append(
            PlanSetup(
                job=job,
                hardware=hardware,
                space=space,
                tokens=tokens,
                price=known if request.price is None else Price(request.price, "yours", "", "--price"),
                host_assumed=name is not None and request.host_memory is None,
                precision_typed=request.precision is not None,
            )
        )
    return setups


def launch_setup(request: Request, nodes: Nodes | None = None) -> LaunchSetup:
    """Return the setup of `autotune launch`: from `request.study`, or from a plan for `request.model` on `nodes`.

    Raises:
        UserError: bad input.
    """
    typed = typed_command(request.script, request.maps)
    script = typed.script
    if nodes is not None:
        nodes.also_send(typed.variables)
        nodes.also_sync(script)
        nodes.lasting = True
    if request.max_restarts < 0:
        raise UserError(f"--max-restarts {request.max_restarts}: expected 0 or more")
    silent_seconds = parse_duration(request.hang_timeout)
    plan = folder = None
    if request.study is None:
        if parse_global_batch(request.global_batch_size) is None:
            raise UserError(
                "launch without a study needs --global-batch-size: what the training is set to per optimizer step"
            )
        own = str(request.ds_config.resolve()) if request.ds_config else None
        script = dataclasses.replace(script, ds_config=own or script.ds_config)
        request = dataclasses.replace(request, gpus=ranks_asked_for(request.gpus, typed, request.device))
        hardware = _machine(request, nodes)
        job = _named_job(request, hardware)
        plan = PlanSetup(job=job, hardware=hardware, space=fitted(_space(request, hardware), job, hardware).space)
        folder = study_folder(request.runs, f"launch-{script.name}")
    return LaunchSetup(
        script=script,
        ranks=typed.ranks,
        ranks_said=typed.said,
        study=request.study,
        storage=request.storage or None,
        plan=plan,
        global_batch_size=FREE if request.global_batch_size == FREE else parse_global_batch(request.global_batch_size),
        folder=folder,
        memory_cap_bytes=_cap(request),
        max_restarts=request.max_restarts,
        silent_seconds=silent_seconds,
        convert=request.convert,
    )


# -- job, machine and space ----------------------------------------------------------------------------------------------


class _Tuned(NamedTuple):
    """Fields of Setup about the job and the machine."""

    job: Job
    hardware: Hardware
    space: SearchSpace
    candidates: Sequence[Candidate]
    notes: Sequence[str] = ()
    landscape: Landscape | None = None
    slots: Sequence[Slot] = ()


def _what_is_tuned(request: Request, nodes: Nodes | None) -> _Tuned:
    kind, _, table = request.executor.partition(":")
    if kind == "replay" and request.parallel != 1:
        raise UserError("--executor replay reads a table: leave --parallel out")
    if kind == "replay" and (nodes is not None or request.nodes is not None):
        raise UserError("--executor replay reads a table: leave the nodes out")
    if kind == "replay" and table:
        landscape = load_landscape(Path(table))
        if request.space:
            raise UserError("--executor replay brings its own space, the rows of its table: leave --space out")
        # A table's rows end at the memory limit itself, so that no headroom is taken off.
        headroom = parse_share(request.headroom) if request.headroom else 0.0
        rows = sorted(landscape.rows, key=str)
        return _Tuned(landscape.job(), landscape.hardware(headroom), landscape.space(), rows, landscape=landscape)
    if request.executor not in ("local", *SCHEDULERS):
        raise UserError(f"--executor {request.executor}: expected local, slurm, ray or replay:TABLE")
    if request.script:
        typed = typed_command(request.script, request.maps, request.worst_case, request.ds_config)
        request = dataclasses.replace(request, gpus=ranks_asked_for(request.gpus, typed, request.device))
        if nodes is not None:
            nodes.also_send(typed.variables)
            nodes.also_sync(typed.script)
    places = _slots(request, nodes)
    hardware = places[0].hardware if places else _machine(request, nodes)
    space = _space(request, hardware)
    if request.script:
        job = _script_job(request, typed.script, hardware)
        return _Tuned(job, hardware, space, first_candidates(typed.script), own_variables_note(typed), slots=places)
    for option, used in (("--map", bool(request.maps)), ("--worst-case", request.worst_case)):
        if used:
            raise UserError(f"{option} is about a script: give it after `--`, like `-- train.py …`")
    job = _named_job(request, hardware)
    space, notes = fitted(space, job, hardware)
    notes = [*batch_note(request.global_batch_size, job, request.ds_config), *notes]
    return _Tuned(job, hardware, space, space.candidates(job), notes, slots=places)


def _slots(request: Request, nodes: Nodes | None) -> tuple[Slot, ...]:
    """Return the slots of `--parallel`; empty if one candidate is measured at a time."""
    if request.parallel == 1:
        return ()
    if nodes is not None:
        raise UserError(
            f"--parallel {request.parallel} is of one machine: leave it out, or call autotune on each machine with one --storage"
        )
    if request.nodes is not None:
        raise UserError(f"--parallel {request.parallel} is of jobs of this machine alone: leave it or --nodes out")
    cap, headroom = _limits(request)
    asked = (request.parallel, request.device, request.gpus)
    found = slots(*asked, memory_cap_bytes=cap, headroom=headroom, offload_beside=request.parallel_offload)
    return tuple(dataclasses.replace(one, hardware=roomy(one.hardware)) for one in found)


def _limits(request: Request) -> tuple[int | None, float]:
    """Return a job's limit of device memory in bytes (None: none), and the headroom as a share."""
    return _cap(request), parse_share(request.headroom or DEFAULT_HEADROOM)


def _cap(request: Request) -> int | None:
    return parse_memory(request.memory_cap, "--memory-cap") if request.memory_cap else None


def _machine(request: Request, nodes: Nodes | None = None) -> Hardware:
    """Return this machine's devices, or those of nodes, which must have the folder of a script or of a workload's module."""
    cap, headroom = _limits(request)
    if nodes is not None:
        path = str(Path.cwd()) if request.script or request.workload else ""
        return roomy(nodes.reach(request.device, request.gpus, cap, headroom, path))
    return roomy(slice_of(request.nodes, detect(request.device, request.gpus, memory_cap_bytes=cap, headroom=headroom)))


def _space(request: Request, hardware: Hardware) -> SearchSpace:
    return load_space(request.space or ("default" if hardware.device == "cuda" else "cpu_demo"))


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise UserError for the first option that was given."""
    for name, given in options.items():
        if given:
            raise UserError(f"{name} {why}; leave {name} out")


def _script_job(request: Request, script: Script, hardware: Hardware) -> Job:
    """Return the stand-in for a script's Job; options about a model are refused."""
    options = {
        "--model": request.model,
        "--seq-len": request.seq_len,
        "--precision": request.precision,
        "--lora": request.lora,
        "--attn": request.attention,
        "--compile": request.compiled,
        "--lengths": request.lengths,
        "--packing": request.packed,
        "--workload": request.workload,
        "--task": request.task,
        "--image-size": request.image_size,
    }
    _refuse(options, "with a script: the script itself says it")
    batch = parse_global_batch(request.global_batch_size)
    if batch is not None and (batch < 1 or batch % hardware.count):
        raise UserError(f"--global-batch-size {batch} cannot be split over {hardware.count} ranks")
    return unknown_job(script, hardware)


# -- the job of a named model --------------------------------------------------------------------------------------------


def _named_job(request: Request, hardware: Hardware) -> Job:
    """Return the Job of a model or a workload on this hardware."""
    model = _model(request)
    own = load_ds_config(request.ds_config) if request.ds_config else {}
    precision, base = precision_of(request.precision, own, hardware)
    lengths = load_lengths(request.lengths) if request.lengths else ()
    task = task_of(model.config, request.task, model.name)
    job = Job(
        model=model,
        ranks=hardware.count,
        seq_len=seq_len_of(request.seq_len, request.packed, model, lengths, hardware),
        precision=precision,
        optimizer=request.optimizer,
        global_batch_size=kept_batch(request.global_batch_size, base, hardware.count, request.ds_config),
        base_config=base,
        lora=parse_lora(request.lora) if request.lora else None,
        attention=request.attention,
        compiled=request.compiled,
        lengths=lengths,
        packed=request.packed,
        workload=request.workload,
        task=task,
        image_size=image_size_of(model.config, task, request.image_size, model.name),
    )
    for option, value in (("--lora", job.lora), ("--attn", job.attention)):
        if package := missing_package(value):
            raise UserError(f"{option} {value} needs the package {package}: install it, or leave {option} out")
    return job


def _model(request: Request) -> ModelSpec:
    if request.workload:
        options = {
            "--model": request.model,
            "--lora": request.lora,
            "--attn": request.attention,
            "--lengths": request.lengths,
            "--packing": request.packed,
            "--task": request.task,
            "--image-size": request.image_size,
        }
        _refuse(options, "with --workload: the function itself makes model and batches")
        return workload_spec(request.workload)
    if request.model:
        return resolve_model(request.model, trust_remote_code=request.trust_remote_code)
    others = "a folder, or a Hub id; or --workload, or your script after `--`"
    raise UserError(f"--model is missing: give a shipped name (`autotune models`), {others}")
