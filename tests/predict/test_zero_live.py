"""The bill of memory against engines made now; tests/predict/test_zero.py has those that were recorded."""

from contextlib import closing
from pathlib import Path

import pytest

from autotune.executors.base import Effort
from autotune.executors.local import LocalExecutor
from autotune.predict.knobs import columns_of
from autotune.predict.trace import trace_job
from autotune.predict.zero import bill
from autotune.problem.hardware import detect
from tests.conftest import make_candidate, make_job
from tests.predict.recorded import SEQ_LEN, recorded_trace


@pytest.mark.parametrize(
    ("precision", "config", "stages"),
    [
        ("fp32", {}, (1, 3)),
        # DeepSpeed's FusedAdam is FP16_Optimizer at stage 0, also in bf16 (docs/deepspeed-facts.md)
        ("bf16", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, (0,)),
        # BF16_Optimizer at stage 1, one flat buffer at stage 2
        ("bf16", {"data_types": {"grad_accum_dtype": "fp32"}}, (1, 2)),
    ],
)
def test_engines_made_now_are_met_too(
    precision: str, config: dict[str, object], stages: tuple[int, ...], tmp_path: Path
) -> None:
    job = make_job(precision=precision, base_config=config)
    candidates = [make_candidate(stage, 1 if config else 3) for stage in stages]
    executor = LocalExecutor(job, detect("cpu", 2), tmp_path, candidates, count_live_tensors=True)
    executor.open(lambda text: None)
    with closing(executor):
        for candidate in candidates:
            with closing(executor.session(candidate, f"stage{candidate.stage}")) as session:
                outcome = session.measure(candidate, Effort(min_steps=2, max_steps=2, min_seconds=0), 120.0)
            assert outcome.measurement is not None, outcome
            one = bill(job, trace_job(job), columns_of([candidate], job))
            at = [i for i, name in enumerate(one.moments) if name != "init"]
            live = max(outcome.measurement.live_tensor_bytes.values())
            assert float(one.peaks()[at, 0].max() + one.host[0]) == pytest.approx(live, rel=0.06)


def test_the_recorded_traces_are_those_of_today() -> None:
    job = make_job(precision="bf16", seq_len=SEQ_LEN)
    assert recorded_trace(job) == trace_job(job), "record them anew: python -m tests.predict.recorded"
