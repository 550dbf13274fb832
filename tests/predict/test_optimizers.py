"""What optimizers keep and take: by the config, and against torch's own where it runs here."""

from typing import Any

import pytest

from autotune.predict.knobs import columns_of
from autotune.predict.optimizers import STATE_BYTES, stepper
from autotune.predict.zero import bill
from autotune.problem.job import OPTIMIZERS
from tests.conftest import make_candidate, make_job
from tests.predict.recorded import SEQ_LEN, recorded_trace


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


@pytest.mark.parametrize(
    ("kind", "states", "one_by_one"),
    [("AdamW8bit", 2.03125, 0), ("paged_adamw_8bit", 0, 0), ("lion_8bit", 1.015625, 0), ("Adafactor", 0, 16)],
)
def test_states_that_are_not_as_wide_as_the_weights(kind: str, states: float, one_by_one: float) -> None:
    one = stepper(make_job(base_config={"optimizer": {"type": kind}}))
    assert one.known
    assert (one.state_bytes, one.one_by_one_bytes, one.follows_weights) == (states, one_by_one, False)


PLAIN = {"bf16": {"enabled": False}}


@pytest.mark.parametrize(("params", "temporary"), [({}, 4), ({"fused": True}, 0)])
def test_plain_torch_takes_foreach_unless_told(params: dict[str, Any], temporary: float) -> None:
    config = {**PLAIN, "optimizer": {"type": "AdamW", "params": params}}
    assert stepper(make_job(precision="bf16", base_config=config)).temporary_bytes == temporary
    assert stepper(make_job(precision="bf16", base_config=PLAIN)).temporary_bytes == 4
    assert not stepper(make_job(precision="bf16", base_config=config)).flattens


@pytest.mark.parametrize(("ranks", "optimizer", "expected"), [(1, "AdamW", 2 * 2), (2, "AdamW", 2 * 2), (1, "Lion", 2)])
def test_plain_torch_keeps_all_in_the_weights_own_type(ranks: int, optimizer: str, expected: float) -> None:
    job = make_job(ranks, precision="bf16", seq_len=SEQ_LEN, base_config={**PLAIN, "optimizer": {"type": optimizer}})
    trace = recorded_trace(job)
    one = bill(job, trace, columns_of([make_candidate(0, 1)], job), "cuda")
    elements = sum(trace.parameters)
    assert one.parameters[0] == 2 * elements
    assert one.optimizer[0] == expected * elements
    assert one.gradients[0] == (2 * elements if ranks > 1 else 0), "DistributedDataParallel's buckets"
    at = one.moments.index("step")
    temporary = 2 if optimizer == "AdamW" else 0
    assert one.temporaries[at, 0] == (2 + temporary) * elements
