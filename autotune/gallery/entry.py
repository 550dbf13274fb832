"""A gallery entry in JSON: one job on one machine, its candidates and their outcomes. Free text has no field.

Every string is in a list here or in `values.py`, or matches a pattern that excludes paths, host names and secrets. Writing
and reading use the same models for validation; `gallery/schema.json` is generated from them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from autotune.errors import UserError
from autotune.gallery.values import known_domains, known_knobs, known_lora, known_sizes
from autotune.problem.candidate import Candidate, is_read
from autotune.problem.hardware import GpuFacts, Hardware, gpu_table
from autotune.problem.job import ATTENTIONS, OPTIMIZERS, PRECISIONS, Job, parse_lora
from autotune.problem.models import ModelSpec
from autotune.problem.outcome import Kind, Phase
from autotune.problem.tasks import CAUSAL, TASKS
from autotune.units import GIB

FORMAT: Literal[1] = 1
MOST_BYTES = 400_000  # of a file; a study of 2000 trials is smaller


def _listed(*allowed: str) -> Any:
    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return value

    return AfterValidator(check)


NAME = r"^[a-z0-9][a-z0-9._-]{0,47}$"
VERSION = r"^\d[0-9a-z.]{0,24}(\+(cpu|cu\d+|rocm[\d.]+|xpu))?$"
Finite = Annotated[float, Field(gt=0, lt=1e15, allow_inf_nan=False)]
Knobs = Annotated[dict[str, bool | int | float | str], AfterValidator(known_knobs)]
PeakOf = Literal["process", "torch_allocated", "torch_reserved"]
Shape = Annotated[dict[str, bool | int | float], AfterValidator(known_sizes)]


class Part(BaseModel):
    """Base of all parts: unknown fields are refused, and so is a number in place of a string."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, allow_inf_nan=False)


class Origin(Part):
    """Source of the figures."""

    # study: shared by a user; recorded: by the project; published: in a public place
    kind: Literal["study", "recorded", "published"]
    source: (
        Annotated[str, Field(pattern=r"^(github\.com|gist\.github\.com|arxiv\.org|huggingface\.co)/[\w./-]{1,120}$")]
        | None
    ) = None  # address of published figures, without https://
    date: Annotated[str, Field(pattern=r"^20\d\d(-(0[1-9]|1[0-2]))?$")] | None = None  # month or year of the figures
    autotune: Annotated[str, Field(pattern=VERSION)] | None = None  # version that wrote the entry

    @model_validator(mode="after")
    def _published_somewhere(self) -> Origin:
        if (self.kind == "published") != (self.source is not None):
            raise ValueError("source: expected where it is published, and only of what is published")
        return self


class Machine(Part):
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
        return gpu_table().get(self.gpu or "")

    def hardware(self) -> Hardware:
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


class Trained(Part):
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
    lora: Annotated[str | None, AfterValidator(known_lora)] = None
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


class Tried(Part):
    """A candidate and its outcome. The peak is the process's, on a GPU as NVML shows it, unless `peak_of` differs."""

    knobs: Knobs
    outcome: Annotated[str, _listed(*(kind.value for kind in Kind if kind.says_something_of_the_candidate))]
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
        if (self.outcome == Kind.OK) != (self.step_seconds is not None):
            raise ValueError("step_seconds: expected of what is ok, and of nothing else")
        if self.outcome == Kind.OK and (self.samples_per_second is None or self.tokens_per_second is None):
            raise ValueError("samples_per_second, tokens_per_second: expected of what is ok")
        for name in self.knobs:
            if not is_read(name, self.knobs):
                raise ValueError(f"knobs.{name}: is not read beside the others")
        return self

    @property
    def candidate(self) -> Candidate:
        return Candidate.of(self.knobs)


class Versions(Part):
    """Library versions of the ranks."""

    torch: Annotated[str, Field(pattern=VERSION)] | None = None
    deepspeed: Annotated[str, Field(pattern=VERSION)] | None = None
    transformers: Annotated[str, Field(pattern=VERSION)] | None = None


class Entry(Part):
    """One job on one machine."""

    format: Literal[1] = FORMAT
    origin: Origin
    machine: Machine
    job: Trained
    versions: Versions = Versions()
    space: Annotated[
        dict[str, list[bool | int | float | str]], AfterValidator(known_domains)
    ] = {}  # knobs and the values tried
    candidates: Annotated[list[Tried], Field(min_length=1, max_length=5000)]
    winner: Annotated[int, Field(ge=0)] | None = None  # index among the candidates
    verified: bool = False  # in a fresh process

    @model_validator(mode="after")
    def _has_its_winner(self) -> Entry:
        if self.winner is not None and self.winner >= len(self.candidates):
            raise ValueError(f"winner: {self.winner} is no place among {len(self.candidates)} candidates")
        if self.winner is not None and self.candidates[self.winner].outcome != Kind.OK:
            raise ValueError(f"winner: candidate {self.winner} is not ok")
        return self

    @property
    def best(self) -> Tried | None:
        return None if self.winner is None else self.candidates[self.winner]

    def text(self) -> str:
        """Return the entry's file content: one candidate per line, without fields at their default."""
        data = self.model_dump(exclude_defaults=True) | {"format": self.format}
        lines = [json.dumps(one) for one in data.pop("candidates")]
        head = {key: data[key] for key in ("format", "origin", "machine", "job", "versions", "space") if key in data}
        tail = {key: data[key] for key in ("winner", "verified") if key in data}
        parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        parts.append(' "candidates": [\n  ' + ",\n  ".join(lines) + "\n ]")
        parts += [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in tail.items()]
        return "{\n" + ",\n".join(parts) + "\n}\n"


def schema() -> str:
    """Return the JSON schema of an entry."""
    return json.dumps(Entry.model_json_schema(), indent=1) + "\n"


def read_entry(path: Path) -> Entry:
    """Read an entry and check its form. `plausible.py` checks its figures.

    Raises:
        UserError: the file cannot be read, or breaks the schema; the message names the field.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no gallery entry {path}: `autotune share STUDY` writes one") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): expected a gallery entry") from None
    if len(data) > MOST_BYTES:
        raise UserError(f"{path} has {len(data)} bytes: a gallery entry has at most {MOST_BYTES}")
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
