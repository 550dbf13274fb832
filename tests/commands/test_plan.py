import json

import pytest

from autotune.commands.plan import make_plan, plans
from autotune.commands.request import Request
from autotune.commands.setup import PlanSetup
from autotune.errors import UserError
from autotune.predict.predictor import Predictor
from autotune.problem.hardware import named_hardware
from autotune.problem.space_file import parse_space
from autotune.results.plan import Plan
from tests.conftest import make_job


def test_a_plan_says_what_fits_and_what_would_unlock_more() -> None:
    (plan,) = plans(Request("gemma-2-2b", 4, seq_len=768), ["rtx3090"])
    assert plan.best
    assert all(one.fits for one in plan.best)
    speeds = [one.samples_per_second for one in plan.best]
    assert speeds == sorted(speeds, reverse=True)
    by_stage = {stage.stage: stage for stage in plan.stages}
    assert by_stage[0].fitting is None  # 16 bytes for each of 2.6e9 parameters
    assert any("GiB or more, like" in text for text in by_stage[0].unlocks)
    assert by_stage[3].fitting is not None
    assert any("activation checkpointing" in text for text in by_stage[2].unlocks + by_stage[3].unlocks)
    data = json.loads(json.dumps(plan.to_json()))
    assert data["best"][0]["ds_config"]["zero_optimization"]["stage"] in (0, 1, 2, 3)
    assert data["best"][0]["fits"] is True


def largest_fitting(plan: Plan) -> int:
    return max((stage.fitting.candidate.micro_batch for stage in plan.stages if stage.fitting), default=0)


def test_more_memory_is_never_worse() -> None:
    small, large = plans(Request("llama-3.2-1b", 2, seq_len=1024), ["rtx3090", "a100-80gb"])
    assert largest_fitting(large) >= largest_fitting(small)
    assert large.best[0].samples_per_second > small.best[0].samples_per_second


def test_a_global_batch_is_kept() -> None:
    (plan,) = plans(Request("llama-3.2-1b", 2, seq_len=1024, global_batch_size=48), ["rtx4090"])
    for one in plan.best:
        assert one.candidate.micro_batch * one.candidate.accumulation * 2 == 48


@pytest.mark.parametrize(
    ("request_", "names", "said"),
    [
        (Request("gemma-2-2b", 4), ["rtx309"], "rtx3090"),
        (Request("gemma-2-2b", -1), ["rtx3090"], "at least|between"),
        (Request("gemma-2-2b", 0), ["rtx3090"], "between 1"),
        (Request("gemma-2-2b", 10**7), ["rtx3090"], "100000"),
        (Request("gemma-2-2c", 4), ["rtx3090"], "gemma-2-2b"),
        (Request("gemma-2-2b", 4, seq_len=10**6), ["rtx3090"], "at most 8192"),
        (Request("gemma-2-2b", 4), [None], "no GPU"),
    ],
)
def test_bad_input_is_said_in_one_line(request_: Request, names: list[str | None], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        plans(request_, names)
    assert "\n" not in str(caught.value)


def test_a_variant_that_cannot_be_made_is_left_out_and_said() -> None:
    job, hardware = make_job(precision="fp32"), named_hardware("rtx4090", 2)
    space = parse_space(
        "knobs: {zero_stage: [2], attention: [sdpa, flash_attention_3], train_micro_batch_size_per_gpu: [1]}"
    )
    plan = make_plan(PlanSetup(job=job, hardware=hardware, space=space), Predictor(job, hardware))
    assert {one.candidate.get("attention") for one in plan.best} == {"sdpa"}
    assert plan.note.startswith("--attn flash_attention_3 computes in 16 bits")
    assert plan.note.endswith(": left out")
