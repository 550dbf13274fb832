"""What the search itself costs: `python benchmarks/search/proposer.py [--sizes 50,500,5000] [--json FILE]`.

Seconds from an Outcome to the next proposal at 50, 500 and 5,000 trials in a study (SQLite, the default space of
13,520 candidates), and seconds to resume the largest: open, read every Outcome, learn, propose.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.search.proposer import Proposer
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from autotune.search.trials import SEARCH
from autotune.util.units import GIB
from benchmarks.common import command_line, parse, print_table, write_json

TARGETS = {50: 0.1, 500: 0.2, 5000: 0.5}


def simulated(predictor: Predictor, candidates: list[Candidate]) -> list[Outcome]:
    """An Outcome for each candidate, as the predictor expects it and with noise; what is too large runs out of memory."""
    table, capacity = predictor.table(candidates), predictor.hardware.capacity_bytes
    outcomes = []
    for i, candidate in enumerate(candidates):
        peak = table.peak[i] * random.Random(i).lognormvariate(0.0, 0.03)
        if peak > capacity:
            outcomes.append(Outcome(OutcomeKind.OOM_DEVICE, missing_bytes=int(0.1 * peak), outside_seconds=9.0))
            continue
        step = table.step[i] * random.Random(-i).lognormvariate(0.1, 0.1)
        rate = candidate.micro_batch * candidate.accumulation * 4 / step
        measured = Measurement(step, 0.02 * step, 5, rate, rate * 2048, int(peak))
        outcomes.append(Outcome(OutcomeKind.OK, measurement=measured, outside_seconds=9.0))
    return outcomes


def informed(proposer: Proposer, store: StudyStore) -> Proposer:
    """The proposer after every Outcome of the study."""
    for record in store.records():
        if record.outcome is not None:
            proposer.observe(record.candidate, record.outcome)
    return proposer


def seconds_a_proposal(proposer: Proposer, repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        proposal = proposer.next()
        seconds.append(time.perf_counter() - began)
        assert proposal is not None
        proposer.observe(proposal.candidate, Outcome(OutcomeKind.OOM_DEVICE, missing_bytes=GIB))
    return statistics.median(seconds)


def measured_rows(sizes: list[int], folder: Path) -> list[dict[str, Any]]:
    job, hardware = Job(resolve_model("llama-3.2-1b"), 4, 2048), named_hardware("rtx4090", 4)
    space, storage = load_space("default"), default_storage(folder)
    candidates = space.candidates(job)
    random.Random(0).shuffle(candidates)
    trace = trace_job(job)
    rows: list[dict[str, Any]] = []
    quick = StudyStore.in_memory(job, hardware, space)  # five thousand trials are written one by one otherwise
    first = candidates[: sizes[-1]]
    for candidate, outcome in zip(first, simulated(Predictor(job, hardware, trace), first), strict=True):
        quick.finish(quick.start(candidate, space, SEARCH), outcome)
    store, _ = StudyStore.create_or_resume("s", storage, folder, job, hardware, space)
    made = 0
    for count in sizes:
        store.study.add_trials(quick.study.get_trials(deepcopy=False)[made:count])
        made = count
        predictor = Predictor(job, hardware, trace)
        proposer = Proposer(candidates, space, predictor, exhaustive=True)
        seconds = seconds_a_proposal(informed(proposer, store))
        rows.append(row(count, "seconds a proposal, median", seconds, TARGETS.get(count)))
    began = time.perf_counter()
    store, resumed = StudyStore.create_or_resume("s", storage, folder, job, hardware, space)
    proposer = Proposer(candidates, space, Predictor(job, hardware, trace))
    informed(proposer, store).next()
    seconds = time.perf_counter() - began
    assert resumed
    return [*rows, row(made, "seconds to resume and propose", seconds, 5 if made == 5000 else None)]


def row(trials: int, measure: str, seconds: float, target: float | None) -> dict[str, Any]:
    return {"trials in the study": trials, "measure": measure, "ours": seconds, "target": target}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, TARGETS)), help="of studies; writing 5000 takes minutes")
    arguments = parse(parser, sizes="5,20")
    sizes = sorted(int(size) for size in arguments.sizes.split(","))
    with tempfile.TemporaryDirectory() as name:
        rows = measured_rows(sizes, Path(name))
    print_table("the search's own time", rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
