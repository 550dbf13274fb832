"""The bill of memory against engines made now; tests/predict/test_zero_memory.py has those that were recorded."""

import pytest

from autotune.executors.base import MeasureSpec
from autotune.predict.features import columns_of, installed_deepspeed
from autotune.predict.trace import trace_job
from autotune.predict.zero_memory import estimate_memory
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job
from tests.conftest import Bench, make_candidate, make_job
from tests.predict.passes import peaks_of
from tests.predict.recorded import SEQ_LEN, recorded_trace
from tests.rank.live_rank import live_bytes


@pytest.mark.parametrize(
    ("precision", "config", "stages"),
    [
        pytest.param("fp32", {}, (1, 3), marks=pytest.mark.slow),
        # DeepSpeed's FusedAdam is FP16_Optimizer at stage 0, also in bf16 (docs/deepspeed-facts.md)
        pytest.param(
            "bf16",
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
            (0,),
            marks=pytest.mark.slow,  # it builds FusedAdam
        ),
        # BF16_Optimizer at stage 1, one flat buffer at stage 2
        ("bf16", {"data_types": {"grad_accum_dtype": "fp32"}}, (2,)),
        pytest.param("bf16", {"data_types": {"grad_accum_dtype": "fp32"}}, (1,), marks=pytest.mark.slow),
    ],
)
def test_engines_made_now_are_met_too(
    live_bench: Bench, precision: str, config: dict[str, object], stages: tuple[int, ...]
) -> None:
    job = make_job(precision=precision, base_config=config)
    check(live_bench, job, [make_candidate(stage, 1 if config else 3) for stage in stages])


@pytest.mark.main_path
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "task", "precision", "stages"),
    [
        pytest.param("tiny-bert", "classification", "fp32", (0,), marks=pytest.mark.slow),
        ("tiny-bert", "masked-lm", "bf16", (2,)),
        pytest.param("tiny-t5", "seq2seq", "fp32", (1, 3), marks=pytest.mark.slow),
        pytest.param("tiny-mixtral", "causal-lm", "fp32", (2,), marks=pytest.mark.slow),
        pytest.param("tiny-llava", "image-text", "fp32", (2,), marks=pytest.mark.slow),
    ],
)
def test_engines_of_other_models_are_met(
    live_bench: Bench, model: str, task: str, precision: str, stages: tuple[int, ...]
) -> None:
    job = make_job(model=model, task=task, precision=precision)
    bucket = {"reduce_bucket_size": 1_000_000}
    plain = [make_candidate(stage, 3, **bucket) for stage in stages]
    check(live_bench, job, [*plain, make_candidate(stages[-1], 6, activation_checkpointing=True, **bucket)])


def check(bench: Bench, job: Job, candidates: list[Candidate]) -> None:
    """Live tensors of engines on CPU ranks are what the bill says."""
    trace = trace_job(job, device="cpu")
    assert trace.exact, trace.note
    bench.executor.job, bench.executor.hardware = job, detect("cpu", 2)
    bench.executor.load_ops(candidates)
    for candidate in candidates:
        outcome = bench.run(candidate, measure_spec=MeasureSpec(min_steps=3, max_steps=3, min_seconds=0))
        assert outcome.ok, outcome
        live = live_bytes(outcome.log)
        one = estimate_memory(job, trace, columns_of([candidate], job, installed_deepspeed()))
        steps = [i for i, name in enumerate(one.moments) if name != "init"]
        assert float(peaks_of(one)[steps, 0].max() + one.terms["host"][0]) == pytest.approx(
            max(live.values()), rel=0.06
        ), candidate
        forward = max(peaks_of(one)[at, 0] for at, name in enumerate(one.moments) if name == "forward")
        # batches wait on the host, which is the ranks' device here
        assert float(forward) == pytest.approx(live["forward"], rel=0.03), candidate


def test_the_recorded_traces_are_those_of_today() -> None:
    job = make_job(precision="bf16", seq_len=SEQ_LEN)
    assert recorded_trace(job) == trace_job(job), "record them anew: python -m tests.predict.recorded"
