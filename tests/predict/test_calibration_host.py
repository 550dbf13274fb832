"""What hosts that ran out, or did not, say of the host's bill."""

import dataclasses

import numpy as np

from autotune.predict.calibration import fit_host
from autotune.predict.predictor import Predictor
from autotune.predict.trace import traced_predictor
from autotune.problem.hardware import named_hardware
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.util.units import GIB
from tests.conftest import make_candidate, make_job

HARDWARE = dataclasses.replace(named_hardware("a100-80gb", 4), host_memory_bytes=128 * GIB)
RAN_OUT = Outcome(OutcomeKind.OOM_HOST)


def measured(host_gib: float = 0.0, pinned_gib: float = 0.0) -> Outcome:
    held = {"host_peak_bytes": int(host_gib * GIB), "pinned_bytes": int(pinned_gib * GIB)} if host_gib else {}
    return Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.0, 4, 1.0, 1.0, GIB, **held))


def factor(gib: list[float], outcomes: list[Outcome]) -> float:
    return float(np.exp(fit_host(GIB * np.array(gib), outcomes, HARDWARE).mean[0]))


def test_a_host_that_ran_out_below_its_limit_makes_the_bill_dearer() -> None:
    assert factor([20.0], [RAN_OUT]) > 1.1
    assert factor([20.0, 18.0, 19.0], [RAN_OUT] * 3) > 1.2
    assert factor([60.0], [RAN_OUT]) == 1.0, "what is known already teaches nothing"


def test_a_host_that_was_large_enough_makes_it_cheaper() -> None:
    assert factor([60.0, 50.0], [measured()] * 2) < 0.95
    assert factor([20.0], [measured()]) == 1.0


def test_what_ranks_held_counts_with_what_they_pinned() -> None:
    assert abs(factor([20.0, 24.0], [measured(14.0, 18.0), measured(16.0, 22.0)]) - 1.5) < 0.1


def test_the_predictor_learns_of_it() -> None:
    job, candidate = make_job(), make_candidate(3, 1, offload_optimizer="cpu")
    predictor = traced_predictor(job, named_hardware("a100-80gb", job.ranks))
    before = predictor.table([candidate]).host_bytes[0]
    small = dataclasses.replace(predictor.hardware, host_memory_bytes=int(4 * before) + 4 * GIB)
    for kind, more in ((OutcomeKind.OOM_HOST, True), (OutcomeKind.OOM_DEVICE, False)):
        learnt = Predictor(job, small, predictor.trace)
        learnt.observe(candidate, Outcome(kind))
        assert bool(learnt.table([candidate]).host_bytes[0] > before) is more
