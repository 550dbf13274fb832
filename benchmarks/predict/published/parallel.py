"""How a row's GPUs share the work: stage, nodes, who runs it, and what is offloaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.predict.published.rows import Row
from benchmarks.predict.published.words import Cell, LeftOut, cell_of

STAGES = {"zero": None, "fsdp": 3, "shard-grad": 2, "no-shard": 0, "ddp": 0, "single": 0}
_SPLITS = re.compile(r"(?:tensor|pipeline|context) parallel(?:ism)?(?: size)? ?=? ?([2-9]|\d\d)")
_SEQUENCES = re.compile(r"(?:sequence parallel(?:ism)?(?: size)? ?=? ?|ulysses sp ?)(\d+)")


@dataclass(frozen=True)
class Parallel:
    """What the columns of parallelism and offloading say; None where they do not."""

    stage: int | None
    deepspeed: bool
    single: bool  # one GPU, where the row does not say how many
    nodes: int | None
    offload_optimizer: str
    offload_param: str
    sequence_ranks: int  # GPUs that share each sequence


def parallel_of(row: Row, gpus: int | None) -> Parallel:
    """What the columns say.

    Raises:
        LeftOut: it is no data parallelism that is predicted, the columns contradict each other, or nobody knows a word.
    """
    cell = cell_of("parallel", row["parallel"])
    _whole_models(cell, row)
    stage, deepspeed = _stage(cell)
    if stage is None and not deepspeed and cell.unknown and gpus == 1:
        stage = 0
    optimizer, param = _offloaded(row, cell, stage)
    nodes = re.search(r"(\d+) nodes", row["parallel"].lower() + " " + row["notes"].lower())
    single = "single" in cell and not deepspeed
    found = int(nodes.group(1)) if nodes else None
    return Parallel(stage, deepspeed, single, found, optimizer, param, _sequence_ranks(cell, row))


def _sequence_ranks(cell: Cell, row: Row) -> int:
    """GPUs that share each sequence, as the column or the notes say; 1 where neither does."""
    if "sp" in cell:
        if (number := cell.number("sp")) is None:
            raise LeftOut("how many GPUs share a sequence is not stated")
        return int(number)
    said = (one for one in _SEQUENCES.finditer(row["notes"].lower()) if row.says(one.group()))
    return max((int(one.group(1)) for one in said), default=1)


def _whole_models(cell: Cell, row: Row) -> None:
    for way in ("tp", "pp", "cp", "ep"):
        if way in cell and cell.number(way) != 1:
            raise LeftOut("tensor or pipeline parallel")
    if "other" in cell or any(row.says(one.group()) for one in _SPLITS.finditer(row["notes"].lower())):
        raise LeftOut("tensor or pipeline parallel")
    if "zero++" in cell:
        raise LeftOut("ZeRO++")
    if "hybrid-shard" in cell:
        raise LeftOut("states sharded within a node only")


def _stage(cell: Cell) -> tuple[int | None, bool]:
    """(ZeRO's stage, whether DeepSpeed runs it)."""
    for name in ("shard-grad", "no-shard", "fsdp"):
        if name in cell:
            return STAGES[name], False
    if "zero" in cell.heads:
        number = cell.number("zero")
        if number is not None and number not in (0, 1, 2, 3):
            raise LeftOut(f"column parallel: no stage {number:g}")
        return None if number is None else int(number), True
    if any(name in cell.heads for name in ("ddp", "single")):
        return 0, False
    return None, False


def _offloaded(row: Row, cell: Cell, stage: int | None) -> tuple[str, str]:
    """(where the optimizer's states are, where parameters are): the columns' word, else what stands with the stage.

    `ZeRO-3 offload` and FSDP's CPUOffload move both; below stage 3 only states can be moved.

    Raises:
        LeftOut: a column denies what stands with the stage, or the place is not known.
    """
    found = {}
    for column in ("offload_optimizer", "offload_param"):
        said = cell_of(column, row[column])
        found[column] = None if said.unknown else said.one_of("cpu", "nvme") or "none"
        if "nvme" in said.remarked:
            found[column] = "nvme"
    where = "nvme" if "offload-nvme" in cell else "cpu"
    either = "offload" in cell or "offload-nvme" in cell
    asked = {
        "offload_optimizer": either or "offload-optimizer" in cell,
        "offload_param": "offload-param" in cell or (stage == 3 and either),
    }
    if any(asked.values()) and {found[column] for column, wanted in asked.items() if wanted} == {"none"}:
        raise LeftOut("columns parallel and offload contradict each other")
    for column, wanted in asked.items():
        if wanted and found[column] is None:
            found[column] = where
    return found["offload_optimizer"] or "none", found["offload_param"] or "none"
