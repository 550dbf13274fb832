"""Experiment trackers of a study: Weights & Biases, MLflow and TensorBoard, each through the API of its own package.

Each tracker is a process of its own, `python -m autotune.results.trackers NAME STUDY FOLDER`, which receives the trials as JSON
lines. So its variables, threads and output reach neither the tuner nor a rank, and a slow server takes no time of the search. A
tracker that fails costs one line, and never a study.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import UserError, did_you_mean, one_line
from autotune.masking import masked, masked_data
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome
from autotune.util.bounds import display_value
from autotune.util.entry_points import TRACKER
from autotune.util.interpreter import OWN, module_command
from autotune.util.units import GIB

PATIENCE_SECONDS = 30.0  # for a tracker to finish after the search

# -- what is recorded ----------------------------------------------------------------------------------------------------

Predict = Callable[[Candidate], Mapping[str, float]]  # figures by name, before the trial is measured


@dataclass(frozen=True)
class TrialEntry:
    """A finished trial as trackers receive it."""

    number: int
    config: Mapping[str, Any]  # knobs of the candidate
    labels: Mapping[str, str]  # candidate, role, outcome and reason
    figures: Mapping[str, float]  # measured and predicted


def measured_figures(outcome: Outcome) -> dict[str, float]:
    """Return the figures of an outcome by name; without those that it lacks."""
    found = {"trial_seconds": outcome.seconds}
    if outcome.peak_bytes:
        found["peak_gib"] = outcome.peak_bytes / GIB
    if (measured := outcome.measurement) is not None:
        found |= {
            "samples_per_second": measured.samples_per_second,
            "tokens_per_second": measured.tokens_per_second,
            "step_seconds": measured.step_seconds,
            "peak_gib": measured.peak_bytes / GIB,
        }
    return found


def entry_of(
    number: int, candidate: Candidate, role: str, outcome: Outcome, predicted: Mapping[str, float]
) -> TrialEntry:
    """Return the entry of a finished trial, with predicted and measured figures, and without secrets."""
    reason = {"reason": masked(outcome.reason)[:500]} if outcome.reason else {}
    return TrialEntry(
        number,
        masked_data(candidate.as_dict),
        {"candidate": masked(str(candidate)), "role": role, "outcome": outcome.kind.value, **reason},
        measured_figures(outcome) | {f"predicted_{name}": value for name, value in predicted.items()},
    )


# -- trackers --------------------------------------------------------------------------------------------------------------


class Tracker(Protocol):
    """One tracker, in its own process."""

    def record(self, entry: TrialEntry) -> None:
        """Record a finished trial."""

    def close(self, winner: Mapping[str, Any]) -> None:
        """Record the winner, if there is one, and finish."""


class Wandb:
    """A run per trial, in the group of the study. Without credentials the runs stay in `wandb/` of the study's folder."""

    def __init__(self, study: str, folder: Path, about: Mapping[str, Any]) -> None:
        import wandb

        offline = False
        if "WANDB_MODE" not in os.environ:
            try:
                offline = not wandb.login()
            except wandb.errors.UsageError:  # no credentials, and no terminal to ask for them
                offline = True
        self._about = about
        # The id is given here, because WANDB_RUN_ID of the shell would make one run of all trials.
        self._start = partial(
            wandb.init,
            project=os.environ.get("WANDB_PROJECT", "autotune"),
            group=study,
            dir=str(folder),
            reinit="create_new",
            resume="never",
            settings=wandb.Settings(silent=True, console="off"),
            **({"mode": "offline"} if offline else {}),
        )

    def _run(self, name: str, config: Mapping[str, Any], kind: str) -> Any:
        return self._start(
            id=uuid.uuid4().hex[:12], name=name, job_type=kind, config={**config, "study": dict(self._about)}
        )

    def record(self, entry: TrialEntry) -> None:
        """Record a finished trial."""
        run = self._run(f"trial {entry.number}", entry.config, entry.labels["role"])
        run.log(dict(entry.figures))
        run.summary.update(dict(entry.labels))
        run.finish()

    def close(self, winner: Mapping[str, Any]) -> None:
        """Record the winner in a run of its own."""
        if winner:
            run = self._run("winner", {}, "winner")
            run.summary.update(dict(winner))
            run.finish()


class Mlflow:
    """A parent run per call, with a nested run per trial, in $MLFLOW_TRACKING_URI or a database in the study's folder."""

    def __init__(self, study: str, folder: Path, about: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._tag = Metric, Param, RunTag
        # A client has no active run, so that nothing is written into the run of MLFLOW_RUN_ID.
        self._client = MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        )
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "autotune")
        known = self._client.get_experiment_by_name(name)
        self._experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._parent = self._client.create_run(self._experiment, run_name=study).info.run_id
        self._log(self._parent, about, {}, {})

    def _log(
        self, run: str, config: Mapping[str, Any], labels: Mapping[str, str], figures: Mapping[str, float]
    ) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            run,
            metrics=[self._metric(name, float(value), now, 0) for name, value in figures.items()],
            params=[self._param(name, str(value)[:500]) for name, value in config.items()],
            tags=[self._tag(name, value) for name, value in labels.items()],
        )

    def record(self, entry: TrialEntry) -> None:
        """Record a finished trial."""
        nested = {"mlflow.parentRunId": self._parent}
        run = self._client.create_run(self._experiment, run_name=f"trial {entry.number}", tags=nested).info.run_id
        self._log(run, entry.config, entry.labels, entry.figures)
        self._client.set_terminated(run)

    def close(self, winner: Mapping[str, Any]) -> None:
        """Record the winner in the parent run, and end it."""
        numbers = {name: value for name, value in winner.items() if isinstance(value, int | float)}
        self._log(self._parent, {}, {name: str(value) for name, value in winner.items()}, numbers)
        self._client.set_terminated(self._parent)


class TensorBoard:
    """Scalars over trial numbers and a table of hyperparameters, in `tensorboard/` of the study's folder."""

    def __init__(self, study: str, folder: Path, about: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams import summary_v2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._hparams = event_pb2.Event, summary_pb2.Summary, summary_v2.hparams_pb
        self._writer, self._folder = EventFileWriter, folder / "tensorboard" / time.strftime("%Y%m%d-%H%M%S")
        self._study = self._writer(str(self._folder))

    def _scalars(self, writer: Any, figures: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in figures.items()]
        writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def record(self, entry: TrialEntry) -> None:
        """Record a finished trial."""
        self._scalars(self._study, entry.figures, entry.number)
        self._study.flush()
        trial = self._writer(str(self._folder / f"trial-{entry.number}"))
        values = {
            name: one if isinstance(one, bool | int | float | str) else str(one) for name, one in entry.config.items()
        }
        labels = {name: value for name, value in entry.labels.items() if name != "reason"}
        trial.add_event(
            self._event(
                wall_time=time.time(), summary=self._hparams({**values, **labels}, trial_id=f"trial-{entry.number}")
            )
        )
        self._scalars(trial, entry.figures, entry.number)
        trial.close()

    def close(self, winner: Mapping[str, Any]) -> None:
        """Close the file."""
        self._study.close()


# by the name of the package
TRACKERS: dict[str, Callable[[str, Path, Mapping[str, Any]], Tracker]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "tensorboard": TensorBoard,
}


def check_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each once.

    Raises:
        UserError: there is no such tracker, or its package is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--track {name}: expected {', '.join(TRACKERS)}{did_you_mean(name, TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--track {name} needs the package {name}, which this Python lacks. Install it, or remove --track."
            )
    return tuple(dict.fromkeys(names))


# -- all trackers of a call --------------------------------------------------------------------------------------------------


class Tracking:
    """All trackers of a call.

    Args:
        names: of trackers that `check_trackers` has accepted.
        print_line: receives a line for each tracker that fails.
    """

    def __init__(self, names: Sequence[str], print_line: Callable[[str], None]) -> None:
        self._print_line, self._queues = print_line, {name: queue.SimpleQueue[str]() for name in names}
        self._threads: list[threading.Thread] = []
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._predict: Predict | None = None
        self._predicted: dict[int, Mapping[str, float]] = {}  # by trial number

    def begin(self, study: str, folder: Path, about: Mapping[str, Any], predict: Predict) -> None:
        """Start the trackers. Trials that ended before are recorded, too.

        Args:
            folder: for files of trackers without a server, and their logs.
            about: the job and the machine.
            predict: returns predicted figures of a candidate.
        """
        self._predict = predict if self._queues else None
        for name in self._queues:
            thread = threading.Thread(target=self._work, args=(name, study, folder, about), daemon=True)
            thread.start()
            self._threads.append(thread)

    def started(self, number: int, candidate: Candidate) -> None:
        """Note what is predicted of a trial before its outcome is known."""
        if self._predict is not None:
            try:
                self._predicted[number] = self._predict(candidate)
            except Exception as error:
                self._print_line(f"trackers: trial {number} has no prediction ({one_line(error)})")

    def finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None:
        """Record a trial."""
        if self._queues:
            self._put(vars(entry_of(number, candidate, role, outcome, self._predicted.pop(number, {}))))

    def end(self, winner: Callable[[], Mapping[str, Any]]) -> None:
        """Record the winner, and wait for the trackers, at most `PATIENCE_SECONDS`.

        Args:
            winner: returns its figures; empty if there is none.
        """
        if not self._threads:
            return
        with suppress(Exception):  # the study cannot be read any more, which is reported elsewhere
            self._put(winner())
        for one in self._queues.values():
            one.put("")  # the last
        until = time.monotonic() + PATIENCE_SECONDS
        for name, thread in zip(self._queues, self._threads, strict=True):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive() and name in self._processes:
                self._processes[name].kill()  # its thread reports the end
                thread.join(5.0)
        self._threads.clear()

    def _put(self, data: Mapping[str, Any]) -> None:
        line = json.dumps(masked_data(dict(data)), default=str)
        for one in self._queues.values():
            one.put(line)

    def _work(self, name: str, study: str, folder: Path, about: Mapping[str, Any]) -> None:
        """Pass the events on to the tracker's process, until the last event or the process's end."""
        log = folder / f"track-{name}.log"
        try:
            with log.open("w", encoding="utf-8") as output:
                process = self._processes[name] = subprocess.Popen(
                    module_command(sys.executable, TRACKER, name, study, str(folder)),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=OWN.environment(),
                    start_new_session=True,  # Ctrl-C ends the search, and then the tracker
                    text=True,
                    encoding="utf-8",
                )
            assert process.stdin is not None
            with suppress(OSError), process.stdin as sent:  # the process has ended
                for line in (json.dumps(masked_data(dict(about)), default=str), *iter(self._queues[name].get, "")):
                    sent.write(f"{line}\n")
                    sent.flush()
            if process.wait() == 0:
                return
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["it was stopped"]
            why = display_value(last[0])
        except OSError as error:
            why = one_line(error)
        self._print_line(f"--track {name} failed and records no more: {why} (see {log})")


def main(name: str, study: str, folder: str) -> None:
    """Record the trials that standard input brings, after a first line about the job; the winner comes last."""
    tracker = TRACKERS[name](study, Path(folder), json.loads(sys.stdin.readline()))
    winner: dict[str, Any] = {}
    for line in sys.stdin:
        event = json.loads(line)
        if "labels" in event:
            tracker.record(TrialEntry(**event))
        else:
            winner = event
    tracker.close(winner)


if __name__ == "__main__":
    main(*sys.argv[1:])
