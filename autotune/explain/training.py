"""The training of a log: model, ranks, batch and DeepSpeed config, as far as its lines tell."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.predict.step_time import layer_parameters, table_sizes
from autotune.problem.candidate import CHECKPOINTING, MICRO_BATCH, ZERO_DEFAULTS, Candidate, knobs_of
from autotune.problem.models import ModelSpec, resolve_model, shipped_models, text_config
from autotune.util.files import shipped_json
from autotune.util.interpreter import OWN
from autotune.util.units import format_count


@cache
def data() -> dict[str, Any]:
    """Return `data/explanations.json`."""
    return dict(shipped_json("explanations.json"))


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
    partition: int | None = None  # elements that a rank steps
    engine: bool = False  # an engine of inference (vLLM, SGLang) works beside it
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

    def counts(self, tokens: int) -> dict[str, Any]:
        """Return what sizes of tensors depend on, by the names in `data/explanations.json`. Missing or None: unknown.

        Args:
            tokens: of a row.
        """
        config = text_config(self.model.config if self.model else {})
        parameters, ranks = self.of_optimizer, max(1, (self.ranks or 1) * min(1, self.candidate.stage))
        return {
            **config,
            "rows": self.micro_batch or 1,
            "tokens": tokens,
            "parameters": parameters,
            "named": f"{format_count(parameters or 0).strip()} {'trained ' * bool(self.trained)}parameters",
            "ranks": ranks,
            "per rank": 1 / ranks,
            "partition": self.partition,
            "layers": layer_parameters(config),
            "per layer": 1 / config.get("num_hidden_layers", 1),
            "bucket": int(knobs_of(self.config).get("reduce_bucket_size", ZERO_DEFAULTS["reduce_bucket_size"])),
        }


# -- model -------------------------------------------------------------------------------------------------------------

_NOMINAL = re.compile(r"(?<![\w.])(\d{1,5}(?:\.\d{1,5})?)\s?b(?!\w)", re.IGNORECASE)
_PARTS = re.compile("[-_/ ]")  # of a name


def known_model(name: str, *, typed: bool) -> tuple[ModelSpec | None, int | None]:
    """Return a model by a name, a Hub id or a folder, and the number of parameters in its name if there is no such model.

    A model is known by a name that has the parts of a known one in their order, as `llama-2-chat-7b-lora` has `llama-2-7b`.

    Raises:
        UserError: the name was typed, and says nothing.
    """
    if typed and Path(name).exists():
        return resolve_model(name, interpreter=OWN), None
    shapes = shipped_json("model_shapes.json")["models"]
    known = {begin: ModelSpec(begin, config, "model_shapes.json") for begin, config in shapes.items()}
    known |= shipped_models()
    plain = f"-{_PARTS.sub('-', name.lower())}-"
    found = [one for one in known if re.search(f"-{_PARTS.sub('-(?:.*-)?', one)}-", plain)]
    if found:
        return known[max(found, key=len)], None
    nominal = _NOMINAL.search(_PARTS.sub(" ", name))
    if nominal is None and typed:
        raise UserError(
            f"--model {name}: not known offline; give a folder with its config.json, or its number of parameters like 6.74B"
        )
    return None, int(float(nominal[1]) * 1e9) if nominal else None


# -- log ---------------------------------------------------------------------------------------------------------------

_NUMBER = r"(\d[\d,_]{0,6})\b(?!\.\d)"  # the tokens of a tokenizer without a limit are 10^30
_RANK = re.compile(r"(?:[Rr]ank ?|local_rank: |\bGPU )(\d{1,9})\b")
_LONGEST_CONFIG = 20_000  # characters
_BRACES = re.compile('[{}]|"zero_optimization"')


def read_training(
    text: str, model: str | None = None, ranks: int | None = None, config: dict[str, Any] | None = None
) -> Training:
    """Return what a log tells of its training. Of values that differ the last one counts, or the largest number of ranks.

    Args:
        model, ranks, config: what is known without the log.

    Raises:
        UserError: the model is not known.
    """
    name = model or _option(text, "model", r"([\w./-]+)") or ""
    spec, nominal = known_model(name, typed=model is not None)
    counted, trained = _number(_said(text, "all parameters")), _number(_said(text, "trained"))
    adapters = _said(text, "adapters") is not None
    if not adapters:  # Trainer says how many are trained, which are all
        counted = counted or trained
    return Training(
        model=spec,
        parameters=counted or nominal,
        nominal=not counted,
        trained=trained * (trained != counted),
        adapters=adapters,
        quantized=_said(text, "quantized") is not None,
        ranks=ranks or _ranks(text),
        micro_batch=_number(_option(text, "micro-batch")),
        tokens=_number(_option(text, "tokens")),
        checkpointing=_said(text, "checkpointing") is not None,
        precision=(_said(text, "precision") or "bf16").lower(),
        partition=_number(_said(text, "partition")),
        engine=_said(text, "engine") is not None,
        config=config or _config(text),
    )


def _said(text: str, fact: str) -> str | None:
    """Return the last group of the last match of a fact's pattern, or None."""
    found = list(re.finditer(data()["facts"][fact], text, re.IGNORECASE))
    return found[-1][found[-1].lastindex or 0] if found else None


def _option(text: str, name: str, value: str = _NUMBER) -> str | None:
    """Return the last value that is given as `--name value`, `name=value`, `name: value` or `'--name', 'value'`, or None."""
    pattern = rf"""(?<!\w)(?:{data()["options"][name]})['"]?(?:\s*[:=,]\s*|\s+)['"\[]?{value}"""
    found = re.findall(pattern, text, re.IGNORECASE)
    return found[-1] if found else None


def _number(found: str | None) -> int:
    """Return a number, 0 for None."""
    return int(re.sub(r"[,_]", "", found or "0")[:18])


def _ranks(text: str) -> int | None:
    """Return the number of ranks that a log says, or of those that it names from 0 on: one GPU's number tells of no others."""
    per_node, nodes = _number(_option(text, "ranks of a node")), _number(_option(text, "nodes"))
    said = [_number(_option(text, "ranks")), per_node * max(1, nodes)]
    said += [gpus.count(",") + 1 for gpus in re.findall(r"(?:VISIBLE_DEVICES=|localhost:)([\d,]*\d)", text)]
    named = set(map(int, _RANK.findall(text)))
    if len(named) > 1 and named == set(range(len(named))):
        said.append(len(named))
    return max(said) or None


def _config(text: str) -> dict[str, Any]:
    """Return a DeepSpeed config that a log prints, or what it says of one; empty if it does neither."""
    opened: list[int] = []
    for match in _BRACES.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}":
            del opened[-1:]
        else:
            with suppress(IndexError, ValueError, RecursionError):
                found = json.JSONDecoder().raw_decode(text[opened[-1] : opened[-1] + _LONGEST_CONFIG])[0]
                if isinstance(found.get("zero_optimization"), dict):
                    return dict(found)
    stage = _option(text, "stage", r"([0-3])\b") or _said(text, "stage by name")
    if not stage:
        return {}
    zero: dict[str, Any] = {"stage": int(stage) if stage.isdigit() else 3}
    zero |= {
        f"offload_{part}": {"device": "cpu"} for part in ("optimizer", "param") if _said(text, f"offloaded {part}")
    }
    return {"zero_optimization": zero, "fsdp": re.search("fsdp|shard", stage, re.IGNORECASE) is not None}
