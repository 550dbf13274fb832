"""Activation checkpointing of transformers' models, as a candidate says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autotune.rank.hooks import deepspeed
from autotune.rank.hooks.base import Context
from tests.conftest import make_candidate
from tests.rank.hooks.conftest import Recorder

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
Make = Callable[..., tuple[Context, Recorder]]


def make_model(on: bool, layers: int = 1) -> Any:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers, num_attention_heads=2))
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
    deepspeed.apply(context(make_candidate(1, **knobs))[0], model)
    assert deepspeed.is_on(model) == recomputes(model) == wanted
    assert deepspeed.can_switch(model)


def saved_and_trained(context: Make, share: float) -> tuple[int, float, float]:
    """Bytes that forward saves for backward, the loss, and the gradients' norm."""
    torch.manual_seed(0)
    model, sizes = make_model(share > 0, 8), list[int]()
    made, _ = context(make_candidate(1, activation_checkpointing=share))
    deepspeed.apply(made, model)
    made.patches.close()
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes * (tensor.data_ptr() not in weights))
        return tensor

    ids = torch.arange(32).view(2, 16)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
    return sum(sizes), loss.item(), norm.item()


def test_a_share_of_the_layers_saves_in_proportion_and_trains_the_same(context: Make) -> None:
    pytest.importorskip("transformers.modeling_layers")
    saved, losses, norms = zip(*(saved_and_trained(context, share) for share in (0, 0.25, 0.5, 0.75, 1)), strict=True)
    assert len({before - after for before, after in itertools.pairwise(saved)}) == 1
    assert len(set(losses)) == len(set(norms)) == 1


def test_layers_without_flags_of_their_own_refuse_a_share(context: Make) -> None:
    pytest.importorskip("transformers.modeling_layers")
    with pytest.raises(ValueError, match="cannot be checkpointed one by one"):
        deepspeed.apply(context(make_candidate(1, activation_checkpointing=0.5))[0], Block(True))


def test_what_is_off_stays_off_in_that_model_alone(context: Make) -> None:
    from peft import prepare_model_for_kbit_training

    made, _ = context(make_candidate(1, activation_checkpointing=False))
    model, other = make_model(True), make_model(False)
    deepspeed.apply(made, model)
    prepare_model_for_kbit_training(model)
    model.model.gradient_checkpointing_enable()
    for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable"):
        getattr(model, name, lambda: None)()
    assert not deepspeed.is_on(model)
    other.gradient_checkpointing_enable()
    assert deepspeed.is_on(other)
    made.patches.close()
    model.gradient_checkpointing_enable()
    assert deepspeed.is_on(model)


def test_trainer_switches_it_on_itself(context: Make) -> None:
    made, _ = context(make_candidate(1, activation_checkpointing=True))
    made.through_arguments = True
    model = make_model(False)
    deepspeed.apply(made, model)
    assert not deepspeed.is_on(model)


class Block(torch.nn.Module):
    """As diffusers' blocks, and models of one's own, ask."""

    def __init__(self, on: bool = False) -> None:
        super().__init__()
        self.gradient_checkpointing = on
        self.net = torch.nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)
        return self.net(x)


class Unet(torch.nn.Module):
    """With the methods that diffusers' `ModelMixin` has (models/modeling_utils.py)."""

    _supports_gradient_checkpointing = True

    def __init__(self, on: bool = False) -> None:
        super().__init__()
        self.block = Block(on)

    def _set(self, on: bool) -> None:
        if not self._supports_gradient_checkpointing:
            raise ValueError(f"{type(self).__name__} does not support gradient checkpointing.")
        self.block.gradient_checkpointing = on

    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Any = None) -> None:
        self._set(True)

    def disable_gradient_checkpointing(self) -> None:
        self._set(False)


class Around(torch.nn.Module):
    """A model of one's own around a library's."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Whole(Unet):
    _supports_gradient_checkpointing = False


MODELS = {
    "diffusers": (Unet, "enable_gradient_checkpointing()"),
    "by hand": (Block, "gradient_checkpointing = True"),
    "around diffusers": (lambda on: Around(Unet(on)), "inner.enable_gradient_checkpointing()"),
    "around transformers": (lambda on: Around(make_model(on)), "inner.gradient_checkpointing_enable()"),
    "around by hand": (lambda on: Around(Block(on)), "inner.gradient_checkpointing = True"),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_models_of_other_libraries_and_of_ones_own(context: Make, kind: str, on: bool, told: bool) -> None:
    make, call = MODELS[kind]
    model = make(on)
    assert deepspeed.can_switch(model)
    assert not deepspeed.can_switch(model, through_arguments=True), "Trainer calls transformers' method"
    assert deepspeed.call_of(model) == call
    made, _ = context(make_candidate(1, activation_checkpointing=told))
    deepspeed.apply(made, model)
    assert deepspeed.is_on(model) == told
    for module in model.modules():  # as the script's code may, later
        for name in ("enable_gradient_checkpointing", "gradient_checkpointing_enable"):
            getattr(module, name, lambda: None)()
    assert deepspeed.is_on(model) == told


@pytest.mark.parametrize("make", [Whole, lambda: Around(Whole()), lambda: torch.nn.Linear(2, 2)])
def test_models_without_any(context: Make, make: Callable[[], torch.nn.Module]) -> None:
    model = make()
    assert not deepspeed.can_switch(model)
    assert deepspeed.call_of(model) == ""
    deepspeed.apply(context(make_candidate(1, activation_checkpointing=True))[0], model)
    assert not deepspeed.is_on(model)


def test_layers_of_transformers_alone_are_left(context: Make) -> None:
    """What they call to checkpoint, their model's own method gives them."""
    model = Around(make_model(False).model.layers)
    deepspeed.apply(context(make_candidate(1, activation_checkpointing=True))[0], model)
    assert not deepspeed.is_on(model)
    assert not deepspeed.can_switch(model)


def test_a_model_that_can_only_be_switched_on() -> None:
    net = torch.nn.Linear(2, 2)
    assert not deepspeed.can_switch(net)
    net.gradient_checkpointing_enable = lambda **_: None  # type: ignore[assignment]
    assert deepspeed.can_switch(net)
    net.gradient_checkpointing = True  # type: ignore[assignment]
    assert not deepspeed.can_switch(net)
