"""Files of a training's arguments that its command names: where they say what a candidate changes. No parser is needed here.

`argument_texts.py` reads them and writes their copies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate
from autotune.problem.ds_file import MOST_BYTES, read_config
from autotune.problem.frameworks import framework_of
from autotune.problem.job import ArgumentFile, Script

Place = tuple[str, ...]  # keys, from the top
# What files call a knob: transformers' names, axolotl's, DeepSpeed's.
NAMES = {
    MICRO_BATCH: ("per_device_train_batch_size", "micro_batch_size", MICRO_BATCH),
    ACCUMULATION: (ACCUMULATION,),
    CHECKPOINTING: ("gradient_checkpointing",),
}
CONFIG, CONFIG_FLAG = "deepspeed", "--deepspeed"  # of Hugging Face's arguments: the config's file
# One of these at the top makes a JSON object a DeepSpeed config.
_DS_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
_CONFIG_SUFFIXES = (".json", ".hjson", ".jsonc")
OUTPUT = "output_dir"
# In a trial's folder, which has links to all that the user's has: names that no link of theirs has.
OUTPUT_FOLDER, COPIES_FOLDER = ".autotune-output", ".autotune-arguments"
_MOST_LINKS = 1000  # into an output folder
_TELLING = (CONFIG, OUTPUT, *(name for names in NAMES.values() for name in names))


def changes_for(script: Script, file: ArgumentFile, candidate: Candidate, config: str | None) -> dict[Place, Any]:
    """What a file must say for a candidate.

    Args:
        config: the path of the DeepSpeed config with the candidate in it; None leaves the file's own.
    """
    data = file.data
    flags = given(script.argv)
    found: dict[Place, Any] = {}
    for knob, value in candidate.told(script):
        place, negated = _place(script, data, knob)
        if place is not None and f"--{place[-1]}" not in flags:
            found[place] = not value if negated else value
    if config is not None and (place := config_place(script, data)) is not None:
        found[place] = config
        framework = framework_of(script)
        if framework is not None and framework.superseded in data:
            found[(framework.superseded,)] = None
    return found


# Of a launcher's file: accelerate refuses them beside a DeepSpeed config's file (1.15, utils/dataclasses.py,
# `DeepSpeedPlugin.deepspeed_config_process`).
_IN_THE_CONFIG = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "zero3_save_16bit_model",
)


def launcher_changes(file: ArgumentFile, candidate: Candidate, config: str) -> dict[Place, Any]:
    """What accelerate's own file must say for a candidate whose DeepSpeed config is at `config`."""
    known = file.data.get("deepspeed_config") or {}
    return {
        ("distributed_type",): "DEEPSPEED",
        **{("deepspeed_config", name): None for name in _IN_THE_CONFIG if name in known},
        ("deepspeed_config", "deepspeed_config_file"): config,
        ("deepspeed_config", "zero3_init_flag"): candidate.stage == 3,
        ("mixed_precision",): None,
    }


def launcher_file(script: Script) -> ArgumentFile | None:
    """accelerate's own file, where it is the one that says how DeepSpeed is used."""
    files = [file for file in script.files if file.launcher]
    return next((one for one in files if one.data.get("distributed_type") == "DEEPSPEED"), None)


def config_place(script: Script, data: dict[str, Any]) -> Place | None:
    """Where the file holds or names the DeepSpeed config, or could where it is the place of Trainer's arguments."""
    known = _find_config(script, data) or find(data, (CONFIG,))
    if known is not None or not _trainers(script, data):
        return known
    elsewhere = CONFIG_FLAG in given(script.argv) or script.ds_config is not None or launcher_file(script) is not None
    return None if elsewhere else (*_beside(data), CONFIG)


def carries(script: Script, knob: str) -> bool:
    """Whether one of the command's files says the knob, or could."""
    return any(_place(script, file.data, knob)[0] for file in own_files(script))


def carries_config(script: Script) -> bool:
    return any(config_place(script, file.data) for file in own_files(script))


def said(script: Script, knob: str) -> list[Any]:
    """What the command's words, by a flag that the user declared, and its files say of a knob."""
    flag, found = dict(script.flags).get(knob), []
    for at, word in enumerate(script.argv):
        name, equals, value = word.partition("=")
        if flag is not None and name.lstrip("+") == flag:
            found += [value] if equals else list(script.argv[at + 1 : at + 2])
    for file in own_files(script):
        place, _ = _place(script, file.data, knob)
        found += [] if place is None else [value_at(file.data, place)]
    return found


def own_config(script: Script) -> dict[str, Any] | Path | None:
    """The DeepSpeed config that one of the command's files holds, or names as a file."""
    for file in own_files(script):
        if (place := _find_config(script, file.data)) is not None:
            value = value_at(file.data, place)
            return value if isinstance(value, dict) else Path(script.cwd) / value
    return None


def copies_folder(folder: Path, file: ArgumentFile) -> Path:
    """Where a group of ranks finds its copy of a file, under the file's own name.

    Args:
        folder: the group's.
    """
    return folder / COPIES_FOLDER / str(file.at)


def output_folder(folder: Path, theirs: Path) -> Path:
    """Return a trial's own output folder, with links to what the user's holds when it is made.

    Args:
        folder: the trial's files.
    """
    own = folder / OUTPUT_FOLDER
    with suppress(FileExistsError):
        own.mkdir()
        with suppress(OSError):
            for entry in islice(os.scandir(theirs), _MOST_LINKS):
                os.symlink(entry.path, own / entry.name)
    return own


def with_copies(script: Script, folder: Path) -> list[str]:
    """The script's words with the copies that a group of ranks has in place of its files."""
    words = list(script.argv)
    for file in own_files(script):
        copy = copies_folder(folder, file) / Path(file.path).name
        if copy.exists():
            words[file.at] = renamed(words[file.at], str(copy))
    return words


# beside NAME.json as NAME.…
_WRITTEN = {"meta.json", "ladder.json", "table.json", "accelerate.yaml", "training_arguments.json"}
_WRITTEN |= {f"{of}.{what}.json" for of in ("accelerate", "sbatch") for what in ("deepspeed", "meta")}
_WRITTEN |= {"training_arguments.meta.json"}


def winners_copy(config: Path, file: ArgumentFile) -> Path:
    """Where the copy of a file is written that carries a winner whose DeepSpeed config is at `config`."""
    # a launcher's file may be called as the script's is, and either as what is written beside a config
    name = Path(file.path).name
    part = "launcher." if file.launcher else "argument." if name in _WRITTEN else ""
    return config.with_name(f"{config.name.removesuffix('.json')}.{part}{name}")


def renamed(word: str, path: str) -> str:
    """`path`, or `--config=path` where the word is written so."""
    head, equals, _ = word.partition("=")
    return f"{head}={path}" if equals else path


def is_ds_config(path: Path) -> bool:
    """Whether the file is a DeepSpeed config. One that is too large for that is not read: every rank asks, and a data set would
    cost it seconds and gigabytes."""
    if path.suffix not in _CONFIG_SUFFIXES or not os.path.isfile(path):  # of a text of any length
        return False
    try:
        if path.stat().st_size > MOST_BYTES:
            return False
        data = read_config(path)
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and not _DS_KEYS.isdisjoint(data)


# -- inside a file -------------------------------------------------------------------------------------------------------


def own_files(script: Script) -> list[ArgumentFile]:
    return [file for file in script.files if not file.launcher]


def value_at(data: Any, place: Place) -> Any:
    """The value at a place; None where there is none."""
    for key in place:
        if not isinstance(data, dict) or key not in data:
            return None
        data = data[key]
    return data


def given(words: Sequence[str]) -> set[str]:
    """The flags and names that a command line gives."""
    return {word.partition("=")[0].lstrip("+") for word in words}


def _place(script: Script, data: dict[str, Any], knob: str) -> tuple[Place | None, bool]:
    """Where a file says a knob, or could; and whether it says the opposite there."""
    declared = dict(script.flags).get(knob)
    if declared is not None:
        place = tuple(declared.split("."))
        return (place, False) if not declared.startswith("-") and value_at(data, place) is not None else (None, False)
    framework = framework_of(script)
    if framework is not None and knob in framework.negated:
        return (find(data, (framework.negated[knob],)) or (framework.negated[knob],)), True
    if knob not in NAMES:
        return None, False
    known = find(data, NAMES[knob])
    if known is None and _trainers(script, data):
        dialect = "micro_batch_size" if find(data, ("micro_batch_size",)) is not None else NAMES[knob][0]
        return (*_beside(data), dialect if knob == MICRO_BATCH else NAMES[knob][0]), False
    return known, False


def _trainers(script: Script, data: dict[str, Any]) -> bool:
    """Whether the file holds arguments of a Trainer, so that one that it lacks may be added."""
    through = bool(script.profile.get("through_arguments")) or framework_of(script) is not None
    return through and telling(data)


def telling(data: dict[str, Any]) -> bool:
    return any(find(data, (name,)) is not None for name in _TELLING)


def _beside(data: dict[str, Any]) -> Place:
    """The mapping that holds the arguments: that of the first that is known."""
    return next((place[:-1] for name in sorted(_TELLING) if (place := find(data, (name,))) is not None), ())


def find(data: Any, names: Sequence[str], above: Place = ()) -> Place | None:
    """The place of the first key of such a name; a DeepSpeed config inside the file is not looked into."""
    if not isinstance(data, dict):
        return None
    for name in names:
        if name in data:
            return (*above, name)
    for key, below in data.items():
        inside = isinstance(key, str) and isinstance(below, dict) and _DS_KEYS.isdisjoint(below)
        if inside and (found := find(below, names, (*above, key))) is not None:
            return found
    return None


def _find_config(script: Script, data: Any, above: Place = ()) -> Place | None:
    """The place of the first DeepSpeed config, or of the name of a file that is one."""
    if not isinstance(data, dict):
        return None
    for key, value in data.items():
        if not isinstance(key, str):
            continue
        if isinstance(value, str) and is_ds_config(Path(script.cwd) / value):
            return (*above, key)
        if isinstance(value, dict) and not _DS_KEYS.isdisjoint(value):
            return (*above, key)
        if (found := _find_config(script, value, (*above, key))) is not None:
            return found
    return None
