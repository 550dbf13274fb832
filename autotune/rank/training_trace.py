"""Recorder of the training trace in a rank: batches, loss, gradient norm, update and learning rates of first steps."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import gc
import itertools
import math
import statistics
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from autotune.problem.training_trace import AHEAD, LEAST_STEPS, MOST_STEPS, TrainingTrace
from autotune.rank.loop_end import LoopEnds
from autotune.rank.random_state import RandomState

_SAMPLED = 16  # parameters, evenly spaced over the model's trained ones, and as many buffers
_ELEMENTS = 512  # elements of each sampled tensor, evenly spaced over it
_PROJECTIONS = 8  # samples of the initial weights
_OF_A_ROW = 32  # first elements of a row that its digest reads
_ENDED = 0.01  # share of its highest rate at which a schedule has come down to zero
_LARGEST = sys.float_info.max  # stands for a value that is not finite, which JSON cannot hold


_Values = dict[Any, tuple[Any, Any]]  # positions and copies of sampled elements, by number or name of the tensor


class TraceRecorder:
    """Record the first optimizer steps of an engine that trains, on one rank.

    The recorder runs no collective and draws no random number. Every rank reports its own shards, and
    `TrainingTrace.merged` adds them up. An error while recording leaves the quantity out and never ends the training.

    Args:
        random_state: of the rank; None watches only the global generators.
        most_steps: optimizer steps to record. With 0 there is no report.
        looks_ahead: ask the schedule for later learning rates. A schedule of the script's own may change by being asked.
    """

    def __init__(
        self, random_state: RandomState | None = None, *, most_steps: int = MOST_STEPS, looks_ahead: bool = True
    ) -> None:
        self._random, self._most_steps, self._looks_ahead = random_state or RandomState(), most_steps, looks_ahead
        self._seconds = 0.0  # spent on recording since `take_seconds`
        self._steps: list[dict[str, Any]] = []
        self._step = _new_step()
        self._in_backward = False
        # tensor on which autograd runs now for a script that calls `loss.backward()`; it keeps its whole graph alive
        self.root: Any = None
        self._sample: list[tuple[Any, Any]] | None = None  # (parameter, positions)
        self._weights: _Values = {}  # before the step
        self._buffers: _Values = {}  # after the last step
        self._loop_ends = LoopEnds()
        self._fetched: Counter[int] = Counter()  # batches of all loaders, by length of the loader
        self._fetched_before: list[Counter[int]] = []  # counts at the end of each step
        self._by_hand = False  # the script itself says which micro-batch ends an optimizer step
        self._gradients: list[tuple[int, int]] | None = None  # versions after the last backward; None after a step
        self._schedule: Any = None
        self._schedule_began = 0.0  # its count before the first step
        self._skipped = 0
        self._autocast: bool | None = None  # the script's first forward ran under torch's autocast
        self._about = dataclasses.asdict(TrainingTrace((), 0, "fp32", 1))

    def fresh(self) -> TraceRecorder:
        """Return a recorder for another engine."""
        return TraceRecorder(self._random, most_steps=self._most_steps, looks_ahead=self._looks_ahead)

    @property
    def records(self) -> bool:
        """True until the last step to trace has ended. Steps that DeepSpeed skips do not count."""
        return sum(not step["skipped"] for step in self._steps) < self._most_steps

    def take_seconds(self) -> float:
        """Return the seconds spent on recording since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def forward(self, tensor: Any, rows: int) -> None:
        """Record a forward with gradients, also one that no backward follows.

        Args:
            tensor: the tensor that counts the rows; None if unknown.
            rows: rows of the forward.
        """
        import torch

        if not self.records:
            return
        with self._recording():
            if self._random.marked is None:
                self._random.mark()
            if self._autocast is None:
                self._autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
            self._in_backward = False
            self._step["rows"] += rows
            self._step["digest"] = self._step["digest"] + _digest(tensor)

    def backward(self, engine: Any, loss: Any = None, *, scaled: bool = True) -> None:
        """Record the loss whose backward begins.

        Args:
            loss: argument of `engine.backward`; None takes `root`.
            scaled: the engine divides the loss by its accumulation.
        """
        if not self.records:
            return
        with self._recording():
            self._step["micro_batches"] += not self._in_backward
            self._in_backward = True
            weight = 1.0 / engine.gradient_accumulation_steps() if scaled else 1.0
            if loss is None:
                loss = self.root
                weight /= _loss_scale(engine)
            if getattr(loss, "numel", lambda: 0)() == 1:
                self._step["loss"].append(loss.detach().float().reshape(()) * weight)

    # -- what the script does between backward and step --------------------------------------------------------------

    def gradients_made(self, engine: Any) -> None:
        """Note the versions of the gradients after a backward. Each write in place, from any library, raises one."""
        if self.records:
            self._gradients = _versions(engine.module)

    def gradients_used(self, engine: Any) -> None:
        """Count a change of the gradients since the last backward. Only stage 0 steps with what the script can change."""
        if self.records and self._gradients is not None and engine.zero_optimization_stage() == 0:
            before, self._gradients = self._gradients, _versions(engine.module)
            self._step["changed_by_hand"] += self._gradients != before

    def clipped(self, engine: Any, parameters: Sequence[Any], limit: float) -> None:
        """Note a call of torch's clipping; without a finite limit it only returns the norm."""
        if self._gradients is None or set(map(id, parameters)).isdisjoint(map(id, engine.module.parameters())):
            return
        if math.isfinite(limit):
            self._about["clips_at"] = limit
        else:
            self.gradients_made(engine)

    @property
    def changes_gradients(self) -> bool:
        """True if the script changes gradients between backward and step."""
        return bool(self._about["clips_at"]) or any(step["changed_by_hand"] for step in self._steps)

    def fetched(self, loader: Any) -> None:
        """Count a batch of a loader's iterator."""
        with suppress(TypeError):  # a stream without a length
            self._fetched[len(loader)] += 1

    def _epoch_steps(self) -> float:
        """Return the optimizer steps of an epoch of the loader with the most batches; 0 if unknown.

        A script that ends an epoch with a step of fewer micro-batches, like accelerate, has a whole number of steps.
        """
        each = [now - before for before, now in itertools.pairwise(self._fetched_before)]
        whole: Counter[int] = sum(each, Counter())
        if len(each) < LEAST_STEPS - 1 or not whole:
            return 0.0
        length = max(whole, key=lambda one: whole[one])
        batches = statistics.mode(one[length] for one in each) or whole[length] / len(each)
        steps = length / batches
        return float(math.ceil(steps)) if self._by_hand else steps

    def optimizer_stepped(self) -> None:
        """Count a step of an optimizer that belongs to no engine."""
        self._step["outside_steps"] += 1

    @contextmanager
    def step(self, engine: Any) -> Iterator[None]:
        """Record an optimizer step, which the block runs."""
        self.before_step(engine)
        yield
        self.after_step(engine)

    def before_step(self, engine: Any) -> None:
        """Record learning rates and weights before the optimizer runs."""
        from autotune.rank import devices

        if not self.records:
            return
        with self._recording(alone=True):
            about, step = self._about, self._step
            self._weights = {}
            if self._sample is None:
                self._sample = _sampled(engine.module)
                about["stage"] = int(engine.zero_optimization_stage())
                about["precision"] = precision_of(engine)
                by_engine = getattr(engine, "torch_autocast_enabled", lambda: False)()
                # GPUs round 32-bit factors of products to TF32: cuDNN by default, cuBLAS if the script allows it.
                if about["precision"] == "fp32" and (by_engine or self._autocast or devices.in_use()):
                    about["precision"] = "mixed"
                about["accumulation"] = int(engine.gradient_accumulation_steps())
                self._schedule = _schedule_of(engine) if self._looks_ahead else None
                self._schedule_began = _count_of(self._schedule)
            about["holds_frozen"] |= any(not one.requires_grad and _is_held(one) for one in engine.module.parameters())
            self._skipped = int(getattr(engine, "skipped_steps", 0))
            if self._schedule is not None and len(self._steps) == MOST_STEPS - 1:
                each = (_count_of(self._schedule) - self._schedule_began) / len(self._steps)
                with suppress(Exception):  # a schedule of the script's own
                    about["ahead"] = _rates_ahead(self._schedule, self._schedule_began, each)
            step["rates"] = [float(group["lr"]) for group in engine.optimizer.param_groups]
            known = sum(bool(one["gradient_norm"]) and not one["skipped"] for one in self._steps)
            if _has_no_norm(engine) and known < LEAST_STEPS:  # reads all gradients, so not in every step
                step["gradient_norm"] = [norm / _loss_scale(engine) for norm in _gradient_norm(engine.module)]
            self._weights = _weights(engine, self._sample)
            if not about["initial"]:
                about["initial"] = _projected(self._weights, sum(len(positions) for _, positions in self._sample))

    def after_step(self, engine: Any) -> None:
        """Record the gradient norm and the update, and end the step."""
        if not self.records:
            return
        with self._recording(alone=True):
            step, self._step = self._step, _new_step()
            self._in_backward, self._gradients = False, None
            if not _has_no_norm(engine):
                step["gradient_norm"] = [engine.get_global_grad_norm()]
            step["skipped"] = int(getattr(engine, "skipped_steps", 0)) > self._skipped
            step["update"] = _change(self._weights, _weights(engine, self._sample or ()))
            before, self._buffers = self._buffers, _sampled_buffers(engine.module)
            step["buffers"] = _change(before, self._buffers)
            self._fetched_before.append(self._fetched.copy())
            self._by_hand = getattr(engine, "_is_gradient_accumulation_boundary", None) is not None
            self._loop_ends.note(sys._getframe(1))
            self._steps.append(step)
            if not self.records:
                self._about["draws"] = self._random.has_drawn()

    def report(self) -> dict[str, Any] | None:
        """Return this rank's steps as JSON data; None if none are to be recorded."""
        if not self._most_steps:
            return None
        if self.records and self._steps:
            self._about["draws"] = self._random.has_drawn()
        found = {**self._about, "epoch_steps": self._epoch_steps(), "loop_ends": self._loop_ends.optimizer_steps}
        if any(step["skipped"] for step in self._steps):
            found["ahead"] = []
        return {**found, "steps": [_plain(step) for step in self._steps]}

    @contextmanager
    def _recording(self, *, alone: bool = False) -> Iterator[None]:
        """Count the seconds of a block that records, without autograd, and note the error that ends it.

        Args:
            alone: the block waits for the GPU, so its seconds begin once the work that the training has queued is done,
                and include the block's own. Otherwise the training's seconds in the queue would count as recording.
        """
        import torch

        from autotune.rank import devices

        wait = devices.synchronize if alone else lambda: None
        wait()
        began = time.perf_counter()
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            self._about["missing"] = self._about["missing"] or f"{type(error).__name__}: {error}"[:200]
        finally:
            wait()
            self._seconds += time.perf_counter() - began


def _new_step() -> dict[str, Any]:
    """Return a step without values. Tensors are read in `_plain`; lists of them are sums."""
    counts = dict.fromkeys(("micro_batches", "rows", "digest", "changed_by_hand", "outside_steps"), 0)
    empty: tuple[list[Any], int] = ([], 0)
    return {**counts, "loss": [], "gradient_norm": [], "update": empty, "buffers": empty, "rates": [], "skipped": False}


def _plain(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step with its tensors read, which waits for the device."""
    found = {**step, "digest": _total([step["digest"]])}
    for name in ("loss", "gradient_norm"):
        found[name] = _total(step[name]) if step[name] else None
    for name in ("update", "buffers"):
        squares, elements = step[name]
        found[name] = [_total(squares), elements]
    return found


def _total(parts: Sequence[Any]) -> float:
    found = math.fsum(map(float, parts))
    return found if math.isfinite(found) else _LARGEST


def _change(before: _Values, after: _Values) -> tuple[list[Any], int]:
    """Return the sums of squares by which sampled values have changed, and their number."""
    pairs = [(one, after[key][1]) for key, (_, one) in before.items() if key in after]
    pairs = [(one, now) for one, now in pairs if one.shape == now.shape]
    return [(now - one).square().sum() for one, now in pairs], sum(one.numel() for one, _ in pairs)


# -- schedule ----------------------------------------------------------------------------------------------------------


def _schedule_of(engine: Any) -> Any:
    """Return the learning-rate schedule of an engine's optimizer, which the engine or the script advances.

    None: it has none, or several.
    """
    import torch

    if getattr(engine, "lr_scheduler", None) is not None:
        return engine.lr_scheduler
    optimizers, one = list[Any](), engine.optimizer
    while one is not None and len(optimizers) < 4:  # ZeRO's optimizer, and the script's inside
        optimizers.append(one)
        one = getattr(one, "optimizer", None)
    # torch marks the step of an optimizer that has a schedule. Without one, no search through all objects.
    if not any(hasattr(getattr(one, "step", None), "_wrapped_by_lr_sched") for one in optimizers):
        return None
    kind = torch.optim.lr_scheduler.LRScheduler
    known = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    found = [one for one in known if any(getattr(one, "optimizer", None) is of for of in optimizers)]
    parts = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    whole = [one for one in found if id(one) not in parts]
    return whole[0] if len(whole) == 1 else None


def _count_of(schedule: Any) -> float:
    """Return the steps that a schedule has counted; NaN if it keeps no count."""
    count = getattr(schedule, "last_epoch", getattr(schedule, "last_batch_iteration", None))
    return float(count) if isinstance(count, int | float) else math.nan


def _rates_ahead(schedule: Any, start: float, each: float) -> list[list[float]]:
    """Return [lowest, highest] learning rate of the group with the highest, between the optimizer steps `AHEAD`.

    A schedule that has come down to zero has ended: a cosine's next rise comes after the training.

    Args:
        schedule: of torch or DeepSpeed. A copy is asked, so that nothing advances.
        start: its count in the first optimizer step.
        each: counts of an optimizer step.
    """
    found: list[list[float]] = []
    if not each > 0:  # by epochs, or without a count
        return found
    asked, highest = _detached_copy(schedule), 0.0
    for begin, end in itertools.pairwise((MOST_STEPS, *AHEAD)):
        rates = [max(_rates_at(asked, int(start + each * step)), default=math.nan) for step in range(begin, end)]
        if not all(map(math.isfinite, rates)):
            break
        if begin in AHEAD:
            found.append([float(f"{one:.4g}") for one in (min(rates), max(rates))])
        for rate in rates:
            if rate < _ENDED * highest:
                return found or [[0.0, 0.0]]
            highest = max(highest, rate)
    return found


def _detached_copy(schedule: Any) -> Any:
    """Return a copy of a schedule that changes neither the schedule nor its optimizer when it is asked for rates."""
    asked = copy.copy(schedule)
    groups = [{key: one for key, one in group.items() if key != "params"} for group in schedule.optimizer.param_groups]
    asked.optimizer, asked._get_lr_called_within_step = types.SimpleNamespace(param_groups=groups), True
    if getattr(asked, "_milestones", None):  # torch's SequentialLR
        asked._schedulers = list(map(_detached_copy, asked._schedulers))
    return asked


def _rates_at(asked: Any, count: int) -> list[float]:
    """Return the learning rates at a count of a schedule; none after its end, or if it is no function of the count."""
    if milestones := getattr(asked, "_milestones", None):
        at = bisect.bisect_right(milestones, count)
        return _rates_at(asked._schedulers[at], count - milestones[at - 1] if at else count)
    setattr(asked, "last_epoch" if hasattr(asked, "last_epoch") else "last_batch_iteration", count)
    try:
        return [float(one) for one in getattr(asked, "_get_closed_form_lr", asked.get_lr)()]
    except Exception:  # OneCycleLR after its last step; ReduceLROnPlateau
        return []


# -- rows --------------------------------------------------------------------------------------------------------------


def _digest(tensor: Any) -> Any:
    """Return a number on the tensor's device that depends on the rows, and not on their order."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or not tensor.numel():
        return 0.0
    rows = tensor.detach().reshape(tensor.shape[0], -1)[:, :_OF_A_ROW].double()
    weights = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=torch.float64).sqrt()
    return torch.sin(rows @ weights).sum()


# -- weights -----------------------------------------------------------------------------------------------------------


def _sampled(module: Any) -> list[tuple[Any, Any]]:
    """Return sampled parameters with the positions of their sampled elements, the same at every stage."""
    import torch

    trained = [p for p in module.parameters() if p.requires_grad]
    every = max(1, len(trained) / _SAMPLED)
    chosen = [trained[int(at * every)] for at in range(min(_SAMPLED, len(trained)))]
    sizes = [int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in chosen]
    return [
        (parameter, torch.arange(0, size, max(1, size // _ELEMENTS)))
        for parameter, size in zip(chosen, sizes, strict=True)
        if size
    ]


def _sampled_buffers(module: Any) -> _Values:
    """Return sampled elements of sampled floating-point buffers, such as BatchNorm's running statistics."""
    floating = [(name, one) for name, one in module.named_buffers() if one.is_floating_point() and one.numel()]
    found = {}
    for name, one in floating[:: max(1, math.ceil(len(floating) / _SAMPLED))]:
        every = slice(None, None, max(1, one.numel() // _ELEMENTS))
        found[name] = every, one.detach().reshape(-1)[every].float().clone()
    return found


def _versions(module: Any) -> list[tuple[int, int]]:
    """Return identity and version of each gradient, which is not kept alive. ZeRO's stages 2 and 3 leave none."""
    gradients = (one.grad for one in module.parameters() if one.requires_grad)
    return [(id(one), one._version) for one in gradients if one is not None]


def _is_held(parameter: Any) -> bool:
    """Return True if ZeRO's optimizer steps a parameter. Stage 3 refers to the optimizer from frozen parameters too."""
    optimizer = getattr(parameter, "_z3_optimizer", None)
    if optimizer is not None:
        return optimizer.get_param_id(parameter) in optimizer.grad_position
    return hasattr(parameter, "_hp_mapping")


def _masters(engine: Any) -> dict[int, Any]:
    """Return the fp32 copies that DeepSpeed's optimizers of stage 0 keep in 16 bits, by id of the parameter."""
    optimizer, found = engine.optimizer, dict[int, Any]()
    whole, flat = getattr(optimizer, "fp32_groups", None), getattr(optimizer, "fp32_groups_flat", None)
    for at, group in enumerate(getattr(optimizer, "fp16_groups", None) or ()):
        start = 0
        for place, parameter in enumerate(group):
            if whole:
                found[id(parameter)] = whole[at][place]
            elif flat:
                found[id(parameter)] = flat[at].narrow(0, start, parameter.numel())
                start += parameter.numel()
    return found


def _projected(weights: _Values, sampled: int) -> list[float]:
    """Return [sum of squares, elements, sampled elements of all ranks, projections on cosines of their positions...].

    Other draws of the same distribution have other projections, and the same squares. Rounding to 16 bits changes neither.
    """
    import torch

    host: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # a script may set another default device
    found = torch.zeros(2 + _PROJECTIONS, **host)
    frequencies = torch.arange(2, 2 + _PROJECTIONS, **host).sqrt()
    for number, one in weights.items():
        at, values = (each.double().cpu() for each in one)
        found[0] += values.square().sum()
        found[1] += values.numel()
        found[2:] += torch.cos(torch.outer(frequencies, at + 7919 * number)) @ values
    square, elements, *projections = found.tolist()
    return [square, elements, sampled, *projections]


def _weights(engine: Any, sample: Sequence[tuple[Any, Any]]) -> _Values:
    """Return this rank's share of the sampled weights in fp32, by number of the parameter."""
    masters, found = _masters(engine), {}
    for number, (parameter, positions) in enumerate(sample):
        part, start = _fp32_part(parameter, masters)
        if part is not None:
            flat = part.detach().reshape(-1)
            inside = positions[(positions >= start) & (positions < start + flat.numel())]
            found[number] = inside, flat.index_select(0, (inside - start).to(flat.device)).clone()
    return found


def _fp32_part(parameter: Any, masters: Mapping[int, Any]) -> tuple[Any, int]:
    """Return the part of a parameter that this rank holds in fp32, and the index of its first element; None if it holds none.

    Stages 1 and 2 hold a fragment at an address of the parameter, stage 3 equal parts in the order of the ranks. Source:
    deepspeed 0.19.8, `utils/tensor_fragment.py` and `zero/partition_parameters.py`.
    """
    import torch

    if hasattr(parameter, "ds_id"):
        size = parameter.ds_tensor.numel()
        is_whole = size >= parameter.ds_numel
        rank = 0 if is_whole else torch.distributed.get_rank(group=parameter.ds_process_group)
        return _stage_3_part(parameter), rank * size
    if hasattr(parameter, "device_mesh"):
        return local_part(parameter)
    if hasattr(parameter, "_hp_mapping"):
        held = parameter._hp_mapping
        return (None, 0) if held is None else (held.hp_fragment, held.lp_fragment_address.start)
    whole = masters.get(id(parameter), parameter)
    return (whole if whole.dtype == torch.float32 else None), 0  # rounding would hide the update


def local_part(parameter: Any) -> tuple[Any, int]:
    """Return this rank's part of a parameter that FSDP2 sharded over its first dimension, and the index of its first element."""
    rows, rank = -(-parameter.shape[0] // parameter.device_mesh.size()), parameter.device_mesh.get_local_rank()
    each = parameter.numel() // parameter.shape[0]
    return parameter.detach().to_local(), min(rank * rows, parameter.shape[0]) * each


def _stage_3_part(parameter: Any) -> Any:
    """Return this rank's part in fp32 on its own device; None if it lies on an NVMe disk.

    DeepSpeed's `get_local_fp32_param` copies an offloaded part to the GPU, which may be gigabytes of an embedding. From
    a disk it reads a whole sub-group with its moments, and up to 0.19.5 it drops small gradients of the coming step.
    """
    optimizer = parameter._z3_optimizer
    group, start, count = optimizer.grad_position[optimizer.get_param_id(parameter)]
    if optimizer._swappable_optimizer_subgroup(group):
        return None
    return optimizer.fp32_partitioned_groups_flat[group].narrow(0, start, count)


def precision_of(engine: Any) -> str:
    """Return the precision of an engine's weights."""
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"


def _loss_scale(engine: Any) -> float:
    """Return the factor of an fp16 engine's loss and gradients; 1 in other precisions."""
    return float(getattr(engine.optimizer, "loss_scale", 1.0) or 1.0) if engine.fp16_enabled() else 1.0


def _has_no_norm(engine: Any) -> bool:
    """Return True if the engine steps with the module's gradients, and keeps no norm with which it steps.

    In fp32 stage 0 keeps none. In fp16 its class for all optimizers but FusedAdam keeps the norm before it divides the
    gradients by the loss scale (deepspeed 0.16 to 0.19.8, `fp16/unfused_optimizer.py`).
    """
    if engine.zero_optimization() or engine.bfloat16_enabled():
        return False
    return not engine.fp16_enabled() or type(engine.optimizer).__name__ == "FP16_UnfusedOptimizer"


def _gradient_norm(module: Any) -> list[Any]:
    """Return the norm of the gradients that the module's parameters hold; empty without any."""
    import torch

    norms = [
        torch.linalg.vector_norm(p.grad.detach(), dtype=torch.float32)  # converts no whole gradient
        for p in module.parameters()
        if p.grad is not None and not p.grad.is_sparse
    ]
    return [torch.stack([one.to(norms[0].device) for one in norms]).norm()] if norms else []
