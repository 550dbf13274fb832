"""What a model's forward and backward allocate and compute, found by running them under fake tensors.

No memory is taken and nothing is computed: operators only work out shapes. Two runs, at micro-batches of two and three
sequences, give every allocation as `fixed + per_sequence x micro_batch`. Layers repeat, so a deep model is traced at two
small depths and extrapolated, allocation by allocation.

Run as `python -m autotune.predict.trace < JOB.json > TRACE.json`: the tuner's own process never imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from autotune.errors import UserError
from autotune.problem.job import Job

FORWARD, BACKWARD = 0, 1
VERSION = 4  # of this module's results: raise it when they change


class Untraceable(Exception):
    """Fake tensors cannot run the model; the message says why."""


@dataclass
class Pass:
    """One forward and backward; arrays hold one entry an allocation (or the few that can be a peak).

    Bytes alive at an allocation are `fixed + per_sequence x micro_batch`, without parameters and without gradients that
    a parameter already holds: those are `gradients`, the bytes of parameters in use by the running module `in_use`.
    """

    phase: list[int]
    fixed: list[float]
    per_sequence: list[float]
    gradients: list[float]
    in_use: list[float]
    after_forward: tuple[float, float]  # fixed, per sequence: what forward leaves for backward
    flops: tuple[float, float]  # forward, backward with recomputation; of one sequence, matrix products
    attention: tuple[float, float]  # the same of fused attention kernels, before a causal mask halves it
    moved: tuple[tuple[float, float], tuple[float, float]]  # bytes of other operators: (fixed, a sequence) each phase
    operators: tuple[float, float]  # how many kernels each phase starts

    @property
    def act_bytes_per_sequence(self) -> float:
        """By how much one more sequence raises the peak of the forward."""
        return self._forward_peak(2) - self._forward_peak(1)

    def _forward_peak(self, micro_batch: int) -> float:
        return max(
            f + p * micro_batch
            for f, p, at in zip(self.fixed, self.per_sequence, self.phase, strict=True)
            if at == FORWARD
        )

    def reduced(self) -> Pass:
        """Only the entries that can be the peak for some micro-batch, weight of gradients and of parameters in use."""
        keep: list[int] = []
        values = np.array([self.fixed, self.per_sequence, self.gradients, self.in_use])
        phases = np.array(self.phase)
        # DeepSpeed makes its buckets when the first gradient is there: moments before and after do not compete
        for phase, started in ((FORWARD, False), (BACKWARD, False), (BACKWARD, True)):
            at = np.flatnonzero((phases == phase) & ((values[2] > 0) == started))
            if not len(at):
                continue
            chosen: set[int] = set()
            for batch in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 1024):
                for grads in (0.0, 0.25, 0.5, 1.0, 2.0):
                    for used in (0.0, 1.0, 2.0):
                        total = values[0, at] + batch * values[1, at] + grads * values[2, at] + used * values[3, at]
                        chosen.add(int(at[total.argmax()]))
            keep += sorted(chosen)
        return Pass(
            [self.phase[i] for i in keep],
            [self.fixed[i] for i in keep],
            [self.per_sequence[i] for i in keep],
            [self.gradients[i] for i in keep],
            [self.in_use[i] for i in keep],
            self.after_forward,
            self.flops,
            self.attention,
            self.moved,
            self.operators,
        )


@dataclass
class Trace:
    """What a job's model needs, whatever DeepSpeed does with it."""

    parameters: list[int]  # elements of each trainable parameter, in the model's order
    frozen: int  # elements of the others
    plain: Pass
    checkpointed: Pass | None
    exact: bool = True  # False: a closed-form estimate, with a reason
    note: str = ""
    largest: int = field(default=0)  # elements of the largest parameter

    def of(self, checkpointing: bool) -> Pass:
        return self.checkpointed if checkpointing and self.checkpointed is not None else self.plain

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trace:
        def restore(value: dict[str, Any] | None) -> Pass | None:
            if value is None:
                return None
            pairs = ("after_forward", "flops", "attention", "operators")
            return Pass(**{**value, **{k: tuple(value[k]) for k in pairs}, "moved": tuple(map(tuple, value["moved"]))})

        plain = restore(data["plain"])
        assert plain is not None
        return cls(**{**data, "plain": plain, "checkpointed": restore(data["checkpointed"])})


# -- what the tuner calls ------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    root = os.environ.get("AUTOTUNE_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "autotune" / "traces"


def cache_key(job: Job, fused_loss: bool = False) -> str:
    """Of what decides a trace: model, sequence length, precision and the versions that run it."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    parts = {
        "model": asdict(job.model),
        "seq_len": job.seq_len,
        "precision": job.precision,
        "versions": versions,
        "version": VERSION,
        **({"fused_loss": True} if fused_loss else {}),
        **({"lora": asdict(job.lora)} if job.lora else {}),
        **({"attention": job.attention} if job.attention else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def trace_job(job: Job, *, fused_loss: bool = False, timeout_seconds: float = 300.0) -> Trace:
    """The job's trace: from the cache, or made in a process of its own; where that fails, the closed form's.

    Raises:
        UserError: the model cannot even be built.
    """
    if job.script and not traceable(job.script.profile):
        from autotune.predict.closed_form import profile_trace

        return profile_trace(job)
    path = cache_folder() / f"{cache_key(job, fused_loss)}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Trace.from_json(json.loads(path.read_text()))
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "autotune.predict.trace", *(["--fused-loss"] if fused_loss else [])],
            input=json.dumps(job.to_json()),
            env=env,
            text=True,
            capture_output=True,
            timeout=timeout_seconds,
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1]) if done.stdout.strip() else {}
        why = answer.get("untraceable") or (done.stderr.strip().splitlines() or ["no answer"])[-1]
    except subprocess.TimeoutExpired:
        answer, why = {}, f"no trace within {timeout_seconds:.0f} s"
    if "impossible" in answer:
        raise UserError(f"model {job.model.name} cannot be built: {answer['impossible']}")
    if "trace" not in answer:
        from autotune.predict.closed_form import closed_form_trace

        return closed_form_trace(job, why)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(answer["trace"]))
        beside.replace(path)
    return Trace.from_json(answer["trace"])


def traceable(profile: dict[str, Any]) -> bool:
    """Whether a script trains what a trace runs: all of a causal model, on its own loss."""
    return bool(profile.get("causal") and not profile.get("frozen") and profile.get("rows_per_sample") == 1)


# -- what runs in its own process ----------------------------------------------------------------------------------------


def trace_model(
    job: Job, *, use_cache: bool = False, whole_depth: bool = False, fused_loss: bool = False, workers: int = 1
) -> Trace:
    """Traces the job's model.

    Args:
        use_cache: keep the keys and values as models do by default; training switches it off.
        whole_depth: trace every layer instead of extrapolating over them.
        fused_loss: the loss is taken from the 16-bit logits in place, as fused cross-entropy kernels do.
        workers: 2 traces with and without checkpointing at the same time, in forked children.

    Raises:
        Untraceable: an operator needs values, not shapes.
        ValueError: transformers refuses the configuration.
    """
    from autotune.rank.workload import transformers_config

    config = None if job.workload else transformers_config(job.model)
    parameters, frozen = _parameters(job, config)
    depths = None if whole_depth or config is None else small_depths(config)
    both = [(job, config, depths, (use_cache, fused_loss), checkpointing) for checkpointing in (False, True)]
    if workers > 1:
        # Forked before torch has run anything: each child has what is imported, and a core.
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            passes = pool.starmap(_one_pass, both)
    else:
        passes = [_one_pass(*arguments) for arguments in both]
    plain = passes[0]
    assert plain is not None
    return Trace(parameters, frozen, plain, passes[1], largest=max(parameters, default=0))


def _one_pass(
    job: Job, config: Any, depths: tuple[int, int] | None, options: tuple[bool, bool], checkpointing: bool
) -> Pass | None:
    try:
        if depths is None:
            return _run_both(job, config, checkpointing, options).reduced()
        deep = config.get_text_config().num_hidden_layers
        short, long = (_run_both(job, at_depth(config, n), checkpointing, options) for n in depths)
        return extrapolate(short, long, depths, deep).reduced()
    except Untraceable:
        if not checkpointing:
            raise
        return None  # a model without gradient checkpointing


def small_depths(config: Any) -> tuple[int, int] | None:
    """Two depths whose difference is whole periods of the layers' pattern, or None where all layers must be run."""
    text = config.get_text_config()
    deep = getattr(text, "num_hidden_layers", None)
    if not isinstance(deep, int) or config.get_text_config() is not config:
        return None
    if getattr(text, "num_kv_shared_layers", 0) or getattr(text, "mlp_only_layers", None):
        return None
    if getattr(text, "first_k_dense_replace", 0) or (getattr(text, "decoder_sparse_step", 1) or 1) > 1:
        return None
    period = 1
    for value in vars(text).values():
        if isinstance(value, list | tuple) and len(value) == deep:
            period = max(period, _period(list(value)))
    short = deep % period + period
    while short < 2:
        short += period
    long = short + period
    return (short, long) if long + 1 < deep else None


def _period(values: list[Any]) -> int:
    return next(n for n in range(1, len(values) + 1) if all(v == values[i % n] for i, v in enumerate(values)))


def at_depth(config: Any, layers: int) -> Any:
    """A copy of a transformers configuration with fewer layers, lists of one entry a layer cut to it."""
    import copy

    changed = copy.deepcopy(config)
    deep = config.num_hidden_layers
    for name, value in list(vars(changed).items()):
        if isinstance(value, list | tuple) and len(value) == deep:
            setattr(changed, name, type(value)(value[:layers]))
    changed.num_hidden_layers = layers
    return changed


def extrapolate(short: Pass, long: Pass, depths: tuple[int, int], deep: int) -> Pass:
    """The pass of a model `deep` layers deep from those of two shallower ones.

    Each phase's first half of allocations is matched from its beginning and the second half from its end: what lies
    between are whole layers more of the same.
    """
    factor = (deep - depths[1]) / (depths[1] - depths[0])

    def further(a: float, b: float) -> float:
        return b + (b - a) * factor

    phase: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in ("fixed", "per_sequence", "gradients", "in_use")}
    for kind in (FORWARD, BACKWARD):
        mine = [i for i, p in enumerate(short.phase) if p == kind]
        theirs = [i for i, p in enumerate(long.phase) if p == kind]
        for at, i in enumerate(mine):
            j = theirs[at] if at < len(mine) / 2 else theirs[len(theirs) - len(mine) + at]
            phase.append(kind)
            for name, column in columns.items():
                column.append(further(getattr(short, name)[i], getattr(long, name)[j]))
    after: Any = tuple(further(a, b) for a, b in zip(short.after_forward, long.after_forward, strict=True))
    flops: Any = tuple(further(a, b) for a, b in zip(short.flops, long.flops, strict=True))
    attention: Any = tuple(further(a, b) for a, b in zip(short.attention, long.attention, strict=True))
    operators: Any = tuple(further(a, b) for a, b in zip(short.operators, long.operators, strict=True))
    moved: Any = tuple(
        tuple(further(a, b) for a, b in zip(one, other, strict=True))
        for one, other in zip(short.moved, long.moved, strict=True)
    )
    return Pass(
        phase, **columns, after_forward=after, flops=flops, attention=attention, moved=moved, operators=operators
    )


def _parameters(job: Job, config: Any) -> tuple[list[int], int]:
    import torch

    with torch.device("meta"):
        model, _ = _build(job, config)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return [n for n, trained in sizes if trained], sum(n for n, trained in sizes if not trained)


def _build(job: Job, config: Any) -> tuple[Any, Any]:
    """The model, and for a workload of the user's own its batches."""
    from transformers.initialization import no_init_weights

    from autotune.rank.workload import DTYPES, adapted, causal_model, own_workload

    if job.workload:
        model, batches = own_workload(job.workload)
        return model.to(DTYPES[job.precision]), batches
    with no_init_weights():
        model = causal_model(config, job)
    model.tie_weights()
    return adapted(model, job), None


def _run_both(job: Job, config: Any, checkpointing: bool, options: tuple[bool, bool]) -> Pass:
    """Micro-batches of two and three sequences, joined allocation by allocation; one sequence is a special case to many
    operators, which then make views where they otherwise copy."""
    one, two = (_run(job, config, checkpointing, options, n) for n in (2, 3))
    events = [np.array(run.events, dtype=float) for run in (one, two)]
    if events[0].shape != events[1].shape or (events[0][:, 0] != events[1][:, 0]).any():
        events = [_phase_peaks(table) for table in events]
    first, second = events
    slope = second[:, 1] - first[:, 1]
    after = two.after_forward - one.after_forward
    moved = tuple((3 * a - 2 * b, b - a) for a, b in zip(one.moved, two.moved, strict=True))
    flops: Any = tuple(b - a for a, b in zip(one.flops, two.flops, strict=True))
    attention: Any = tuple(b - a for a, b in zip(one.attention, two.attention, strict=True))
    return Pass(
        [int(p) for p in first[:, 0]],
        list(first[:, 1] - 2 * slope),
        list(slope),
        list(first[:, 2]),
        list(first[:, 3]),
        (one.after_forward - 2 * after, after),
        flops,
        attention,
        moved,  # type: ignore[arg-type]
        (float(one.operators[0]), float(one.operators[1])),
    )


def _attention_flops(func: Any, args: Any) -> float:
    """2 products forward; 5 backward, where scores are computed again (Dao 2023, FlashAttention-2)."""
    backward = "backward" in func.name()
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    batch, heads, length, width = query.shape
    return float((10.0 if backward else 4.0) * batch * heads * length * key.shape[2] * width)


def _phase_peaks(table: Any) -> Any:
    """The highest entry of each phase: what is left where two runs cannot be matched one to one."""
    rows = [table[table[:, 0] == phase] for phase in (FORWARD, BACKWARD)]
    return np.array([row[(row[:, 1] + row[:, 2]).argmax()] for row in rows])


class _Run:
    """Counters of one forward and backward."""

    def __init__(self) -> None:
        self.phase = FORWARD
        self.gradients = 0.0
        self.in_use = 0.0
        self.base = 0.0
        self.events: list[tuple[int, float, float, float]] = []
        self.flops = [0.0, 0.0]
        self.attention = [0.0, 0.0]
        self.moved = [0.0, 0.0]
        self.operators = [0, 0]
        self.after_forward = 0.0
        self.last = 0
        self.allocations: list[tuple[int, int]] = []

    def saw(self, alive: int) -> None:
        """Every change of what is alive; only growth can be a peak."""
        grew, self.last = alive > self.last, alive
        if not grew:
            return
        self.events.append((self.phase, alive - self.base - self.gradients, self.gradients, self.in_use))


def allocations(job: Job, checkpointing: bool, micro_batch: int, layers: int) -> list[tuple[int, int]]:
    """(storage, bytes) of every allocation of a forward and backward of the job's model cut to some layers, negative
    where it is freed: what a model of an allocator replays."""
    from autotune.rank.workload import transformers_config

    run = _run(job, at_depth(transformers_config(job.model), layers), checkpointing, (False, False), micro_batch, True)
    return run.allocations


def _run(
    job: Job, config: Any, checkpointing: bool, options: tuple[bool, bool], micro_batch: int, keep_events: bool = False
) -> _Run:
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    from autotune.rank.live import LiveTensors

    run = _Run()
    kinds: dict[Any, tuple[bool, Any]] = {}

    def kind_of(func: Any) -> tuple[bool, Any]:
        """(whether it starts no kernel, its FLOP formula or None)."""
        if func not in kinds:
            returns = func._schema.returns
            view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
            view = view or func.namespace == "prim" or func.overloadpacket.__name__ == "_unsafe_view"
            kinds[func] = (view, flop_registry.get(func.overloadpacket))
        return kinds[func]

    class Tracer(LiveTensors):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            view, formula = kind_of(func)
            if view:
                return out
            run.operators[run.phase] += 1
            if "flash_attention_for_cpu" in func.name():  # stands for every fused kernel; torch has no formula for it
                run.attention[run.phase] += _attention_flops(func, args)
                return out
            if formula is not None:
                run.flops[run.phase] += formula(*args, **(kwargs or {}), out_val=out)
                return out
            tensors = [out, *args] if "embedding" not in func.name() else [out, out]
            run.moved[run.phase] += sum(
                leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)
            )
            return out

    live = Tracer()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), live, _plain_masks():
            with _plain_conversion():
                model, batches = _build(job, config)
            use_cache, fused_loss = options
            if job.workload is None:
                model.config.use_cache = use_cache and not checkpointing
            model.train()
            if checkpointing:
                if not hasattr(model, "gradient_checkpointing_enable"):
                    raise Untraceable("the model has no gradient_checkpointing_enable")
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for tensor in (*model.parameters(), *model.buffers()):
                live.add(tensor)
            run.base = live.bytes
            run.operators, run.moved, run.flops = [0, 0], [0.0, 0.0], [0.0, 0.0]
            _hook(model, run)
            live.watch = run.saw
            live.events = run.allocations if keep_events else None
            loss = _loss(job, model, batches, micro_batch, fused_loss)
            run.after_forward = live.bytes - run.base
            run.phase = BACKWARD
            loss.backward()
            live.watch = live.events = None
    except DataDependentOutputException as error:
        raise Untraceable(f"operator {error} needs values") from None
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        raise Untraceable(str(error).splitlines()[0][:300] if str(error) else type(error).__name__) from None
    return run


def _loss(job: Job, model: Any, batches: Any, micro_batch: int, fused_loss: bool) -> Any:
    import torch

    from autotune.rank.workload import forward, to_device

    if batches is not None:
        return forward(model, to_device(next(iter(batches(micro_batch))), torch.device("cpu")))
    ids = torch.zeros(micro_batch, job.seq_len, dtype=torch.long)
    return model(input_ids=ids).logits.mean() if fused_loss else model(input_ids=ids, labels=ids).loss


@contextlib.contextmanager
def _plain_conversion() -> Iterator[None]:
    """`module.to(…)` swaps fake tensors in place, which is refused where anything holds a weak reference to one, as a
    fake mode does. Here converted parameters are new ones, shared where the old were."""
    import torch

    original = torch.nn.Module._apply
    made: dict[int, tuple[Any, Any]] = {}

    def converted(parameter: Any, fn: Any) -> Any:
        if id(parameter) not in made:
            with torch.no_grad():
                new = fn(parameter)
            same = new.dtype == parameter.dtype and new.device == parameter.device
            made[id(parameter)] = (parameter, parameter if same else torch.nn.Parameter(new, parameter.requires_grad))
        return made[id(parameter)][1]

    def apply(module: Any, fn: Any, recurse: bool = True) -> Any:
        if recurse:
            for child in module.children():
                child._apply(fn)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = converted(parameter, fn)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    setattr(torch.nn.Module, original.__name__, apply)
    try:
        yield
    finally:
        setattr(torch.nn.Module, original.__name__, original)


@contextlib.contextmanager
def _plain_masks() -> Iterator[None]:
    """Batches are not packed; transformers looks at the values of position ids for it, which fake tensors have not,
    and would then build masks that real training does without."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    before = getattr(masking_utils, name, None)
    if before is None:
        yield
        return
    setattr(masking_utils, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, before)


def _hook(model: Any, run: _Run) -> None:
    """Follows which parameters the running module uses, and which gradients a parameter holds already."""

    def size(parameter: Any) -> float:
        return float(parameter.numel() * parameter.element_size())

    def follow(module: Any, own: list[Any]) -> None:
        bytes_used = sum(size(p) for p in own)
        state = {"backward": 0}

        def begin(*_: Any) -> None:
            run.in_use += bytes_used

        def end(module: Any, args: Any, output: Any) -> None:
            run.in_use -= bytes_used
            if hasattr(output, "register_hook") and output.requires_grad:
                output.register_hook(begin_backward)

        def begin_backward(gradient: Any) -> None:
            if not state["backward"]:
                run.in_use += bytes_used
            state["backward"] = len(own)

        def end_backward(*_: Any) -> None:
            if state["backward"]:
                state["backward"] -= 1
                if not state["backward"]:
                    run.in_use -= bytes_used

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
        for parameter in own:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(end_backward)

    def accumulated(parameter: Any) -> None:
        run.gradients += size(parameter)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(accumulated)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            follow(module, own)


def main() -> None:
    answer: dict[str, Any]
    job = Job.from_json(json.loads(sys.stdin.read()))
    try:
        answer = {"trace": trace_model(job, fused_loss="--fused-loss" in sys.argv, workers=2).to_json()}
    except Untraceable as error:
        answer = {"untraceable": str(error)}
    except (ValueError, TypeError, KeyError, OSError, ImportError, AttributeError) as error:
        answer = {"impossible": f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
