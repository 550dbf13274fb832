"""Recording of the training trace next to a GPU, whose calls are stood in for."""

import gc
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from torch.optim import lr_scheduler as schedules

from autotune.problem.training_trace import AHEAD, MOST_STEPS, TrainingTrace
from autotune.rank import devices
from autotune.rank.hooks import deepspeed as hooks
from autotune.rank.patches import Call
from autotune.rank.training_trace import TraceRecorder, _projected
from autotune.search.certificate import Runs

SCALE = 1024.0


class FP16_UnfusedOptimizer:  # DeepSpeed's name
    loss_scale = SCALE

    def __init__(self, module: torch.nn.Module) -> None:
        self.param_groups = [{"lr": 1e-3, "params": list(module.parameters())}]


class Engine:
    """Engine of stage 0 in fp16 whose own norm is that of the scaled gradients."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.optimizer, self.skipped_steps = module, FP16_UnfusedOptimizer(module), 0
        self.stage, self.fp16 = 0, True

    def gradient_accumulation_steps(self) -> int:
        return 1

    def zero_optimization_stage(self) -> int:
        return self.stage

    def zero_optimization(self) -> bool:
        return self.stage > 0

    def fp16_enabled(self) -> bool:
        return self.fp16

    def bfloat16_enabled(self) -> bool:
        return False

    def get_global_grad_norm(self) -> float:
        return 3.0 * SCALE


@pytest.fixture
def engine() -> Engine:
    module = torch.nn.Linear(8, 8, bias=False)
    module.weight.grad = torch.full((8, 8), 0.5 * SCALE)
    return Engine(module)


def test_gradients_of_the_unfused_optimizer_in_fp16_are_unscaled(engine: Engine) -> None:
    recorder = TraceRecorder()
    recorder.before_step(engine)
    recorder.after_step(engine)
    (step,) = recorder.report()["steps"]
    assert step["gradient_norm"] == pytest.approx(4.0)  # of 64 elements of 0.5


def test_skipped_steps_are_recorded_and_do_not_count(engine: Engine) -> None:
    recorder = TraceRecorder()
    for at in range(MOST_STEPS + 4):
        recorder.before_step(engine)
        engine.skipped_steps += at < 4
        recorder.after_step(engine)
    assert not recorder.records
    skipped = [step["skipped"] for step in recorder.report()["steps"]]
    assert skipped == [True] * 4 + [False] * MOST_STEPS


def test_work_that_the_training_has_queued_is_not_time_of_recording(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued, now = [60.0], 0.0

    def synchronize() -> None:
        nonlocal now
        now += queued.pop() if queued else 0.0

    def tick() -> float:
        nonlocal now
        now += 0.25
        return now

    monkeypatch.setattr(devices, "in_use", lambda: True)
    monkeypatch.setattr(devices, "generator_state", lambda: None)
    monkeypatch.setattr(devices, "synchronize", synchronize)
    monkeypatch.setattr("time.perf_counter", tick)
    recorder = TraceRecorder()
    recorder.before_step(engine)
    assert not queued
    assert recorder.take_seconds() == 0.25
    assert recorder.take_seconds() == 0


def warm_then_linear(optimizer: Any) -> Any:
    parts = [schedules.ConstantLR(optimizer, 0.1, 100), schedules.LinearLR(optimizer, 1.0, 0.1, 900)]
    return schedules.SequentialLR(optimizer, parts, [100])


@pytest.mark.few(6)
@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("counts", [1, 4])
@pytest.mark.parametrize(
    "made",
    [
        lambda optimizer: schedules.LambdaLR(optimizer, lambda count: 1 / (1 + count // 50)),
        lambda optimizer: schedules.CosineAnnealingLR(optimizer, 1000),
        lambda optimizer: schedules.OneCycleLR(optimizer, 1.0, total_steps=1200),
        lambda optimizer: WarmupDecayLR(optimizer, 1100, warmup_max_lr=1.0, warmup_num_steps=300),
        warm_then_linear,
    ],
)
def test_later_rates_are_those_to_which_the_schedule_leads(
    engine: Engine, made: Callable[[Any], Any], counts: int, by_engine: bool
) -> None:
    held: Any = engine
    held.fp16, held.optimizer = False, torch.optim.SGD(engine.module.parameters(), lr=1.0)
    schedule = made(held.optimizer)
    if by_engine or isinstance(schedule, WarmupDecayLR):
        held.lr_scheduler = schedule
    else:
        held.optimizer = SimpleNamespace(optimizer=held.optimizer, param_groups=held.optimizer.param_groups)
    recorder = TraceRecorder()
    ahead: list[list[float]] = []
    for step in range(AHEAD[29]):
        if step in AHEAD:
            low, high = ahead[AHEAD.index(step)]
            assert low - 1e-3 <= held.optimizer.param_groups[0]["lr"] <= high + 1e-3
        recorder.before_step(engine)
        getattr(held.optimizer, "optimizer", held.optimizer).step()
        recorder.after_step(engine)
        ahead = ahead or recorder.report()["ahead"]
        for _ in range(counts):
            schedule.step()
    assert recorder.report()["missing"] == ""


def ahead_of(engine: Engine, schedule: Any, recorder: TraceRecorder) -> list[list[float]]:
    held: Any = engine
    held.fp16, held.lr_scheduler = False, schedule
    for _ in range(MOST_STEPS):
        recorder.before_step(engine)
        held.optimizer.step()
        recorder.after_step(engine)
        schedule.step()
    report = recorder.report()
    assert report["missing"] == ""
    assert all(step["rates"] and step["update"][0] for step in report["steps"])
    return report["ahead"]  # type: ignore[no-any-return]


def test_a_cosine_is_followed_to_its_end(engine: Engine) -> None:
    held: Any = engine
    held.optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)
    for length in (10, 100):

        def cosine(count: int, length: int = length) -> float:
            return 0.5 * (1 + math.cos(math.pi * count / length))  # rises again, as the one of transformers

        ahead = ahead_of(engine, schedules.LambdaLR(held.optimizer, cosine), TraceRecorder())
        assert ahead == sorted(ahead, reverse=True)
        assert ahead[-1][0] < 0.01
        assert length > AHEAD[0] or ahead == [[0.0, 0.0]]


class Counting:
    """Schedule of a script's own, which changes when it is asked."""

    def __init__(self, optimizer: Any, **count: Any) -> None:
        self.groups, self.asked = optimizer.param_groups, 0
        vars(self).update(count)

    def get_lr(self) -> list[float]:
        self.asked += 1
        return [1.0]

    def step(self) -> None:
        if vars(self).get("last_epoch") is not None:
            vars(self)["last_epoch"] += 1


@pytest.mark.parametrize("count", [{}, {"last_epoch": None}, {"last_epoch": 0}])
def test_a_schedule_that_cannot_be_asked_costs_no_step(engine: Engine, count: dict[str, Any]) -> None:
    held: Any = engine
    held.optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)
    assert not ahead_of(engine, Counting(held.optimizer, **count), TraceRecorder())


def test_the_schedule_of_a_whole_training_is_not_asked(engine: Engine) -> None:
    held: Any = engine
    held.optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)
    calls: list[int] = []
    schedule = schedules.LambdaLR(held.optimizer, lambda count: calls.append(count) or 1.0)  # type: ignore[func-returns-value]
    assert not ahead_of(engine, schedule, TraceRecorder(looks_ahead=False))
    assert calls == [*range(MOST_STEPS + 1)]


@pytest.mark.parametrize(
    ("gpu", "autocast", "precision"), [(False, False, "fp32"), (False, True, "mixed"), (True, False, "mixed")]
)
def test_products_of_fewer_bits_are_no_fp32(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, gpu: bool, autocast: bool, precision: str
) -> None:
    engine.fp16 = False
    monkeypatch.setattr(devices, "in_use", lambda: gpu)
    monkeypatch.setattr(devices, "generator_state", lambda: None)
    monkeypatch.setattr(devices, "synchronize", lambda: None)
    recorder = TraceRecorder()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        recorder.forward(torch.ones(2, 2), 2)
    recorder.before_step(engine)
    recorder.after_step(engine)
    assert recorder.report()["precision"] == precision
    assert recorder.report()["missing"] == ""


@pytest.mark.parametrize(("on_disk", "elements"), [(False, 64), (True, 0)])
def test_offloaded_weights_of_stage_3_are_read_where_they_lie(engine: Engine, on_disk: bool, elements: int) -> None:
    weight: Any = engine.module.weight
    engine.stage = 3

    def copy_to_gpu(parameter: Any) -> None:
        raise AssertionError("a whole part is copied")

    weight.ds_id, weight.ds_numel, weight.ds_tensor = 7, 64, torch.zeros(64)
    weight._z3_optimizer = SimpleNamespace(
        grad_position={7: [0, 16, 64]},
        get_param_id=lambda parameter: parameter.ds_id,
        _swappable_optimizer_subgroup=lambda group: on_disk,
        fp32_partitioned_groups_flat=[torch.zeros(128)],
        get_local_fp32_param=copy_to_gpu,
    )
    recorder = TraceRecorder()
    recorder.before_step(engine)
    weight._z3_optimizer.fp32_partitioned_groups_flat[0][16:80] = 2.0
    recorder.after_step(engine)
    found = recorder.report()
    assert found["missing"] == ""
    assert found["steps"][0]["update"] == [4.0 * elements, elements]


def test_a_backward_without_the_engine_keeps_no_graph_alive() -> None:
    context: Any = SimpleNamespace(trace=TraceRecorder(), inside=None)
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    alive = weakref.ref(loss)
    hooks._autograd_backward(context, Call(torch.autograd.backward, (loss,), {}))
    del loss
    gc.collect()
    assert alive() is None


def test_initial_weights_are_read_on_the_host_if_the_default_device_is_another() -> None:
    at, weights = torch.arange(4), torch.ones(4)
    expected = _projected({0: (at, weights)}, 8)
    torch.set_default_device("meta")
    try:
        assert _projected({0: (at, weights)}, 8) == expected
    finally:
        torch.set_default_device(None)
    assert expected[:3] == [4.0, 4.0, 8]


def test_other_draws_of_initial_weights_are_told_from_rounded_ones() -> None:
    """Norms' weights of 1 hide other draws from a mean of squares, and rounding to 16 bits changes it as much."""
    at = torch.arange(512)

    def trace(seed: int, dtype: torch.dtype, ranks: int) -> TrainingTrace:
        generator = torch.Generator().manual_seed(seed)
        whole = [torch.ones(512), *(torch.randn(512, generator=generator) * 0.02 for _ in range(2))]
        whole = [one.to(dtype).float() for one in whole]
        parts = [[(p, w[p]) for w in whole for p in [at.chunk(ranks)[rank]]] for rank in range(ranks)]
        initial = [_projected(dict(enumerate(part)), 3 * 512) for part in parts]
        initial = initial if ranks > 1 else initial * 2  # copies of all
        step = {"micro_batches": 1, "rows": 1, "digest": 0.0, "loss": 1.0, "gradient_norm": 1.0}
        step |= {"update": [1.0, 1], "rates": [1.0], "skipped": False}
        about = {"stage": 1, "precision": "bf16", "accumulation": 1, "draws": False, "missing": "", "steps": [step]}
        merged = TrainingTrace.merged([{**about, "initial": one} for one in initial])
        assert merged is not None
        return merged

    own = trace(0, torch.float32, 1)
    assert Runs(own, trace(0, torch.bfloat16, 2)).has_same_weights
    assert not any(Runs(own, trace(seed, torch.float32, 1)).has_same_weights for seed in range(1, 200))


def epoch_steps(engine: Engine, loader: Any, accumulation: int, *, ends_by_hand: bool = False, ahead: int = 0) -> float:
    """Train on the batches of a loader, of which some are read ahead."""
    recorder = TraceRecorder()
    batches = iter(loader)
    for _ in range(ahead):
        next(batches)
        recorder.fetched(batches)
    engine._is_gradient_accumulation_boundary = True if ends_by_hand else None  # type: ignore[attr-defined]
    for _ in range(MOST_STEPS):
        for _ in range(accumulation):
            try:
                next(batches)
            except StopIteration:
                batches = iter(loader)
                next(batches)
            recorder.fetched(batches)
        recorder.before_step(engine)
        recorder.after_step(engine)
    return float(recorder.report()["epoch_steps"])


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(1000))


def test_the_length_of_the_loader_tells_the_optimizer_steps_of_an_epoch(engine: Engine) -> None:
    rows = torch.arange(26)

    def loader(batch_size: int, **how: Any) -> Any:
        return torch.utils.data.DataLoader(rows, batch_size, **how)  # type: ignore[arg-type]

    assert epoch_steps(engine, loader(2), 4) == 3.25
    assert epoch_steps(engine, loader(2), 4, ends_by_hand=True) == 4, "accelerate steps at the end of each epoch"
    assert epoch_steps(engine, loader(8), 1) == 4
    assert epoch_steps(engine, loader(8, drop_last=True), 1) == 3
    assert epoch_steps(engine, loader(8), 1, ahead=1) == 4
    sampler = torch.utils.data.BatchSampler(range(26), 8, drop_last=False)
    assert epoch_steps(engine, torch.utils.data.DataLoader(rows, batch_sampler=sampler), 1) == 4  # type: ignore[arg-type]
    assert epoch_steps(engine, torch.utils.data.DataLoader(Stream(), 8), 1) == 0, "a stream has no length"
