import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.hardware import named_hardware
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.search import surrogate as module
from autotune.search.surrogate import SpeedMemoryModel, student_cdf
from autotune.util.units import GIB
from benchmarks.search.replay import load_replay_table
from tests.conftest import make_candidate, make_job
from tests.predict.recorded import SEQ_LEN, recorded_trace

TABLE = load_replay_table(Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz")
JOB, HARDWARE, CANDIDATES = TABLE.job(), TABLE.hardware(), sorted(TABLE.rows, key=str)
FITTING = [at for at, c in enumerate(CANDIDATES) if TABLE.rows[c].kind is OutcomeKind.OK]
Lie = Callable[[float], float]


def believed(speed: Lie = float, peak: Lie = float) -> SpeedMemoryModel:
    """After ten measurements of what the predictor says, bent by the two lies."""
    speed_memory_model = SpeedMemoryModel(Predictor(JOB, HARDWARE, trace_job(JOB)), CANDIDATES)
    honest = Predictor(JOB, HARDWARE, trace_job(JOB)).table(CANDIDATES)
    for at in np.random.default_rng(0).permutation(FITTING)[:10]:
        speed_memory_model.forecast()
        candidate = CANDIDATES[at]
        rate = speed(float(honest.samples[at]))
        step = candidate.micro_batch * candidate.accumulation * JOB.ranks / rate
        measured = Measurement(step, 0.0, 4, rate, rate, int(peak(float(honest.peak[at]))))
        speed_memory_model.observe(candidate, int(at), Outcome(OutcomeKind.OK, measurement=measured))
    return speed_memory_model


def test_a_predictor_that_is_right_is_believed() -> None:
    assert not believed().predictor_rejected
    assert not believed(lambda rate: 1.2 * rate).predictor_rejected, "a factor for all is what calibration is for"


def test_time_and_memory_are_given_up_apart() -> None:
    wrong_time = believed(speed=lambda rate: 400.0 / rate)
    assert wrong_time.speed.predictor_rejected
    assert not wrong_time.memory.predictor_rejected
    wrong_memory = believed(peak=lambda peak: (6 * GIB) ** 2 / peak)
    assert wrong_memory.memory.predictor_rejected
    assert not wrong_memory.speed.predictor_rejected
    assert not wrong_memory.forecast().hopeless.any(), "nothing is ruled out by a belief that was given up"


def test_large_errors_of_measured_peaks_leave_a_chance_to_what_is_predicted_not_to_fit() -> None:
    chances = []
    for missed in (0.0, 4.0):
        model = believed()
        model._peak_surprises = [missed] * 10
        forecast = model.forecast()
        unlikely = forecast.hopeless & (forecast.fits > 1e-6)
        assert (forecast.may_fit >= forecast.fits).all()
        chances.append(float(forecast.may_fit[unlikely].max()))
    assert 0 < chances[0] < 0.02
    assert chances[1] > 0.1


def test_measured_peaks_are_compared_with_their_predictions() -> None:
    assert all(missed < 1 for missed in believed()._peak_surprises)
    assert max(believed(peak=lambda peak: 0.5 * peak)._peak_surprises) > 2


@pytest.mark.parametrize(
    ("t", "degrees", "share"), [(0.0, 3, 0.5), (2.776, 4, 0.975), (-2.776, 4, 0.025), (-1.372, 10, 0.1)]
)
def test_distribution_of_students_t(t: float, degrees: int, share: float) -> None:
    """Quantiles from tables of the distribution."""
    assert float(student_cdf(np.array(t), degrees)) == pytest.approx(share, abs=1e-3)


def test_measurements_alone_are_asked_where_the_predictor_is_refuted() -> None:
    speed_memory_model = believed(speed=lambda rate: 400.0 / rate)
    own, rival = speed_memory_model.forecast(), speed_memory_model.forecast(rival=True)
    assert own.logs == pytest.approx(rival.logs)


def test_of_a_large_space_only_some_are_predicted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORTLIST", 64)
    asked: list[int] = []
    whole = Predictor.prepared_table

    def counted(self: Predictor, prepared: object) -> object:
        asked.append(len(prepared.columns))  # type: ignore[attr-defined]
        return whole(self, prepared)  # type: ignore[arg-type]

    monkeypatch.setattr(Predictor, "prepared_table", counted)
    speed_memory_model = believed()
    table = speed_memory_model.table()
    assert 64 in asked
    assert asked[0] == len(CANDIDATES)
    fresh = speed_memory_model.predictor.table(CANDIDATES)
    best = np.argsort(fresh.samples * (fresh.needed < HARDWARE.capacity_bytes))[-16:]
    assert table.samples[best] == pytest.approx(fresh.samples[best], rel=0.1)


SAVING = [make_candidate(2, 1), make_candidate(3, 1), make_candidate(3, 1, offload_optimizer="cpu")]


def of_hosts(share: float, device: str = "cuda", **changes: Any) -> tuple[list[float], list[bool]]:
    """(host_share, host_hopeless) of the forecast, where a host has that share of the weights' bytes; two ranks on each of two nodes."""
    job = make_job(4, precision="bf16", seq_len=SEQ_LEN, **changes)
    trace = recorded_trace(job)
    weights = 2 * sum(trace.parameters)
    two = named_hardware("a100-80gb", 4, nodes=2, host_memory_bytes=int(share * weights))
    two = dataclasses.replace(two, device=device)
    forecast = SpeedMemoryModel(Predictor(job, two, trace), SAVING).forecast()
    return forecast.host_share.tolist(), forecast.host_hopeless.tolist()


def test_a_host_that_cannot_hold_the_weights_saves_nothing_of_stage_3() -> None:
    held, host = of_hosts(0.5)
    assert held[:2] == pytest.approx([0, 2], rel=1e-3), "all weights once a node, however many ranks it has"
    assert host[:2] == [False, True]
    config = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}}
    held, host = of_hosts(0.5, base_config=config)
    assert (held[:2], host[:2]) == ([0, 0], [False, False]), "nothing is gathered"
    assert of_hosts(0.5, "cpu") == ([0, 0, 0], [False, False, False]), "host and device are one"


def test_a_host_that_holds_the_weights_is_large_enough_whatever_its_processes_are_guessed_to_have() -> None:
    held, host = of_hosts(2.0)
    assert held[1] == pytest.approx(0.5, rel=1e-3)
    assert not host[1], "2 GiB a rank are more than all of it"
    assert host[2], "what is offloaded has to leave room for these"
