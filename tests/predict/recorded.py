"""Traces of the tiny models as recorded in `tests/data/traces.json`, so that a test of arithmetic imports no torch.

`python -m tests.predict.recorded` records them again: after a change of the tracer or of torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from autotune.predict.trace import trace_job
from autotune.predict.trace_data import Trace
from autotune.problem.job import Job
from tests.conftest import make_job

FILE = Path(__file__).parents[1] / "data" / "traces.json"
MODELS = [(model, precision) for model in ("tiny-llama", "tiny-gemma-2") for precision in ("bf16", "fp32")]
SEQ_LEN = 64


def recorded_trace(job: Job) -> Trace:
    """The trace of a job of one of MODELS at SEQ_LEN tokens; any other is a KeyError."""
    assert job.seq_len == SEQ_LEN, "only these were recorded"
    return Trace.from_json(json.loads(FILE.read_text())[f"{job.model.name} {job.precision}"])


def main() -> None:
    jobs = [make_job(model=model, precision=precision, seq_len=SEQ_LEN) for model, precision in MODELS]
    traces = {f"{job.model.name} {job.precision}": trace_job(job).to_json() for job in jobs}
    lines = (f"{json.dumps(name)}: {json.dumps(trace)}" for name, trace in traces.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
