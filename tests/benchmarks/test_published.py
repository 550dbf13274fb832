import csv
import dataclasses
import json

import pytest

from autotune.predict.calibration import coverage_factors
from autotune.predict.features import columns_of
from autotune.predict.predictor import Predictor
from autotune.predict.trace_cache import closed_form_trace
from autotune.predict.what_if import is_published
from autotune.problem.gpu_specs import gpu_table
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Job, parse_lora
from autotune.problem.models import resolve_model
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from benchmarks.common import HERE
from benchmarks.predict import published
from benchmarks.predict.published import (
    COVERAGE,
    Case,
    candidate_of,
    coverage,
    job_kind,
    own_trials,
    published_cases,
    stored_rows,
    stretch,
    widening,
)
from tests.conftest import make_candidate, make_job


def case(number: int, quantity: str, value: float, micro_batch: int, source: str = "a") -> Case:
    job = Job(resolve_model("llama-3.2-1b"), 1, 2048, "bf16")
    return Case(
        "t",
        str(number),
        source,
        job,
        named_hardware("rtx4090", 1),
        make_candidate(0, micro_batch),
        "own",
        quantity,
        value,
    )


def test_every_case_is_a_row_of_a_table_and_a_job_that_can_be_predicted() -> None:
    folder = HERE / "data" / "published"
    tables = {path.stem: path for path in (*folder.glob("*.csv"), *folder.glob("jobs/*.csv"))}
    ids = {name: {row["id"] for row in csv.DictReader(path.open())} for name, path in tables.items()}
    cases = published_cases()
    assert len(cases) > 400
    for one in cases:
        assert one.id in ids[one.table]
        assert one.value > 0 or one.quantity == "decision"
        assert one.candidate.micro_batch > 0
        assert one.job.ranks == one.hardware.count
    assert {one.source for one in cases if one.held_out} == {
        "Lightning-AI/litgpt",
        "VectorInstitute/vectorlm",
        "InternLM/xtuner",
        "LianjiaTech/BELLE",
        "huggingface/peft",
    }


def test_factors_on_intervals_are_those_of_the_published_rows() -> None:
    rows = stored_rows()
    for gpus, nodes in ((1, 1), (4, 1), (16, 2)):
        hardware = named_hardware("a100-80gb", gpus, nodes=nodes)
        for adapters in (None, "r=8", "r=8,quantize=nf4"):
            job = make_job(model="llama-3.2-1b", precision="bf16", ranks=gpus)
            job = dataclasses.replace(job, lora=parse_lora(adapters) if adapters else None)
            for stage in range(4):
                for offload in ("none", "cpu"):
                    candidate = make_candidate(stage, 1, offload_optimizer=offload)
                    kind = job_kind(Case("t", "1", "a", job, hardware, candidate, "own", "step", 1.0))
                    peak, step = coverage_factors(job, hardware, columns_of([candidate], job))
                    expected = [
                        widening(kind, [row for row in rows if row["figure"] == name]) for name in ("peak", "step")
                    ]
                    assert [peak[0], step[0]] == pytest.approx(expected, rel=1e-3), kind


def test_intervals_hold_nine_of_ten_rows_of_every_kind() -> None:
    rows = stored_rows()
    for kind in {json.dumps(row["kind"]): row["kind"] for row in rows}.values():
        for name in ("peak", "step"):
            _, _, own = published.alike(kind, [row for row in rows if row["figure"] == name])
            factor = widening(kind, [row for row in rows if row["figure"] == name])
            assert sum(stretch(row) <= factor for row in own) >= COVERAGE * len(own)
    assert {"figure", "kind", "rows", "sources", "bias", "median", "widened", "held"} == set(coverage()[0])


def test_widened_intervals_end_with_the_first_observation() -> None:
    job, hardware = make_job(model="llama-3.2-1b", precision="bf16", ranks=1), named_hardware("rtx4090", 1)
    trace, one = closed_form_trace(job, "no trace"), [make_candidate(3)]
    plain, wide = (Predictor(job, hardware, trace, widened=widened) for widened in (False, True))
    factor, _ = coverage_factors(job, hardware, columns_of(one, job))
    assert factor[0] > 1
    before, after = plain.table(one), wide.table(one)
    assert after.peak_sigma == pytest.approx(factor[0] * before.peak_sigma)
    for predictor in (plain, wide):
        measured = Measurement(1.0, 0.0, 4, 1.0, 1.0, 10**10)
        predictor.observe(one[0], Outcome(OutcomeKind.OK, measurement=measured))
    assert wide.table(one).peak_sigma == pytest.approx(plain.table(one).peak_sigma)


def test_our_own_trials_are_steps_of_named_candidates() -> None:
    found = own_trials()
    assert {one.quantity for one in found} == {"step"}
    assert {one.hardware.facts for one in found} == {"h100", "h200"}
    assert candidate_of("z2 mb4 ga2 no-overlap rbs=5e+08").as_dict["reduce_bucket_size"] == 5 * 10**8
    with pytest.raises(ValueError, match="names no knob"):
        candidate_of("z2 nothing=3")


def test_a_plan_marks_the_cards_without_a_published_row() -> None:
    compared = {case.hardware.facts for case in (*published.published_cases(), *published.own_trials())}
    assert {name for name in gpu_table() if is_published(name)} == compared
