"""Models by name, and tasks."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from autotune.errors import NotProtected, UserError, did_you_mean
from autotune.util.bounds import display_value, parse_json, read_text
from autotune.util.entry_points import HUB_READER, NOT_PROTECTED
from autotune.util.files import shipped_json
from autotune.util.interpreter import OWN, Interpreter, sandboxed_command
from autotune.versions import release

# -- models ------------------------------------------------------------------------------------------------------------
#
# Models by name, folder, file or Hub id, as configurations; no weights are loaded.


@dataclass(frozen=True)
class ModelSpec:
    """Model as its transformers configuration."""

    name: str
    config: dict[str, Any]  # config.json, `model_type` included
    source: str  # origin of the configuration
    parameters: int | None = None  # published count, if there is one
    trust_remote_code: bool = False


@cache
def shipped_models() -> dict[str, ModelSpec]:
    """Return the models that resolve offline, by name."""
    found = {}
    for entry in (resources.files("autotune") / "data" / "models").iterdir():
        if entry.name.endswith(".json"):
            data = json.loads(entry.read_text(encoding="utf-8"))
            name = entry.name.removesuffix(".json")
            found[name] = ModelSpec(name, data["config"], data["source"], data["parameters"])
    return dict(sorted(found.items()))


def resolve_model(
    name: str, *, trust_remote_code: bool = False, unprotected: bool = False, interpreter: Interpreter = OWN
) -> ModelSpec:
    """Resolve a shipped name, a folder with `config.json`, a `config.json`, or a Hub id.

    Args:
        unprotected: run the model's own code without a sandbox on a machine that offers none.

    Raises:
        UserError: there is no such model, or its configuration cannot be read.
    """
    if not name.strip():
        raise UserError("the model's name is empty: give a shipped name (`autotune models`), a folder or a Hub id")
    shipped = shipped_models()
    if name.lower() in shipped:
        return shipped[name.lower()]
    path = Path(name).expanduser()
    if path.exists():
        return _from_path(path, trust_remote_code)
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        raise UserError(f"no model at {name}: expected a folder with config.json, or that file")
    by_source = {spec.source.split("huggingface.co/")[-1].lower(): spec for spec in shipped.values()}
    if name.lower() in by_source:  # the Hub id of a shipped model: the same facts without the network
        return by_source[name.lower()]
    if "/" not in name:
        raise UserError(f"unknown model {name!r}{did_you_mean(name, shipped)} (`autotune models` lists the names)")
    return _from_hub(name, trust_remote_code, unprotected, interpreter)


def _from_path(path: Path, trust_remote_code: bool) -> ModelSpec:
    file = path / "config.json" if path.is_dir() else path
    # resolved, so that `.` and `..` have names
    name = (path if path.is_dir() else path.parent).resolve().name or "model"
    if not file.exists():
        raise UserError(f"no config.json in {path}: expected the folder of a transformers model")
    expected = "expected a transformers config.json"
    config = parse_json(read_text(file, str(file), expected), str(file), expected)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f'{file}: no "model_type"; expected a transformers config.json like the Hub\'s')
    if why := invalid_config_reason(config):
        raise UserError(f"{file}: {why}")
    if "auto_map" in config and not trust_remote_code:
        raise UserError(f"{file} contains code to run (auto_map): add --trust-remote-code if you trust it")
    if "auto_map" in config:
        config = {**config, "_name_or_path": str(file.parent.resolve())}
    return ModelSpec(name, config, str(file.resolve()), trust_remote_code=trust_remote_code)


def _from_hub(name: str, trust_remote_code: bool, unprotected: bool, interpreter: Interpreter) -> ModelSpec:
    """Read the configuration in a subprocess: this process never imports transformers."""
    flags = ["--trust-remote-code"] if trust_remote_code else []
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:  # takes what remote code writes
        agreed = unprotected or not trust_remote_code
        command = sandboxed_command(interpreter.path, folder, HUB_READER, *flags, name, agreed=agreed)
        environment = interpreter.environment()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, encoding="utf-8")
    if done.returncode == NOT_PROTECTED:
        raise NotProtected
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = {"error": f"no answer, exit status {done.returncode}"}
    if "error" in answer:
        hint = did_you_mean(name.split("/")[-1], shipped_models()) or "; a folder with its config.json works offline"
        raise UserError(f"model {name!r} could not be read from the Hub: {answer['error'][:200]}{hint}")
    if why := invalid_config_reason(answer["config"]):
        raise UserError(f"model {name!r}: its configuration on the Hub: {why}")
    return ModelSpec(name.split("/")[-1], answer["config"], name, None, trust_remote_code)


def workload_spec(reference: str, interpreter: Interpreter = OWN) -> ModelSpec:
    """Return a user's function `package.module:function` as a model.

    Its source holds a hash of the file, so that an edit makes another model.

    Raises:
        UserError: there is no such module, or it does not define the function.
    """
    name, colon, function = reference.partition(":")
    if not colon or not name or not function:
        raise UserError(f"--workload {reference}: expected package.module:function")
    found = interpreter.origin(name)
    if found is None:
        raise UserError(f"--workload {reference}: no module {name} here or installed")
    text = Path(found).read_bytes()
    named = re.escape(function)
    defined = rf"^\s*(?:def|class) {named}\b|^{named}\s*=|^from .*\b{named}\b"
    if not re.search(defined, text.decode(errors="replace"), re.MULTILINE):
        raise UserError(f"--workload {reference}: {found} has no {function}")
    return ModelSpec(function, {}, f"{found} {hashlib.sha256(text).hexdigest()[:12]}")


@dataclass(frozen=True)
class AttentionHeads:
    """Attention heads of each layer of a model, under the names that Ulysses reads.

    Source: deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py, `register_with_transformers`.
    """

    layers: int
    queries: int
    keys: int  # and as many of values
    size: int  # elements of a head

    def exchanged(self, ranks: int) -> int:
        """Return the elements per token that the exchanges of a layer carry: queries, keys, values and the output.

        Keys are repeated until each of the `ranks` of a sequence has one (`kv_replication_factor`).
        """
        return 2 * self.size * (self.queries + max(self.keys, ranks))

    def repeated(self, ranks: int) -> int:
        """Return the elements per token of a layer's keys and values that are copies."""
        return 2 * self.size * max(0, ranks - self.keys)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the part that reads text; the whole one if it is not divided."""
    return config.get("text_config") or config


def attention_heads(config: dict[str, Any]) -> AttentionHeads | None:
    """Return the heads of a model's attention layers; None if the configuration lacks them, or some layers are recurrent.

    accelerate refuses to split sequences of recurrent layers (1.15, big_modeling.py).
    """
    text = text_config(config)
    if any("linear_attention" in str(kind) for kind in text.get("layer_types") or ()):
        return None
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    sizes = [size for name in names if isinstance(size := text.get(name), int) and size > 0]
    if len(sizes) < len(names):
        return None
    layers, queries, keys, hidden = sizes
    return AttentionHeads(layers, queries, keys, text.get("head_dim") or hidden // queries)


# -- model sizes -------------------------------------------------------------------------------------------------------
#
# Sizes in a model's configuration, and their bounds.

_SIZE = re.compile(r"size$|layers$|heads$|dim$|^depth$|^n_|^num_|^d_")  # keys that hold a size
_NEEDED = ("num_hidden_layers", "n_layer", "hidden_size", "num_attention_heads", "vocab_size")  # at least 1
_MOST_LAYERS, _MOST_SIZE = 10_000, 10**9


def invalid_config_reason(config: dict[str, Any]) -> str | None:
    """Return why a size in a configuration is impossible, or None. Lists, nulls and words are left to transformers."""
    for key, value in config.items():
        if isinstance(value, dict):
            why = invalid_config_reason(value)
            if why:
                return f"{key}.{why}"
        elif isinstance(value, int | float) and not isinstance(value, bool) and _SIZE.search(key):
            low = 1 if key in _NEEDED else -1
            high = _MOST_LAYERS if "layer" in key else _MOST_SIZE
            if not low <= value <= high or value != int(value):
                return f"{key}: expected a whole number from {low} to {high}, found {display_value(value)}"
    return None


# -- tasks -------------------------------------------------------------------------------------------------------------
#
# Tasks for which a model can be trained, and the image size in its configuration: plain facts, without transformers.
#
# `data/tasks.json` lists for each task the `model_type`s of transformers' auto classes; a test compares it with the
# installed ones. An unlisted `model_type` is never refused here: building the model shows its abilities.

CAUSAL = "causal-lm"
SEQ2SEQ, IMAGE_TEXT, MASKED = "seq2seq", "image-text", "masked-lm"
CLASSIFICATION, TOKENS, ANSWERS = "classification", "token-classification", "question-answering"
TASKS = (CAUSAL, MASKED, CLASSIFICATION, TOKENS, ANSWERS, SEQ2SEQ, IMAGE_TEXT)
DECODED = (CAUSAL, IMAGE_TEXT)  # each token is predicted from those before it

# Endings of `architectures`. An encoder's pretraining head includes the masked one.
_ENDINGS = {
    "ForCausalLM": CAUSAL,
    "LMHeadModel": CAUSAL,
    "ForMaskedLM": MASKED,
    "ForPreTraining": MASKED,
    "ForSequenceClassification": CLASSIFICATION,
    "ForTokenClassification": TOKENS,
    "ForQuestionAnswering": ANSWERS,
}
# Order of preference if `architectures` does not decide (`…ForConditionalGeneration`, `BertModel`, missing). Encoders also have a
# causal head, which is rarely trained.
_PREFERRED = (IMAGE_TEXT, SEQ2SEQ, MASKED, CAUSAL, CLASSIFICATION, TOKENS, ANSWERS)

# Vision towers that accept images of any size, in whole patches. The size in their configurations is the largest.
_ANY_SIZE = ("pixtral",)


@cache
def _model_types() -> dict[str, frozenset[str]]:
    """Return the `model_type`s of each task."""
    data = shipped_json("tasks.json")
    return {task: frozenset(data[task]) for task in TASKS}


def tasks_of(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the tasks for which transformers has a head; empty for an unlisted `model_type`."""
    return tuple(task for task in TASKS if config.get("model_type") in _model_types()[task])


def default_task(config: dict[str, Any]) -> str:
    """Return the task for which a configuration is published, or else the usual one of its kind."""
    possible = tasks_of(config)
    for architecture in config.get("architectures") or ():
        for ending, task in _ENDINGS.items():
            if str(architecture).endswith(ending) and (task in possible or not possible):
                return task
    if config.get("is_decoder") is True and CAUSAL in possible:
        return CAUSAL
    return next((task for task in _PREFERRED if task in possible), CAUSAL)


def task_of(config: dict[str, Any], asked: str | None, name: str) -> str:
    """Return the task for training a model: the requested one, or the default.

    Raises:
        UserError: there is no such task, or the architecture has no head for it.
    """
    if asked is None:
        return default_task(config)
    if asked not in TASKS:
        raise UserError(f"--task {asked}: expected one of {', '.join(TASKS)}")
    possible = tasks_of(config)
    if possible and asked not in possible:
        kind = config.get("model_type")
        raise UserError(
            f"--task {asked}: transformers has no such head for {name} ({kind}); it has {', '.join(possible)}"
        )
    return asked


def declared_image_size(config: dict[str, Any]) -> int | None:
    """Return height and width of an image in pixels, or None if the configuration does not give them."""
    vision = config.get("vision_config")
    size: Any = vision.get("image_size") if isinstance(vision, dict) else None
    size = config.get("image_size") if size is None else size
    if isinstance(size, dict):
        size = size.get("height")
    if isinstance(size, list | tuple) and size:
        size = size[0]
    return size if isinstance(size, int) and size > 0 else None


def image_size_of(config: dict[str, Any], task: str, asked: int | None, name: str) -> int | None:
    """Return `asked` if it differs from the configuration: height and width of the job's images in pixels.

    Raises:
        UserError: no image size is known, the configuration has another, or the task has no images.
    """
    if task != IMAGE_TEXT:
        if asked is not None:
            raise UserError(
                f"--image-size {asked}: {name} has no image input with --task {task}; leave --image-size out"
            )
        return None
    told = declared_image_size(config)
    if told is None and asked is None:
        raise UserError(
            f"the configuration of {name} names no image size: give --image-size (height and width in pixels)"
        )
    vision = config.get("vision_config")
    fixed = told is not None and not (isinstance(vision, dict) and vision.get("model_type") in _ANY_SIZE)
    if fixed and asked not in (None, told):
        raise UserError(f"--image-size {asked}: {name} has a fixed image size of {told} pixels; leave --image-size out")
    return asked if asked != told else None


# Slices of the vocabulary from which `loss: chunked` computes the loss, one after the other (`rank/model_builder.py`). More of
# them save less memory each time, and make the products of a slice small.
VOCABULARY_SLICES = 16

# Options of Liger's kernels, of any model type, that leave its loss alone (transformers' `liger_kernel_config`).
LIGER_LOSS_ALONE = dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared"), False)
_EXPERTS_AT_ONCE = (5,)  # transformers


def has_expert_modules(config: dict[str, Any], transformers: str | None) -> bool:
    """Check that transformers of this version keeps each expert of the model in a module, of which ranks skip different ones.

    Since 5.0 one parameter holds all experts of a layer. False if the version is unknown.
    """
    experts = any("expert" in key for key in text_config(config))
    return experts and transformers is not None and release(transformers) < _EXPERTS_AT_ONCE
