"""Study: all candidates and outcomes, in an Optuna database from which any later run resumes."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import UserError, did_you_mean
from autotune.masking import hide_password
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, threads_per_rank
from autotune.problem.job import Job
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import SearchSpace, fitted, parse_space
from autotune.script.recorded import recorded_job
from autotune.search.fingerprint import THREADS, changes, fingerprint, merged_fingerprint
from autotune.search.leaderboard import Leaderboard, StudyFacts
from autotune.search.storage import (
    DATABASES,
    HEARTBEAT_SECONDS,
    ServerStorage,
    lock_study,
    open_storage,
    record_heartbeat,
    stored_in,
)
from autotune.search.trials import (
    ABANDONED,
    DIED,
    NO_CALL,
    OUTCOME,
    REFERENCE,
    RESUME,
    SEARCH,
    Call,
    MeasuredHere,
    Record,
    attributes,
    begin,
    kept_if_it_fails,
    now,
    outcomes_kept_in_folder,
    record_of,
    set_attribute,
    store_outcome,
    tell,
    with_second_deaths,
    withdraw,
)
from autotune.util.interpreter import OWN, Interpreter, other_python

if TYPE_CHECKING:
    from typing import Self

# -- study -------------------------------------------------------------------------------------------------------------

_CALL = "call "  # prefix of the names of attributes with calls
_REFERENCE = "reference "  # prefix of the names of attributes with trials without DeepSpeed
_SET_ASIDE = "set aside"  # attribute with trial numbers

Callback = Callable[[optuna.Study, FrozenTrial], None]

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", module=r"optuna\.|autotune\.search", category=optuna.exceptions.ExperimentalWarning)


class StudyStore:
    """One study in its database. All writes go to storage first, so memory never holds the only copy."""

    def __init__(
        self,
        study: optuna.Study,
        folder: Path | None,
        name: str = "",
        interpreter: Interpreter = OWN,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.study, self.folder, self.interpreter = study, folder, interpreter
        self.name = name or study.study_name  # the folder's, which may have been renamed, if the study is a file in it
        self._lock: Any = None
        self._callbacks = callbacks
        self._ended: dict[int, Record | None] = {}  # parsed once: trials that have ended never change
        self._open: dict[int, optuna.Trial] = {}  # of this tuner
        self.tuner = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(3)}"  # a process may tune twice
        self._heartbeat: threading.Thread | None = None
        self._left = threading.Event()
        self._seen: set[int] = set()  # running trials of peers
        self.measured_here = MeasuredHere()
        self._call: tuple[str, Call] | None = None  # this process's call, and the name of its attribute
        self.finished: Counter[str] = Counter()  # trials of this process by kind of outcome, the script's own run too

    @classmethod
    def in_memory(cls, job: Job, hardware: Hardware, space: SearchSpace) -> StudyStore:
        """Create a study that ends with the process. Replays need no database."""
        store = cls(optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler()), None)
        write_study_metadata(store.study, fingerprint(job, hardware), hardware, space, other_python(job.interpreter))
        return store

    @classmethod
    def create_or_resume(
        cls,
        name: str,
        storage: str,
        folder: Path,
        job: Job,
        hardware: Hardware,
        space: SearchSpace,
        *,
        force: bool = False,
        shared: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> tuple[StudyStore, bool]:
        """Create a study or resume an existing one.

        Args:
            storage: URL of its database.
            force: resume even if the fingerprint differs.
            shared: peer tuners may be active.
            callbacks: called after each trial of this process, as those of `optuna.Study.optimize`.

        Returns:
            The study, and whether it existed.

        Raises:
            UserError: the study belongs to another job, machine or package set and `force` is not given.
        """
        database, here = open_storage(storage), optuna.samplers.RandomSampler()
        mark, shown, python = fingerprint(job, hardware), name, other_python(job.interpreter)
        name = name if shared else _stored_name(name, database)
        if name not in optuna.get_all_study_names(database):
            # one of several tuners that start together creates it
            with suppress(optuna.exceptions.DuplicatedStudyError):
                made = optuna.create_study(study_name=name, storage=database, direction="maximize", sampler=here)
                write_study_metadata(made, mark, hardware, space, python)
                return cls(made, folder, interpreter=job.interpreter, callbacks=callbacks), False
        loaded = optuna.load_study(study_name=name, storage=database, sampler=here)
        store = cls(loaded, folder, shown, job.interpreter, callbacks)
        if not wait_for_study_metadata(store.study):  # the creator died before it wrote the metadata
            write_study_metadata(store.study, mark, hardware, space, python)
            return store, False
        before = store.attributes.get("fingerprint")
        if before is None:
            raise UserError(
                f"study {name!r} in {hide_password(storage)} was not made by autotune: choose another --study"
            )
        changed = changes(before, mark)
        if changed:
            if not force:
                raise UserError(
                    f"study {name!r} is of another job or machine ({'; '.join(changed[:6])}): "
                    "choose another --study, or --force to go on with it"
                )
            store._append("forced", {"at": now(), "differences": changed})
        store._set("fingerprint", merged_fingerprint(before, mark))
        store._set("space", space.text)
        store._set("python", python)
        store.note_hardware(hardware)
        return store, True

    @classmethod
    def load(
        cls, name: str, storage: str | None = None, runs: Path = Path("runs"), interpreter: Interpreter = OWN
    ) -> Self:
        """Load an existing study by name or by the folder of its run, which may be read-only.

        Args:
            name: the study's name, or its folder.
            storage: URL of its database; None: the file in its folder.
            runs: folder of the studies.
            interpreter: of the ranks, if the caller starts any.

        Raises:
            UserError: no study has this name.
        """
        folder, is_own = Path(name) if stored_in(Path(name)) else runs / name, not storage
        if not storage:
            storage = stored_in(folder)
            if storage is None:
                known = sorted({path.parent.name for file in DATABASES for path in runs.glob(f"*/{file}")})
                hint = did_you_mean(name, known) or (f"; there are {', '.join(known[:8])}" if known else "")
                raise UserError(f"no study {name!r} in {runs}/{hint} (`--storage` reaches other databases)")
            name = folder.resolve().name
        database = open_storage(storage, reading=True)
        stored = _stored_name(name, database) if is_own else name
        try:
            study = optuna.load_study(study_name=stored, storage=database, sampler=optuna.samplers.RandomSampler())
        except KeyError:
            known = optuna.get_all_study_names(database)
            raise UserError(f"no study {name!r} in {hide_password(storage)}{did_you_mean(name, known)}") from None
        store = cls(study, folder, name, interpreter)
        check_founded(study, f"study {name!r} in {hide_password(storage)}")
        return store

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the study."""
        return attributes(self.study)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return the recorded fingerprint."""
        return dict(self.attributes["fingerprint"])

    @property
    def job(self) -> Job:
        """Return the recorded job, in this call's interpreter."""
        return dataclasses.replace(recorded_job(self.fingerprint["job"]), interpreter=self.interpreter)

    @property
    def hardware(self) -> Hardware:
        """Return the recorded hardware."""
        return Hardware.from_json(self.attributes["hardware"])

    def note_hardware(self, hardware: Hardware) -> None:
        """Store the hardware."""
        self._set("hardware", hardware.to_json())

    @property
    def versions(self) -> dict[str, str]:
        """Return the recorded package versions."""
        return dict(self.fingerprint["versions"])

    @property
    def python(self) -> str | None:
        """Python of the ranks; None if it is the tuner's own."""
        found = self.attributes.get("python")
        return str(found) if found else None

    @property
    def threads(self) -> int:
        """CPU threads per rank during measurements."""
        return int(self.fingerprint.get(THREADS) or threads_per_rank(self.job.ranks))

    @property
    def space_text(self) -> str:
        """Return the recorded search space as YAML."""
        return str(self.attributes["space"])

    def searched_space(self) -> SearchSpace:
        """Return the space as searched, fitted to the study's machine and job.

        Raises:
            UserError: this version cannot read it.
        """
        return fitted(parse_space(self.space_text), self.job, self.hardware, here=False).space

    def lock(self) -> None:
        """Hold the study for this process.

        Raises:
            UserError: another run holds it.
        """
        self._lock = lock_study(self.folder, self.name) if self.folder is not None else None

    @property
    def shared(self) -> bool:
        """True if peer tuners may be active; otherwise this tuner holds the study alone."""
        return self._heartbeat is not None

    def share(self, print_line: Callable[[str], None]) -> None:
        """Tune the study together with peer tuners until `leave`, instead of holding it.

        Args:
            print_line: receives lines for the user.
        """
        self._heartbeat = threading.Thread(target=self._keep_alive, name="autotune-heartbeat", daemon=True)
        self._heartbeat.start()
        backend = getattr(self.study._storage, "_backend", None)  # behind Optuna's cache
        if isinstance(backend, ServerStorage):
            backend.print_line = print_line

    def leave(self) -> None:
        """End this tuner. Another tuner, also in this process, may then hold the study."""
        self._left.set()
        # the error that ended the call is reported, and a later call closes the trial
        with suppress(Exception):
            for number in list(self._open):
                self._store(number, ABANDONED)
        if self._lock is not None:
            self._lock.release()

    def _keep_alive(self) -> None:
        while not self._left.wait(HEARTBEAT_SECONDS):
            with suppress(Exception):  # the search reports an unavailable database
                for trial in list(self._open.values()):
                    record_heartbeat(trial)

    def peers(self) -> list[str]:
        """Return the peer tuners that run trials now."""
        return sorted({record.tuner for record in self.running_elsewhere() if record.tuner is not None})

    def _set(self, key: str, value: Any) -> None:
        """Store an attribute unless it is already stored."""
        if self.attributes.get(key) != value:
            set_attribute(self.study, key, value)

    def _append(self, key: str, value: Any) -> None:
        self._set(key, [*self.attributes.get(key, []), value])

    # -- trials ------------------------------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Return all trials in order."""
        each = [self._record(trial) for trial in self.study.get_trials(deepcopy=False)]
        return list(with_second_deaths(record for record in each if record is not None))

    def _record(self, trial: FrozenTrial) -> Record | None:
        if not trial.state.is_finished():
            return record_of(trial)
        if trial.number not in self._ended:
            self._ended[trial.number] = record_of(trial)
        return self._ended[trial.number]

    def record(self, number: int) -> Record:
        """Return one trial.

        Raises:
            UserError: the study has no such trial.
        """
        records = self.records()
        for one in records:
            if one.number == number:
                return one
        have = f"0 to {records[-1].number}" if records else "none yet"
        raise UserError(f"study {self.name} has no trial {number}: its trials are {have}")

    def leaderboard(
        self, hardware: Hardware, job: Job, is_inside: Callable[[Candidate], bool], began: int
    ) -> Leaderboard:
        """Return the trials as a call sees them whose first trial has the number `began`.

        Args:
            hardware: of the call.
            job: of the call.
            is_inside: test for the call's space, which may differ from that of earlier calls.
        """
        records = self.records()
        outside = {record.candidate for record in records if not is_inside(record.candidate)}
        return Leaderboard(records, hardware, job, outside=outside, began=began)

    def measured(self) -> dict[Candidate, Measurement]:
        """Return the latest measurement of every measured candidate."""
        return {
            r.candidate: r.outcome.measurement
            for r in self.records()
            if r.outcome and r.outcome.measurement and r.role != RESUME
        }

    def failed(self) -> dict[Candidate, OutcomeKind]:
        """Return candidates with an attributable failure and without a measurement, with their last failure.

        An OOM on a machine with clearly less memory does not count.
        """
        machine = self.hardware
        ended = [(r.candidate, r.outcome) for r in self.records() if r.outcome]
        told = [one for one in ended if not machine.outgrew(one[1].kind, one[1].capacity_bytes)]
        measured = {candidate for candidate, outcome in told if outcome.measurement}
        failed = [one for one in told if one[1].kind.is_attributable_to_candidate and one[0] not in measured]
        return {candidate: outcome.kind for candidate, outcome in failed}

    def start(self, candidate: Candidate, space: SearchSpace | None, role: str = SEARCH, note: str = "") -> int:
        """Store the start of a trial and return its number.

        Args:
            space: the candidate's space; None if it has none.
            note: reason for the trial.
        """
        trial = begin(self.study, candidate, space, role=role, note=note, tuner=self.tuner)
        self._open[trial.number] = trial
        if self.shared:
            record_heartbeat(trial)
        return trial.number

    def claim(
        self, candidate: Candidate, space: SearchSpace, role: str, note: str = "", known: Container[int] = ()
    ) -> int | None:
        """Start a trial unless a peer tuner is trying the same candidate or has just finished it; None then.

        Args:
            note: reason for the trial.
            known: numbers of trials that the caller has processed.
        """
        number = self.start(candidate, space, role, note)
        earlier = self.records() if self.shared else []
        for record in earlier:
            if (
                record.number >= number
                or record.number in known
                or (record.candidate, record.role) != (candidate, role)
            ):
                continue
            if record.outcome is None or record.outcome.kind.is_attributable_to_candidate:
                withdraw(self._open.pop(number))
                return None
        return number

    def finish(self, number: int, outcome: Outcome) -> None:
        """Store a trial's outcome.

        Memory is a graded constraint, not Optuna's FAIL, because samplers ignore failed trials and repeat them.
        """
        self.finished[outcome.kind.value] += 1
        self._store(number, outcome)

    def _store(self, number: int, outcome: Outcome) -> None:
        trial = self._open.pop(number)
        with kept_if_it_fails(self.folder, trial, outcome, self.measured_here):
            if not store_outcome(self.study, trial, outcome, self.hardware):
                # A peer tuner closed the trial because it missed the heartbeats. The outcome is stored as a new trial.
                was = self.record(number)
                trial = begin(self.study, was.candidate, None, role=was.role, note=was.note, tuner=self.tuner)
                store_outcome(self.study, trial, outcome, self.hardware)
        for callback in self._callbacks:
            callback(self.study, self.study._storage.get_trial(trial._trial_id))

    def finish_late(self) -> int:
        """Store outcomes that earlier calls in this folder could not store; return the number of trials."""
        stored = 0
        for trial, outcome in outcomes_kept_in_folder(self.folder, self.study):
            self._open[trial.number] = trial
            self._store(trial.number, outcome)
            stored += 1
        return stored

    def close_interrupted(self) -> int:
        """Close trials that dead tuners left running, as interrupted; return their number.

        Optuna closes those of a shared study without a heartbeat.
        """
        running = [one for one in self._running() if one.number not in self._open]
        if not self.shared:
            for trial in running:
                stored = trial.user_attrs.get(OUTCOME)
                outcome = DIED if stored is None else Outcome.from_json(stored)
                tell(self.study, optuna.Trial(self.study, trial._trial_id), outcome, self.hardware)
            return sum(record_of(one) is not None and OUTCOME not in one.user_attrs for one in running)
        for trial in running:
            if trial.number not in self._seen:  # its tuner may have died before its first heartbeat
                record_heartbeat(optuna.Trial(self.study, trial._trial_id))
        self._seen.update(one.number for one in running)
        optuna.storages.fail_stale_trials(self.study)
        return len(running) - sum(one.number not in self._open for one in self._running())

    def _running(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def running_elsewhere(self) -> list[Record]:
        """Return the running trials of peer tuners on a shared study, after closing trials of dead tuners."""
        self.close_interrupted()
        return [one for one in self.records() if one.outcome is None and one.tuner != self.tuner]

    # -- calls -------------------------------------------------------------------------------------------------------

    def begin_call(self, budget_seconds: float) -> None:
        """Store the start of a call in its own attribute.

        A single attribute for all calls would be rewritten, and grow, with every trial.
        """
        key = f"{_CALL}{len(self.calls()):06d} {self.tuner}"  # the tuner's name keeps simultaneous calls apart
        self._call = key, Call(now(), budget_seconds)
        self._set(key, vars(self._call[1]))

    def update_call(self, used_seconds: float, stop_sentence: str = "", confidence: str = "") -> None:
        """Store the seconds that the current call used, the reason of its end, and the sentence of its `Confidence`."""
        if self._call is not None:
            key, call = self._call
            used = round(used_seconds, 1)
            self._set(
                key, vars(dataclasses.replace(call, used_seconds=used, ended=stop_sentence, confidence=confidence))
            )

    def calls(self) -> list[Call]:
        """Return all calls in order."""
        stored = self.attributes
        return [Call.of(stored[key]) for key in sorted(stored) if key.startswith(_CALL)]

    def note_command(self, command: str) -> None:
        """Store the command line unless it is already stored."""
        if command not in self.commands:
            self._append("commands", command)

    @property
    def commands(self) -> tuple[str, ...]:
        """Distinct command lines of the calls."""
        return tuple(self.attributes.get("commands", ()))

    def set_winner(self, number: int, why: str) -> None:
        """Store the winner and the reason."""
        self._set("winner", {"number": number, "why": why})

    @property
    def winner(self) -> Record | None:
        """Return the record of the winner, or None. A winner that was rejected since is returned as it was measured."""
        chosen = self.attributes.get("winner")
        if not chosen:
            return None
        return self.facts().winner or next((one for one in self.records() if one.number == chosen["number"]), None)

    def facts(self) -> StudyFacts:
        """Return the facts of the study's verdict, which every output reads."""
        chosen = self.attributes.get("winner")
        return StudyFacts(
            self.records(),
            self.job,
            self.hardware,
            winner=chosen["number"] if chosen else None,
            set_aside=self.set_aside,
            call=next(reversed(self.calls()), NO_CALL),
            references=self.references,
        )

    def note_reference(self, candidate: Candidate, outcome: Outcome) -> None:
        """Store a trial without DeepSpeed of the current call, in its own attribute: it is no candidate's.

        Args:
            candidate: stage 0 stands for DDP, stage 3 for FSDP2.
        """
        stored = {"candidate": candidate.as_dict, "outcome": outcome.to_json(), "tuner": self.tuner, "started": now()}
        self._set(f"{_REFERENCE}{now()} {self.tuner} {candidate.stage}", stored)

    @property
    def references(self) -> list[Record]:
        """Trials without DeepSpeed in order, with numbers of their own."""
        named = sorted((key, value) for key, value in self.attributes.items() if key.startswith(_REFERENCE))
        stored = [value for _, value in named if isinstance(value, dict)]  # others are pieces of a long one
        return [
            Record(
                number,
                Candidate.of(one["candidate"]),
                Outcome.from_json(one["outcome"]),
                REFERENCE,
                tuner=one["tuner"],
                started=one["started"],
            )
            for number, one in enumerate(stored)
        ]

    @property
    def set_aside(self) -> frozenset[int]:
        """Numbers of trials of measured candidates outside the space of the latest call."""
        return frozenset(self.attributes.get(_SET_ASIDE, ()))

    def note_set_aside(self, numbers: list[int]) -> None:
        """Store the numbers of trials outside the space of this call."""
        if numbers or self.set_aside:
            self._set(_SET_ASIDE, numbers)

    def note_extensions(self, folder: str) -> None:
        """Store the folder of the ops that DeepSpeed built for the trials."""
        self._set("extensions", folder)

    @property
    def extensions(self) -> str:
        """Folder of DeepSpeed's ops; empty if unknown."""
        return str(self.attributes.get("extensions", ""))

    def note_skips(self, skips: dict[str, int]) -> None:
        """Store the number of untried candidates by reason."""
        self._set("skips", skips)

    @property
    def skips(self) -> dict[str, int]:
        """Return the number of skipped candidates by reason."""
        return dict(self.attributes.get("skips", {}))


def _stored_name(name: str, database: optuna.storages.BaseStorage) -> str:
    """Return the name under which a folder's own file stores the study. The folder may have been renamed since."""
    known = optuna.get_all_study_names(database)
    return known[0] if len(known) == 1 else name


# -- study metadata ----------------------------------------------------------------------------------------------------
#
# Write a study's first attributes. They are written one by one, so a killed process may leave only some of them.

_NEEDED = ("fingerprint", "hardware", "space")  # required to read a study
_WRITTEN_FIRST = (*_NEEDED, "python")
_LAST = "objective"  # written last, which marks the metadata as complete
METRIC = "samples per second"  # name of the objective in Optuna's dashboard and tables
_FOUNDING_SECONDS = 3.0  # within which the creator of a new study writes its metadata


def write_study_metadata(
    study: optuna.Study, mark: dict[str, Any], hardware: Hardware, space: SearchSpace, python: str | None = None
) -> None:
    """Store a study's metadata.

    Args:
        mark: its fingerprint.
        python: path of the ranks' Python; None: the tuner's own.
    """
    first = {"fingerprint": mark, "hardware": hardware.to_json(), "space": space.text, "python": python}
    _name_metric(study)
    for key, value in {**first, _LAST: "samples per second, all ranks"}.items():
        set_attribute(study, key, value)


def _name_metric(study: optuna.Study) -> None:
    with warnings.catch_warnings():  # the function is marked as experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([METRIC])


def wait_for_study_metadata(study: optuna.Study) -> bool:
    """Wait for the metadata of a new study, and return False if its creator ended before it wrote them.

    Any tuner may then write the metadata. A study with trials, or of another program, returns True.
    """
    until = time.monotonic() + _FOUNDING_SECONDS
    while _LAST not in study.user_attrs:
        # pieces of a long attribute have names that begin with its name
        others = [key for key in study.user_attrs if not key.startswith(_WRITTEN_FIRST)]
        if others or study.get_trials(deepcopy=False) or study.direction is not StudyDirection.MAXIMIZE:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def check_founded(study: optuna.Study, shown: str) -> None:
    """Raise UserError if a study cannot be read: autotune did not create it, or its creator ended too early."""
    told = attributes(study)
    if all(key in told for key in _NEEDED):
        return
    if wait_for_study_metadata(study):
        raise UserError(f"{shown} was not made by autotune")
    raise UserError(f"{shown} was begun by a run that died before its first trial: run it again")
