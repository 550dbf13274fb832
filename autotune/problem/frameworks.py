"""Frameworks whose own command starts the ranks: how each is told their number, and what its files call a knob.

How a framework goes on inside its ranks is not listed: a rank runs the command itself, and takes over where it would start
other processes (`rank/hooks/relaunch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.problem.candidate import CHECKPOINTING
from autotune.problem.job import Script


@dataclass(frozen=True)
class Framework:
    """One framework's command."""

    package: str  # as pip calls it
    packages: tuple[str, ...]  # as Python imports it
    programs: tuple[str, ...]
    modules: tuple[str, ...]  # worth importing once for all trials
    variables: dict[str, str] = field(default_factory=dict)  # that make it start RANKS ranks
    words: tuple[str, ...] = ()  # the same, at the end of its command
    separated: bool = False  # by `--` before them
    superseded: str = (
        ""  # an argument that names a launcher's config with DeepSpeed in it, and would contradict the winner's
    )
    negated: dict[str, str] = field(default_factory=dict)  # knob -> the name by which its files switch it off

    def environment(self, ranks: int) -> dict[str, str]:
        return {name: value.replace("RANKS", str(ranks)) for name, value in self.variables.items()}

    def arguments(self, argv: Sequence[str], ranks: int) -> list[str]:
        """The command's words, such that it starts so many ranks with DeepSpeed."""
        words = list(argv)
        if self.superseded and (flag := f"--{self.superseded}") in words:
            del words[words.index(flag) : words.index(flag) + 2]
        given = any(word.partition("=")[0].replace("-", "_") in _SPELT for word in words)
        added = [word.replace("RANKS", str(ranks)) for word in self.words if not given or word == "--use_deepspeed"]
        if any(word in words for word in ("--use_deepspeed", "--launcher")):
            added = [word for word in added if word != "--use_deepspeed"]
        return [*words, *(["--"] if self.separated and "--" not in words and added else []), *added]


_SPELT = {"__num_processes", "__nproc_per_node"}
_BY_ACCELERATE = ("--use_deepspeed", "--num_processes", "RANKS")  # its one launcher that starts CPU ranks, too
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
    """The framework whose command or module it is."""
    if script.program is not None:
        return next((one for one in FRAMEWORKS if Path(script.program).name in one.programs), None)
    top = script.target.partition(".")[0] if script.is_module else ""
    return next((one for one in FRAMEWORKS if top in one.packages), None)
