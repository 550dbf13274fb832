"""`autotune run`, without the command line: from a request to an exported winner."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import json
import os
import shlex
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from autotune.commands.probe import Probe, job_of, own_candidate, probe, unknown_job
from autotune.errors import NothingFits, UserError
from autotune.problem.candidate import (
    ACCUMULATION,
    CHECKPOINTING,
    MICRO_BATCH,
    MODEL_KNOBS,
    PACKING,
    TRACED_KNOBS,
    Candidate,
    knobs_of,
)
from autotune.problem.hardware import Hardware, detect, named_hardware
from autotune.problem.job import Job, load_ds_config, load_lengths, longest_sequence, parse_lora
from autotune.problem.models import resolve_model, workload_spec
from autotune.problem.outcome import Kind
from autotune.problem.script import carried, command, make_script, starter
from autotune.problem.space import Domain, SearchSpace
from autotune.problem.space_file import load_space
from autotune.results.console import PlainObserver, closest_lines, make_observer, record_json, winner_lines
from autotune.results.export import meta, write_export
from autotune.search.study import AS_IS, SEARCH, Record, StudyStore, default_storage, fingerprint
from autotune.units import format_bytes, format_duration, parse_bytes, parse_duration, parse_share

if TYPE_CHECKING:
    from autotune.commands.plan import Plan
    from autotune.executors.base import Executor
    from autotune.executors.local import LocalExecutor
    from autotune.executors.replay import Landscape
    from autotune.predict.predictor import Predictor
    from autotune.predict.trace import Trace
    from autotune.search.tuner import Result

DEFAULT_HEADROOM = "5%"
DEFAULT_SEQ_LEN = {"cuda": 2048, "cpu": 64}


@dataclass
class Request:
    """What the user asked for; texts as typed."""

    model: str | None
    gpus: int | None = None
    budget: str = "30m"
    device: str = "auto"
    seq_len: int | str | None = None  # `max`: the model's longest
    precision: str | None = None
    optimizer: str = "adamw"
    global_batch_size: int | None = None
    ds_config: Path | None = None
    space: str | None = None
    memory_cap: str | None = None
    headroom: str | None = None
    study: str | None = None
    storage: str | None = None
    seed: int = 0
    max_trials: int | None = None
    out: Path | None = None
    force: bool = False
    isolation: str = "fork"
    trust_remote_code: bool = False
    tolerance: str = "1%"
    exhaustive: bool = False
    executor: str = "local"
    script: list[str] = field(default_factory=list)  # what was typed after `--`
    maps: list[str] = field(default_factory=list)
    worst_case: bool = False
    lora: str | None = None
    attention: str | None = None
    compiled: bool = False
    lengths: Path | None = None
    packed: bool = False
    workload: str | None = None
    runs: Path = field(default_factory=lambda: Path("runs"))


def build_job(request: Request, hardware: Hardware) -> Job:
    """The Job of a request on this hardware.

    Raises:
        UserError: something in it is not possible.
    """
    if request.workload:
        for name, given in (
            ("--model", request.model),
            ("--lora", request.lora),
            ("--attn", request.attention),
            ("--lengths", request.lengths),
            ("--packing", request.packed),
        ):
            if given:
                raise UserError(
                    f"{name} with --workload: the function itself makes model and batches; leave {name} out"
                )
        model = workload_spec(request.workload)
    elif request.model:
        model = resolve_model(request.model, trust_remote_code=request.trust_remote_code)
    else:
        raise UserError(
            "--model is missing: give a shipped name (`autotune models`), a folder, or a Hub id; or "
            "--workload, or your script after `--`"
        )
    base = load_ds_config(request.ds_config) if request.ds_config else {}
    longest = longest_sequence(model.config)
    seq_len = _sequence(request.seq_len, longest, model.name)
    lengths = load_lengths(request.lengths) if request.lengths else ()
    if lengths:
        most = max(tokens for tokens, _ in lengths)
        if seq_len is not None and not request.packed:
            raise UserError("--lengths says how long sequences are: leave --seq-len out")
        seq_len = seq_len or most
        if seq_len < most:
            raise UserError(
                f"--seq-len {seq_len}: the longest sequence of --lengths, {most} tokens, fits in no such row"
            )
    if seq_len is None:
        seq_len = min(DEFAULT_SEQ_LEN[hardware.device], longest or 10**9)
    if longest and seq_len > longest:
        raise UserError(f"--seq-len {seq_len}: {model.name} takes at most {longest} tokens")
    batch = request.global_batch_size
    if batch is None and isinstance(base.get("train_batch_size"), int):
        batch = base["train_batch_size"]
    job = Job(
        model=model,
        ranks=hardware.count,
        seq_len=seq_len,
        precision=request.precision or _precision(base, hardware),
        optimizer=request.optimizer,
        global_batch_size=batch,
        base_config=base,
        lora=parse_lora(request.lora) if request.lora else None,
        attention=request.attention,
        compiled=request.compiled,
        lengths=lengths,
        packed=request.packed,
        workload=request.workload,
    )
    for option, value in (("--lora", job.lora), ("--attn", job.attention)):
        if package := _missing_package(value):
            raise UserError(
                f"{option} {value} needs the package {package}, which is not installed: install it or leave it out"
            )
    return job


def installed(space: SearchSpace) -> tuple[SearchSpace, list[str]]:
    """The space without choices whose package is missing, and a line for each: found out once, not in every trial.

    Raises:
        UserError: none is left.
    """
    knobs, lines = dict(space.knobs), []
    for knob in TRACED_KNOBS:
        if knob not in knobs:
            continue
        missing = {value: package for value in knobs[knob].values if (package := _missing_package(value))}
        said = [
            f"{knob} {value} needs the package {package}, which is not installed" for value, package in missing.items()
        ]
        left = tuple(value for value in knobs[knob].values if value not in missing)
        if not left:
            raise UserError(f"space {space.name}: {said[0]}; install it or add another")
        knobs[knob] = dataclasses.replace(knobs[knob], values=left)
        lines += [f"{line}: left out" for line in said]
    return dataclasses.replace(space, knobs=knobs), lines


_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def _missing_package(choice: object) -> str | None:
    """What an attention or adapters need and this machine has not."""
    if choice in (None, "none"):
        return None
    package = "peft" if str(choice).startswith("r=") else _PACKAGES.get(str(choice))
    return package if package and importlib.util.find_spec(package) is None else None


def _sequence(asked: int | str | None, longest: int | None, model: str) -> int | None:
    """Tokens a sequence, as typed; `max` is the model's longest."""
    if asked is None or isinstance(asked, int):
        return asked
    if asked == "max":
        if longest is None:
            raise UserError(f"--seq-len max: the configuration of {model} names no longest sequence; give a number")
        return longest
    try:
        return int(asked)
    except ValueError:
        raise UserError(f"--seq-len {asked}: expected a number of tokens, or max") from None


def _precision(base: dict[str, Any], hardware: Hardware) -> str:
    for name in ("bf16", "fp16"):
        section = base.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            return name
    if hardware.device == "cpu":
        return "fp32"
    return "bf16" if hardware.bf16 else "fp16"


def with_base(space: SearchSpace, base: dict[str, Any]) -> SearchSpace:
    """The space, with what the user's own config says of knobs that it does not tune held fixed."""
    knobs = dict(space.knobs)
    for name, value in knobs_of(base).items():
        knobs.setdefault(name, Domain((value,)))
    return dataclasses.replace(space, knobs=knobs)


def study_name(job: Job, hardware: Hardware) -> str:
    """The same for the same job on the same machine, so that the same command resumes."""
    key = hashlib.sha256(json.dumps(fingerprint(job, hardware), sort_keys=True).encode()).hexdigest()[:6]
    if job.script:
        key = job.script.key[:6]
    return f"{job.model.name}-{hardware.count}x{hardware.facts or hardware.device}-{key}"


def study_folder(runs: Path, name: str) -> Path:
    """`runs/NAME`, made and writable.

    Raises:
        UserError: it cannot be.
    """
    if not name or "/" in name or name.startswith(".") or len(name) > 120:
        raise UserError(f"--study {name!r}: expected a plain name, without slashes and not starting with a dot")
    folder = runs / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_text("x" * 4096)
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}): free or unlock it, or change directory"
        ) from None
    return folder


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; a second Ctrl-C raises KeyboardInterrupt."""
    stopped = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stopped.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopped.set()

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    try:
        yield stopped
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@dataclass
class Report:
    """What a call of `run` gave."""

    study: str
    folder: Path
    winner: Record | None
    verified: bool
    ended: str
    interrupted: bool
    files: list[Path]
    lines: list[str]
    used_seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "study": self.study,
            "folder": str(self.folder),
            "verified": self.verified,
            "ended": self.ended,
            "interrupted": self.interrupted,
            "used_seconds": round(self.used_seconds, 2),
            "files": [str(path) for path in self.files],
            "winner": record_json(self.winner) if self.winner else None,
            "lines": self.lines,
        }


@dataclass(frozen=True)
class _Setup:
    job: Job
    hardware: Hardware
    space: SearchSpace
    candidates: list[Candidate]
    landscape: Landscape | None = None
    is_script: bool = False  # then job and candidates are stand-ins until it has run
    notes: list[str] = field(default_factory=list)  # for people, before it begins


def _prepare(request: Request) -> _Setup:
    """The job, machine and space of a request: this machine's, or a table's. A script's job is not known yet."""
    kind, _, table = request.executor.partition(":")
    if kind == "replay" and table:
        from autotune.executors.replay import load_landscape

        landscape = load_landscape(Path(table))
        if request.space:
            raise UserError("--executor replay brings its own space, the rows of its table: leave --space out")
        # a table's rows end at the memory itself
        headroom = parse_share(request.headroom) if request.headroom else 0.0
        rows = sorted(landscape.rows, key=str)
        return _Setup(landscape.job(), landscape.hardware(headroom), landscape.space(), rows, landscape)
    if request.executor != "local":
        raise UserError(f"--executor {request.executor}: expected local or replay:TABLE")
    cap = parse_bytes(request.memory_cap) if request.memory_cap else None
    headroom = parse_share(request.headroom or DEFAULT_HEADROOM)
    hardware = detect(request.device, request.gpus, memory_cap_bytes=cap, headroom=headroom)
    space = load_space(request.space or ("default" if hardware.device == "cuda" else "cpu_demo"))
    if request.script:
        for name, given in (
            ("--model", request.model),
            ("--seq-len", request.seq_len),
            ("--precision", request.precision),
            ("--lora", request.lora),
            ("--attn", request.attention),
            ("--compile", request.compiled),
            ("--lengths", request.lengths),
            ("--packing", request.packed),
            ("--workload", request.workload),
        ):
            if given:
                raise UserError(f"{name} with a script: the script itself says it; leave {name} out")
        if request.global_batch_size is not None and request.global_batch_size % hardware.count:
            raise UserError(
                f"--global-batch-size {request.global_batch_size} cannot be split over {hardware.count} ranks"
            )
        job = unknown_job(make_script(request.script, request.maps, request.worst_case, request.ds_config), hardware)
        engines = [Candidate.of(family) for family in space.families()]  # enough to know which ops are needed
        return _Setup(job, hardware, space, engines, is_script=True)
    for option, used in (("--map", bool(request.maps)), ("--worst-case", request.worst_case)):
        if used:
            raise UserError(f"{option} is about a script: give it after `--`, like `-- train.py …`")
    job = build_job(request, hardware)
    space, notes = installed(for_job(space, job))
    return _Setup(job, hardware, space, space.candidates(job), notes=notes)


def run_study(
    request: Request, console: Console, *, quiet: bool = False, confirm: Callable[[str], bool] | None = None
) -> Report:
    """Tunes, verifies and exports.

    Raises:
        UserError: bad input, or a job that fails by itself.
        NothingFits: no candidate is feasible.
    """
    from autotune.executors.local import LocalExecutor
    from autotune.executors.replay import ReplayExecutor
    from autotune.predict.predictor import Predictor
    from autotune.search.proposer import Proposer
    from autotune.search.tuner import Tuner, too_short

    budget_seconds = parse_duration(request.budget)
    if why := too_short(budget_seconds):
        raise UserError(why)
    if request.max_trials is not None and request.max_trials < 1:
        raise UserError(f"--max-trials {request.max_trials}: expected at least 1")
    if request.isolation not in ("fork", "spawn"):
        raise UserError(f"--isolation {request.isolation}: expected fork or spawn")
    setup = _prepare(request)
    hardware = setup.hardware
    if hardware.device == "cpu" and request.device == "auto" and setup.landscape is None:
        console.print("no GPU found: running CPU ranks", style="yellow")
        if confirm is not None and not confirm("tune on CPU ranks?"):
            raise UserError("not started; on a GPU machine, `autotune doctor` says why no GPU is seen")
    name = request.study or study_name(setup.job, hardware)
    folder = study_folder(request.runs, name)
    with _disk_full(), stop_on_signals() as stopped, ExitStack() as closing:
        opening = time.monotonic()
        executor: Executor
        local: LocalExecutor | None = None
        if setup.landscape is not None:
            executor = ReplayExecutor(setup.landscape, request.seed, hardware.headroom)
        else:
            executor = local = LocalExecutor(
                setup.job,
                hardware,
                folder,
                setup.candidates,
                isolation=request.isolation,
                seed=request.seed,
                cancelled=stopped.is_set,
            )
        closing.callback(executor.close)
        probed: Probe | None = None
        if setup.is_script and local is not None:
            say = PlainObserver(Console(quiet=True) if quiet else console).say
            local.open(say)
            setup, probed = _probed(setup, local, folder, request, budget_seconds / 2, say)
        job, space, candidates = setup.job, setup.space, setup.candidates
        storage = request.storage or default_storage(folder)
        store, resumed = StudyStore.create_or_resume(name, storage, folder, job, hardware, space, force=request.force)
        store.lock()
        observer = make_observer(hardware, budget_seconds, console, quiet)
        for note in setup.notes:
            observer.say(note)
        closed = store.close_interrupted()
        if probed is not None:
            candidates = _with_baseline(store, space, candidates, probed)
        _announce(observer, job, hardware, space, len(candidates), name, resumed, closed, store)
        if not resumed:  # what is known before the search: a script's own config
            for record in store.records():
                if record.outcome is not None:
                    observer.trial_finished(record.number, record.candidate, record.role, record.outcome)
        predictor = Predictor(job, hardware)
        if not predictor.trace.exact:
            observer.say(f"{predictor.trace.note}; predictions are wider for it")
        spent = 0.0
        if local is not None:
            local.on_phase = observer.phase
            if probed is None:
                local.open(observer.say)
            # All of the call counts, but for building DeepSpeed's ops: that happens once a machine.
            spent = time.monotonic() - opening - local.build_seconds
        proposer = Proposer(
            candidates,
            space,
            job,
            hardware,
            store,
            request.seed,
            predictor,
            tolerance=parse_share(request.tolerance),
            exhaustive=request.exhaustive,
        )
        tuner = Tuner(
            store,
            executor,
            proposer,
            space,
            hardware,
            budget_seconds=budget_seconds,
            max_trials=request.max_trials,
            spent_seconds=spent,
            observer=observer,
            cancelled=stopped.is_set,
        )
        try:
            observer.start()
            result = tuner.run()
        finally:
            with suppress(Exception):
                observer.stop()
            executor.close()
        ladder = None if setup.landscape is not None else partial(_write_ladder, store, space, predictor)
        return _report(request, store, result, list(proposer.open), ladder)


def _report(
    request: Request,
    store: StudyStore,
    result: Result,
    untried: list[Candidate],
    ladder: Callable[[Candidate, Path], Path] | None,
) -> Report:
    """What a call has found, exported."""
    job, hardware, name = store.job, store.hardware, store.name
    folder = store.folder or request.runs / name
    if result.winner is None:
        if result.interrupted:
            lines = ["stopped before anything was measured"]
            return Report(name, folder, None, False, result.ended, True, [], lines, result.used_seconds)
        first = "nothing fits yet" if untried else "nothing fits"
        raise NothingFits("\n".join([first, *closest_lines(store.records(), hardware, untried)]))
    out = request.out or folder / f"{name}.json"
    winner = result.winner.candidate
    files = export_record(store, result.winner, out, "deepspeed", result.verified)
    if ladder is not None:
        files.append(ladder(winner, out.with_suffix(".ladder.json")))
    lines = winner_lines(result.winner, store.records(), job, hardware)
    if not result.verified:
        lines.append("  not verified: the budget or the call ended first; run again to verify it")
    if job.script is not None:
        config = str(files[0].resolve())
        plain = shlex.join([*starter(job.script, job.ranks, config), *command(job.script, winner, config)])
        watched = f"autotune launch {name} -- {shlex.join(job.script.argv)}"
        if carried(job.script):
            lines += [f"  train with: {plain}", f"  or watched: {watched}"]
        else:
            lines += [f"  train with: {watched}", f"  or put {files[0]} where the script has its own config"]
        if job.script.profile["loader_prepared"] and not dict(job.script.flags).get(MICRO_BATCH):
            lines += [f"    with batch_size={winner.micro_batch} in its data loader, which no config reaches"]
    counts = ", ".join(f"{count} {kind}" for kind, count in result.by_kind.most_common())
    lines.append(
        f"  {sum(result.by_kind.values())} trials ({counts}) in {format_duration(result.used_seconds)}; {result.ended}"
    )
    return Report(
        name,
        folder,
        result.winner,
        result.verified,
        result.ended,
        result.interrupted,
        files,
        lines,
        result.used_seconds,
    )


def _write_ladder(store: StudyStore, space: SearchSpace, predictor: Predictor, top: Candidate, path: Path) -> Path:
    """What `autotune launch` steps down to, beside the winner."""
    from autotune.recovery.ladder import recovery_ladder, write_ladder

    ladder = recovery_ladder(top, space, store.job, predictor, store.measured(), store.failed())
    write_ladder(path, ladder, store.job)
    return path


# -- scripts -------------------------------------------------------------------------------------------------------------


def _probed(
    setup: _Setup, local: LocalExecutor, folder: Path, request: Request, seconds: float, say: Callable[[str], None]
) -> tuple[_Setup, Probe]:
    """The setup of a script, now that it has run."""
    assert setup.job.script is not None
    probed = probe(local, setup.job.script, folder, seconds, say)
    local.job = job = job_of(probed.script, setup.hardware, request.global_batch_size)
    space = for_job(setup.space, job)
    return dataclasses.replace(setup, job=job, space=space, candidates=space.candidates(job)), probed


def for_job(space: SearchSpace, job: Job) -> SearchSpace:
    """The space with what the user's own config says of other knobs, without what this script or workload cannot be
    told."""
    space = with_base(space, job.base_config)
    knobs = dict(space.knobs)
    if job.workload is not None:
        for knob in TRACED_KNOBS:
            knobs.pop(knob, None)
    if not job.lengths:
        knobs.pop(PACKING, None)
    if job.script is None:
        return dataclasses.replace(space, knobs=knobs)
    seen = job.script.profile
    for knob in MODEL_KNOBS:
        knobs.pop(knob, None)
    if not seen["checkpointing"]:
        knobs.pop(CHECKPOINTING, None)
    if seen["batch_note"]:
        knobs |= {MICRO_BATCH: Domain((seen["micro_batch"],)), ACCUMULATION: Domain((seen["accumulation"],))}
    return dataclasses.replace(space, knobs=knobs)


def _with_baseline(
    store: StudyStore, space: SearchSpace, candidates: list[Candidate], probed: Probe
) -> list[Candidate]:
    """The candidates and the script's own config among them, which is a trial of the study when it was measured."""
    own = own_candidate(probed.script)
    if probed.baseline is not None and all(record.candidate != own for record in store.records()):
        store.finish(store.start(own, space, SEARCH, AS_IS), probed.baseline)
    return candidates if own in candidates else [*candidates, own]


def plans(request: Request, names: list[str | None]) -> list[Plan]:
    """A plan for each named GPU; None is the machine's own.

    Raises:
        UserError: bad input.
    """
    from autotune.commands.plan import check_gpus, make_plan
    from autotune.predict.predictor import Predictor

    count = check_gpus(1 if request.gpus is None else request.gpus)
    headroom = parse_share(request.headroom or DEFAULT_HEADROOM)
    made: list[Plan] = []
    traces: dict[str, Trace] = {}
    for name in names:
        if name is None:
            hardware = detect("auto", count, headroom=headroom)
        else:
            hardware = named_hardware(name.strip(), count, headroom=headroom)
        job = build_job(request, hardware)
        space, _ = installed(for_job(load_space(request.space or "default"), job))
        predictor = Predictor(job, hardware, traces.get(job.precision))
        traces[job.precision] = predictor.trace
        made.append(make_plan(job, hardware, space, predictor))
    return made


def record_study(store: StudyStore, out: Path) -> tuple[Path, Path, int]:
    """A study's measured candidates as a table that `--executor replay:TABLE` searches: its two files, and its rows.

    What ran out of memory is given the peak at which it failed at the least: capacity and the bytes missing.

    Raises:
        UserError: the study has measured nothing.
    """
    from autotune.executors.replay import Row, write_landscape
    from autotune.units import GIB

    job, hardware = store.job, store.hardware
    rows: dict[Candidate, Row] = {}
    started = [r.outcome.outside_seconds for r in store.records() if r.outcome and r.outcome.outside_seconds > 1.0]
    startup = statistics.median(started) if started else 1.0
    for record in store.records():
        outcome = record.outcome
        if outcome is None or (record.role != SEARCH and record.candidate in rows):
            continue
        if outcome.measurement is not None:
            measured = outcome.measurement
            rows[record.candidate] = Row(measured.peak_bytes / GIB, measured.step_seconds, startup, Kind.OK)
        elif outcome.kind.is_oom:
            peak = (hardware.capacity_bytes + (outcome.missing_bytes or 0)) / GIB
            rows[record.candidate] = Row(peak, None, startup, outcome.kind)
    if not any(row.kind is Kind.OK for row in rows.values()):
        raise UserError(f"study {store.name} has measured nothing that could be replayed: run it first")
    facts = {
        "model": job.model.name,
        "model_config": job.model.config,
        "seq_len": job.seq_len,
        "precision": job.precision,
        "optimizer": job.optimizer,
        "global_batch_size": job.global_batch_size,
        "device": hardware.device,
        "gpu": hardware.name,
        "gpu_memory_gib": hardware.capacity_bytes / GIB,
        "n_gpus": job.ranks,
        "host_memory_gib": hardware.host_memory_bytes / GIB,
        "recorded_from": store.name,
        "versions": store.versions,
    }
    return (*write_landscape(out, facts, rows), len(rows))


def export_record(store: StudyStore, record: Record, out: Path, style: str, verified: bool) -> list[Path]:
    """Writes a record's config and its meta file."""
    assert record.outcome is not None
    assert record.outcome.measurement is not None
    data = meta(
        record.candidate,
        store.job,
        record.outcome.measurement,
        study=store.name,
        trial=record.number,
        verified=verified,
        fingerprint=store.study.user_attrs["fingerprint"],
        headroom=store.hardware.headroom,
    )
    try:
        return write_export(record.candidate, store.job, out, data, style=style, device=store.hardware.device)
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({error.strerror}); the study keeps the winner: `autotune export`"
        ) from None


def _announce(
    observer: PlainObserver,
    job: Job,
    hardware: Hardware,
    space: SearchSpace,
    count: int,
    name: str,
    resumed: bool,
    closed: int,
    store: StudyStore,
) -> None:
    observer.say(f"{job.summary}, on {hardware}")
    observer.say(
        f"space {space.name}: {count} candidates; winners use at most {format_bytes(hardware.ceiling_bytes)} a rank"
    )
    if resumed:
        used = sum(call.used_seconds for call in store.calls())
        done = [record for record in store.records() if record.outcome and record.outcome.kind is not Kind.INTERRUPTED]
        interrupted = f", {closed} closed as interrupted" if closed else ""
        observer.say(f"study {name} goes on: {len(done)} trials in {format_duration(used)} so far{interrupted}")
    else:
        observer.say(f"study {name} is new")


@contextmanager
def _disk_full() -> Iterator[None]:
    """A full disk is said in one line; what is stored stays stored."""
    from sqlalchemy.exc import OperationalError

    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise UserError(
            f"the disk refuses to be written ({os.strerror(error.errno)}): make room and run again; "
            "what was measured is kept"
        ) from None
    except OperationalError as error:
        raise UserError(
            f"the study's database fails ({error.orig}): make room or repair it and run again; "
            "what was measured is kept"
        ) from None
    except Exception as error:
        if type(error).__name__ != "StorageInternalError":
            raise
        cause = error.__cause__ or error
        raise UserError(
            f"the study's database fails ({str(cause).splitlines()[0][:160]}): make room or repair it and "
            "run again; what was measured is kept"
        ) from None
