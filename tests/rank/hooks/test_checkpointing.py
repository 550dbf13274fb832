"""Activation checkpointing of transformers' models, as a candidate says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autotune.rank.hooks import checkpointing
from autotune.rank.hooks.context import Context
from tests.conftest import make_candidate
from tests.rank.hooks.conftest import Recorder

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
Make = Callable[..., tuple[Context, Recorder]]


def make_model(on: bool) -> Any:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=1, num_attention_heads=2))
    if on:
        model.gradient_checkpointing_enable()
    return model


def recomputes(model: Any) -> bool:
    """Whether a backward runs a layer again."""
    runs = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.mean().backward()
    handle.remove()
    return len(runs) == 2


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("told", [True, False, None])
def test_a_model_is_as_the_candidate_says(context: Make, on: bool, told: bool | None) -> None:
    knobs = {} if told is None else {"activation_checkpointing": told}
    model, wanted = make_model(on), on if told is None else told
    checkpointing.apply(context(make_candidate(1, **knobs))[0], model)
    assert checkpointing.is_on(model) == recomputes(model) == wanted
    assert checkpointing.can_switch(model)


@pytest.mark.parametrize("on", [True, False])
def test_a_script_as_it_is_keeps_its_own(context: Make, on: bool) -> None:
    model = make_model(on)
    checkpointing.apply(context(None)[0], model)
    assert checkpointing.is_on(model) == on


def test_what_is_off_stays_off_in_that_model_alone(context: Make) -> None:
    from peft import prepare_model_for_kbit_training

    made, _ = context(make_candidate(1, activation_checkpointing=False))
    model, other = make_model(True), make_model(False)
    checkpointing.apply(made, model)
    prepare_model_for_kbit_training(model)
    model.model.gradient_checkpointing_enable()
    for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable"):
        getattr(model, name, lambda: None)()
    assert not checkpointing.is_on(model)
    other.gradient_checkpointing_enable()
    assert checkpointing.is_on(other)
    made.patches.undo()
    model.gradient_checkpointing_enable()
    assert checkpointing.is_on(model)


def test_trainer_switches_it_on_itself(context: Make) -> None:
    made, _ = context(make_candidate(1, activation_checkpointing=True))
    made.through_arguments = True
    model = make_model(False)
    checkpointing.apply(made, model)
    assert not checkpointing.is_on(model)


def test_a_model_that_can_only_be_switched_on() -> None:
    net = torch.nn.Linear(2, 2)
    assert not checkpointing.can_switch(net)
    net.gradient_checkpointing_enable = lambda **_: None  # type: ignore[assignment]
    assert checkpointing.can_switch(net)
    net.gradient_checkpointing = True  # type: ignore[assignment]
    assert not checkpointing.can_switch(net)
