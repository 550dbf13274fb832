"""What optimizers keep and take: by the config, and against torch's own where it runs here."""

from typing import Any

import pytest

from autotune.predict.optimizers import STATE_BYTES, stepper
from autotune.problem.job import OPTIMIZERS
from tests.conftest import make_job


def of_config(kind: str, **params: Any) -> tuple[float, float, bool]:
    one = stepper(make_job(base_config={"optimizer": {"type": kind, "params": params}}))
    return one.state_bytes, one.temporary_bytes, one.flattens


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("AdamW", {}, (8, 0, True)),  # DeepSpeed's FusedAdam
        ("Adam", {"adam_w_mode": False}, (8, 0, True)),
        ("AdamW", {"torch_adam": True}, (8, 4, False)),
        ("AdamW", {"torch_adam": True, "fused": True}, (8, 0, False)),
        ("Adagrad", {}, (4, 8, False)),
        ("SGD", {"momentum": 0.9}, (4, 0, False)),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, (4, 4, False)),
        ("Lion", {}, (4, 0, False)),
    ],
)
def test_the_users_own_optimizer(kind: str, params: dict[str, Any], expected: tuple[float, float, bool]) -> None:
    assert of_config(kind, **params) == expected


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_by_name(kind: str) -> None:
    one = stepper(make_job(optimizer=kind))
    assert one.known
    assert one.state_bytes == STATE_BYTES[kind]
    assert one.flattens == (kind == "fused_adam")
    assert one.temporary_bytes == (8 if kind == "adagrad" else 0), "torch's own are fused where they can be"


def test_an_optimizer_of_which_nothing_is_known() -> None:
    one = stepper(make_job(base_config={"optimizer": {"type": "Shampoo"}}))
    assert (one.known, one.state_bytes) == (False, 8)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("AdamW", {"torch_adam": True}),
        ("Adam", {"torch_adam": True, "weight_decay": 0.1}),
        ("Adagrad", {}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ],
)
def test_torchs_foreach_takes_what_is_said_of_it(kind: str, params: dict[str, Any]) -> None:
    import torch

    from autotune.rank.live import LiveTensors

    elements = 1000
    weights = [torch.nn.Parameter(torch.ones(elements)) for _ in range(3)]
    own = {name: value for name, value in params.items() if name != "torch_adam"}
    optimizer = getattr(torch.optim, kind)(weights, lr=0.1, foreach=True, **own)
    for _ in range(2):  # the first step makes the states
        for weight in weights:
            weight.grad = torch.ones(elements)
        with LiveTensors() as live:
            optimizer.step()
        taken = live.peak
    expected = of_config(kind, **params)[1]
    assert taken / (elements * len(weights)) == pytest.approx(expected, abs=0.1)
