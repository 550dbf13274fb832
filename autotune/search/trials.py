"""Conversion between Optuna trials and Records."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    check_distribution_compatibility,
)
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from autotune.masking import masked_data
from autotune.problem.candidate import Candidate, Value
from autotune.problem.hardware import Hardware
from autotune.problem.knobs import KNOBS
from autotune.problem.outcome import Outcome, OutcomeKind, Source
from autotune.problem.space import SearchSpace
from autotune.util.bounds import known_fields
from autotune.util.files import write_atomically
from autotune.util.units import GIB

# -- trials ------------------------------------------------------------------------------------------------------------


def begin(
    study: optuna.Study, candidate: Candidate, space: SearchSpace | None, *, role: str, note: str, tuner: str
) -> optuna.Trial:
    """Store in one step that a candidate is being tried.

    Args:
        space: values of this space are passed to Optuna; None passes the candidate's values only.
        note: reason for the trial.
    """
    knobs: dict[str, Any] = dict(candidate.knobs)
    attributes = {CANDIDATE: knobs, ROLE: role, "note": note, "started": now(), TUNER: tuner}
    parameters, kinds = optuna_parameters(candidate, space, stored_distributions(study))
    create = functools.partial(optuna.trial.create_trial, state=TrialState.RUNNING, user_attrs=attributes)
    storage, which = study._storage, study._study_id
    try:
        number = storage.create_new_trial(which, template_trial=create(params=parameters, distributions=kinds))
    except ValueError:  # a peer tuner with another space has stored other choices since
        number = storage.create_new_trial(which, template_trial=create())
    return optuna.Trial(study, number)


def stored_distributions(study: optuna.Study) -> dict[str, BaseDistribution]:
    """Return the distributions by name, each from the first trial that has it."""
    found: dict[str, BaseDistribution] = {}
    for trial in study.get_trials(deepcopy=False):
        for name, kind in trial.distributions.items():
            found.setdefault(name, kind)
    return found


def withdraw(trial: optuna.Trial) -> None:
    """End a trial that a peer tuner has begun first, so that it leaves no record."""
    with suppress(UpdateFinishedTrialError):
        trial.set_user_attr(CANDIDATE, None)
        trial.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)


def store_outcome(study: optuna.Study, trial: optuna.Trial, outcome: Outcome, hardware: Hardware) -> bool:
    """Store a trial's outcome, then its state, which cannot be changed afterwards.

    The outcome survives if this tuner is killed between the two writes, or if a peer closes the trial.

    Returns:
        False if a peer tuner has already closed the trial because it missed this tuner's heartbeats.
    """
    try:
        trial.set_user_attr(OUTCOME, outcome.to_json())
    except UpdateFinishedTrialError:
        return False
    try:
        for name, value in flat(outcome, hardware).items():
            trial.set_user_attr(name, value)
        tell(study, trial, outcome, hardware)
    except (UpdateFinishedTrialError, ValueError):  # Optuna raises ValueError if a trial is ended twice
        if not study._storage.get_trial(trial._trial_id).state.is_finished():
            raise
    return True


def now() -> str:
    """Return the time in UTC, in ISO format."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# -- records -----------------------------------------------------------------------------------------------------------

AS_IS = "the script as it is"  # note of the trial of the script's own config
SEARCH, VERIFY, RESUME = "search", "verify", "resume"  # roles of trials; RESUME continues from a checkpoint
REFERENCE = "reference"  # without DeepSpeed; stored apart from the trials (`StudyStore.references`)
TRAINING = "training"  # recorded by `autotune.recovery.trainer_callback`

# Names of trial attributes.
CANDIDATE, ROLE, OUTCOME, TUNER = "candidate", "role", "outcome", "tuner"
_LEFT = "left"  # outcome of a trial that another tuner closed, in studies of earlier versions


@dataclass(frozen=True)
class Record:
    """A trial of the study as stored."""

    number: int
    candidate: Candidate
    outcome: Outcome | None  # None while the trial runs
    role: str  # SEARCH, VERIFY, RESUME, TRAINING or REFERENCE
    note: str = ""  # reason for the trial
    tuner: str | None = None  # tuner's name; None if the trial was not started by a tuner
    started: str = ""  # time of its start in UTC, in ISO format

    def __str__(self) -> str:
        """Return the trial in one line."""
        measured = self.outcome and self.outcome.measurement
        speed = f" at {measured.samples_per_second:.4g} samples/s" if measured else ""
        return f"trial {self.number} ({self.role}): {self.candidate}{speed}"


@dataclass(frozen=True)
class Call:
    """One call of `autotune run` on the study."""

    started: str
    budget_seconds: float
    used_seconds: float = 0.0
    ended: str = ""  # sentence of the Stop; empty while the call runs, or after a SIGKILL
    confidence: str = ""  # sentence that bounds the speed of untried candidates; empty without a measurement

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Call:
        """Return a stored call without the fields of a newer version."""
        return cls(**known_fields(cls, stored))


NO_CALL = Call("", 0.0)  # stands for the latest call of a study without any


def resumed_peak_bytes(records: list[Record], candidate: Candidate) -> int | None:
    """Return the peak of a rank in the candidate's latest resume trial, in bytes; None unless that trial succeeded."""
    found = [r.outcome for r in records if r.role == RESUME and r.candidate == candidate and r.outcome]
    return found[-1].peak_bytes if found and found[-1].ok else None


def _died(why: str, kind: OutcomeKind) -> Outcome:
    return Outcome(kind, reason=why, evidence="found running", source=Source.DEATH)


DIED = _died("the tuner's process ended meanwhile", OutcomeKind.INTERRUPTED)
# The trial may have killed its tuner: a container or a Slurm step is killed as a whole when its memory is full. After a
# second death the trial is taken for the cause, so that the study can continue.
DIED_TWICE = _died(
    "the tuner's process ended twice while it ran: it may have taken all of main memory", OutcomeKind.OOM_HOST
)
# of a call that ended by an error; the candidate is not at fault
ABANDONED = Outcome(OutcomeKind.INTERRUPTED, reason="its call ended", evidence="left behind", source=Source.STOP)


def with_second_deaths(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records in order. A trial during which a tuner died again has the outcome DIED_TWICE."""
    died: set[tuple[Candidate, str]] = set()
    for record in records:
        outcome, which = record.outcome, (record.candidate, record.role)
        if outcome == DIED and which in died:
            record = dataclasses.replace(record, outcome=DIED_TWICE)
        elif outcome == DIED:
            died.add(which)
        elif outcome is not None and outcome.kind is not OutcomeKind.INTERRUPTED:
            died -= {(record.candidate, role) for role in (SEARCH, VERIFY, RESUME)}
        yield record


def record_of(trial: FrozenTrial) -> Record | None:
    """Return a trial's Record; None for a trial of another program, or one that was withdrawn."""
    knobs = trial.user_attrs.get(CANDIDATE)
    if knobs is None:
        return None
    stored = trial.user_attrs.get(OUTCOME, trial.user_attrs.get(_LEFT))
    unknown = DIED if trial.state.is_finished() else None
    return Record(
        trial.number,
        Candidate(tuple(sorted(knobs.items()))),
        Outcome.from_json(stored) if stored else unknown,
        str(trial.user_attrs.get(ROLE, SEARCH)),
        str(trial.user_attrs.get("note", "")),
        trial.user_attrs.get(TUNER),
        str(trial.user_attrs.get("started", "")),
    )


# -- distributions -----------------------------------------------------------------------------------------------------
#
# Convert candidates and outcomes to Optuna's terms: parameters, distributions and constraints.


def constraints(outcome: Outcome, hardware: Hardware) -> dict[str, float]:
    """Return Optuna's constraints, feasible at 0 or less: GiB over the ceiling, and 1 for any other failure."""
    if outcome.measurement is not None:
        over = (outcome.measurement.peak_bytes - hardware.ceiling_bytes) / GIB
        return {"memory_gib_over": over, "failed": 0.0}
    if outcome.kind.is_oom:
        over = max((outcome.missing_bytes or 0) / GIB, 0.01) + hardware.capacity_bytes * hardware.headroom / GIB
        return {"memory_gib_over": over, "failed": 0.0}
    return {"memory_gib_over": 0.0, "failed": 1.0}


def optuna_parameters(
    candidate: Candidate, space: SearchSpace | None, stored: Mapping[str, BaseDistribution]
) -> tuple[dict[str, Value], dict[str, BaseDistribution]]:
    """Return the candidate's parameters and their distributions: ordered numbers as ranges, the rest as choices.

    A database accepts only one type of distribution, and one set of choices, per name, and a study may be searched in
    several spaces. A value that the stored choices lack is only in the attribute CANDIDATE.

    Args:
        space: a distribution covers this space's values; None covers the candidate's values only.
        stored: distributions of the study's earlier trials, by name.
    """
    parameters: dict[str, Value] = {}
    found: dict[str, BaseDistribution] = {}
    for name, value in candidate.knobs:
        values = space.knobs[name].values if space is not None and name in space.knobs else ()
        known, new = stored.get(name), distribution(name, (*values, value))
        if isinstance(known, FloatDistribution) and isinstance(new, IntDistribution):
            new = FloatDistribution(float(new.low), float(new.high))
        if isinstance(known, CategoricalDistribution) and value in known.choices:
            new = known
        if known is None or (type(known) is type(new) and _is_compatible(known, new)):
            parameters[name], found[name] = value, new
    return parameters, found


def _is_compatible(known: BaseDistribution, new: BaseDistribution) -> bool:
    try:
        check_distribution_compatibility(known, new)
    except ValueError:
        return False
    return True


def distribution(name: str, values: tuple[Value, ...]) -> BaseDistribution:
    """Return a range or a choice that holds all values of a knob.

    A choice contains all possible values of the knob if these are few, including values that the space lacks.
    """
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values) and name != "zero_stage":
        low, high = min(numbers), max(numbers)
        if all(isinstance(v, int) for v in numbers):
            return IntDistribution(int(low), int(high), log=low >= 1)
        return FloatDistribution(float(low), float(high), log=low > 0)
    return CategoricalDistribution(tuple(dict.fromkeys((*_all_of(name), *values))))


def _all_of(name: str) -> tuple[Value, ...]:
    kind = KNOBS[name].kind if name in KNOBS else None
    if name == "zero_stage":
        return (0, 1, 2, 3)
    return (False, True) if kind is bool else kind if isinstance(kind, tuple) else ()


# -- dashboard ---------------------------------------------------------------------------------------------------------
#
# Adapt a study to optuna-dashboard. Based on the source of version 0.21.0.
#
# The dashboard does not know the constraints of Optuna 5: `_serializer.py` reads the attribute `constraints`, while
# Optuna writes `constraints:NAME`. Its best trial is the storage's best, the COMPLETE trial with the highest value.
# autotune therefore writes a study as follows:
#
# * A candidate that does not fit is PRUNED, with its speed as the value. Optuna's TPE checks feasibility before the state
#   (`samplers/_tpe/sampler.py`, `_split_trials`), so the sampler is unaffected, and the dashboard's best trial fits.
# * Each trial has flat attributes, which become columns of the dashboard's table.


def flat(outcome: Outcome, hardware: Hardware) -> dict[str, Any]:
    """Return a trial's flat attributes for the dashboard's table.

    Returns:
        `kind`, and if known `peak_gib`, `tokens_per_s` and `over_gib`: GiB above the ceiling, negative below it.
    """
    found: dict[str, Any] = {"kind": outcome.kind.value}
    if outcome.peak_bytes or outcome.measurement:
        peak = outcome.measurement.peak_bytes if outcome.measurement else outcome.peak_bytes or 0
        found["peak_gib"] = round(peak / GIB, 3)
    if outcome.measurement or outcome.kind.is_oom:
        found["over_gib"] = round(constraints(outcome, hardware)["memory_gib_over"], 3)
    if outcome.measurement:
        found["tokens_per_s"] = round(outcome.measurement.tokens_per_second, 2)
    return found


def tell(study: optuna.Study, trial: optuna.Trial, outcome: Outcome, hardware: Hardware) -> None:
    """End a trial whose outcome is stored. The call can be repeated if a process was killed during it."""
    if not outcome.kind.is_attributable_to_candidate:
        study.tell(trial, state=TrialState.FAIL)
        return
    known = trial.constraints
    values = constraints(outcome, hardware)
    fits, measured = all(value <= 0 for value in values.values()), outcome.measurement
    if not fits and measured is not None and not known:
        # Optuna takes the last report as the value of a pruned trial
        trial.report(measured.samples_per_second, measured.steps)
    for name, value in values.items():
        if name not in known:
            trial.set_constraint(name, value)
    if fits and measured is not None:
        study.tell(trial, measured.samples_per_second)
    else:
        study.tell(trial, state=TrialState.PRUNED)


# -- trials not saved --------------------------------------------------------------------------------------------------
#
# Keep outcomes that could not be stored because the database was unavailable.
#
# The study's folder holds them for the next call.

_NAME = "unsaved-*.json"


class MeasuredHere:
    """Numbers of the trials that this process measured, and of those that are only in the study's folder."""

    def __init__(self) -> None:
        self.ended, self.in_folder = set[int](), set[int]()

    def what_is_left(self, study: str, storage: str) -> str:
        """Return which of these trials a later call will find, after reading the storage.

        Args:
            storage: the URL of the study's database.
        """
        from autotune.search.storage import open_storage  # it imports databases, which `plan` needs none of

        if not self.ended:
            return "nothing was measured in this call"
        try:
            opened = optuna.load_study(study_name=study, storage=open_storage(storage, reading=True))
            stored = {one.number for one in opened.get_trials(deepcopy=False) if OUTCOME in one.user_attrs}
        except Exception:  # any error of a failing storage
            if self.ended == self.in_folder:
                return "what was measured is kept"
            return "what was measured cannot be read back now"
        if lost := len(self.ended - stored - self.in_folder):
            return f"{lost} of {len(self.ended)} measured trials could not be stored and will be measured again"
        return "what was measured is kept"


@contextmanager
def kept_if_it_fails(folder: Path | None, trial: optuna.Trial, outcome: Outcome, here: MeasuredHere) -> Iterator[None]:
    """Keep a trial's outcome in the folder, if writable, when the block that stores it fails.

    Args:
        folder: the study's folder; None keeps nothing.
        here: receives the trial's number.
    """
    number, tuner = trial.number, trial.user_attrs.get(TUNER)
    if outcome.ok:
        here.ended.add(number)
    try:
        yield
    except BaseException as error:  # also a second Ctrl-C during the wait for the database
        if folder is not None and tuner and outcome.kind.is_attributable_to_candidate:
            kept = {"number": number, "tuner": tuner, "outcome": outcome.to_json()}
            try:
                name = _NAME.replace("*", f"{tuner.rpartition('/')[2]}-{number}")  # the random word of the tuner's name
                write_atomically(folder / name, json.dumps(kept) + "\n")
            except OSError:
                raise error from None
            here.in_folder.add(number)
        raise


def outcomes_kept_in_folder(folder: Path | None, study: optuna.Study) -> Iterator[tuple[optuna.Trial, Outcome]]:
    """Yield trials with outcomes that earlier calls left in the folder.

    Files of another study with the same name are deleted.
    """
    for path in sorted(folder.glob(_NAME)) if folder is not None else []:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            number, tuner, outcome = int(kept["number"]), kept["tuner"], Outcome.from_json(kept["outcome"])
        except (OSError, ValueError, KeyError, TypeError):  # another call was faster, or it is not a file of autotune
            continue
        trial = next((trial for trial in study.get_trials(deepcopy=False) if trial.number == number), None)
        if trial is not None and trial.user_attrs.get(TUNER) == tuner and OUTCOME not in trial.user_attrs:
            yield optuna.Trial(study, trial._trial_id), outcome
        with suppress(OSError):
            path.unlink()  # only after the outcome is stored, so that a killed call leaves it to the next one


# -- attributes --------------------------------------------------------------------------------------------------------
#
# Study attributes of any length. A database may limit an attribute to 64 KiB, as MySQL's TEXT does.
#
# The JSON text of a longer value is split into pieces, each stored as an attribute that is named by a digest of the
# value. A concurrent reader therefore gets the complete old value or the complete new one.

MOST_BYTES = 60_000  # bytes in one attribute; MySQL's TEXT holds 65,535 (Optuna's tables have no larger type)
# characters; a piece is encoded as JSON again, and a backslash before each quote doubles it at worst
_PIECE_CHARACTERS = MOST_BYTES // 2 - 1
_AS_THEY_ARE = ("fingerprint", "space")  # stored without masking: a resumed study runs its command with these values
_PIECES = "autotune pieces"  # the only key of a value that refers to pieces


def set_attribute(study: optuna.Study, key: str, value: Any) -> None:
    """Store an attribute. Secrets are masked unless the study needs them to resume."""
    if key not in _AS_THEY_ARE:
        value = masked_data(value)
    text = json.dumps(value)
    if len(text) <= MOST_BYTES:
        study.set_user_attr(key, value)
        return
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    starts = range(0, len(text), _PIECE_CHARACTERS)
    names = [f"{key} {digest} {number}" for number in range(len(starts))]
    for name, start in zip(names, starts, strict=True):
        study.set_user_attr(name, text[start : start + _PIECE_CHARACTERS])
    study.set_user_attr(key, {_PIECES: names})


def attributes(study: optuna.Study) -> dict[str, Any]:
    """Return all attributes, with split values joined."""
    stored = study.user_attrs
    return {key: _whole(stored, value) for key, value in stored.items()}


def _whole(stored: dict[str, Any], value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_PIECES}:
        return json.loads("".join(stored[name] for name in value[_PIECES]))
    return value
