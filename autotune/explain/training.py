"""The training of a log: model, ranks, batch and DeepSpeed config, as far as its lines tell."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.predict.step_time import layer_parameters, table_sizes
from autotune.problem.candidate import CHECKPOINTING, MICRO_BATCH, Candidate, knobs_of
from autotune.problem.models import ModelSpec, resolve_model, shipped_models, text_config
from autotune.util.files import shipped_json
from autotune.util.interpreter import OWN


@dataclass(frozen=True, kw_only=True)
class Training:
    """A failed training. None: unknown."""

    model: ModelSpec | None = None
    parameters: int | None = None
    nominal: bool = False  # `parameters` is the number in a name
    trained: int | None = None  # parameters of these
    adapters: bool = False
    quantized: bool = False  # the base weights of adapters are kept in 4 bits
    ranks: int | None = None
    micro_batch: int | None = None
    tokens: int | None = None  # of a row
    checkpointing: bool = False
    precision: str = "bf16"
    config: dict[str, Any] = field(default_factory=dict)  # DeepSpeed config; empty if nothing is shown of it

    @property
    def of_model(self) -> int | None:
        """Return the number of parameters, by count or by the model's shape."""
        if self.parameters or self.model is None:
            return self.parameters
        layers = layer_parameters(self.model.config)
        return self.model.parameters or (layers and layers + sum(table_sizes(self.model.config)))

    @property
    def of_optimizer(self) -> int | None:
        """Return the number of trained parameters; None for adapters of unknown size."""
        return self.trained or (None if self.adapters else self.of_model)

    @property
    def candidate(self) -> Candidate:
        """Return its config; what is unknown has DeepSpeed's default, and one row a rank."""
        batch: dict[str, Any] = {MICRO_BATCH: self.micro_batch or 1, CHECKPOINTING: self.checkpointing}
        return Candidate.of({"zero_stage": 0, **knobs_of(self.config), **batch})

    def lengths(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens of a row if they are known, or else the usual ones."""
        return (self.tokens,) if self.tokens else usual

    def size(self, key: str) -> int | None:
        """Return a size in the model's configuration, or None."""
        config = self.model.config if self.model else {}
        value = text_config(config).get(key)
        return value if isinstance(value, int) else None


# -- model -------------------------------------------------------------------------------------------------------------

_NOMINAL = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s?b(?!\w)", re.IGNORECASE)


def known_model(name: str, *, typed: bool) -> tuple[ModelSpec | None, int | None]:
    """Return a model by a name, a Hub id or a folder, and the number of parameters in its name if there is no such model.

    Raises:
        UserError: the name was typed, and says nothing.
    """
    if typed and Path(name).exists():
        return resolve_model(name, interpreter=OWN), None
    plain = name.rstrip("/").rsplit("/", 1)[-1].lower()
    shapes = shipped_json("model_shapes.json")["models"]
    known = {begin: ModelSpec(begin, config, "model_shapes.json") for begin, config in shapes.items()}
    known |= {spec.source.rstrip("/").rsplit("/", 1)[-1].lower(): spec for spec in shipped_models().values()}
    known |= shipped_models()
    beginnings = [begin for begin in known if plain.startswith(begin)]
    if beginnings:
        return known[max(beginnings, key=len)], None
    nominal = _NOMINAL.search(re.sub(r"[-_/]", " ", name))
    if nominal is None and typed:
        raise UserError(
            f"--model {name}: not known offline; give a folder with its config.json, or its number of parameters like 6.74B"
        )
    return None, int(float(nominal[1]) * 1e9) if nominal else None


# -- log ---------------------------------------------------------------------------------------------------------------


def _option(*names: str, value: str = r"([\w./-]+)") -> re.Pattern[str]:
    """Return a pattern of `--name value`, `name=value`, `name: value` and `"name": value`."""
    return re.compile(rf"""\b(?:{"|".join(names)})['"]?(?:\s*[:=]\s*|\s+)['"]?{value}""")


_NUMBER = r"(\d[\d,_]*)\b(?!\.\d)"
_MODEL = _option(
    "(?:_|pretrained_model_|model_|base_model_)name_or_path", "base_model", "model_id_or_path", "model_name", "--model"
)
_TRAINED = re.compile(rf"trainable params: {_NUMBER}|Number of trainable parameters = {_NUMBER}")
_ALL = re.compile(rf"all params: {_NUMBER}")
_RANKS = _option("(?:dist_)?world[ _-]size", "num[ _]processes", value=_NUMBER)
_PER_NODE = _option("num[ _]gpus", "nproc[-_]per[-_]node", value=_NUMBER)
_NODES = _option("nnodes", "num[ _]nodes", "num[ _]machines", value=_NUMBER)
_RANK = re.compile(r"(?:[Rr]ank ?|local_rank: |\bGPU )(\d+)")
_MICRO_BATCH = _option(
    "per_device_train_batch_size",
    "(?:train_)?micro_batch_size(?:_per_gpu)?",
    "Instantaneous batch size per device",
    value=_NUMBER,
)
_TOKENS = _option(
    "cutoff_len",
    "max_(?:seq_)?len(?:gth)?",
    "max_seq_length",
    "model_max_length",
    "block_size",
    "sequence_len",
    value=_NUMBER,
)
_CHECKPOINTING = _option("gradient_checkpointing", value=r"([Tt]rue|[Ff]alse)")
_PRECISION = re.compile(r"""\b(bf16|fp16)['"]?(?:\s*[:=]\s*|\s+)['"]?(?:[Tt]rue|\{\s*['"]enabled['"]: [Tt]rue)""")
_ADAPTERS = re.compile(r"\bq?lora\b|\bpeft\b|lora_\w|LoraConfig", re.IGNORECASE)
_QUANTIZED = re.compile(
    r"load_in_4bit\W+True|\bnf4\b|quantization_bit[ :=]+4|\bqlora\b|Linear4bit|_4bit\b", re.IGNORECASE
)
_STAGE = _option("zero[-_](?:optimization_)?stage", "stage", value=r"([0-3])\b")
_STAGE_BY_NAME = re.compile(
    r"(?:zero|z|stage)_?-?([0-3])(?:_offload)?[\w-]*\.json|ZeRoOffload|stage3\.py|partition_parameters\.py"
)
_LONGEST_CONFIG = 20_000  # characters


def read_training(
    text: str, model: str | None = None, ranks: int | None = None, config: dict[str, Any] | None = None
) -> Training:
    """Return what a log tells of its training. Of values that differ the last one counts, or the largest number of ranks.

    Args:
        model, ranks, config: what is known without the log.

    Raises:
        UserError: the model is not known.
    """
    name = model or _last(_MODEL, text) or ""
    spec, nominal = known_model(name, typed=model is not None)
    counted, trained = _number(_ALL, text), _number(_TRAINED, text)
    adapters = _ADAPTERS.search(text) is not None
    if counted is None and not adapters:  # Trainer says how many are trained, which are all
        counted = trained
    return Training(
        model=spec,
        parameters=counted or nominal,
        nominal=counted is None and nominal is not None,
        trained=trained if trained != counted else None,
        adapters=adapters,
        quantized=_QUANTIZED.search(text) is not None,
        ranks=ranks or _ranks(text),
        micro_batch=_number(_MICRO_BATCH, text),
        tokens=_number(_TOKENS, text),
        checkpointing=_last(_CHECKPOINTING, text) in ("True", "true"),
        precision=_last(_PRECISION, text) or "bf16",
        config=config or _config(text),
    )


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = [next(filter(None, match.groups())) for match in pattern.finditer(text)]
    return found[-1] if found else None


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = _last(pattern, text)
    return int(re.sub(r"[,_]", "", found)) if found else None


def _ranks(text: str) -> int | None:
    """Return the number of ranks that a log says, or of those that it names from 0 on: one GPU's number tells of no others."""
    said = [_number(_RANKS, text) or 0, (_number(_PER_NODE, text) or 0) * (_number(_NODES, text) or 1)]
    named = set(map(int, _RANK.findall(text)))
    if len(named) > 1 and named == set(range(len(named))):
        said.append(len(named))
    return max(said) or None


def _config(text: str) -> dict[str, Any]:
    """Return a DeepSpeed config that a log prints, or the stage that it names; empty if it does neither."""
    for match in re.finditer(r"""['"]zero_optimization['"]""", text):
        earliest = max(0, match.start() - _LONGEST_CONFIG)
        start = text.rfind("{", earliest, match.start())
        while start >= 0:
            found = _mapping_at(text, start)
            if "zero_optimization" in found:
                return found
            start = text.rfind("{", earliest, start)
    named = _STAGE_BY_NAME.search(text)
    stage = _last(_STAGE, text) or (named and (named[1] or "3"))
    return {"zero_optimization": {"stage": int(stage)}} if stage else {}


def _mapping_at(text: str, start: int) -> dict[str, Any]:
    """Return the JSON object that begins there, as DeepSpeed prints its config; empty if there is none."""
    with suppress(ValueError):
        return dict(json.JSONDecoder().raw_decode(text, start)[0])
    return {}
