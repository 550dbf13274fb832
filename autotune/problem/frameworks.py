"""Frameworks whose own command starts the ranks: how each receives their number, and how its files name a knob.

This table does not list what a framework does inside its ranks. A rank runs the framework's command and takes over at the point
that would start other processes (`rank/hooks/relaunch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.problem.candidate import CHECKPOINTING
from autotune.problem.job import Script


@dataclass(frozen=True)
class Framework:
    """Command of one framework."""

    package: str  # name on PyPI
    packages: tuple[str, ...]  # names of its Python packages
    programs: tuple[str, ...]
    modules: tuple[str, ...]  # imported once for all trials, to save time
    variables: dict[str, str] = field(default_factory=dict)  # variables that make it start RANKS ranks
    words: tuple[str, ...] = ()  # words at the end of its command with the same effect
    separated: bool = False  # put `--` before these words
    superseded: str = (
        ""  # argument that names a launcher's config with DeepSpeed in it, which would contradict the winner's
    )
    negated: dict[str, str] = field(default_factory=dict)  # knob -> name of the setting that switches it off

    def environment(self, ranks: int) -> dict[str, str]:
        return {name: value.replace("RANKS", str(ranks)) for name, value in self.variables.items()}

    def arguments(self, argv: Sequence[str], ranks: int) -> list[str]:
        """Return the command's words, changed so that it starts `ranks` ranks with DeepSpeed."""
        words = list(argv)
        if self.superseded and (flag := f"--{self.superseded}") in words:
            del words[words.index(flag) : words.index(flag) + 2]
        given = any(word.partition("=")[0].replace("-", "_") in _SPELT for word in words)
        added = [word.replace("RANKS", str(ranks)) for word in self.words if not given or word == "--use_deepspeed"]
        if any(word in words for word in ("--use_deepspeed", "--launcher")):
            added = [word for word in added if word != "--use_deepspeed"]
        return [*words, *(["--"] if self.separated and "--" not in words and added else []), *added]


_SPELT = {"__num_processes", "__nproc_per_node"}
# accelerate is the only launcher of these that also starts CPU ranks
_BY_ACCELERATE = ("--use_deepspeed", "--num_processes", "RANKS")
_TRAINER = ("transformers.trainer", "transformers.training_args", "accelerate", "datasets", "peft")

# llamafactory 0.9.5 launcher.py, ms-swift 4.6.0 swift/cli/main.py, axolotl 0.19.0 axolotl/cli/utils/train.py, trl 1.16
# trl/cli/commands/training.py
FRAMEWORKS = (
    Framework(
        "llamafactory",
        ("llamafactory",),
        ("llamafactory-cli", "lmf"),
        (*_TRAINER, "trl"),
        variables={"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "RANKS"},
        negated={CHECKPOINTING: "disable_gradient_checkpointing"},
    ),
    Framework("ms-swift", ("swift",), ("swift",), (*_TRAINER, "trl"), variables={"NPROC_PER_NODE": "RANKS"}),
    Framework("axolotl", ("axolotl",), ("axolotl",), (*_TRAINER, "trl"), words=_BY_ACCELERATE, separated=True),
    Framework("trl", ("trl",), ("trl",), (*_TRAINER, "trl"), words=_BY_ACCELERATE, superseded="accelerate_config"),
)


def framework_of(script: Script) -> Framework | None:
    """Return the framework whose command or module the script is, or None."""
    if script.program is not None:
        return next((one for one in FRAMEWORKS if Path(script.program).name in one.programs), None)
    top = script.target.partition(".")[0] if script.is_module else ""
    return next((one for one in FRAMEWORKS if top in one.packages), None)
