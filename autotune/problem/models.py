"""Models by name, folder, file or Hub id, as configurations; no weights are loaded."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from autotune.bounds import parse_json, read_text
from autotune.entry_points import HUB_READER
from autotune.errors import UserError, near
from autotune.interpreter import current, module_command
from autotune.problem.model_sizes import config_trouble


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


def resolve_model(name: str, *, trust_remote_code: bool = False) -> ModelSpec:
    """Resolve a shipped name, a folder with `config.json`, a `config.json`, or a Hub id.

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
        raise UserError(f"unknown model {name!r}{near(name, shipped)} (`autotune models` lists the names)")
    return _from_hub(name, trust_remote_code)


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
    if why := config_trouble(config):
        raise UserError(f"{file}: {why}")
    if "auto_map" in config and not trust_remote_code:
        raise UserError(f"{file} runs code of its own (auto_map): add --trust-remote-code if you trust it")
    if "auto_map" in config:
        config = {**config, "_name_or_path": str(file.parent.resolve())}
    return ModelSpec(name, config, str(file.resolve()), trust_remote_code=trust_remote_code)


def _from_hub(name: str, trust_remote_code: bool) -> ModelSpec:
    """Read the configuration in a subprocess: this process never imports transformers."""
    flags = ["--trust-remote-code"] if trust_remote_code else []
    command = module_command(current().path, HUB_READER, *flags, name)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=current().environment(), encoding="utf-8")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = {"error": f"no answer, exit status {done.returncode}"}
    if "error" in answer:
        hint = near(name.split("/")[-1], shipped_models()) or "; a folder with its config.json works offline"
        raise UserError(f"model {name!r} could not be read from the Hub: {answer['error'][:200]}{hint}")
    if why := config_trouble(answer["config"]):
        raise UserError(f"model {name!r}: its configuration on the Hub: {why}")
    return ModelSpec(name.split("/")[-1], answer["config"], name, None, trust_remote_code)


def workload_spec(reference: str) -> ModelSpec:
    """Return a user's function `package.module:function` as a model. Its source holds a hash of the file, so that an edit makes
    another model.

    Raises:
        UserError: there is no such module, or it does not define the function.
    """
    name, colon, function = reference.partition(":")
    if not colon or not name or not function:
        raise UserError(f"--workload {reference}: expected package.module:function")
    found = current().origin(name)
    if found is None:
        raise UserError(f"--workload {reference}: no module {name} here or installed")
    text = Path(found).read_bytes()
    named = re.escape(function)
    defined = rf"^\s*(?:def|class) {named}\b|^{named}\s*=|^from .*\b{named}\b"
    if not re.search(defined, text.decode(errors="replace"), re.MULTILINE):
        raise UserError(f"--workload {reference}: {found} has no {function}")
    return ModelSpec(function, {}, f"{found} {hashlib.sha256(text).hexdigest()[:12]}")
