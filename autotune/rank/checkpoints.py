"""Load a checkpoint that another DeepSpeed config wrote.

A checkpoint of the same layout is loaded directly. Any other is first converted to DeepSpeed's universal format.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from autotune.interpreter import module_command
from autotune.problem.candidate import ZERO_DEFAULTS
from autotune.problem.cpus import usable_cpus
from autotune.problem.host import host_available_bytes
from autotune.rank.universal import every_sub_group
from autotune.rank.versions import deepspeed_release, knows_every_sub_group, takes_states_in_dicts

# A suffix of autotune's own. `TAG_universal` next to the checkpoint belongs to the user, as does the `latest_universal`
# that DeepSpeed's converter writes next to its output.
_SUFFIX = "_universal_autotune"
_MODEL_STATES = "mp_rank_00_model_states.pt"
_LOOK_SECONDS = 1.0  # poll interval of ranks that wait for the first rank
_DONE = itertools.count()  # numbers the tasks of the first rank; all ranks count alike
_WELL = "done"
_MOST_WORKERS = 16  # more processes slow each other down at one disk


def layout(config: dict[str, Any]) -> tuple[object, ...]:
    """Return the format of a config's checkpoints. Configs with equal layouts load each other's checkpoints.

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
        return 3, int(float(zero.get("sub_group_size", ZERO_DEFAULTS["sub_group_size"]))), nvme
    return ("flat" if stage else 0), nvme


def convertible(before: dict[str, Any], after: dict[str, Any], deepspeed: tuple[int, ...]) -> bool:
    """Return True if checkpoints of config `before` can be converted to load under `after`.

    Conversion works from stage 1, 2 or 3 to stage 3. DeepSpeed's converter cannot read checkpoints of stage 0. Before
    0.18.0 it reads only the first sub-group of stage 3. Conversion from stage 3 to a lower stage is never needed,
    because a lower stage takes more memory.

    Args:
        deepspeed: DeepSpeed release of the ranks.
    """
    source, target = layout(before), layout(after)
    read = source[0] == "flat" or (source[0] == 3 and knows_every_sub_group(deepspeed))
    return read and target[0] == 3 and not any((*_nvme(source), *_nvme(target)))


def _nvme(found: tuple[object, ...]) -> tuple[bool, ...]:
    places = found[-1]
    assert isinstance(places, tuple)
    return places


def written_under(folder: Path) -> dict[str, Any] | None:
    """Return the DeepSpeed config under which a checkpoint was written, or None without a checkpoint."""
    config = model_states(folder).get("ds_config")
    return config if isinstance(config, dict) else None


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
    say: Callable[[str], None],
    **kwargs: Any,
) -> Any:
    """Load a checkpoint that another config of the recovery ladder may have written. Every rank must call this.

    Args:
        load: DeepSpeed's own `load_checkpoint`, which defines the other arguments and the result.
        convert: convert a checkpoint that does not load directly. The universal copy lies next to it and is removed
            after the load.
        say: called on the first rank with a message when a checkpoint is converted.

    Raises:
        RuntimeError: the checkpoint cannot be converted.
    """
    own = settings_of(engine) if engine.optimizer is not None else None
    written = _to_convert(engine, load_dir, tag) if convert and own is not None else None
    if written is None or own is None:
        found = load(engine, load_dir, tag, *args, **kwargs)
    else:
        found = _load_converted(load, engine, *written, own, say, *args, **kwargs)
    if found and found[0] and own is not None:
        mend(engine, own)
    return found


def _to_convert(engine: Any, load_dir: str, tag: str | None) -> tuple[Path, int] | None:
    """Return folder and ZeRO stage of the checkpoint, or None if conversion is unnecessary or impossible."""
    latest = Path(load_dir) / "latest"
    name = tag if tag is not None else latest.read_text(encoding="utf-8").strip() if latest.exists() else None
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
    say: Callable[[str], None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    import torch

    place = folder.with_name(folder.name + _SUFFIX)
    universal = place / folder.name
    first = torch.distributed.get_rank() == 0
    if first:
        say(f"converting {folder} for stage 3; it was written under stage {stage}")
    _by_the_first(lambda: convert(folder, universal, torch.distributed.get_world_size()))
    settings = engine._config
    settings.load_universal_checkpoint = True
    whole = nullcontext() if knows_every_sub_group(deepspeed_release()) else every_sub_group(engine)
    try:
        with whole:
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


def mend(engine: Any, own: list[dict[str, Any]]) -> None:
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
    command = module_command(sys.executable, "deepspeed.checkpoint.ds_to_universal", *folders, *_workers(folder))
    flat = (folder / _MODEL_STATES).exists()
    if flat:  # the converter expects fields that Megatron-DeepSpeed adds to its checkpoints
        command.append("--inject_missing_state")
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, encoding="utf-8"
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"checkpoint {folder} cannot be converted: {why}")
    if flat:
        _name_for_stage3(universal, ranks)
        if not takes_states_in_dicts(deepspeed_release()):
            _bare_states(universal)


def _workers(folder: Path) -> list[str]:
    """Return the converter's options for its numbers of processes, limited by CPUs and free memory.

    An extracting process holds a whole file of optimizer states and a copy of its largest slice. A merging process
    holds a parameter three times in 32 bits.
    """
    # half: ranks grow during the conversion
    most, free = min(usable_cpus(), _MOST_WORKERS), host_available_bytes() // 2
    files = [file.stat().st_size for file in folder.glob("*optim_states.pt")]
    shapes = model_states(folder).get("param_shapes") or []
    parameters = [math.prod(shape) for group in shapes for shape in group.values()]
    extract = min(most, len(files), free // (2 * max(files, default=1)))
    merge = min(most, len(parameters), free // (3 * 4 * max(parameters, default=1)))
    return ["--num_extract_workers", str(max(1, extract)), "--num_merge_workers", str(max(1, merge))]


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
