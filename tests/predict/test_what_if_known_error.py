import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from autotune.predict import what_if
from autotune.predict.features import columns_of, installed_deepspeed
from autotune.predict.predictor import Predictor
from autotune.predict.trace_cache import closed_form_trace
from autotune.predict.what_if import FIGURES, JobKind, PublishedRow, known_errors, published_rows
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.job import parse_lora
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from tests.conftest import make_candidate, make_job


def test_a_jobs_kind() -> None:
    plain = Candidate.of({"zero_stage": 2})
    out = Candidate.of({"zero_stage": 3, "offload_param": "cpu"})
    full, lora = make_job(), make_job(lora=parse_lora("r=8"))
    assert JobKind.of(full, plain, named_hardware("t4", 1)) == JobKind("full", 2, False, "one")
    assert JobKind.of(lora, out, named_hardware("t4", 4)) == JobKind("lora", 3, True, "several")
    assert JobKind.of(full, plain.but(lora="r=4"), named_hardware("t4", 4, nodes=2)) == JobKind(
        "lora", 2, False, "nodes"
    )
    quantized = dataclasses.replace(lora, lora=parse_lora("r=8,quantize=nf4"))
    assert JobKind.of(quantized, plain, named_hardware("t4", 1)) == JobKind("qlora", 2, False, "one")
    assert str(JobKind("lora", 3, True, "nodes")) == "LoRA, ZeRO 3 with offload, several nodes"
    assert str(JobKind("full", 0, False, "one")) == "full training, ZeRO 0, one GPU"


def row(source: str, predicted: float, **changed: object) -> PublishedRow:
    measured = PublishedRow(
        id="1", source=source, figure="peak", kind=JobKind("full", 2, False, "one"), model="llama-7b", parameters=7 * 10**9,
        gpu="a800", gpus=8, nodes=1, seq_len=2048, micro_batch=4, checkpointing=True, step_tokens=65536.0, measured=1.0,
        predicted=predicted, low=0.9 * predicted, high=1.1 * predicted,
    )  # fmt: skip
    return dataclasses.replace(measured, **changed)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[PublishedRow]], None]]:
    def use(rows: list[PublishedRow]) -> None:
        monkeypatch.setattr(what_if, "published_rows", lambda: tuple(rows))
        what_if.known_error.cache_clear()

    yield use
    what_if.known_error.cache_clear()


def test_errors_are_signed_and_of_five_rows_of_two_sources_or_of_a_wider_kind(
    given: Callable[[list[PublishedRow]], None],
) -> None:
    kind, wider = JobKind("full", 2, False, "one"), JobKind("full", 3, False, "one")
    four = [row("a", 0.8), row("a", 0.9), row("b", 0.95), row("b", 1.1)]
    given([*four, row("b", 0.7, kind=wider), row("c", 3.0, kind=JobKind("lora", 2, False, "one"))])
    found = what_if.known_error(kind, "peak")
    assert (found.rows, found.sources, found.kind) == (5, 2, "full training, without offload, one GPU")
    assert found.bias == pytest.approx(-0.1)
    given([*four, row("b", 0.7)])
    assert what_if.known_error(kind, "peak").kind == str(kind)
    given([row("a", one) for one in (0.8, 0.9, 0.95, 1.1, 0.7)])
    assert what_if.known_error(kind, "peak").kind == "every kind of job", "one source is not enough for any"


def test_rows_of_qlora_stand_for_it_at_any_stage_and_else_those_of_lora(
    given: Callable[[list[PublishedRow]], None],
) -> None:
    lora, asked = JobKind("lora", 0, False, "one"), JobKind("qlora", 2, False, "several")
    of_lora = [row("ab"[i % 2], 1.1, kind=lora) for i in range(6)]
    of_qlora = [row("ab"[i % 2], 0.7, kind=JobKind("qlora", 0, False, "one")) for i in range(5)]
    given([*of_lora, *of_qlora])
    found = what_if.known_error(asked, "peak")
    assert (found.kind, found.rows, found.bias) == ("QLoRA", 5, pytest.approx(-0.3))
    given([*of_lora, *of_qlora[:4]])
    assert what_if.known_error(asked, "peak").kind == "LoRA"


def test_intervals_are_widened_until_they_hold_nine_of_ten_rows(given: Callable[[list[PublishedRow]], None]) -> None:
    kind = JobKind("full", 2, False, "one")
    rows = [row("ab"[i % 2], 1.0 + 0.02 * i) for i in range(10)]
    given([*rows, row("a", 1.0, figure="step")])
    found = what_if.known_error(kind, "peak")
    assert found.held == 9
    assert found.widening == pytest.approx(sorted(one.stretch for one in rows)[8])
    assert found.widening == pytest.approx(0.16 / (0.1 * 1.16))
    columns = columns_of([Candidate.of({"zero_stage": 2})], make_job(ranks=1), installed_deepspeed())
    of_peak, _ = what_if.published_widening(make_job(ranks=1), named_hardware("t4", 1), columns)
    assert of_peak == pytest.approx([found.widening])


def test_what_is_shipped_holds_nine_of_ten_rows_of_every_kind() -> None:
    for kind in {one.kind for one in published_rows()}:
        for figure in FIGURES:
            error = what_if.known_error(kind, figure)
            assert error.held >= 0.9 * error.rows
            assert error.widening >= 1
            assert error.kind == "every kind of job" or (error.rows >= 5 and error.sources >= 2)
    for one in published_rows():
        assert (one.low <= one.measured <= one.high) == (one.stretch <= 1), one


def test_the_nearest_measured_rows_are_of_like_jobs(given: Callable[[list[PublishedRow]], None]) -> None:
    like = row("a", 1.3, figure="step")
    rows = [
        row("a", 1.1, figure="step", seq_len=8192),  # farther, of the same source and model
        like,
        row("b", 1.1, figure="step", parameters=13 * 10**9, gpu="a100-80gb"),
        row("c", 1.1, figure="step", kind=JobKind("lora", 2, False, "several")),
        row("d", 1.1, figure="step", parameters=10**8),
        row("e", 1.1),
    ]
    given(rows)
    found = known_errors(
        make_job(ranks=8, seq_len=2048), Candidate.of({"zero_stage": 2}), named_hardware("a800", 8), 7 * 10**9
    )
    assert found.nearest == (like, rows[2])
    assert "llama-7b, 2048 tokens, 8 x a800, ZeRO 2, micro-batch 4, checkpointing (a, row 1)" in str(like)


def test_widened_intervals_end_with_the_first_observation() -> None:
    job, hardware = make_job(model="llama-3.2-1b", precision="bf16"), named_hardware("rtx4090", 2)
    trace, one = closed_form_trace(job, "no trace"), [make_candidate(2)]
    plain = Predictor(job, hardware, trace)
    wide = Predictor(
        job, hardware, trace, widening=lambda job, hardware, c: (np.full(len(c), 3.0), np.full(len(c), 2.0))
    )
    before, after = plain.table(one), wide.table(one)
    assert after.peak_sigma == pytest.approx(3 * before.peak_sigma)
    assert after.step_sigma == pytest.approx(2 * before.step_sigma)
    for predictor in (plain, wide):
        measured = Measurement(1.0, 0.0, 4, 1.0, 1.0, 10**10)
        predictor.observe(one[0], Outcome(OutcomeKind.OK, measurement=measured))
    assert wide.table(one).peak_sigma == pytest.approx(plain.table(one).peak_sigma)
