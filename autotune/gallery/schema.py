"""Gallery entries: pydantic schema, plausibility checks, and the anonymous entry of a study."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from autotune._version import __version__
from autotune.errors import UserError
from autotune.predict.step_time import matmul_parameters, model_flops_per_token
from autotune.problem.candidate import KNOBS, LORA, Candidate, Value, is_read, job_with_candidate
from autotune.problem.gpu_specs import GpuFacts, gpu_table
from autotune.problem.hardware import Hardware
from autotune.problem.job import ATTENTIONS, OPTIMIZERS, PRECISIONS, Job, parse_lora
from autotune.problem.knobs import Knob
from autotune.problem.models import CAUSAL, SHAPE_KEYS, TASKS, ModelSpec, invalid_size_reason, shipped_models
from autotune.problem.outcome import Outcome, OutcomeKind, Phase
from autotune.problem.space import DS_TOP_LEVEL, DS_ZERO_KEYS
from autotune.search.study import StudyStore
from autotune.search.trials import RESUME, VERIFY, Record
from autotune.util.bounds import bounded_bytes
from autotune.util.files import shipped_json
from autotune.util.units import GIB

# Names of layers in public architectures. A LoRA on other layers is recorded as one on all layers.
PUBLIC_TARGETS = frozenset(
    (
        "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head embed_tokens c_attn c_proj c_fc wte "
        "query_key_value dense dense_h_to_4h dense_4h_to_h fc1 fc2 query key value q k v o wi wo wi_0 wi_1 out_proj "
        "all-linear score"
    ).split()
)
MOST_NUMBER = 2**63  # DeepSpeed's "no limit" is one less


def refused_knob_reason(name: str, value: Value) -> str | None:
    """Return the reason why a knob is not allowed in an entry, or None. A string is only allowed if it is in a list."""
    knob = KNOBS.get(name)
    if knob is None:
        return _key_trouble(name, value)
    if isinstance(knob.kind, tuple):
        return None if value in knob.kind else f"expected one of {', '.join(knob.kind)}, found {value!r}"
    if knob.kind is bool:
        return None if isinstance(value, bool) else f"expected true or false, found {value!r}"
    if knob.kind in (int, float):
        return _number_trouble(knob, value)
    if name == LORA:
        return refused_lora_reason(value) if value != "none" else None
    return f"has no place here, found {value!r}"


def _key_trouble(name: str, value: Value) -> str | None:
    """Check a name that is no knob: a DeepSpeed key with a number or a switch is allowed."""
    head, _, leaf = name.partition(".")
    known = name in DS_TOP_LEVEL or (head in DS_TOP_LEVEL and re.fullmatch(r"[a-z0-9_.]{1,80}", leaf))
    if head == "zero_optimization" and leaf.split(".")[0] not in DS_ZERO_KEYS:
        known = False
    if not known:
        return "is no knob, and DeepSpeed knows no such key"
    if isinstance(value, str):
        return "is a text, which has no place here"
    return None if _is_number(value) else f"expected a number below {MOST_NUMBER}"


def _number_trouble(knob: Knob, value: Value) -> str | None:
    whole = knob.kind is int
    if isinstance(value, bool) or not _is_number(value) or not knob.low <= value <= knob.high or (whole and value % 1):  # type: ignore[operator]
        to = f"of at least {knob.low:g}" if math.isinf(knob.high) else f"from {knob.low:g} to {knob.high:g}"
        return f"expected a {'whole ' * whole}number {to}, found {value!r}"
    return None


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and abs(value) <= MOST_NUMBER  # false for NaN


def refused_lora_reason(value: Value) -> str | None:
    """Return the reason why a LoRA is not allowed in an entry, or None.

    Its layers must exist in public architectures, and no part may appear twice.
    """
    if not isinstance(value, str):
        return f"expected none, or r=16,targets=all-linear, found {value!r}"
    try:
        lora = parse_lora(value)
    except UserError as error:
        return str(error)
    if private := sorted({*lora.targets, *lora.saved} - PUBLIC_TARGETS):
        return f"names layers of no public architecture: {', '.join(private)}"
    keys = [part.partition("=")[0].strip() for part in value.split(",")]
    return "says a part of itself twice" if len(set(keys)) < len(keys) else None


def _refused(reason: Callable[[Any], str | None]) -> AfterValidator:
    """Return a validator that refuses a value if `reason` returns a text for it."""

    def check(value: Any) -> Any:
        if why := reason(value):
            raise ValueError(why)
        return value

    return AfterValidator(check)


def _listed(*allowed: str) -> AfterValidator:
    return _refused(lambda value: None if value in allowed else f"expected one of {', '.join(allowed)}")


def _sizes_trouble(shape: dict[str, Any]) -> str | None:
    for key, value in shape.items():
        if why := invalid_size_reason(key, value):
            return f"{key!r} {why}" if key not in SHAPE_KEYS else f"{key}: {why}"
    return None


def _knobs_trouble(knobs: Iterable[tuple[str, Any]]) -> str | None:
    return next((f"{name}: {why}" for name, value in knobs if (why := refused_knob_reason(name, value))), None)


# -- entry -------------------------------------------------------------------------------------------------------------
#
# A gallery entry in JSON: one job on one machine, its candidates and their outcomes. Free text has no field.
#
# Every string is in a list, or matches a pattern that excludes paths, host names and secrets.
# Writing and reading use the same models for validation; `gallery/schema.json` is generated from them.

FORMAT: Literal[1] = 1
MOST_BYTES = 400_000  # of a file; a study of 2000 trials is smaller


NAME = r"^[a-z0-9][a-z0-9._-]{0,47}$"
VERSION = r"^\d[0-9a-z.]{0,24}(\+(cpu|cu\d+|rocm[\d.]+|xpu))?$"
Finite = Annotated[float, Field(gt=0, lt=1e15, allow_inf_nan=False)]
Knobs = Annotated[dict[str, bool | int | float | str], _refused(lambda knobs: _knobs_trouble(knobs.items()))]
PeakOf = Literal["process", "torch_allocated", "torch_reserved"]
Shape = Annotated[dict[str, bool | int | float], _refused(_sizes_trouble)]


class EntryPart(BaseModel):
    """Base of all parts: unknown fields are refused, and so is a number in place of a string."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, allow_inf_nan=False)


class Origin(EntryPart):
    """Source of the figures."""

    # study: shared by a user; recorded: by the project; published: in a public place
    kind: Literal["study", "recorded", "published"]
    # address of published figures, without https://
    source: (
        Annotated[str, Field(pattern=r"^(github\.com|gist\.github\.com|arxiv\.org|huggingface\.co)/[\w./-]{1,120}$")]
        | None
    ) = None
    date: Annotated[str, Field(pattern=r"^20\d\d(-(0[1-9]|1[0-2]))?$")] | None = None  # month or year of the figures
    autotune: Annotated[str, Field(pattern=VERSION)] | None = None  # version that wrote the entry

    @model_validator(mode="after")
    def _published_somewhere(self) -> Origin:
        if (self.kind == "published") != (self.source is not None):
            raise ValueError("source: expected where it is published, and only of what is published")
        return self


class Machine(EntryPart):
    """The devices, all alike; memory in GiB of each."""

    device: Literal["cuda", "cpu"]
    gpu: Annotated[str, Field(pattern=NAME)] | None  # a name for `autotune plan --gpu`; null: not in its table
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ()@.+-]{0,79}$")]  # as the driver reports it
    count: Annotated[int, Field(ge=1, le=65536)]  # all nodes together
    nodes: Annotated[int, Field(ge=1, le=8192)] = 1
    memory_gib: Annotated[float, Field(gt=0, le=4096)]
    capacity_gib: Annotated[float, Field(gt=0, le=4096)]  # GiB available to a rank
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share that the winner leaves free
    host_memory_gib: Annotated[float, Field(gt=0, le=1e6)] | None = None  # GiB of one node

    @model_validator(mode="after")
    def _consistent(self) -> Machine:
        if self.count % self.nodes:
            raise ValueError(f"count: {self.count} devices cannot be split over {self.nodes} nodes")
        if self.gpu is not None and self.gpu not in gpu_table():
            raise ValueError(f"gpu: {self.gpu!r} is not in autotune's table of GPUs")
        return self

    @property
    def facts(self) -> GpuFacts | None:
        """Return the table row of the GPU, or None if it is not listed."""
        return gpu_table().get(self.gpu or "")

    def hardware(self) -> Hardware:
        """Return the machine as Hardware, in bytes."""
        return Hardware(
            device=self.device,
            name=self.name,
            count=self.count,
            memory_bytes=int(self.memory_gib * GIB),
            memory_cap_bytes=int(self.capacity_gib * GIB) if self.capacity_gib < self.memory_gib else None,
            host_memory_bytes=int((self.host_memory_gib or 4096) * GIB),
            facts=self.gpu,
            headroom=self.headroom,
            nodes=self.nodes,
        )


class Trained(EntryPart):
    """The job: sizes of the model, and settings of the training."""

    model: Annotated[str, Field(pattern=NAME)] | None  # name of a public model; null: not shipped with autotune
    architecture: Annotated[str, Field(pattern=NAME)] | None  # transformers' model_type; null: not public
    parameters: Annotated[int, Field(ge=1000, le=10**14)] | None
    shape: Shape
    vision: Shape | None = None  # shape of its tower
    task: Annotated[str, _listed(*TASKS)] = CAUSAL
    seq_len: Annotated[int, Field(ge=1, le=10_000_000)]
    tokens_per_sample: Finite  # without padding
    precision: Annotated[str, _listed(*PRECISIONS)]
    optimizer: Annotated[str, _listed(*OPTIMIZERS)]
    global_batch_size: Annotated[int, Field(ge=1, le=10**9)] | None = None
    lora: Annotated[str | None, _refused(lambda text: refused_lora_reason(text) if text is not None else None)] = None
    attention: Annotated[str, _listed(*ATTENTIONS)] | None = None
    compiled: bool = False
    packed: bool = False

    def config(self) -> dict[str, Any]:
        """Return a transformers configuration with the known sizes."""
        vision = {"vision_config": dict(self.vision)} if self.vision else {}
        return {"model_type": self.architecture or "unknown", **self.shape, **vision}

    def job(self, ranks: int) -> Job:
        """Build a Job for predictions. Only the longest length and the model's sizes are known, so the model cannot be built."""
        name = self.model or self.architecture or "a model"
        return Job(
            ModelSpec(name, self.config(), "the gallery", self.parameters),
            ranks,
            self.seq_len,
            self.precision,
            self.optimizer,
            lora=parse_lora(self.lora) if self.lora else None,
            attention=self.attention,
            compiled=self.compiled,
            task=self.task,
        )


class Tried(EntryPart):
    """A candidate and its outcome. The peak is the process's, on a GPU as NVML shows it, unless `peak_of` differs."""

    knobs: Knobs
    outcome: Annotated[str, _listed(*(kind.value for kind in OutcomeKind if kind.is_attributable_to_candidate))]
    phase: Annotated[str, _listed(*(phase.value for phase in Phase))] | None = None  # phase of the failure
    step_seconds: Finite | None = None
    spread: Annotated[float, Field(ge=0, le=10)] | None = None  # half the 95 % interval, as a share
    samples_per_second: Finite | None = None  # all ranks together
    tokens_per_second: Finite | None = None  # all ranks together
    peak_gib: Finite | None = None
    peak_of: PeakOf = "process"
    missing_gib: Annotated[float, Field(ge=0, lt=1e6)] | None = None  # GiB by which an allocation failed

    @model_validator(mode="after")
    def _whole(self) -> Tried:
        if (self.outcome == OutcomeKind.OK) != (self.step_seconds is not None):
            raise ValueError("step_seconds: expected of what is ok, and of nothing else")
        if self.outcome == OutcomeKind.OK and (self.samples_per_second is None or self.tokens_per_second is None):
            raise ValueError("samples_per_second, tokens_per_second: expected of what is ok")
        for name in self.knobs:
            if not is_read(name, self.knobs):
                raise ValueError(f"knobs.{name}: is not read beside the others")
        return self

    @property
    def candidate(self) -> Candidate:
        """Return the candidate of the knobs."""
        return Candidate.of(self.knobs)


class Versions(EntryPart):
    """Library versions of the ranks."""

    torch: Annotated[str, Field(pattern=VERSION)] | None = None
    deepspeed: Annotated[str, Field(pattern=VERSION)] | None = None
    transformers: Annotated[str, Field(pattern=VERSION)] | None = None


class Entry(EntryPart):
    """One job on one machine."""

    format: Literal[1] = FORMAT
    origin: Origin
    machine: Machine
    job: Trained
    versions: Versions = Versions()
    # knobs and the values tried
    space: Annotated[
        dict[str, list[bool | int | float | str]],
        _refused(lambda space: _knobs_trouble((name, value) for name, values in space.items() for value in values)),
    ] = {}
    candidates: Annotated[list[Tried], Field(min_length=1, max_length=5000)]
    winner: Annotated[int, Field(ge=0)] | None = None  # index among the candidates
    verified: bool = False  # in a fresh process

    @model_validator(mode="after")
    def _has_its_winner(self) -> Entry:
        if self.winner is not None and self.winner >= len(self.candidates):
            raise ValueError(f"winner: {self.winner} is no place among {len(self.candidates)} candidates")
        if self.winner is not None and self.candidates[self.winner].outcome != OutcomeKind.OK:
            raise ValueError(f"winner: candidate {self.winner} is not ok")
        return self

    @property
    def best(self) -> Tried | None:
        """Return the winning candidate's trial, or None."""
        return None if self.winner is None else self.candidates[self.winner]

    def text(self) -> str:
        """Return the entry's file content: one candidate per line, without fields at their default."""
        data = self.model_dump(exclude_defaults=True) | {"format": self.format}
        texts = {key: json.dumps(value) for key, value in data.items()}
        texts["candidates"] = "[\n  " + ",\n  ".join(json.dumps(one) for one in data["candidates"]) + "\n ]"
        return "{\n" + ",\n".join(f' "{key}": {texts[key]}' for key in Entry.model_fields if key in texts) + "\n}\n"


def schema() -> str:
    """Return the JSON schema of an entry."""
    return json.dumps(Entry.model_json_schema(), indent=1) + "\n"


def read_entry(path: Path) -> Entry:
    """Read an entry and check its form, not its figures.

    Raises:
        UserError: the file cannot be read, or breaks the schema; the message names the field.
    """
    try:
        data = bounded_bytes(path, MOST_BYTES)
    except FileNotFoundError:
        raise UserError(f"no gallery entry {path}: `autotune share STUDY` writes one") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): expected a gallery entry") from None
    if len(data) > MOST_BYTES:
        raise UserError(f"{path} is too large: a gallery entry has at most {MOST_BYTES} bytes")
    try:
        return Entry.model_validate_json(data)
    except ValidationError as error:
        raise UserError(f"{path}: {_in_one_line(error)}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply; expected a gallery entry") from None


def _in_one_line(error: ValidationError) -> str:
    """Describe the first error, with its field in dotted notation, and the number of further errors."""
    first, *more = error.errors(include_url=False, include_input=False, include_context=False)
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = " ".join(first["msg"].removeprefix("Value error, ").split())[:300]
    if first["type"] == "json_invalid":
        return f"not JSON ({message.removeprefix('Invalid JSON: ')}); expected a gallery entry"
    also = f" (and {len(more)} more)" if more else ""
    return (
        f"{field or 'the entry'}: {message[:1].lower()}{message[1:]}{also}; `gallery/schema.json` says what is expected"
    )


# -- plausibility checks -----------------------------------------------------------------------------------------------
#
# Check that an entry's figures are possible: no card computes faster than its peak or holds more than its memory, and
# figures of one trial agree.

# relative difference allowed between figures of one trial: a step is a median, speeds may be means
COUNTED_ALIKE = 0.05
OTHER_LENGTHS = 3.0  # factor by which a script's batches of a few steps may be longer than average
ABOVE_MEMORY = 1.02  # drivers differ slightly in the GiB they report
CPU_TFLOPS = 200.0  # more than any CPU rank reaches
FORWARD_AND_BACKWARD = 4.0  # least FLOPs per parameter and token, if a model's shape is unknown
ALL_BUT_EMBEDDINGS = 0.3  # least share of the parameters that compute, if a model's shape is unknown
# allowed ratio of parameters in matrix products to a model's own count; tied embeddings count twice
FITTING_SHARES = (0.2, 1.5)


def check(entry: Entry) -> None:
    """Check all figures of an entry.

    Raises:
        UserError: a figure is impossible, or there is no winner; the message names the field.
    """
    for why in _troubles(entry):
        raise UserError(why)


def _troubles(entry: Entry) -> Iterator[str]:
    """Yield a line for each impossible figure, with its field and the reason."""
    machine, trained = entry.machine, entry.job
    if entry.winner is None:
        yield "winner: there is none; the gallery takes what fits and is fastest, beside what was tried"
    if machine.capacity_gib > ABOVE_MEMORY * machine.memory_gib:
        yield f"machine.capacity_gib: {machine.capacity_gib:g} GiB are more than the card's {machine.memory_gib:g}"
    if machine.facts is not None and not 0.8 < machine.memory_gib / machine.facts.memory_gib < 1.1:
        yield f"machine.memory_gib: {machine.memory_gib:g} GiB, and a {machine.gpu} has {machine.facts.memory_gib:g}"
    # Peaks are judged by the sizes, so these have to describe the model of the parameter count.
    if trained.parameters is not None and trained.task == CAUSAL and not _has_experts(trained):
        multiplied, (low, high) = matmul_parameters(trained.config(), trained.task), FITTING_SHARES
        if multiplied is not None and not low < multiplied / trained.parameters < high:
            yield (
                f"job.shape: multiplies by {multiplied:.3g} weights, and job.parameters says {trained.parameters:.3g}: "
                "one of them is of another model"
            )
    for at, one in enumerate(entry.candidates):
        for why in _troubles_of(entry, one):
            yield f"candidates[{at}].{why}"


def _has_experts(trained: Trained) -> bool:
    return any("expert" in key for key in trained.shape)


def _troubles_of(entry: Entry, one: Tried) -> Iterator[str]:
    """Yield each impossible figure of a candidate that ran, with the reason."""
    machine, trained, candidate = entry.machine, entry.job, one.candidate
    step_seconds, samples, tokens = one.step_seconds, one.samples_per_second, one.tokens_per_second
    if step_seconds is None or samples is None or tokens is None:
        return
    if one.peak_gib is not None and one.peak_gib > ABOVE_MEMORY * machine.memory_gib:
        yield f"peak_gib: {one.peak_gib:g} GiB are more than the card's {machine.memory_gib:g}, and it ran"
    sequences = candidate.rows_per_rank * machine.count
    packs = trained.packed or bool(candidate.get("packing", False))
    if not packs and abs(samples * step_seconds / sequences - 1) > COUNTED_ALIKE:
        yield (
            f"samples_per_second: {samples:g} times a step of {step_seconds:g} s is not the {sequences} samples of its step"
        )
    of_sample = tokens / samples
    if not 1 / OTHER_LENGTHS < of_sample / trained.tokens_per_sample < OTHER_LENGTHS:
        yield (
            f"tokens_per_second: {of_sample:.4g} tokens a sample, and job.tokens_per_sample says "
            f"{trained.tokens_per_sample:g}"
        )
    job = job_with_candidate(trained.job(machine.count), candidate)
    flops = model_flops_per_token(job)
    if not flops and trained.parameters is not None and not _has_experts(trained):
        flops = FORWARD_AND_BACKWARD * ALL_BUT_EMBEDDINGS * trained.parameters
    # Padding counts as work, but not in tokens per second.
    used = (flops or 0.0) * (tokens / (job.ranks * 1e12))
    peak, card = _peak_tflops(machine)
    if used > peak:
        yield (
            f"tokens_per_second: {tokens:g} tokens a second are {used:.3g} TFLOP/s a device, and {card} computes at most "
            f"{peak:g}"
        )


def _peak_tflops(machine: Machine) -> tuple[float, str]:
    """Return the peak of 16-bit arithmetic, which 32-bit matrices may use too (TF32), and the card in words.

    An unknown card gets the peak of the fastest known one.
    """
    if machine.device == "cpu":
        return CPU_TFLOPS, "a rank on a processor"
    if machine.facts is not None:
        return machine.facts.tflops, f"a {machine.gpu}"
    return max(row.tflops for row in gpu_table().values()), "the fastest card known"


# -- entry of a study --------------------------------------------------------------------------------------------------
#
# Convert a study to a gallery entry: figures, sizes and public names, without anything that identifies the user.


def entry_of(store: StudyStore) -> Entry:
    """Return the study as an entry. Each candidate gets its latest attributable trial; the winner gets the trial that won.

    Raises:
        UserError: the study has measured nothing.
    """
    if store.table:
        raise UserError(f"study {store.name} searches a recorded table: only what was measured can be shared")
    by_candidate = _outcomes_by_candidate(store.records(), store.winner)
    if not any(outcome.measurement for outcome in by_candidate.values()):
        raise UserError(f"study {store.name} has measured nothing that could be shared: run it first")
    job, hardware = store.job, store.hardware
    if hardware.sliced:
        raise UserError(f"study {store.name} is of a slice: the gallery takes what was measured on all nodes")
    public = {candidate: knobs for candidate in by_candidate if (knobs := _public_knobs(candidate)) is not None}
    kept, winner = list(public), store.winner
    try:
        return Entry(
            origin=Origin(kind="study", date=f"{datetime.date.today():%Y-%m}", autotune=_version(__version__)),
            machine=_machine(hardware),
            job=_trained(job),
            versions=_versions(store.versions),
            space=_space(store),
            candidates=[_tried(knobs, by_candidate[candidate]) for candidate, knobs in public.items()],
            winner=kept.index(winner.candidate) if winner is not None and winner.candidate in kept else None,
            verified=winner is not None and winner.role == VERIFY and winner.candidate in kept,
        )
    except ValidationError as error:  # a study may hold unforeseen values, which are not written
        fields = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(f"study {store.name} cannot be shared: its {fields} has no place in a gallery entry") from None


def _outcomes_by_candidate(records: list[Record], winner: Record | None) -> dict[Candidate, Outcome]:
    """Return the outcome of each candidate. An OOM during verification or resume replaces an earlier success."""
    by_candidate: dict[Candidate, Outcome] = {}
    for record in records:
        outcome = record.outcome
        if outcome is None or not record.candidate.knobs or not outcome.kind.is_attributable_to_candidate:
            continue
        if record.role == RESUME and outcome.ok:
            continue
        by_candidate[record.candidate] = outcome
    if winner is not None and winner.outcome is not None and winner.candidate.knobs:
        by_candidate[winner.candidate] = winner.outcome
    return by_candidate


def _public_knobs(candidate: Candidate) -> dict[str, Value] | None:
    """Return the candidate's knobs that an entry may contain; None if a knob that must be left out defines the candidate."""
    kept: dict[str, Value] = {}
    for name, value in candidate.knobs:
        if name == LORA and value != "none":
            value = public_lora(str(value))
        if refused_knob_reason(name, value) is None:
            kept[name] = value
        elif not isinstance(value, str):
            return None
    return {name: value for name, value in kept.items() if is_read(name, kept)}


def public_lora(text: str) -> str:
    """Replace targets that exist in no public architecture by `all-linear`."""
    lora = parse_lora(text)
    targets = lora.targets if set(lora.targets) <= PUBLIC_TARGETS else ("all-linear",)
    saved = tuple(name for name in lora.saved if name in PUBLIC_TARGETS)
    return str(dataclasses.replace(lora, targets=targets, saved=saved))


def _tried(knobs: dict[str, Value], outcome: Outcome) -> Tried:
    measured = outcome.measurement
    if measured is None:
        missing = outcome.missing_bytes
        return Tried(
            knobs=knobs,
            outcome=outcome.kind.value,
            phase=outcome.phase.value,
            missing_gib=_rounded(missing / GIB) if missing else None,
        )
    return Tried(
        knobs=knobs,
        outcome=outcome.kind.value,
        step_seconds=_rounded(measured.step_seconds),
        spread=_rounded(measured.step_seconds_spread / measured.step_seconds, 2),
        samples_per_second=_rounded(measured.samples_per_second),
        tokens_per_second=_rounded(measured.tokens_per_second),
        peak_gib=_rounded(measured.peak_bytes / GIB),
    )


def _rounded(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


def _machine(hardware: Hardware) -> Machine:
    facts = hardware.gpu_facts
    name = re.sub(r"[^A-Za-z0-9 ()@.+-]+", " ", hardware.name).strip()[:80].strip()
    return Machine(
        device="cuda" if hardware.device == "cuda" else "cpu",
        gpu=hardware.facts,
        name=facts.name if facts is not None and not hardware.gpus else name or hardware.device,
        count=hardware.count,
        nodes=hardware.nodes,
        memory_gib=_rounded(hardware.memory_bytes / GIB),
        capacity_gib=_rounded(hardware.capacity_bytes / GIB),
        headroom=hardware.headroom,
        host_memory_gib=_rounded(hardware.host_memory_bytes / GIB, 3),
    )


def _trained(job: Job) -> Trained:
    """Return the job with its model as sizes. The model's name is added if every size matches a public model."""
    config = job.model.config
    known = next((name for name, spec in shipped_models().items() if _alike(spec.config, config)), None)
    architecture = str(config.get("model_type", ""))
    parameters = job.model.parameters or (shipped_models()[known].parameters if known else None)
    vision = config.get("vision_config")
    return Trained(
        model=known,
        architecture=architecture if architecture in public_architectures() else None,
        parameters=parameters,
        shape=shape_of(config),
        vision=shape_of(vision) if isinstance(vision, dict) else None,
        task=job.task,
        seq_len=job.seq_len,
        tokens_per_sample=_rounded(job.tokens_per_sample),
        precision=job.precision,
        optimizer=job.optimizer,
        global_batch_size=job.global_batch_size,
        lora=public_lora(str(job.lora)) if job.lora else None,
        attention=job.attention,
        compiled=job.compiled,
        packed=job.packed,
    )


def shape_of(config: dict[str, Any]) -> dict[str, bool | int | float]:
    """Return the keys of a configuration that determine a model's size."""
    text = config.get("text_config")
    text = {**config, **text} if isinstance(text, dict) else config
    return {key: text[key] for key in sorted(SHAPE_KEYS & text.keys()) if invalid_size_reason(key, text[key]) is None}


def _alike(known: dict[str, Any], config: dict[str, Any]) -> bool:
    """Check that a configuration has the same sizes as a published one, under any name."""
    ours, theirs = shape_of(known), shape_of(config)
    both = ours.keys() & theirs.keys()
    same = known.get("model_type") == config.get("model_type") and len(both) >= 4
    return same and all(ours[key] == theirs[key] for key in both)


@cache
def public_architectures() -> frozenset[str]:
    """Return transformers' own names of architectures."""
    tasks = shipped_json("tasks.json")
    names = {spec.config.get("model_type") for spec in shipped_models().values()}
    for listed in tasks.values():
        if isinstance(listed, list):
            names |= set(listed)
    return frozenset(str(name) for name in names if isinstance(name, str) and re.fullmatch(NAME, name))


def _versions(versions: dict[str, str]) -> Versions:
    found = {name: _version(versions.get(name, "")) for name in ("torch", "deepspeed", "transformers")}
    return Versions(**found)


def _version(text: str) -> str | None:
    """Return a version without the suffix of a custom build."""
    return next((one for one in (text, text.partition("+")[0]) if re.fullmatch(VERSION, one)), None)


def _space(store: StudyStore) -> dict[str, list[Value]]:
    try:
        knobs = store.searched_space().knobs
    except UserError:
        return {}
    return {
        name: values
        for name, domain in knobs.items()
        if (values := [value for value in domain.values if refused_knob_reason(name, value) is None])
    }
