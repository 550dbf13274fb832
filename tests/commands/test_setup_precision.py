"""The precision that a model is trained in: what was typed, what the config says, what the device has."""

import dataclasses

import pytest

from autotune.commands.setup import precision_of
from autotune.problem.hardware import Hardware, named_hardware
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from tests.conftest import make_candidate

ON, OFF = {"enabled": True}, {"enabled": False}


@pytest.mark.parametrize(
    ("typed", "config", "expected"),
    [
        (None, {}, "bf16"),
        (None, {"fp16": ON}, "fp16"),
        (None, {"bf16": ON, "fp16": OFF}, "bf16"),
        (None, {"fp16": OFF}, "bf16"),
        (None, {"bf16": {"enabled": "auto"}}, "bf16"),
        (None, {"bf16": OFF}, "fp32"),
        ("bf16", {"bf16": OFF}, "bf16"),
        ("fp16", {"bf16": ON}, "fp16"),
        ("fp32", {"bf16": ON}, "fp32"),
    ],
)
def test_trials_predictions_and_the_export_agree(typed: str | None, config: dict[str, object], expected: str) -> None:
    hardware = named_hardware("a100", 1)
    precision, base = precision_of(typed, config, hardware)
    job = Job(resolve_model("tiny-gemma-2"), 1, 64, precision=precision, base_config=base)
    trained = make_candidate(0, 1, 1).ds_config(job)
    on = [name for name in ("bf16", "fp16") if trained.get(name, OFF)["enabled"]]
    assert (precision, on) == (expected, [expected] if expected != "fp32" else [])
    assert not job.plain


def test_a_card_without_bf16_and_a_cpu_have_their_own() -> None:
    def of(hardware: Hardware) -> str:
        return precision_of(None, {}, hardware)[0]

    card = named_hardware("v100", 1)
    assert of(card) == "fp16"
    assert of(dataclasses.replace(card, device="cpu")) == "fp32"
