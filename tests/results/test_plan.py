import pytest
from rich.console import Console

from autotune.commands.plan import make_plan
from autotune.commands.setup import PlanSetup
from autotune.predict.predictor import Predictor
from autotune.problem.hardware import named_hardware
from autotune.problem.space_file import load_space
from autotune.results.plan import BAR, bar, show_comparison, show_plan
from tests.conftest import make_job


def test_what_is_shown() -> None:
    job = make_job(model="llama-3.2-1b", precision="bf16", seq_len=1024)
    hardware = named_hardware("rtx4090", 2)
    setup = PlanSetup(job=job, hardware=hardware, space=load_space("default"))
    plan = make_plan(setup, Predictor(job, hardware))
    out = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    show_plan(plan, out)
    show_comparison([plan], out)
    text = out.export_text()
    assert "largest micro-batch by stage" in text
    for stage in range(4):
        assert f"ZeRO {stage}" in text
    assert "optimizer" in text
    fitting = next(stage.fitting for stage in plan.stages if stage.fitting)
    drawn = bar(fitting, hardware).plain
    assert len(drawn) == BAR
    assert drawn.count("█") == pytest.approx(BAR * fitting.peak_bytes / hardware.capacity_bytes, abs=2)
