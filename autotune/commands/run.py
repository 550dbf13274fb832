"""One tuning call: set up, measure, search, export."""

from __future__ import annotations

import dataclasses
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from autotune.commands.doctor import shared_memory
from autotune.commands.environment import NAMED_MODEL, TRAINING, check_studys_python, named_nodes, ranks_python
from autotune.commands.job_file import COMMAND_FILE, job_text
from autotune.commands.request import Request
from autotune.commands.script_probe import Probe, StartupDeadline, after_probe, probe, remember
from autotune.commands.setup import Setup, run_setup
from autotune.commands.study_output import write_study
from autotune.errors import NothingFits, NoWinner, Stopped, UserError, one_line, readable
from autotune.executors.base import Executor
from autotune.executors.cluster.transports import hostfile_of, hostfile_text
from autotune.executors.local import LocalExecutor
from autotune.executors.machine import protection_of
from autotune.masking import hide_password
from autotune.predict.predictor import Predictor
from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job
from autotune.problem.outcome import OutcomeKind
from autotune.rank.sandbox import Protection
from autotune.recovery.ladder import ladder_path, recovery_ladder, write_ladder
from autotune.results.console import PlainObserver, how_to_train, make_observer, record_json, verdict_lines
from autotune.results.export import export_record
from autotune.results.output_files import secrets_note
from autotune.results.plan import links_text
from autotune.script.profile import own_candidate
from autotune.script.recorded import runs_user_code
from autotune.search.certificate import trains_otherwise
from autotune.search.concurrency import SearchWorkers
from autotune.search.proposer import Proposer
from autotune.search.sampler import SampledProposer, Sampler, named_sampler
from autotune.search.storage import (
    StorageFailures,
    default_storage,
    failures_in_one_line,
    is_server,
    lock_log_dir,
    lock_study,
    make_study_folder,
    open_storage,
)
from autotune.search.study import Callback, StudyStore
from autotune.search.trials import AS_IS, SEARCH, Record
from autotune.search.tuner import SearchSummary, Tuner
from autotune.util.files import write_atomically
from autotune.util.interpreter import Interpreter
from autotune.util.linux import handled_signals, silent_mounts
from autotune.util.units import counted, format_bytes, format_duration
from autotune.workers.gpu_locks import lock_gpus


@dataclass
class RunSummary:
    """Result of a call of `run`."""

    study: str
    folder: Path
    winner: Record | None
    verified: bool
    ended: str  # sentence of the Stop
    interrupted: bool
    files: list[Path]
    lines: list[str]  # for display
    used_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON data, as `--json` prints it."""
        found = {"winner": self.winner and record_json(self.winner), "used_seconds": round(self.used_seconds, 2)}
        return {**vars(self), **found, "folder": str(self.folder), "files": [*map(str, self.files)]}


def run_study(
    request: Request,
    console: Console,
    *,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    sampler: Sampler | None = None,
) -> RunSummary:
    """Tune, verify and export.

    Args:
        callbacks: called after each trial, as those of `optuna.Study.optimize`.
        sampler: proposes in place of the own one.

    Raises:
        UserError: bad input, or a job that fails by itself.
        MachineError: the machine fails, for any candidate.
        NothingFits: no candidate is feasible.
        Stopped: the user stopped the tuner before the search began.
    """
    began = time.monotonic()
    needed = TRAINING if request.script or request.workload else NAMED_MODEL
    observer = make_observer(console, quiet)
    if request.sampler is not None:
        sampler = named_sampler(request.sampler, request.seed)
    python = ranks_python(request.python, observer.print_line, needed=needed)
    if request.study is not None:
        _check_python(request.study, request, python)
    with named_nodes(request, observer.print_line, python) as nodes:
        return _run(run_setup(request, nodes, python), began, observer, callbacks, sampler)


@readable("the study")
def _check_python(study: str, request: Request, python: Interpreter) -> None:
    """Check that a study was measured in the ranks' Python. A missing study is new.

    Raises:
        UserError: it was measured in another Python that the user has not typed.
    """
    measured_in = None
    with suppress(UserError):
        measured_in = StudyStore.load(study, request.storage).python
    check_studys_python(study, measured_in, request.python, python)


def _run(
    setup: Setup, began: float, observer: PlainObserver, callbacks: Sequence[Callback], sampler: Sampler | None
) -> RunSummary:
    for line in setup.warnings:
        observer.print_line(line)
    who = f"study {setup.name}"
    all_gpus = tuple(uuid for slot in setup.slots for uuid in slot.hardware.gpus)
    ours = dataclasses.replace(setup.hardware, gpus=all_gpus)
    # agents of the nodes lock their own GPUs
    gpus = lock_gpus(ours, who) if setup.nodes is None else nullcontext()
    with failures_in_one_line() as failing, gpus, stop_on_signals() as stopped, ExitStack() as kept:
        if setup.storage is not None and is_server(setup.storage):
            open_storage(setup.storage)  # a server that refuses does so before anything is built or started
        make_study_folder(setup.folder)
        work = kept.enter_context(acquire_log_dir(setup))
        check_protection(setup, work, observer.print_line)
        if setup.nodes is not None:
            write_atomically(hostfile_of(setup.folder), hostfile_text(setup.nodes.hosts))
            nodes = dataclasses.replace(setup.nodes, who=who, print_line=observer.print_line, cancelled=stopped.is_set)
            setup = dataclasses.replace(setup, nodes=nodes)
        kept.enter_context(observer)
        observer.doing("starting the ranks' Python, which imports torch and DeepSpeed")
        workers = SearchWorkers()
        deadline = StartupDeadline(setup.budget_seconds)
        # a failed worker ends all trials
        cancelled = lambda: stopped.is_set() or workers.failed or deadline.ends_startup  # noqa: E731
        with closing(make_executor(setup, work, cancelled, observer.doing)) as first:
            opening = first.now() - seconds_since(began)
            deadline.begin(first, opening)
            first.begin()  # its imports run while the study is opened
            probed = None
            if setup.job.script is not None:
                with deadline.ended(without_trial=True):
                    _open(first, observer.print_line)
                    observer.showing("running the script as it is, then with another batch")
                    probed = probe(first, setup.job.script, work, deadline, observer.print_line)
                setup = after_probe(setup, probed)
            store = _open_study(setup, probed, observer, failing, callbacks)
            kept.callback(store.leave)
            write_atomically(work / COMMAND_FILE, job_text(setup.request))  # a refused call keeps the study's
            if probed is not None:
                remember(probed, work)
            observer.doing("tracing the model, to predict memory and speed")
            is_up = lambda: stopped.is_set() or deadline.passed  # noqa: E731
            predictor = traced_predictor(setup.job, setup.hardware, cancelled=is_up)
            candidates, left_out = predictor.buildable(setup.candidates)
            for line in [*left_out, *predictor.notes()]:
                observer.print_line(line)
            with deadline.ended(without_trial=False):
                if probed is None:
                    observer.showing(
                        "waiting for the ranks' Python, and building DeepSpeed's ops where they are missing"
                    )
                    _open(first, observer.print_line)
                candidates = _with_ops(first, setup.job, candidates, observer.print_line)
                store.note_extensions(first.ops.folder)
            setup = dataclasses.replace(
                setup, candidates=tuple(candidates), hardware=first.hardware
            )  # with its link's rate
            store.note_hardware(setup.hardware)
            if told := links_text(setup.hardware):
                observer.print_line(f"after the ranks' self-test{told}")
            predictor = traced_predictor(setup.job, setup.hardware, predictor.trace, cancelled=is_up)
            executor = first.for_search(setup.job, observer.phase)
            deadline.end_startup()
            # The whole call counts, except builds of DeepSpeed's ops, which happen once per environment.
            spent_seconds = executor.now() - opening - executor.ops.build_seconds
            beside = [kept.enter_context(closing(one)) for one in parallel_executors(setup, work, cancelled)]
            found = _search(
                setup, store, executor, predictor, observer, spent_seconds, stopped.is_set, beside, workers, sampler
            )
        return _summary(setup, store, found, predictor, observer.print_line)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C, SIGTERM and a closed terminal set; a second Ctrl-C ends the block by raising Stopped."""
    stopped = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stopped.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopped.set()

    with handled_signals(handle):
        try:
            yield stopped
        except KeyboardInterrupt:
            raise Stopped("stopped at once; measured trials are kept, and the same command goes on") from None


def _open(executor: Executor, print_line: Callable[[str], None]) -> None:
    executor.open(print_line)
    if executor.hardware.device == "cuda" and executor.hardware.count > 1:
        for one in shared_memory():
            if one.fix:
                print_line(f"{one.found}: {one.cost}; {one.fix}")
    executor.check(print_line)


def seconds_since(began: float) -> float:
    """Return the seconds since a time of the monotonic clock."""
    return time.monotonic() - began


def _with_ops(
    executor: Executor, job: Job, candidates: list[Candidate], print_line: Callable[[str], None]
) -> list[Candidate]:
    """Return the candidates whose DeepSpeed ops can be loaded here. Missing ops are built now."""
    executor.load_ops(candidates, job=job)
    left, lines = executor.ops.buildable(candidates, job, executor.hardware.device)
    for line in lines:
        print_line(line)
    return left


def _open_study(
    setup: Setup, probed: Probe | None, observer: PlainObserver, failing: StorageFailures, callbacks: Sequence[Callback]
) -> StudyStore:
    """Open and announce the study. A script's own config becomes a trial if it was measured or ran out of memory."""
    storage = setup.storage or default_storage(setup.folder)
    of, shared = (setup.name, storage, setup.folder, setup.job, setup.hardware, setup.space), setup.storage is not None
    with readable("the study"):
        store, resumed = StudyStore.create_or_resume(*of, force=setup.request.force, shared=shared, callbacks=callbacks)
    failing.ask(partial(store.measured_here.what_is_left, store.study.study_name, storage))
    if shared:
        store.share(observer.print_line)
    if setup.request.command:
        store.note_command(setup.request.command)
    for note in setup.notes:
        observer.print_line(note)
    if late := store.finish_late():
        observer.print_line(
            f"{counted(late, 'trial')} stored that an earlier call had measured while the database was away"
        )
    closed = store.close_interrupted()
    own_outcome = probed.baseline or probed.ran_out if probed is not None else None
    if probed is not None and own_outcome is not None:
        own = own_candidate(probed.script)
        known = store.records()
        if probed.kept or all(record.candidate != own for record in known):
            number = store.claim(own, setup.space, SEARCH, AS_IS, [record.number for record in known])
            if number is not None:
                store.finish(number, own_outcome)
    _announce(setup, store, observer, resumed, closed)
    began = len(store.study.get_trials(deepcopy=False))
    observer.begin_study(
        partial(store.leaderboard, setup.hardware, setup.job, setup.space.test_of(setup.candidates), began)
    )
    if not resumed:  # trials known before the search: a script's own config
        for record in store.records():
            if record.outcome is not None:
                observer.trial_finished(record.number, record.candidate, record.role, record.outcome)
    return store


def _announce(setup: Setup, store: StudyStore, observer: PlainObserver, resumed: bool, closed: int) -> None:
    ceiling = format_bytes(setup.hardware.ceiling_bytes)
    observer.print_line(f"{setup.job.summary}, on {setup.hardware}{links_text(setup.hardware)}")
    if store.python is not None:
        versions = ", ".join(f"{name} {store.versions[name]}" for name in TRAINING)
        observer.print_line(f"ranks run in {store.python}: {versions}")
    observer.print_line(
        f"space {setup.space.name}: {counted(len(setup.candidates), 'candidate')}; winners use at most {ceiling} a rank"
    )
    if resumed:
        used = sum(call.used_seconds for call in store.calls())
        done = [
            record
            for record in store.records()
            if record.outcome and record.outcome.kind is not OutcomeKind.INTERRUPTED
        ]
        interrupted = f", {closed} closed as interrupted" if closed else ""
        observer.print_line(
            f"study {store.name} goes on: {counted(len(done), 'trial')} in {format_duration(used)} so far{interrupted}"
        )
        if peers := store.peers():
            hosts = [peer.partition("/")[0] for peer in peers]
            observer.print_line(f"{len(peers)} more at it: {', '.join(hosts)}")
    else:
        observer.print_line(f"study {store.name} is new")


def _search(
    setup: Setup,
    store: StudyStore,
    executor: Executor,
    predictor: Predictor,
    observer: PlainObserver,
    spent_seconds: float,
    cancelled: Callable[[], bool],
    beside: Sequence[Executor],
    workers: SearchWorkers,
    sampler: Sampler | None,
) -> SearchSummary:
    make = Proposer if sampler is None else partial(SampledProposer, store.study, sampler)
    proposer = make(list(setup.candidates), setup.space, predictor, exhaustive=setup.request.exhaustive)
    tuner = Tuner(
        store,
        executor,
        proposer,
        budget_seconds=setup.budget_seconds,
        max_trials=setup.request.max_trials,
        spent_seconds=spent_seconds,
        observer=observer,
        cancelled=cancelled,
        beside=beside,
        workers=workers,
        references=not setup.request.no_references,
    )
    try:
        observer.start(setup.budget_seconds, spent_seconds)
        return tuner.run()
    finally:
        observer.doing("writing the results")


def _summary(
    setup: Setup, store: StudyStore, found: SearchSummary, predictor: Predictor, print_line: Callable[[str], None]
) -> RunSummary:
    """Export a call's result and summarize it.

    Raises:
        NothingFits: memory was too small for every candidate, and the call was not stopped early.
        NoWinner: there is no winner for another reason.
    """
    files: list[Path] = []
    facts = store.facts()
    if found.winner is not None:
        files = _export(setup, store, found.winner, found.verified, print_line)
        ladder = recovery_ladder(
            found.winner.candidate,
            setup.space,
            store.job,
            predictor,
            store.measured(),
            store.failed(),
            trains_otherwise=trains_otherwise(store.job, store.records()),
        )
        files.append(ladder_path(setup.folder, setup.name))
        write_ladder(files[-1], ladder, store.job)
        files += _write_report(setup, store, print_line)
        ended = f"{_end_line(found)} (autotune show {shlex.quote(setup.name)} has the rest)"
        lines = [ended, *verdict_lines(facts, store.job, store.hardware)]
        lines += how_to_train(store, found.winner.candidate, files[0]).lines(1)
        if setup.storage is not None:
            told = hide_password(setup.storage)
            lines.append(f"  the study is in {told}: launch, report and export need AUTOTUNE_STORAGE or --storage, too")
        lines += [f"  {line}" for line in secrets_note(files)]
    elif found.interrupted:
        lines = ["stopped without a winner", _end_line(found)]
    else:
        files = _write_report(setup, store, print_line)
        lines = verdict_lines(facts, store.job, store.hardware)
        lines += [_end_line(found)] if facts.trials else []  # otherwise the verdict is the reason why no trial ran
    summary = RunSummary(
        store.name,
        setup.folder,
        found.winner,
        found.winner is not None and found.verified,
        found.stop_sentence,
        found.interrupted,
        files,
        lines,
        found.used_seconds,
    )
    if found.winner is None and not found.interrupted:
        text = "\n".join([*lines, *(f"wrote {path}" for path in files)])
        if facts.closest is None:
            raise NoWinner(text, summary.to_json())
        raise NothingFits(text, summary.to_json())
    return summary


def _end_line(found: SearchSummary) -> str:
    """Return the trials of a call by outcome, the time that it used, and why it stopped."""
    counts = ", ".join(f"{count} {OutcomeKind(kind).word}" for kind, count in found.by_kind.most_common())
    trials, used = sum(found.by_kind.values()), format_duration(found.used_seconds)
    return f"{counted(trials, 'trial')}{f' ({counts})' if counts else ''} in {used}; {found.stop_sentence}"


def _export(
    setup: Setup, store: StudyStore, winner: Record, verified: bool, print_line: Callable[[str], None]
) -> list[Path]:
    """Write the winner's files to the requested path, or to the study's folder if that path is no longer writable."""
    if setup.request.out is not None:
        try:
            return export_record(store, winner, setup.request.out, "deepspeed", verified)
        except UserError as error:
            print_line(f"{error}; it is in {setup.folder}")
    return export_record(store, winner, setup.folder / f"{setup.name}.json", "deepspeed", verified)


def _write_report(setup: Setup, store: StudyStore, print_line: Callable[[str], None]) -> list[Path]:
    """Write the study's page next to its winner. An error costs one line, and never the winner."""
    path = setup.folder / f"{setup.name}.html"
    try:
        write_study(store, path)
    except Exception as error:
        print_line(
            f"the report was not written ({one_line(error)}): `autotune report {shlex.quote(setup.name)}` tries again"
        )
        return []
    return [path]


# -- executors ---------------------------------------------------------------------------------------------------------


@contextmanager
def acquire_log_dir(setup: Setup) -> Iterator[Path]:
    """Lock and return the folder where this call keeps logs, until the call ends.

    The folder is the study's, or, if several calls share a study, a subfolder for this call.

    Raises:
        UserError: another run holds the study.
    """
    if setup.storage is None:
        place, held = setup.folder, lock_study(setup.folder, setup.name)
    else:
        place, held = lock_log_dir(setup.folder, setup.name)
    try:
        yield place
    finally:
        held.release()


def check_protection(setup: Setup, work: Path, print_line: Callable[[str], None]) -> None:
    """Check the protection of a call that may start user code here, and name mounts that its trials do not see.

    Raises:
        NotProtected: this machine offers no protection of the user's files, and the user has not agreed to go without.
    """
    starts = setup.nodes is None and runs_user_code(setup.job)  # each node answers for itself
    if not starts and not setup.job.has_own_code:  # which is traced here
        return
    cwd = Path(setup.job.script.cwd) if setup.job.script is not None else Path.cwd()
    found = protection_of(cwd, work, unprotected=setup.job.unprotected, interpreter=setup.job.interpreter)
    for path in silent_mounts() if found is not Protection.NONE else ():
        print_line(f"{path} does not answer, so it is left out of trials")


def make_executor(
    setup: Setup,
    work: Path,
    cancelled: Callable[[], bool],
    show: Callable[[str], None] = lambda text: None,
    at: int = 0,
) -> LocalExecutor:
    """Return the executor of the worker `at`."""
    slot = setup.slots[at]
    return LocalExecutor(
        setup.job,
        slot.hardware,
        work,
        list(setup.candidates),
        seed=setup.request.seed,
        cancelled=cancelled,
        show=show,
        target=setup.nodes,
        variables=slot.variables,
        study=setup.folder,
    )


def parallel_executors(setup: Setup, work: Path, cancelled: Callable[[], bool]) -> list[LocalExecutor]:
    """Return the executors that measure in parallel to the first, each in its own folder."""
    return [make_executor(setup, work / f"beside-{at + 1}", cancelled, at=at) for at in range(1, len(setup.slots))]
