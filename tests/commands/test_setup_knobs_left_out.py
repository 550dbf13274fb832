"""Knobs of a space that a request leaves out: not installed here, or without effect on this job."""

import pytest

from autotune.commands.request import Request
from autotune.commands.setup import _tuned_model, plan_setups
from autotune.errors import UserError
from autotune.problem.hardware import detect
from autotune.problem.space import fitted, for_job, parse_space
from autotune.util import inquiry
from autotune.util.interpreter import OWN
from tests.conftest import make_job


def test_kernels_that_are_not_installed_are_left_out_once() -> None:
    space = parse_space("knobs: {zero_stage: [1], attention: [sdpa, flash_attention_2], compile: [true, false]}")
    left, lines = fitted(space, make_job(), detect("cpu", 2))
    assert left.knobs["attention"].values == ("sdpa",)
    assert lines == ["attention flash_attention_2 needs the package flash_attn, which is not installed: left out"]
    with pytest.raises(UserError, match="flash_attn"):
        fitted(parse_space("knobs: {zero_stage: [1], attention: [flash_attention_2]}"), make_job(), detect("cpu", 2))


def test_a_plan_needs_no_package_of_the_ranks_and_a_run_does() -> None:
    for one in ("attention", "flash_attention_2"), ("loss", "liger"):
        request = Request(model="tiny-llama", precision="bf16", **dict([one]))
        (setup,) = plan_setups(request, ["h100"], OWN)
        with pytest.raises(UserError, match=r"needs the package (flash_attn|liger_kernel)"):
            _tuned_model(request, setup.space, setup.hardware, OWN)


def test_without_a_batch_plan_and_run_assume_the_same_and_run_says_it() -> None:
    request = Request(model="tiny-llama", precision="bf16")
    (setup,) = plan_setups(request, ["h100"], OWN)
    job, _, [line, *_] = _tuned_model(request, setup.space, setup.hardware, OWN)
    assert job.global_batch_size == setup.job.global_batch_size == 128
    assert line == "global batch 128 is assumed; --global-batch-size free tunes it"


def test_adapters_without_peft_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "has", lambda module: False)
    space = parse_space("knobs: {zero_stage: [1], lora: [none, 8]}")
    left, lines = fitted(space, make_job(), detect("cpu", 2))
    assert left.knobs["lora"].values == ("none",)
    assert lines[0] == "lora r=8 needs the package peft, which is not installed: left out"


def test_packing_is_a_knob_only_where_lengths_differ() -> None:
    space = parse_space("knobs: {zero_stage: [1], packing: [true, false]}")
    assert "packing" not in for_job(space, make_job()).knobs, "batches without lengths are full already"
    assert "packing" in for_job(space, make_job(lengths=((16, 1), (32, 1)))).knobs
