"""A row's precision as two types: that of the weights which are kept, and that of the arithmetic.

| the row says | weights | arithmetic |
| --- | --- | --- |
| fp32, 32-true | 32 bits | 32 bits |
| tf32 | 32 bits | TF32, whose speed is not predicted |
| bf16-mixed, 16-mixed, amp, autocast, apex O1 | 32 bits | 16 bits, under autocast (which is fp16 unless told otherwise) |
| bf16-true, 16-true, pure bf16, O3 | 16 bits, without masters | 16 bits |
| bf16, fp16 under DeepSpeed, FSDP or apex O2 | 16 bits and 32-bit masters (FSDP: 32-bit shards) | 16 bits |
| bf16 with neither | 16 bits: torch keeps no masters | 16 bits |
| fp16 with neither | 32 bits: gradients in fp16 cannot be unscaled (torch.amp.GradScaler) | fp16, under autocast |
| fp16 with LoRA | 16 bits, frozen, and 32-bit adapters: only these are unscaled | fp16 |
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.predict.published.rows import Row
from benchmarks.predict.published.words import Cell, LeftOut, cell_of, remarks_of

TYPES = ("bf16", "fp16", "fp32", "tf32")
TORCH_TYPES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Precision:
    """What a row's precision column says; `kind` None: it does not."""

    kind: str | None  # of the arithmetic: bf16, fp16 or fp32
    mixed: bool = False  # forward runs under autocast on 32-bit weights
    pure: bool = False  # weights, gradients and states are 16-bit
    masters: bool = False  # 32-bit weights are kept beside 16-bit ones
    adapters32: bool = False  # 32-bit adapters on weights of the kind
    low_masters: bool = False  # DeepSpeed's bf16_master_weights_and_grads


def precision_of(row: Row) -> Precision:
    """What the precision column says.

    Raises:
        LeftOut: it has a word that nobody knows, names no type or several, or one whose speed is not predicted.
    """
    cell = cell_of("precision", row["precision"])
    kind = _kind(cell, row["precision"])
    if kind == "tf32":
        if row.of_speed:
            raise LeftOut("speed of TF32 arithmetic")
        kind = "fp32"
    return Precision(
        kind,
        mixed="mixed" in cell or "weights32" in cell,
        pure="pure" in cell or row.says("pure bf16", "states are bf16"),
        masters="masters" in cell,
        adapters32="adapters32" in cell,
        low_masters="low-masters" in cell,
    )


def _kind(cell: Cell, text: str) -> str | None:
    if cell.unknown:
        # `unknown (fp16 likely)`: the type that the brackets guess; of two 16-bit ones either, they take the same bytes
        guessed = text.lower()
        return next((kind for kind in ("fp32", "fp16", "bf16") if kind in guessed), None)
    kind = cell.one_of("bf16", "fp16", "fp32")
    if kind in (None, "fp32") and "tf32" in cell:
        return "tf32"  # beside 16-bit arithmetic it changes next to nothing
    if kind is None and len(within := [one for one in TYPES if one in remarks_of(text)]) == 1:
        return within[0]  # `autocast (bf16)`
    if kind is None and "amp" in cell:
        return "fp16"  # torch.amp.autocast's default on CUDA
    if kind is None and "weights32" in cell and not cell.heads[1:]:
        return "fp32"
    if kind is None:
        raise LeftOut(f"column precision: {text.strip()!r} names no type")
    return kind
