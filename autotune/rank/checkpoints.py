"""Checkpoints: load, convert, verify and choose."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.problem.candidate import ZERO_DEFAULTS
from autotune.rank.versions import deepspeed_release, takes_states_in_dicts
from autotune.util.interpreter import module_command

# -- load --------------------------------------------------------------------------------------------------------------
#
# Load a checkpoint that another DeepSpeed config wrote, directly if the layouts are equal. Any other is first converted
# to DeepSpeed's universal format.

# A suffix of autotune's own. `TAG_universal` next to the checkpoint belongs to the user, as does the `latest_universal`
# that DeepSpeed's converter writes next to its output.
_SUFFIX = "_universal_autotune"
_EVERY_SUB_GROUP = (0, 18)  # release of DeepSpeed since which conversion covers all sub-groups of stage 3
_MODEL_STATES = "mp_rank_00_model_states.pt"
_LOOK_SECONDS = 1.0  # poll interval of ranks that wait for the first rank
_DONE = itertools.count()  # numbers the tasks of the first rank; all ranks count alike
_WELL = "done"


def layout(config: dict[str, Any]) -> tuple[object, ...]:
    """Return the format of a config's checkpoints: kind, size of sub-groups, and what lies on NVMe (optimizer, parameters).

    Configs with equal layouts load each other's checkpoints.
    Source: each config was loaded under each other one with deepspeed 0.19.8 (docs/recovery.md; tests/test_scripts.py
    loads some). Stages 1 and 2 save the same flat partitions. Stage 3 partitions every parameter and saves sub-groups
    of them. Offloading to main memory changes neither. With NVMe, states lie outside the checkpoint's folder.
    """
    zero = config.get("zero_optimization") or {}
    stage = int(zero.get("stage", 0))
    nvme = tuple(
        isinstance(zero.get(part), dict) and zero[part].get("device") == "nvme"
        for part in ("offload_optimizer", "offload_param")
    )
    if stage == 3:
        return 3, int(float(zero.get("sub_group_size", ZERO_DEFAULTS["sub_group_size"]))), *nvme
    return "flat" if stage else 0, None, *nvme


def convertible(before: dict[str, Any], after: dict[str, Any], deepspeed: tuple[int, ...]) -> bool:
    """Return True if checkpoints of config `before` can be converted to load under `after`.

    Conversion works from stage 1, 2 or 3 to stage 3. DeepSpeed's converter cannot read checkpoints of stage 0. Before
    0.18.0 only the first sub-group of stage 3 is read and written. Conversion from stage 3 to a lower stage is never needed,
    because a lower stage takes more memory.

    Args:
        deepspeed: DeepSpeed release of the ranks.
    """
    source, target = layout(before), layout(after)
    read = source[0] in ("flat", 3) and deepspeed >= _EVERY_SUB_GROUP
    return read and target[0] == 3 and not any((*source[2:], *target[2:]))


def written_under(folder: Path) -> dict[str, Any] | None:
    """Return the DeepSpeed config under which a checkpoint was written, or None without a checkpoint."""
    return model_states(folder).get("ds_config")


def model_states(folder: Path) -> dict[str, Any]:
    """Return the first rank's model states with tensors memory-mapped, or an empty dict without a checkpoint."""
    import torch

    states = next(iter(sorted(folder.glob(f"*{_MODEL_STATES}"))), None)
    return dict(torch.load(states, map_location="cpu", mmap=True, weights_only=False)) if states else {}


def load_any(
    load: Callable[..., Any],
    engine: Any,
    load_dir: str,
    tag: str | None = None,
    *args: Any,
    convert: bool,
    print_line: Callable[[str], None],
    **kwargs: Any,
) -> Any:
    """Load a checkpoint that another config of the recovery ladder may have written. Every rank must call this.

    Args:
        load: DeepSpeed's own `load_checkpoint`, which defines the other arguments and the result.
        convert: convert a checkpoint that does not load directly. The universal copy lies next to it and is removed
            after the load.
        print_line: called on the first rank with a message when a checkpoint is converted.

    Raises:
        RuntimeError: the checkpoint cannot be converted.
    """
    own = settings_of(engine) if engine.optimizer is not None else None
    written = _to_convert(engine, load_dir, tag) if convert and own is not None else None
    if written is None or own is None:
        found = load(engine, load_dir, tag, *args, **kwargs)
    else:
        found = _load_converted(load, engine, *written, own, print_line, *args, **kwargs)
    if found and found[0] and own is not None:
        repair_optimizer(engine, own)
    return found


def _to_convert(engine: Any, load_dir: str, tag: str | None) -> tuple[Path, int] | None:
    """Return folder and ZeRO stage of the checkpoint, or None if conversion is unnecessary or impossible."""
    name = tag if tag is not None else tag_of(Path(load_dir))
    folder = Path(load_dir) / str(name)
    before = written_under(folder) if name is not None else None
    if before is None or layout(before) == layout(engine.config):
        return None
    if not convertible(before, engine.config, deepspeed_release()):
        return None
    return folder, int(before["zero_optimization"]["stage"])


def _load_converted(
    load: Callable[..., Any],
    engine: Any,
    folder: Path,
    stage: int,
    own: list[dict[str, Any]],
    print_line: Callable[[str], None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    import torch

    place = folder.with_name(folder.name + _SUFFIX)
    universal = place / folder.name
    first = torch.distributed.get_rank() == 0
    if first:
        print_line(f"converting {folder} for stage 3; it was written under stage {stage}")
    _by_the_first(lambda: convert(folder, universal, torch.distributed.get_world_size()))
    settings = engine._config
    settings.load_universal_checkpoint = True
    try:
        found = load(engine, str(place), universal.name, *args, **kwargs)
    finally:
        settings.load_universal_checkpoint = False
    _keep_groups(_inner(engine).param_groups, own)
    _load_buffers(engine.module, folder)
    torch.distributed.barrier()
    if first:
        shutil.rmtree(place, ignore_errors=True)
    return found


def _by_the_first(do: Callable[[], None]) -> None:
    """Run a task that may take hours on the first rank; the other ranks poll the store for its end.

    A pending collective would time out instead, and NCCL's watchdog would then end its rank.

    Raises:
        RuntimeError: the task failed on the first rank. Raised on every rank, with the first rank's message.
    """
    import torch

    store = torch.distributed.distributed_c10d._get_default_store()
    key = f"autotune/done-by-the-first/{next(_DONE)}"
    if torch.distributed.get_rank() == 0:
        end = "the first rank was stopped"
        try:
            do()
            end = _WELL
        except Exception as error:
            end = f"{error} (on the first rank)"
            raise
        finally:
            store.set(key, end)
        return
    while not store.check([key]):
        time.sleep(_LOOK_SECONDS)
    if (end := store.get(key).decode()) != _WELL:
        raise RuntimeError(end)


def settings_of(engine: Any) -> list[dict[str, Any]]:
    """Return the settings (learning rate, weight decay, …) of every parameter group of the inner optimizer."""
    return [{k: v for k, v in group.items() if k != "params"} for group in _inner(engine).param_groups]


def repair_optimizer(engine: Any, own: list[dict[str, Any]]) -> None:
    """Repair the optimizer after a load.

    With offloading, its class of Adam differs from the one whose states were saved. Settings missing in its groups are
    taken from `own`, the settings before the load. Each state's `step` gets the type that this class reads.
    """
    import torch

    optimizer = _inner(engine)
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        for key in kept.keys() - group.keys():
            group[key] = kept[key]
    deepspeeds = type(optimizer).__module__.startswith("deepspeed")
    beside = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        if "step" in state:
            count, device = float(state["step"]), parameter.device if beside else torch.device("cpu")
            state["step"] = int(count) if deepspeeds else torch.tensor(count, dtype=torch.float32, device=device)


def _inner(engine: Any) -> Any:
    """Return the optimizer inside ZeRO's."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def convert(folder: Path, universal: Path, ranks: int) -> None:
    """Convert the checkpoint in `folder` to DeepSpeed's universal format in the form that stage 3 loads.

    Raises:
        RuntimeError: DeepSpeed's converter fails; the message ends with its last line.
    """
    shutil.rmtree(universal, ignore_errors=True)  # left by a launch that was killed during a conversion
    universal.parent.mkdir(parents=True, exist_ok=True)
    folders = ("--input_folder", str(folder), "--output_folder", str(universal))
    command = module_command(sys.executable, "deepspeed.checkpoint.ds_to_universal", *folders)
    flat = (folder / _MODEL_STATES).exists()
    if flat:  # the converter expects fields that Megatron-DeepSpeed adds to its checkpoints
        command.append("--inject_missing_state")
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, encoding="utf-8"
    )
    if done.returncode:
        why = ["no reason given", *done.stderr.strip().splitlines()][-1]
        raise RuntimeError(f"checkpoint {folder} cannot be converted: {why}")
    if flat:
        _name_for_stage3(universal, ranks)
        if not takes_states_in_dicts():
            _bare_states(universal)


def _name_for_stage3(universal: Path, ranks: int) -> None:
    """Add the file names and the optimizer state that stage 3 looks for.

    DeepSpeed (0.16.0 to 0.19.8) converts checkpoints of stages 1 and 2 only for those stages.
    """
    import torch

    for rank in range(ranks):
        os.link(universal / _MODEL_STATES, universal / f"zero_pp_rank_{rank}_{_MODEL_STATES}")
    path = universal / "zero" / "optimizer_state.pt"
    state = torch.load(path, map_location="cpu", weights_only=False)
    steps = next(iter((universal / "zero").glob("*/step.pt")), None)
    step = torch.load(steps, map_location="cpu", weights_only=False) if steps else 0
    state["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": state["param_groups"]}
    torch.save(state, path)


def _bare_states(universal: Path) -> None:
    """Unwrap the tensors from the dicts in which the converter writes them, in place."""
    import torch

    for path in (universal / "zero").rglob("*.pt"):
        found = torch.load(path, map_location="cpu", weights_only=False) if path.parent.name != "zero" else None
        if isinstance(found, dict):
            torch.save(found["param"], path)


def _keep_groups(groups: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Restore the own settings of every parameter group.

    When stage 3 loads a universal checkpoint, it sets all groups to the first group's settings. The learning rate keeps
    its ratio to that of the first group.
    """
    first = own[0].get("initial_lr", own[0]["lr"])
    for group, kept in zip(groups, own, strict=True):
        share = kept.get("initial_lr", kept["lr"]) / first if first else 1.0
        group["lr"] *= share
        if "initial_lr" in kept:
            group["initial_lr"] = kept["initial_lr"]
        group.update({key: kept[key] for key in kept if key not in ("lr", "initial_lr", "step")})


def _load_buffers(module: Any, folder: Path) -> None:
    """Load the module's buffers from the original checkpoint, because universal ones hold only parameters."""
    saved = model_states(folder).get("module") or {}
    for name, buffer in module.named_buffers():
        if name in saved:
            buffer.copy_(saved[name])


# -- checkpoint shards -------------------------------------------------------------------------------------------------
#
# Check that the files of a DeepSpeed checkpoint are whole, by a few bytes of each, with the standard library only.
#
# A power cut, a full disk or a lost write of a file server leaves files that are truncated, empty or all zeros. Without
# a check, this is noticed only at the load.

# ZeRO files owned by one rank (`pp` counts data parallel ones); files of experts belong to a group.
_OWN = re.compile(r"(?<!ex)pp_rank_(\d+)_.*_(model|optim)_states\.pt")
_SHARDS_STATES = "*_states.pt"
_ZIP, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"  # written by torch since 1.6; older files have no end mark
_TAIL_BYTES = 1024  # torch writes no comment after the mark, other writers a short one


@dataclass(frozen=True)
class CheckpointShare:
    """Assign the files of a checkpoint to ranks for checking.

    A rank checks its own files. The first rank of each machine checks all files without an owner. Every file is thus
    checked, on shared and on local disks.
    """

    rank: int
    world: int
    local: int  # rank on its own host

    @property
    def random(self) -> str:
        """Name of the file with the rank's random states in a Trainer checkpoint."""
        return "rng_state.pth" if self.world == 1 else f"rng_state_{self.rank}.pth"

    def has(self, name: str) -> bool:
        """Return True if this rank checks the file."""
        owner = _OWN.search(name)
        return int(owner[1]) == self.rank if owner and int(owner[1]) < self.world else self.local == 0


def is_cut_off(file: Path) -> bool:
    """Return True if a file written by `torch.save` is missing, empty or truncated."""
    try:
        with file.open("rb") as opened:
            head = opened.read(len(_ZIP))
            if head != _ZIP:
                return not any(head)  # empty, or a hole in the file
            size = os.fstat(opened.fileno()).st_size
            opened.seek(max(0, size - _TAIL_BYTES))
            return _ZIP_END not in opened.read()
    except OSError:
        return True


def tag_of(folder: Path, latest: str = "latest") -> str | None:
    """Return the name of the tag in the file that DeepSpeed reads in the folder, or None."""
    try:
        return (folder / latest).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def is_damaged(folder: Path, part: CheckpointShare) -> bool:
    """Return True if the tag's folder is empty, or a file there that this rank checks is truncated."""
    files = list(folder.glob(_SHARDS_STATES))
    return not files or any(is_cut_off(file) for file in files if part.has(file.name))


def lacks_own_files(folder: Path, part: CheckpointShare) -> bool:
    """Return True if other ranks have own files in the tag's folder and this rank has none."""
    owners: dict[str, set[int]] = {}
    for file in folder.glob(_SHARDS_STATES):
        if match := _OWN.search(file.name):
            owners.setdefault(match[2], set()).add(int(match[1]))
    return any(part.rank not in ranks for ranks in owners.values())


@dataclass(frozen=True)
class TaggedFolderView:
    """One rank's view of a folder into which a script saves checkpoints itself."""

    latest: str | None
    whole: dict[str, int]  # time of writing in ns (clock of the file server) of each tag that is whole for this rank


def tags_in(folder: Path, part: CheckpointShare) -> TaggedFolderView:
    """Return this rank's view of the folder."""
    whole = {}
    for tag in {file.parent for file in folder.glob(f"*/{_SHARDS_STATES}")}:
        if not is_damaged(tag, part) and not lacks_own_files(tag, part):
            whole[tag.name] = max((file.stat().st_mtime_ns for file in tag.glob(_SHARDS_STATES)), default=0)
    return TaggedFolderView(tag_of(folder), whole)


def instead_of_latest(seen: Sequence[TaggedFolderView], bad: set[str]) -> str | None:
    """Return the newest tag that is whole for all ranks if the latest is damaged or in `bad`.

    None means that no tag is better than the latest.

    Args:
        seen: views of all ranks, the first rank's first.
    """
    latest, whole = seen[0].latest, set.intersection(*(set(one.whole) for one in seen))
    if latest is None or (latest in whole and latest not in bad):
        return None
    times = seen[0].whole
    return max((tag for tag in whole - bad - {latest}), key=lambda tag: times[tag], default=None)


# -- trainer checkpoints -----------------------------------------------------------------------------------------------
#
# Select the Trainer checkpoint from which a restarted script resumes, with the standard library only.
#
# A script may call `train` several times with one output folder, and each call counts steps from zero. A call therefore
# never resumes from a checkpoint of another call.

STATE = "trainer_state.json"  # written last
BEFORE = -1  # in place of a call's number: present before this launch
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass
class CheckpointLedger:
    """Writers of the checkpoints in one output folder.

    Files are identified by their times. Because clocks differ and jump, these are never compared with a clock.

    Attributes:
        found: time (clock of the file server, in ns) and call of each checkpoint, by the path of its state.
        last: the last call that began, in this or an earlier attempt.
        call: current call of this attempt.
    """

    folder: Path
    found: dict[str, tuple[int, int]] = field(default_factory=dict)
    last: int = BEFORE
    call: int = -1

    @classmethod
    def of(cls, folder: Path, state: dict[str, Any] | None) -> CheckpointLedger:
        """Restore from `to_json`; None starts without knowledge of the folder."""
        if state is None:
            return cls(folder)
        return cls(folder, {path: (at, by) for path, (at, by) in state["found"].items()}, state["last"])

    def to_json(self) -> dict[str, Any]:
        """Return the state that the parent passes to the ranks of the next attempt."""
        return {"found": self.found, "last": self.last}

    def begin(self) -> None:
        """Begin a new call of `train`, and attribute all new checkpoints to the previous call."""
        found = {}
        for state in self.folder.glob(f"checkpoint-*/{STATE}"):
            with suppress(OSError):
                at = state.stat().st_mtime_ns
                known = self.found.get(str(state))
                found[str(state)] = (at, known[1] if known is not None and known[0] == at else self.last)
        self.call += 1
        self.found, self.last = found, self.call

    def seen(self, part: CheckpointShare, given: Any, bad: Collection[str] = ()) -> OutputFolderView:
        """Return this rank's view of the folder after `begin`.

        Args:
            given: the script's `resume_from_checkpoint`.
            bad: folders that an attempt of this launch failed to load.
        """
        readable, whole, failed, by = set(), set(), set(), {}
        for path, (_, call) in self.found.items():
            try:
                step = int(json.loads(Path(path).read_text(encoding="utf-8"))["global_step"])
            except (OSError, ValueError, KeyError, TypeError):
                continue
            checkpoint = Path(path).parent
            by[step] = call
            tag = tag_of(checkpoint)  # DeepSpeed's tag
            if tag is None or not is_damaged(checkpoint / tag, part):
                readable.add(step)
                if (
                    tag is not None
                    and not lacks_own_files(checkpoint / tag, part)
                    and not is_cut_off(checkpoint / part.random)
                ):
                    whole.add(step)
            if tag is not None and str(checkpoint / tag) in bad:
                failed.add(step)
        return OutputFolderView(readable, whole, by, self._named(given), failed)

    def _named(self, given: Any) -> int | None:
        """Return the step of the checkpoint in this folder that Trainer would resume from, or None."""
        if given is True:
            names = (_NAME.fullmatch(path.name) for path in self.folder.glob("checkpoint-*") if path.is_dir())
            return max((int(name[1]) for name in names if name), default=None)
        if not isinstance(given, str | Path):
            return None
        path = Path(given)
        name = _NAME.fullmatch(path.name)
        return int(name[1]) if name and path.is_dir() and path.resolve().parent == self.folder else None

    def path(self, step: int) -> Path:
        """Return the path of a checkpoint in Trainer's naming."""
        return self.folder / f"checkpoint-{step}"


@dataclass(frozen=True)
class OutputFolderView:
    """One rank's view of an output folder. Checkpoints are identified by step."""

    readable: set[int]  # checkpoints with a state and no damaged file
    whole: set[int]  # readable ones that also have DeepSpeed's and this rank's files
    by: dict[int, int]  # call that wrote each
    named: int | None  # step named by the script
    failed: set[int] = field(default_factory=set)  # failed to load, although they look whole

    @property
    def newest_before(self) -> int | None:
        """The newest checkpoint from before this launch, or None."""
        return max((step for step in self.readable if self.by.get(step) == BEFORE), default=None)


@dataclass(frozen=True)
class Choice:
    """Checkpoint to resume from in place of the script's choice; a step of None starts from the beginning."""

    step: int | None
    not_whole: int | None = None  # newer checkpoint that was skipped because it is damaged


def checkpoint_to_resume(seen: Sequence[OutputFolderView], call: int) -> Choice | None:
    """Return the checkpoint from which this call resumes, or None to keep the script's choice.

    The first choice is the newest whole checkpoint of this call in this launch, unless the script names a newer one. If
    the named one is damaged, the newest whole checkpoint of any call replaces it. A checkpoint that failed to load is a
    last resort: the cause may lie elsewhere, and training must not restart because of it.

    Args:
        seen: views of all ranks, the first rank's first. Machines may see different files. The first rank's view gives
            the writers, and a checkpoint counts as whole if it is so for all ranks.
        call: number of this call.
    """
    by, named, failed = seen[0].by, {one.named for one in seen}, set.union(*(one.failed for one in seen))
    whole = set.intersection(*(one.whole for one in seen))
    mine = {step for step in whole if by.get(step) == call}
    own = max(mine - failed or mine, default=None)
    if own is not None:
        newer = len(named) == 1 and all(step in whole - failed and step > own for step in named)
        cut_off = {step for step, writer in by.items() if writer == call and step > own} - whole
        return None if newer else Choice(own, max(cut_off, default=None))
    # an older launch may have had other ranks
    older = {step for step in set.intersection(*(one.readable for one in seen)) if by.get(step) == BEFORE}
    good = (whole | older) - failed
    if given_up := {step for step in named if step in failed} if good else set():
        return Choice(max(good), max(given_up))
    not_whole = {step for step in named if step is not None} - whole - older
    return Choice(max(good or whole | older, default=None), max(not_whole)) if not_whole else None
