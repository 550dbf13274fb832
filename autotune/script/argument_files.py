"""Files that a training command names and that hold its arguments: where each knob stands in them. No parser is needed here.

`argument_writer.py` reads these files and writes their copies.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, KNOBS, MICRO_BATCH, Candidate
from autotune.problem.ds_config import MOST_BYTES, read_config, value_at
from autotune.problem.job import ArgumentFile, Script
from autotune.script.command_line import framework_of

Place = tuple[str, ...]  # keys, from the top
# names of axolotl's files and DeepSpeed's, besides transformers'
ALIASES = {MICRO_BATCH: ("micro_batch_size", MICRO_BATCH)}
CONFIG, CONFIG_FLAG = "deepspeed", "--deepspeed"  # key and flag of Hugging Face's arguments that name the config's file
# One of these at the top makes a JSON object a DeepSpeed config.
DS_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
CONFIG_SUFFIXES = (".json", ".hjson", ".jsonc")
OUTPUT = "output_dir"
# A trial's folder links to all of the user's files. No file of theirs has these names.
OUTPUT_FOLDER, COPIES_FOLDER = ".autotune-output", ".autotune-arguments"
_MOST_LINKS = 1000  # links into one output folder
_TELLING = (
    *(CONFIG, OUTPUT, *ALIASES[MICRO_BATCH]),
    *(KNOBS[knob].trainer for knob in (MICRO_BATCH, ACCUMULATION, CHECKPOINTING)),
)


# Keys of a launcher's file that accelerate refuses together with a DeepSpeed config's file (1.15, utils/dataclasses.py,
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
    """Return the changes to accelerate's own file for a candidate whose DeepSpeed config is at `config`."""
    known = file.data.get("deepspeed_config") or {}
    return {
        ("distributed_type",): "DEEPSPEED",
        **{("deepspeed_config", name): None for name in _IN_THE_CONFIG if name in known},
        ("deepspeed_config", "deepspeed_config_file"): config,
        ("deepspeed_config", "zero3_init_flag"): candidate.stage == 3,
        ("mixed_precision",): None,
    }


def launcher_data(files: Sequence[ArgumentFile]) -> dict[str, Any]:
    """Return the data of accelerate's own file; empty without one."""
    return next((file.data for file in files if file.launcher), {})


def launcher_file(script: Script) -> ArgumentFile | None:
    """Return accelerate's own file if it configures DeepSpeed, else None."""
    deepspeed = launcher_data(script.files).get("distributed_type") == "DEEPSPEED"
    return next(file for file in script.files if file.launcher) if deepspeed else None


def config_place(script: Script, data: dict[str, Any]) -> Place | None:
    """Return the place in the file that holds or names the DeepSpeed config.

    If there is none, return the place to add it, provided that the file holds Trainer's arguments.
    """
    known = _find_config(script, data) or find_key(data, (CONFIG,))
    named = CONFIG_FLAG in argument_names(script.argv) or script.ds_config is not None
    if known is not None or named or launcher_file(script) is not None:
        return known
    return place_to_add(script, data, CONFIG)


def carries_config(script: Script) -> bool:
    """Return True if a script's argument file holds the DeepSpeed config."""
    return any(config_place(script, file.data) for file in own_files(script))


def own_config(script: Script) -> dict[str, Any] | Path | None:
    """Return the DeepSpeed config that one of the command's files holds, or the path of the config that it names."""
    for file in own_files(script):
        if (place := _find_config(script, file.data)) is not None:
            value = value_at(file.data, place)
            return value if isinstance(value, dict) else Path(script.cwd) / value
    return None


def copies_folder(folder: Path, file: ArgumentFile) -> Path:
    """Return the folder of a worker group's copy of a file. The copy keeps the file's name."""
    return folder / COPIES_FOLDER / str(file.at)


def output_folder(folder: Path, theirs: Path) -> Path:
    """Return a trial's own output folder. On creation it gets links to the contents of the user's folder."""
    own = folder / OUTPUT_FOLDER
    with suppress(FileExistsError):
        own.mkdir()
        with suppress(OSError):
            for entry in islice(os.scandir(theirs), _MOST_LINKS):
                os.symlink(entry.path, own / entry.name)
    return own


def with_copies(script: Script, folder: Path) -> list[str]:
    """Return the script's words, with its files replaced by the worker group's copies."""
    words = list(script.argv)
    for file in own_files(script):
        copy = copies_folder(folder, file) / Path(file.path).name
        if copy.exists():
            words[file.at] = renamed(words[file.at], str(copy))
    return words


def winners_copy(config: Path, file: ArgumentFile) -> Path:
    """Return the path of a file's copy that carries a winner whose DeepSpeed config is at `config`."""
    # Launcher and script may name files alike, and a file's name may be one of those written next to a config.
    part = "launcher" if file.launcher else "argument"
    return config.with_name(f"{config.name.removesuffix('.json')}.{part}.{Path(file.path).name}")


def renamed(word: str, path: str) -> str:
    """Return `path`, or `--config=path` if the word has that form."""
    head, equals, _ = word.partition("=")
    return f"{head}={path}" if equals else path


def is_ds_config(path: Path) -> bool:
    """Check that the file is a DeepSpeed config.

    A file above MOST_BYTES is not read: every rank calls this, and reading a data set would cost seconds and gigabytes.
    """
    if path.suffix not in CONFIG_SUFFIXES or not os.path.isfile(path):  # `os.path.isfile` accepts a text of any length
        return False
    try:
        if path.stat().st_size > MOST_BYTES:
            return False
        data = read_config(path)
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and not DS_KEYS.isdisjoint(data)


# -- inside a file -------------------------------------------------------------------------------------------------------


def own_files(script: Script) -> list[ArgumentFile]:
    """Return the script's argument files, without the launcher's."""
    return [file for file in script.files if not file.launcher]


def argument_names(words: Sequence[str]) -> set[str]:
    """Return the names of flags and arguments that a command line gives."""
    return {word.partition("=")[0].lstrip("+") for word in words}


def typed_values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (flag or name, value) of the arguments of a command line: `--size 4`, `--size=4` and `size=4`."""
    for word, follows in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if equals:
            yield name.lstrip("+"), value
        elif word.startswith("-"):
            yield word, follows


def integers_in_words(words: Sequence[str]) -> dict[str, int]:
    """Return the positive integers that a command line gives, by flag or name."""
    return {name: int(value) for name, value in typed_values(words) if value.isdecimal() and int(value) > 0}


def has_known_key(data: dict[str, Any]) -> bool:
    """Return True if the data has a key of the config, the output folder or a knob."""
    return find_key(data, _TELLING) is not None


def place_to_add(script: Script, data: dict[str, Any], name: str) -> Place | None:
    """Return the place at which a Trainer's argument may be added to a file: next to a known one; None in other files."""
    known = find_key(data, _TELLING)
    through = script.profile.through_arguments or framework_of(script) is not None
    return (*known[:-1], name) if known and through else None


def entries(data: dict[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Yield (place, value) of every key of nested mappings, those at the top first. A DeepSpeed config inside is not searched."""
    left: list[tuple[Place, dict[str, Any]]] = [((), data)]
    for above, mapping in left:  # the list grows during the loop
        for key, value in mapping.items():
            yield (*above, key), value
            if isinstance(value, dict) and DS_KEYS.isdisjoint(value):
                left.append(((*above, key), value))


def find_key(data: dict[str, Any], names: Collection[str]) -> Place | None:
    """Return the place of the first key with one of the names."""
    return next((place for place, _ in entries(data) if place[-1] in names), None)


def _find_config(script: Script, data: dict[str, Any]) -> Place | None:
    """Return the place of the first DeepSpeed config, or of the first name of a config file."""
    for place, value in entries(data):
        if isinstance(value, str) and is_ds_config(Path(script.cwd) / value):
            return place
        if isinstance(value, dict) and not DS_KEYS.isdisjoint(value):
            return place
    return None
