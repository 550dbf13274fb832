"""What entries teach of a card's steps."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotune.commands.run import begin_with_rates
from autotune.gallery import warm_start
from autotune.gallery.schema import Entry
from autotune.gallery.warm_start import rates_for, shipped_entries, shipped_rates
from autotune.predict.calibration import CalibrationEvidence
from autotune.predict.predictor import Predictor
from autotune.predict.trace import traced_predictor
from autotune.predict.trace_cache import closed_form_trace
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from benchmarks.predict.card_rates import rates_of_entry

SLOWER = "qwen-7b_4xa100-80gb_2048_lora64_qwen"  # takes 1.7 times what is predicted without it


@pytest.fixture
def entry() -> Entry:
    return shipped_entries()[SLOWER]


@pytest.fixture
def hardware(entry: Entry) -> Hardware:
    return entry.machine.hardware()


@pytest.fixture
def job(entry: Entry) -> Job:
    return entry.job.job(entry.machine.count)


def alone(job: Job, hardware: Hardware) -> Predictor:
    return Predictor(job, hardware, closed_form_trace(job, "a test"))


@pytest.fixture
def learnt(entry: Entry, job: Job, hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> CalibrationEvidence:
    """What the entry teaches a predictor whose trace costs no time."""
    monkeypatch.setattr("benchmarks.predict.card_rates.traced_predictor", alone)
    found = rates_of_entry(entry)
    assert found is not None
    return found


def begun(job: Job, hardware: Hardware, learnt: CalibrationEvidence) -> Predictor:
    predictor = alone(job, hardware)
    predictor.begin_with(learnt)
    return predictor


def test_every_entry_of_a_gpu_has_rates_of_todays_constants() -> None:
    of_gpus = {name: entry.job.model for name, entry in shipped_entries().items() if entry.machine.gpu and entry.best}
    named = {name for name, model in of_gpus.items() if model is not None}
    assert named <= set(shipped_rates()) <= set(of_gpus), "`make gallery` writes them anew"


@pytest.mark.slow
def test_the_rates_that_ship_are_what_the_entry_teaches(entry: Entry, job: Job, hardware: Hardware) -> None:
    [tried], learnt = entry.candidates, rates_of_entry(entry)
    assert learnt is not None
    assert tried.step_seconds is not None
    anew, shipped = traced_predictor(job, hardware), traced_predictor(job, hardware)
    anew.begin_with(learnt)
    shipped.begin_with(shipped_rates()[SLOWER])
    a, b = (one.predict(tried.candidate) for one in (anew, shipped))
    assert b.step_seconds == pytest.approx(a.step_seconds, rel=0.01), "`make gallery` writes them anew"
    assert b.step_interval == pytest.approx(a.step_interval, rel=0.01)
    without = traced_predictor(job, hardware).predict(tried.candidate)
    assert without.step_seconds < b.step_seconds < tried.step_seconds


def test_a_job_near_an_entry_is_predicted_as_the_entry_was_measured(
    entry: Entry, job: Job, hardware: Hardware, learnt: CalibrationEvidence
) -> None:
    [tried] = entry.candidates
    assert tried.step_seconds is not None
    unknown, known = (one.predict(tried.candidate) for one in (alone(job, hardware), begun(job, hardware, learnt)))
    off = [abs(np.log(one.step_seconds / tried.step_seconds)) for one in (known, unknown)]
    assert off[0] < 0.9 * off[1]
    widths = [np.log(one.step_interval[1] / one.step_interval[0]) for one in (known, unknown)]
    assert widths[0] < 0.9 * widths[1]
    assert known.peak_bytes == unknown.peak_bytes, "memory is not the card's"


def test_what_is_measured_here_counts_for_more(
    entry: Entry, job: Job, hardware: Hardware, learnt: CalibrationEvidence
) -> None:
    candidate = entry.candidates[0].candidate
    predictor = begun(job, hardware, learnt)
    before = predictor.predict(candidate)
    seconds = before.step_seconds / 3
    measured = Measurement(seconds, 0.0, 4, 1.0, 1.0, int(before.peak_bytes))
    predictor.observe(candidate, Outcome(OutcomeKind.OK, measurement=measured))
    after = predictor.predict(candidate)
    assert after.step_seconds == pytest.approx(seconds, rel=0.3)
    without = alone(job, hardware)
    without.observe(candidate, Outcome(OutcomeKind.OK, measurement=measured))
    assert after.step_interval != without.predict(candidate).step_interval, "the entry is not forgotten either"


def test_a_new_study_says_so_once(job: Job, hardware: Hardware) -> None:
    def said(*, gallery: bool = True, records: tuple[Any, ...] = ()) -> list[str]:
        setup: Any = SimpleNamespace(gallery=gallery, job=job, hardware=hardware)
        store: Any = SimpleNamespace(records=lambda: records)
        lines: list[str] = []
        begin_with_rates(setup, store, predictor := alone(job, hardware), lines.append)
        began.append(predictor.constants() != alone(job, hardware).constants())
        return lines

    began: list[bool] = []
    [line] = said()
    assert line.startswith("gallery: predictions use the rates of qwen-7b on 4 x a100-80gb (published at github.com/")
    assert said(records=(SimpleNamespace(note="measured"),)) == []
    assert said(gallery=False) == []
    assert began == [True, True, False]


def test_only_the_same_card_and_a_job_like_it(job: Job, hardware: Hardware) -> None:
    entries = shipped_entries()
    assert rates_for(entries, job, hardware) is not None
    assert rates_for(entries, job, dataclasses.replace(hardware, facts="h100", name="h100")) is None
    assert rates_for(entries, dataclasses.replace(job, seq_len=16), hardware) is None
    assert rates_for({}, job, hardware) is None


def test_evidence_comes_back_from_a_file(
    job: Job, hardware: Hardware, entry: Entry, learnt: CalibrationEvidence
) -> None:
    one, two = begun(job, hardware, learnt), alone(job, hardware)
    two.begin_with(CalibrationEvidence(**json.loads(json.dumps(dataclasses.asdict(learnt)))))
    a, b = (predictor.predict(entry.candidates[0].candidate) for predictor in (one, two))
    assert b.step_seconds == pytest.approx(a.step_seconds, rel=1e-9)
    assert b.step_interval == pytest.approx(a.step_interval, rel=1e-9)
    assert alone(job, hardware).rates() is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"constants": "0", "entries": {}}', '{"entries": 1}', '{"constants": 1, "entries": {"a": {"b": 1}}}'],
)
def test_rates_of_another_version_or_none_at_all_decide_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / warm_start.FILE).write_text(text)
    monkeypatch.setattr(warm_start.resources, "files", lambda package: tmp_path)
    shipped_rates.cache_clear()
    try:
        assert shipped_rates() == {}
    finally:
        shipped_rates.cache_clear()
