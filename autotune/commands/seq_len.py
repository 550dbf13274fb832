"""`--seq-len`: the typed value, or the default from the model and the device."""

from __future__ import annotations

from autotune.bounds import MOST, shown, whole_number
from autotune.errors import UserError
from autotune.problem.hardware import Hardware
from autotune.problem.job import longest_sequence
from autotune.problem.models import ModelSpec

DEFAULT_SEQ_LEN = {"cuda": 2048, "cpu": 64}


def seq_len_of(
    asked: int | str | None, packed: bool, model: ModelSpec, lengths: tuple[tuple[int, int], ...], hardware: Hardware
) -> int:
    """Return tokens per sequence: as requested, else the longest of `--lengths`, else the device's default."""
    longest = longest_sequence(model.config)
    seq_len = _typed_seq_len(asked, longest, model.name)
    if lengths:
        most = max(tokens for tokens, _ in lengths)
        if seq_len is not None and not packed:
            raise UserError("--lengths says how long sequences are: leave --seq-len out")
        seq_len = seq_len or most
        if seq_len < most:
            raise UserError(
                f"--seq-len {seq_len}: the longest sequence of --lengths, {most} tokens, fits in no such row"
            )
    if seq_len is None:
        seq_len = min(DEFAULT_SEQ_LEN[hardware.device], longest or 10**9)
    if longest and seq_len > longest:
        raise UserError(f"--seq-len {seq_len}: {model.name} takes at most {longest} tokens")
    return seq_len


def _typed_seq_len(asked: int | str | None, longest: int | None, model: str) -> int | None:
    if asked is None or isinstance(asked, int):
        return asked
    if asked == "max":
        if longest is None:
            raise UserError(f"--seq-len max: the configuration of {model} names no longest sequence; give a number")
        return longest
    try:
        return whole_number(asked, "--seq-len", -MOST, MOST)
    except UserError:
        raise UserError(f"--seq-len {shown(asked)}: expected a number of tokens, or max") from None
