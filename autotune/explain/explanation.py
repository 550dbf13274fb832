"""Explanation of a training's failure: what ran out, which tensor asked for it, what holds the rest, and what helps."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.explain.log import LoggedFailure
from autotune.explain.tensor import (
    INITIALIZATION,
    INNERMOST,
    LOADING,
    STEPPING,
    FoundTensor,
    find_tensor,
    place_of,
    progress_of,
)
from autotune.explain.training import Training, data
from autotune.predict.predictor import Prediction, Predictor
from autotune.predict.step_time import table_sizes
from autotune.predict.trace_cache import closed_form_trace
from autotune.predict.zero_memory import ACTIVATIONS, MASTERS, STATES, WEIGHTS
from autotune.problem.candidate import CHECKPOINTING, MICRO_BATCH, Candidate, describe
from autotune.problem.hardware import Hardware
from autotune.problem.job import NF4, Job, Lora
from autotune.problem.models import ModelSpec
from autotune.problem.outcome import Outcome, OutcomeKind
from autotune.util.units import GIB, format_bytes, format_duration
from autotune.workers.failure_classifier import UNEQUAL_COLLECTIVES


@dataclass(frozen=True)
class Explanation:
    """Up to six lines on a failure."""

    what: str  # ran out, or went wrong
    tensor: str = ""
    holds: str = ""  # contents of a GPU or a node
    change: str = ""
    useless: str = ""  # what cannot help
    next: str = ""  # what to type

    def lines(self) -> list[str]:
        """Return the lines for display, without empty ones."""
        return [f"{name:8} {text}" for name, text in dataclasses.asdict(self).items() if text]


_FREE_OTHERS = "end the other processes (`nvidia-smi` lists them), or train on another GPU: CUDA_VISIBLE_DEVICES"
_MUCH_ELSEWHERE = 0.1  # share of a GPU; contexts and communicators of the process itself take less
_DEFRAGMENT = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (before torch 2.1 max_split_size_mb:128), which lets the allocator use "
    "these pieces; it costs nothing"
)
_MUCH_UNUSED = 0.05  # share of a GPU; the usual cache of blocks is smaller
_LIKELY = 0.75  # least probability of fitting of a change that is named
_ONE_TENSOR = (
    "shorter rows (cutoff_len, max_length) or fewer pixels, and attention that keeps no scores (flash_attention_2, sdpa). "
    "Neither a ZeRO stage nor checkpointing makes one tensor smaller"
)
_ROOM = (
    "the GPU has room, so its memory is not what ran out: another process held it a moment before, or the system refuses "
    "(under WSL: memory= in .wslconfig; in a container or a virtual GPU: its limit)"
)
_NO_BATCH = "a smaller batch or fewer tokens: these bytes hold no batch"


def explain(failure: LoggedFailure, training: Training) -> Explanation:
    """Explain a failure."""
    if failure.collective:
        return _explain_collective(failure, training)
    of_gpu = failure.kind is OutcomeKind.OOM_DEVICE
    if not of_gpu or failure.snapshot.asked is None:
        evidence = "\n".join([*failure.frames[-INNERMOST:], failure.text])
        for pattern, cause in data()["causes"].items():
            if re.search(pattern, evidence):
                return Explanation(**{"what": failure.text[:300], **cause})
    if failure.kind is OutcomeKind.OOM_HOST:
        return _explain_host(failure, training)
    return _explain_gpu(failure, training) if of_gpu else Explanation(failure.text[:300])


def _explain_gpu(failure: LoggedFailure, training: Training) -> Explanation:
    found, place = find_tensor(failure, training), place_of(failure)
    before_batch = place in (LOADING, INITIALIZATION) or (found is not None and found.tensor.before_batch)
    memory = MemoryTable.of(failure, training)
    change, is_enough = _remedy(failure, training, found)
    if not is_enough and memory:
        change = "; or ".join(filter(None, [change, memory.nearest_change(before_batch)]))
    change = change or _usual_change(training, before_batch)
    holds = memory.held() if memory else ""
    return Explanation(
        _happened(failure, place), str(found or ""), holds, change, _NO_BATCH * before_batch, _command(training)
    )


def training_of(job: Job, candidate: Candidate) -> Training:
    """Return a job under a candidate as a training; the sizes of a script's model are those that its probe run has seen."""
    trained, frozen = sum(job.profile.trained), job.profile.frozen
    return Training(
        model=job.model,
        parameters=trained + frozen or None,
        trained=trained or None,
        adapters=job.lora is not None or frozen > 0,
        precision=job.precision,
        ranks=job.ranks,
        micro_batch=candidate.micro_batch,
        tokens=round(job.tokens_per_sample),
        checkpointing=candidate.checkpointing,
        config=candidate.ds_config(job),
    )


def explain_end(ended: str, job: Job, candidate: Candidate) -> list[str]:
    """Return lines on the end of a training, like `oom_device: …`: the tensor, and the change; none if it is no OOM."""
    kind, _, reason = ended.partition(": ")
    if kind not in (OutcomeKind.OOM_DEVICE, OutcomeKind.OOM_HOST):
        return []
    found = explain(LoggedFailure(OutcomeKind(kind), reason), training_of(job, candidate))
    return dataclasses.replace(found, what="", next="").lines()


def explain_outcome(candidate: Candidate, outcome: Outcome, job: Job) -> str:
    """Return the tensor for which a trial ran out of memory, and what to change, in one line; empty if it is not known."""
    held, capacity = outcome.peak_bytes, outcome.capacity_bytes
    if outcome.kind is not OutcomeKind.OOM_DEVICE or held is None or capacity is None:
        return ""
    training = training_of(job, candidate)
    failure = LoggedFailure(outcome.kind, outcome.reason, phase=outcome.phase)
    found = find_tensor(failure, training)
    if found is None or not found.formula:
        return ""
    change = _smaller_bucket(capacity - held) if "bucket" in found.tensor.sizes else found.tensor.remedy
    size = f"{format_bytes(found.asked_bytes)} = {found.formula}"
    text = f"{found.tensor.name} ({size}) did not fit beside {format_bytes(held)}"
    return ": ".join(filter(None, [text, change]))


def _happened(failure: LoggedFailure, place: str) -> str:
    snapshot = failure.snapshot
    text = "the GPU's memory ran out" + f" in {place}" * bool(place)
    if snapshot.asked is not None:
        text += f": {format_bytes(snapshot.asked)} were asked for"
    if snapshot.free is not None and snapshot.total is not None:
        text += f", {format_bytes(snapshot.free)} of {format_bytes(snapshot.total)} were free"
    return text + "; steps before it fitted, so this batch may have longer rows" * (progress_of(failure) == STEPPING)


def _remedy(failure: LoggedFailure, training: Training, found: FoundTensor | None) -> tuple[str, bool]:
    """Return the change that follows from the failure itself, and True if nothing else is needed; empty if there is none."""
    snapshot, asked = failure.snapshot, failure.snapshot.asked or 0
    total, others, unused = snapshot.total or 0, snapshot.elsewhere, snapshot.unused or 0
    if asked > total > 0:
        return f"{format_bytes(asked)} fit on no GPU of this size: {_ONE_TENSOR}", True
    if snapshot.is_roomy and (snapshot.free or 0) > asked and snapshot.under_cap is None:
        return _ROOM, True
    if others > max(asked, _MUCH_ELSEWHERE * total):
        free = data()["engine"] if training.engine else _FREE_OTHERS
        sure = bool(snapshot.own) or 2 * others > total
        who = "other processes" if sure else "other processes, or this one outside of torch,"
        return f"{who} hold {format_bytes(others)} of this GPU: {free}", sure
    if asked and unused > max(asked, _MUCH_UNUSED * total):
        return f"{format_bytes(unused)} are reserved in pieces that are too small: {_DEFRAGMENT}", True
    if found is None:
        return "", False
    if "bucket" in found.tensor.sizes:
        return f"{_smaller_bucket(snapshot.free or 0)}, which costs little: more, smaller all-reduces", True
    return found.tensor.remedy, "copy" in found.tensor.sizes


def _smaller_bucket(free_bytes: int) -> str:
    """Return the largest power of ten of elements that fits, in 32 bits, as a setting."""
    elements = 10 ** math.floor(math.log10(max(free_bytes / 4, 1e6)))
    return f"set reduce_bucket_size to {elements:.0e}".replace("e+0", "e")


def _usual_change(training: Training, before_batch: bool) -> str:
    """Return what usually helps, if nothing is known of the memory."""
    if not before_batch:
        checkpointing = "gradient checkpointing, or " * (not training.checkpointing)
        batch = "half the micro-batch with twice the accumulation, or " * (training.micro_batch != 1)
        return f"{checkpointing}{batch}shorter rows"
    if training.candidate.stage < 3:
        return "ZeRO stage 3 under zero.Init, which divides the weights too"
    return "more GPUs, offload_optimizer or offload_param to the cpu, or adapters (LoRA)"


def _command(training: Training) -> str:
    return f"autotune run --gpus {training.ranks or 'N'} -- your command, as you typed it"


# -- memory table ------------------------------------------------------------------------------------------------------

_ADAPTER_SHARE = 0.005  # share of the parameters, if a log does not say how large its adapters are
# tokens of a row, if a log does not tell: the longest that explains what was seen is assumed
_SHORT_ROWS = (256, 512, 1024, 2048)
_WORDS = {
    "zero_stage": "ZeRO stage {}",
    CHECKPOINTING: "gradient checkpointing",
    "offload_optimizer": "offload_optimizer to the {}",
    "offload_param": "offload_param to the {}",
    MICRO_BATCH: "micro-batch {} with more accumulation",
}


@dataclass(frozen=True)
class MemoryTable:
    """Predicted memory of the failed training and of configs near it."""

    training: Training
    predictor: Predictor
    observed_bytes: int  # memory that the training had and asked for, which a prediction may miss

    @classmethod
    def of(cls, failure: LoggedFailure, training: Training) -> MemoryTable | None:
        """Return the table with the longest common rows that need no more than was observed; None if too little is known."""
        snapshot = failure.snapshot
        if training.of_model is None or training.ranks is None or not snapshot.total:
            return None
        observed = max(snapshot.own or 0, snapshot.reserved or 0) + (snapshot.asked or 0)
        found = [
            cls(training, _predictor(training, training.ranks, tokens, snapshot.total), observed)
            for tokens in training.lengths(_SHORT_ROWS)
        ]
        fitting = [one for one in found if one.own.needed_bytes <= observed]
        return (fitting or found[:1])[-1]

    @property
    def own(self) -> Prediction:
        """Return the prediction of the failed config."""
        return self.predictor.predict(self.training.candidate)

    def held(self) -> str:
        """Describe what a GPU holds before any batch, and with one if its size is known."""
        training, memory = self.training, self.own.memory
        stage = training.candidate.stage
        resident = {name: memory[name] for name in (WEIGHTS, MASTERS, STATES) if memory[name] > 0.01 * GIB}
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in resident.items()) or "all of it is offloaded"
        where = f"at stage {stage}" if training.config else "without ZeRO, of which nothing is shown,"
        if training.config.get("fsdp"):
            where = "under FSDP, which divides like stage 3,"
        text = f"{where} a GPU holds {format_bytes(sum(resident.values()))} before any batch: {parts}"
        if stage == 0 and self.predictor.job.ranks > 1:
            text += "; the number of GPUs does not matter, since nothing is divided"
        if training.micro_batch and training.tokens:
            batch = memory[ACTIVATIONS] + memory["logits and loss"]
            text += f"; a batch of {training.micro_batch} x {training.tokens:,} tokens adds up to {format_bytes(batch)}"
        return text

    def nearest_change(self, before_batch: bool) -> str:
        """Return the fewest changes of the config with which it fits, and their cost; of several the fastest.

        Args:
            before_batch: the batch is no part of what ran out.
        """
        own, now = self.training.candidate, self.own
        more = max(1.0, self.observed_bytes / now.needed_bytes)
        ceiling = self.predictor.hardware.ceiling_bytes / more
        near = self._near()
        for changes, one in near:
            useless = before_batch and set(changes) <= {MICRO_BATCH, CHECKPOINTING}
            if useless or one.needed_bytes > ceiling or one.chance < _LIKELY:
                continue
            slower = one.step_seconds / one.candidate.micro_batch / (now.step_seconds / own.micro_batch)
            cost = f"about {max(1, slower):.2g}x the time of a row"
            words = " and ".join(text.format(changes[name]) for name, text in _WORDS.items() if name in changes)
            batch = f"{one.candidate.micro_batch} x {self.predictor.job.seq_len:,} tokens"
            return f"{words}: a GPU then needs about {format_bytes(one.needed_bytes * more)} with {batch}; {cost}"
        least = min((one for _, one in near), key=lambda one: one.needed_bytes, default=now)
        knobs = {name: value for name, value in least.candidate.knobs if name in _WORDS}
        return (
            f"no stage, offload or micro-batch is likely to fit: the least is {describe(knobs)} with about "
            f"{format_bytes(least.needed_bytes * more)}; take more GPUs, adapters (LoRA), or a smaller model"
        )

    def _near(self) -> list[tuple[Mapping[str, Any], Prediction]]:
        """Return (changed knobs, prediction) of configs near the failed one: fewest changes first, then the fastest."""
        own = self.training.candidate
        levels: dict[str, Any] = {
            "zero_stage": range(own.stage, 4) if own.stage else (0, 2, 3),
            CHECKPOINTING: {own.checkpointing, True},
            "offload_optimizer": {own.offload_optimizer, "cpu"},
            "offload_param": {own.offload_param, "cpu"},
            MICRO_BATCH: [own.micro_batch >> halvings for halvings in range(own.micro_batch.bit_length())],
        }
        known = {"offload_optimizer": "none", "offload_param": "none", **own.as_dict}
        near = {own.but(**dict(zip(levels, values, strict=True))) for values in itertools.product(*levels.values())}
        found = self.predictor.predict_many(sorted(near, key=str))
        changed = [
            ({name: value for name, value in one.candidate.knobs if name in levels and known.get(name) != value}, one)
            for one in found
        ]
        return sorted(
            (pair for pair in changed if pair[0]), key=lambda pair: (len(pair[0]), -pair[1].samples_per_second)
        )


def _predictor(training: Training, ranks: int, tokens: int, capacity_bytes: int) -> Predictor:
    """Return a predictor of the training from its counts alone, which starts nothing."""
    count = training.of_model or 0
    trained = training.of_optimizer or int(_ADAPTER_SHARE * count)
    lora = Lora(16, quantize=NF4 if training.quantized else "") if training.adapters else None
    zero = {"zero_optimization": training.config.get("zero_optimization", {})}
    model = training.model or ModelSpec("model", {}, "a log", count)
    job = Job(model, ranks, tokens, training.precision, lora=lora, base_config=zero)
    layers = training.counts(0).get("num_hidden_layers", 32)
    tables = table_sizes(model.config) if model.config and trained == count else []
    sizes = [*[max(1, (trained - sum(tables)) // layers)] * layers, *tables]
    trace = closed_form_trace(job, "read from a log", (sizes, count - trained))
    trace = dataclasses.replace(trace, frozen_sizes=[(count - trained) // layers] * layers)
    nodes = math.ceil(ranks / 8) if ranks % math.ceil(ranks / 8) == 0 else 1
    return Predictor(job, Hardware("cuda", "GPU", ranks, capacity_bytes, None, 2**50, nodes=nodes), trace, widened=True)


# -- other failures ----------------------------------------------------------------------------------------------------


def _explain_host(failure: LoggedFailure, training: Training) -> Explanation:
    count, ranks = training.of_model or 0, min(8, training.ranks or 1)
    what = "main memory ran out"
    if failure.killed:
        what = "a rank was killed (SIGKILL), as the kernel does if main memory runs out"
    place, changes, holds = place_of(failure) or progress_of(failure), data()["host"], ""
    offloaded = bool(training.candidate.offloaded)
    if count:
        holds = f"a copy of the weights takes {format_bytes(2 * count)} in 16 bits and {format_bytes(4 * count)} in 32"
        holds += f"; while {ranks} ranks load one each, {format_bytes(2 * ranks * count)} or more" * (ranks > 1)
        need = format_bytes(16 * (training.of_optimizer or 0) + 2 * count)
        holds += f"; offloaded, AdamW takes 16 bytes a trained parameter and the weights 2: {need} in all" * offloaded
    if offloaded:
        place = {"saving": place}.get(place, "offloading")
    change = f"{changes.get(place, changes[''])}; or more main memory (in a container or a job: a higher limit)"
    return Explanation(what, "", holds, change, "a smaller batch: these bytes hold none", _command(training))


def _explain_collective(failure: LoggedFailure, training: Training) -> Explanation:
    fields = dict(re.findall(r"(\w+)=(\w+)", failure.collective))
    called = f"{fields.get('OpType', 'a collective')} of {fields.get('NumelIn', 'unknown')} elements"
    what = f"NCCL waited {format_duration(failure.waited_seconds)} for {called}: a rank did not call it"
    change = data()["collective"] + f". At stage 3 {UNEQUAL_COLLECTIVES}" * (training.candidate.stage == 3)
    return Explanation(what, change=change, useless="a smaller batch: memory did not run out")
