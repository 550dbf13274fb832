"""What torch allocates, what NVML shows, and which of them a limit concerns."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.predict.predictor import Predictor, moments, peaks, slopes
from autotune.predict.zero_memory import SEGMENTS
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.hardware import Hardware, named_hardware
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.util.units import GIB, MIB
from tests.conftest import make_candidate, make_job
from tests.predict.recorded import SEQ_LEN, recorded_trace


def predictor_on(hardware: Hardware) -> Predictor:
    job = make_job(precision="bf16", seq_len=SEQ_LEN)
    return Predictor(job, hardware, recorded_trace(job))


def card(memory_bytes: float) -> Hardware:
    return replace(named_hardware("rtx4090", 2), memory_bytes=int(memory_bytes), headroom=0.0)


BIG = make_candidate(2, 4096)


def test_nvml_shows_what_is_allocated_and_what_is_kept_and_the_overhead() -> None:
    one = predictor_on(card(200 * GIB)).predict(BIG)
    beside = one.memory["context and communication"] + one.memory["allocator"]
    assert one.allocated_bytes < one.needed_bytes < one.peak_bytes
    assert one.peak_bytes == pytest.approx(one.allocated_bytes + beside, rel=1e-3)
    assert sum(one.memory.values()) == pytest.approx(one.peak_bytes, rel=1e-6)
    low, high = one.allocated_interval
    assert low < one.allocated_bytes < high


def test_blocks_that_can_be_given_back_make_nothing_not_fit() -> None:
    free = predictor_on(card(200 * GIB)).predict(BIG)
    between = (free.needed_bytes + free.peak_bytes) / 2
    one = predictor_on(card(between)).predict(BIG)
    assert one.fits
    assert one.peak_bytes == pytest.approx(between, rel=1e-6), "the card is full, and no fuller"
    assert one.peak_interval[1] > between, "more may be needed than is expected"
    assert one.allocated_bytes == pytest.approx(free.allocated_bytes)
    assert sum(one.memory.values()) == pytest.approx(one.peak_bytes, rel=1e-6)


def test_fsdp_has_no_bucket_of_deepspeeds_default_size() -> None:
    """References of capped CPU ranks were refused for DeepSpeed's bucket of 5e8 elements."""
    job = make_job(precision="fp32", seq_len=SEQ_LEN, base_config={"zero_optimization": {"reduce_bucket_size": 5e8}})
    trace = recorded_trace(job)
    predictor = Predictor(job, card(200 * GIB), trace)
    alone, candidate = predictor.for_torch_alone(), Candidate.of({"zero_stage": 3, MICRO_BATCH: 1, ACCUMULATION: 1})
    states = 16 * sum(trace.parameters)
    assert predictor.table([candidate]).allocated[0] > 4 * 5e8
    assert alone.table([candidate]).allocated[0] < states + 200 * MIB


@pytest.mark.parametrize("torch_alone", [False, True])
@pytest.mark.parametrize("lengths", [(), ((SEQ_LEN // 2, 10_000), (SEQ_LEN, 1))])
def test_slopes_are_those_of_the_peaks(lengths: tuple[tuple[int, int], ...], torch_alone: bool) -> None:
    job = make_job(precision="bf16", seq_len=SEQ_LEN, lengths=lengths, torch_alone=torch_alone)
    predictor = Predictor(job, card(200 * GIB), recorded_trace(job))
    candidates = [make_candidate(stage, batch) for stage in range(4) for batch in (1, 256)]
    prepared, mean = predictor.prepare(candidates), predictor._memory.mean
    by_shown, by_allocated = slopes(prepared, predictor.hardware, mean, peaks(prepared, predictor.hardware, mean))
    for at in range(len(mean)):
        step = np.zeros(len(mean))
        step[at] = 1e-6
        up, down = (peaks(prepared, predictor.hardware, mean + sign * step) for sign in (1, -1))
        assert (up.shown - down.shown) / 2e-6 == pytest.approx(by_shown[:, at], rel=1e-3, abs=MIB)
        assert (up.allocated - down.allocated) / 2e-6 == pytest.approx(by_allocated[:, at], rel=1e-3, abs=MIB)


def test_what_torch_measured_teaches_what_torch_allocates() -> None:
    predictor = predictor_on(card(200 * GIB))
    before = predictor.predict(BIG)
    allocated, shown = int(1.05 * before.allocated_bytes), int(1.1 * before.peak_bytes)
    measured = Measurement(1.0, 0.0, 4, 1.0, 1.0, shown, torch_allocated_bytes=allocated)
    predictor.observe(BIG, Outcome(OutcomeKind.OK, measurement=measured))
    like: Candidate = make_candidate(2, 2048)
    after, was = predictor.predict(like), predictor_on(card(200 * GIB)).predict(like)
    assert 1.01 < after.allocated_bytes / was.allocated_bytes < 1.1
    assert after.peak_interval[1] - after.peak_interval[0] < was.peak_interval[1] - was.peak_interval[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_flat_gradients_that_no_block_of_the_loss_can_hold_take_new_segments(stage: int) -> None:
    """Free blocks of different segments are never merged, so the first step reserves more than backward has left."""
    job = make_job(precision="bf16", seq_len=SEQ_LEN)
    predictor = Predictor(job, card(200 * GIB), recorded_trace(job))
    prepared = predictor.prepare([make_candidate(stage, batch) for batch in (1, 4096)])
    bill, sum_bytes = prepared.memory, 2 * sum(recorded_trace(job).parameters) / job.ranks
    passes = np.array([name in ("forward", "backward") for name in bill.moments])
    taken = bill.terms[SEGMENTS]
    assert (taken[passes, 0] > sum_bytes).all(), "the logits of one sequence are smaller than the flat gradients"
    assert not taken[:, 1].any(), "those of many sequences leave blocks that hold them"
    assert not taken[~passes].any()
    without = replace(prepared, memory=replace(bill, terms=bill.terms | {SEGMENTS: 0 * taken}))
    found, bare = (moments(one, predictor.hardware, predictor._memory.mean) for one in (prepared, without))
    assert found - bare == pytest.approx(taken)
    growing, offloaded = (
        predictor.prepare([make_candidate(at, 1, **knobs)]).memory.terms[SEGMENTS]
        for at, knobs in ((stage, {"expandable_segments": True}), (2, {"offload_optimizer": "cpu"}))
    )
    assert not growing.any()
    assert not offloaded.any()
