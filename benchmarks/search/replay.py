"""Replay a recorded table instead of using a machine, with a simulated clock.

A table is `NAME.csv.gz` (or `NAME.csv`) with one row per candidate: its knobs, then `peak_gib`, `step_seconds`,
`startup_seconds` and `outcome`. `NAME.json` next to it describes the job and the machine, with the complete job under
`job`, or a few keys instead. `record.py` writes such tables.

`python benchmarks/search/replay.py TABLE run --study NAME …` is `autotune run` on a table, as is `replayed` in a process.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.cli import app
from autotune.commands.environment import Nodes
from autotune.commands.request import Request
from autotune.commands.setup import Setup, run_setup, study_folder, study_name
from autotune.errors import UserError, did_you_mean
from autotune.executors.base import Executor, MeasureSpec, Session, too_slow_outcome
from autotune.problem.candidate import KNOBS, Candidate, Value, samples
from autotune.problem.gpu_specs import GpuFacts, gpu_table, named_gpu
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, Lora
from autotune.problem.knobs import knob_value
from autotune.problem.models import CAUSAL, ModelSpec, resolve_model
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.problem.space import Domain, SearchSpace
from autotune.rank.step_statistics import MAX_TIMED_MICRO_BATCHES
from autotune.script.recorded import recorded_job
from autotune.util.interpreter import OWN, Interpreter
from autotune.util.units import GIB, parse_share

RESULTS = ("peak_gib", "step_seconds", "startup_seconds", "outcome")
OOM_SECONDS = 2.0
NOISE = 0.02  # log-normal sigma of a measured step time


@dataclass(frozen=True)
class Row:
    """Recorded result of one candidate."""

    peak_gib: float
    step_seconds: float | None
    startup_seconds: float
    kind: OutcomeKind


@dataclass(frozen=True)
class ReplayTable:
    """Recorded table with its job and machine."""

    name: str
    facts: dict[str, Any]
    rows: dict[Candidate, Row]

    @property
    def best_step_seconds(self) -> float:
        """Seconds of the fastest `ok` row, per sample."""
        return min(self.seconds_per_sample(c) for c, row in self.rows.items() if row.kind is OutcomeKind.OK)

    def seconds_per_sample(self, candidate: Candidate) -> float:
        """Return the recorded seconds per sample of a candidate that ran."""
        row = self.rows[candidate]
        assert row.step_seconds is not None
        return row.step_seconds / (candidate.rows_per_rank * int(self.facts["n_gpus"]))

    def job(self, interpreter: Interpreter = OWN) -> Job:
        """Return the job that the table was recorded for, in this interpreter."""
        facts = self.facts
        if "job" in facts:
            return replace(recorded_job(facts["job"]), interpreter=interpreter)
        config, name = facts.get("model_config"), str(facts["model"])
        if isinstance(config, dict):
            model = ModelSpec(name, config, "the table's JSON")
        else:
            model = resolve_model(name, interpreter=interpreter)
        batch = facts.get("global_batch_size")
        return Job(
            model,
            int(facts["n_gpus"]),
            int(facts["seq_len"]),
            str(facts["precision"]).lower(),
            str(facts.get("optimizer", "adamw")).lower(),
            int(batch) if batch else None,
            task=str(facts.get("task", CAUSAL)),
            image_size=facts.get("image_size"),
            interpreter=interpreter,
        )

    def hardware(self, headroom: float = 0.0) -> Hardware:
        """Return the table's machine.

        The default headroom is 0, so that a row fits if it is within the whole memory.
        """
        facts = self.facts
        known: GpuFacts | None = None
        with suppress(UserError):
            known = named_gpu(str(facts["gpu"]))
        base = known or gpu_table()["a100-80gb"]
        rates = {
            **vars(base),
            "name": str(facts["gpu"]),
            "memory_gib": float(facts["gpu_memory_gib"]),
            "tflops": float(facts.get("gpu_bf16_tflops", base.tflops)),
            "memory_gb_per_s": float(facts.get("hbm_gb_per_s", base.memory_gb_per_s)),
            "link_gb_per_s": float(facts.get("interconnect_gb_per_s", base.link_gb_per_s)),
            "pcie_gb_per_s": float(facts.get("pcie_gb_per_s", base.pcie_gb_per_s)),
        }
        device = str(facts.get("device", "cuda"))
        return Hardware(
            device,
            str(facts["gpu"]),
            int(facts["n_gpus"]),
            int(float(facts["gpu_memory_gib"]) * GIB),
            None,
            int(float(facts.get("host_memory_gib", 64)) * GIB),
            known.name if known else None,
            headroom,
            rates=rates if device == "cuda" else None,
        )

    def space(self) -> SearchSpace:
        """Return the knobs and values of the table."""
        knobs: dict[str, dict[Value, None]] = {}
        for candidate in self.rows:
            for name, value in candidate.knobs:
                knobs.setdefault(name, {})[value] = None
        domains = {name: Domain(tuple(sorted(values, key=_order))) for name, values in knobs.items()}
        return SearchSpace(self.name, f"the rows of {self.name}", domains, f"# replay of {self.name}\n")


def _order(value: Value) -> tuple[int, float | str]:
    return (1, value) if isinstance(value, str) else (0, float(value))


def load_replay_table(path: Path) -> ReplayTable:
    """Read a table and its JSON file.

    Raises:
        UserError: a file is missing or not as described above.
    """
    stem = path.name.removesuffix(".gz").removesuffix(".csv").removesuffix(".json")
    tables = (path.parent / f"{stem}{end}" for end in (".csv.gz", ".csv"))
    table = next((one for one in tables if one.is_file()), None)
    about = path.parent / f"{stem}.json"
    if table is None or not about.is_file():
        there = [p.name.split(".csv")[0] for p in path.parent.glob("*.csv*")] if path.parent.is_dir() else []
        raise UserError(
            f"no table {path}{did_you_mean(stem, there)}: expected {stem}.csv.gz with {stem}.json beside it"
        )
    try:
        facts = json.loads(about.read_text(encoding="utf-8"))
        with gzip.open(table) if table.suffix == ".gz" else table.open("rb") as file:
            data = file.read()
        needed = ("model", "seq_len", "gpu", "gpu_memory_gib", "n_gpus", "precision")
        if missing := [key for key in needed if key not in facts]:
            raise UserError(f"{about}: no {missing[0]!r}; expected the job and machine of the table")
        rows = dict(_rows(data.decode(), table))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{table} or its JSON cannot be read: {error}") from None
    if not any(row.kind is OutcomeKind.OK for row in rows.values()):
        raise UserError(
            f"{table}: no row with outcome ok, so nothing of it fits: record a study of which something ran"
        )
    return ReplayTable(stem, facts, rows)


def _rows(text: str, table: Path) -> list[tuple[Candidate, Row]]:
    reader = csv.DictReader(io.StringIO(text))
    if missing := [name for name in RESULTS if name not in (reader.fieldnames or [])]:
        raise UserError(f"{table}: no column {missing[0]!r}; expected knobs and {', '.join(RESULTS)}")
    found = []
    for line in reader:
        try:
            kind = OutcomeKind(line["outcome"])
            seconds = float(line["step_seconds"]) if line["step_seconds"] else None
            row = Row(float(line["peak_gib"] or "nan"), seconds, float(line["startup_seconds"]), kind)
            if kind is OutcomeKind.OK and not (seconds and seconds > 0):
                raise ValueError("an ok row without step_seconds")
            knobs = {name: read_value(name, word) for name, word in line.items() if name not in RESULTS and word}
        except (ValueError, TypeError) as error:
            raise UserError(f"{table}:{reader.line_num}: {error}") from None
        found.append((Candidate.of(knobs), row))
    return found


def write_replay_table(path: Path, facts: dict[str, Any], rows: dict[Candidate, Row]) -> tuple[Path, Path]:
    """Write `NAME.csv.gz` and `NAME.json` for `load_replay_table`, and return the two paths."""
    stem = path.name.removesuffix(".gz").removesuffix(".csv").removesuffix(".json")
    names = sorted({name for candidate in rows for name, _ in candidate.knobs})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *RESULTS])
    for candidate, row in rows.items():
        peak = "" if math.isnan(row.peak_gib) else f"{row.peak_gib:.5f}"
        step = "" if row.step_seconds is None else f"{row.step_seconds:.6g}"
        knobs = [candidate.get(name, "") for name in names]
        writer.writerow([*knobs, peak, step, f"{row.startup_seconds:.3f}", row.kind.value])
    table, about = path.parent / f"{stem}.csv.gz", path.parent / f"{stem}.json"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_bytes(gzip.compress(out.getvalue().encode(), mtime=0))
    about.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return table, about


def read_value(name: str, word: str) -> Value:
    """Return a knob's value from a table cell."""
    value_type = KNOBS[name].kind if name in KNOBS else None
    if word in ("True", "False", "true", "false") and not isinstance(value_type, tuple):
        return word.lower() == "true"
    if value_type is Lora:
        return knob_value(KNOBS[name], word)
    if isinstance(value_type, tuple):
        if word not in value_type:
            raise ValueError(f"{name}: expected one of {', '.join(value_type)}, found {word!r}")
        return word
    try:
        number = float(word)
    except ValueError:
        if value_type is None:
            return word
        raise ValueError(f"{name}: expected a number, found {word!r}") from None
    return int(number) if number.is_integer() else number


@dataclass
class ReplayLog:
    """Record of a replay.

    One entry of `trials` per measured candidate: (simulated end in seconds, candidate, kind).
    """

    trials: list[tuple[float, Candidate, OutcomeKind]] = field(default_factory=list)
    process_starts: list[float] = field(default_factory=list)
    oom_seconds: float = 0.0


class ReplayExecutor(Executor):
    """Executor that returns rows of a `ReplayTable`, on a simulated clock."""

    def __init__(self, replay_table: ReplayTable, seed: int = 0, headroom: float = 0.0) -> None:
        self.replay_table, self.log = replay_table, ReplayLog()
        self.job, self.hardware = replay_table.job(), replay_table.hardware(headroom)
        self._random = random.Random(seed)
        self._now = 0.0

    def session(
        self, candidate: Candidate, name: str, patience: float = 1.0, *, job: Job | None = None
    ) -> ReplaySession:
        """Return a session that replays rows of the candidate's family."""
        return ReplaySession(self, candidate)

    def now(self) -> float:
        """Return the simulated clock in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the simulated clock by seconds."""
        self._now += seconds


class ReplaySession(Session):
    """One simulated engine."""

    def __init__(self, executor: ReplayExecutor, candidate: Candidate) -> None:
        self._executor, self._candidate = executor, candidate
        self._starts, self.alive = True, True  # the next trial starts the engine

    def measure(self, candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
        """Return the recorded outcome of the candidate, and advance the simulated clock.

        Raises:
            ValueError: The candidate belongs to another family.
            UserError: The table has no row for the candidate.
        """
        if candidate.family != self._candidate.family:
            raise ValueError("a session holds one family")
        executor = self._executor
        row = executor.replay_table.rows.get(candidate)
        if row is None:
            raise UserError(f"the table has no row for {candidate}: use the space of the table (leave --space out)")
        started, self._starts = self._starts, False
        outside = 0.0
        if started:
            outside = row.startup_seconds
            executor.log.process_starts.append(executor.now())
        if row.kind is not OutcomeKind.OK:
            outside += OOM_SECONDS
            measured = 0.0
        else:
            assert row.step_seconds is not None
            measured = row.step_seconds * (
                measure_spec.min_steps if measure_spec.full else min(4.0, 6 / candidate.accumulation)
            )
            if row.step_seconds > measure_spec.beaten_step_seconds:  # one of two timed steps, after two of warm-up
                measured *= 0.75
            first = row.step_seconds * (
                1.0 if measure_spec.full else min(1.0, MAX_TIMED_MICRO_BATCHES / candidate.accumulation)
            )
            measured = max(first, min(measured, measure_spec.measuring_seconds(outside)))
            most = measure_spec.most_first_seconds(outside)
            if first > most and outside + most < deadline_seconds:
                return self._end(too_slow_outcome(Phase.FORWARD, candidate, most), outside + most)
        seconds = outside + measured
        if seconds > deadline_seconds:
            phase, why = Phase.INIT if outside > deadline_seconds else Phase.STEP, "its share of the budget ended"
            evidence = "deadline of the budget"
            late = Outcome(OutcomeKind.INTERRUPTED, phase, reason=why, evidence=evidence, source=Source.BUDGET)
            return self._end(late, max(0.0, deadline_seconds))
        if row.kind is OutcomeKind.OK:
            executor.advance(seconds)
            outcome = replace(self._measured(candidate, row, seconds, outside), started=started)
        else:
            executor.log.oom_seconds += seconds
            outcome = self._end(replace(self._failed(row), started=started), seconds)
        executor.log.trials.append((executor.now(), candidate, row.kind))
        return outcome

    def _end(self, outcome: Outcome, seconds: float) -> Outcome:
        """End the session `seconds` after the trial's start, and return its outcome."""
        self._executor.advance(seconds)
        self.alive = False
        return replace(outcome, seconds=seconds, outside_seconds=seconds)

    def _failed(self, row: Row) -> Outcome:
        missing = None
        if row.kind is OutcomeKind.OOM_DEVICE:
            capacity_gib = self._executor.hardware.memory_bytes / GIB
            missing = int(max(0.0, min(row.peak_gib - capacity_gib, 0.25 * row.peak_gib)) * GIB)
        return Outcome(
            row.kind,
            Phase.BACKWARD,
            reason="the table says so",
            evidence="replay",
            source=Source.TABLE,
            missing_bytes=missing,
        )

    def _measured(self, candidate: Candidate, row: Row, seconds: float, outside: float) -> Outcome:
        executor = self._executor
        assert row.step_seconds is not None
        step = row.step_seconds * executor._random.lognormvariate(0.0, NOISE)
        trained = samples(executor.job, candidate)
        peak = int(row.peak_gib * GIB)
        measurement = Measurement(
            step_seconds=step,
            step_seconds_spread=1.96 * NOISE * step,
            steps=4,
            samples_per_second=trained / step,
            tokens_per_second=trained * executor.job.tokens_per_sample / step,
            peak_bytes=peak,
            extrapolated=candidate.accumulation > 3,
        )
        return Outcome(
            OutcomeKind.OK, Phase.STEP, measurement, peak_bytes=peak, seconds=seconds, outside_seconds=outside
        )

    def close(self) -> None:
        """End the session."""
        self.alive = False


# -- whole calls ---------------------------------------------------------------------------------------------------------


@contextmanager
def replayed(path: Path) -> Iterator[None]:
    """Let `autotune run` in this process search a table in place of this machine. Job, machine and space are the table's."""
    table = load_replay_table(path)

    def setup_of(request: Request, nodes: Nodes | None = None, interpreter: Interpreter = OWN) -> Setup:
        stand_in = request.model_copy(update={"model": "tiny-llama", "device": "cpu", "gpus": 1})
        headroom = parse_share(request.headroom) if request.headroom else 0.0
        job, hardware = table.job(interpreter), table.hardware(headroom)
        name = request.study or study_name(job, hardware)
        return replace(
            run_setup(stand_in, nodes, interpreter),
            job=job,
            hardware=hardware,
            space=table.space(),
            candidates=tuple(sorted(table.rows, key=str)),
            notes=(),
            name=name,
            folder=study_folder(request.runs, name),
        )

    def executor_of(setup: Setup, *others: object) -> ReplayExecutor:
        return ReplayExecutor(table, setup.request.seed, setup.hardware.headroom)

    with mock.patch.multiple(
        "autotune.commands.run",
        run_setup=setup_of,
        make_executor=executor_of,
        seconds_since=lambda began: 0.0,  # only simulated seconds count
    ):
        yield


def main() -> None:
    """Run the command line after the table's path."""
    with replayed(Path(sys.argv.pop(1))):
        app.main()


if __name__ == "__main__":
    main()
