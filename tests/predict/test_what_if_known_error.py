from autotune.predict.what_if import JobKind, known_errors
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.job import parse_lora
from tests.conftest import make_job


def test_a_jobs_kind() -> None:
    plain = Candidate.of({"zero_stage": 2})
    out = Candidate.of({"zero_stage": 3, "offload_param": "cpu"})
    full, lora = make_job(), make_job(lora=parse_lora("r=8"))
    assert JobKind.of(full, plain, named_hardware("t4", 1)) == JobKind("full", 2, False, "one")
    assert JobKind.of(lora, out, named_hardware("t4", 4)) == JobKind("lora", 3, True, "several")
    assert JobKind.of(full, plain.but(lora="r=4"), named_hardware("t4", 4, nodes=2)) == JobKind(
        "lora", 2, False, "nodes"
    )
    assert str(JobKind("lora", 3, True, "nodes")) == "LoRA, ZeRO 3 with offload, several nodes"
    assert str(JobKind("full", 0, False, "one")) == "full training, ZeRO 0, one GPU"


def test_what_is_shipped_can_be_read() -> None:
    found = known_errors(make_job(), Candidate.of({"zero_stage": 2}), named_hardware("t4", 1))
    for error in (found.peak, found.step, found.all_peak, found.all_step):
        assert error is None or (error.rows > 0 and error.median >= 0 and 0 <= error.inside <= 1)
    assert found.all_peak is not None, "rows of a table that is there"
    assert found.all_step is not None
