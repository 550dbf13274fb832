"""What the knob of Liger's kernels needs, and how a rank applies it."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from autotune.problem import knobs
from autotune.problem.knobs import RequirementInputs
from autotune.rank.model_builder import use_liger
from autotune.util import inquiry
from tests.conftest import make_job
from tests.problem.test_knobs_requirements import GPUS


@pytest.mark.parametrize(
    ("model", "task", "said"),
    [("llama-3.2-1b", "causal-lm", ""), ("tiny-bert", "masked-lm", "is for --task causal-lm and --task image-text")],
)
def test_it_needs_a_head_for_words(model: str, task: str, said: str) -> None:
    job = make_job(model=model, task=task, seq_len=64)
    assert knobs.liger_task(True, RequirementInputs(job, GPUS)) == said


@pytest.mark.parametrize("installed", [False, True])
def test_it_needs_its_package(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(inquiry, "has", lambda name: installed)
    said = knobs.liger_kernel(True, RequirementInputs(make_job(model="llama-3.2-1b"), GPUS))
    assert said == ("" if installed else "needs the package liger_kernel, which is not installed")


@pytest.mark.parametrize("adapters", [False, True])
def test_it_is_put_into_the_model_that_adapters_are_around(monkeypatch: pytest.MonkeyPatch, adapters: bool) -> None:
    """Through Liger's own function: transformers before 5 has none."""
    seen: list[object] = []
    package = types.ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = lambda model: seen.append(model)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(inner)
    outer.get_base_model = lambda: inner  # type: ignore[assignment]
    use_liger(outer if adapters else inner)
    assert seen == [inner]
