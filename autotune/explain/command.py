"""`autotune explain`: read the log of a failed training. Nothing is started, and nothing is fetched."""

from __future__ import annotations

import re
import sys
from codecs import BOM_UTF16_LE
from pathlib import Path

from autotune.errors import UserError
from autotune.explain.explanation import Explanation, explain
from autotune.explain.log import find_failure
from autotune.explain.training import read_training
from autotune.problem.ds_config import load_ds_config
from autotune.util.bounds import bounded_bytes
from autotune.util.units import MIB

MOST_LOG_BYTES = 64 * MIB
_END = 2**20  # characters at each end of a long log, where it tells of the training
_EXPECTED = "expected the output of a training that failed, from its start up to the traceback"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # codes of a terminal


def explain_log(
    log: Path | None, model: str | None = None, gpus: int | None = None, ds_config: Path | None = None
) -> Explanation:
    """Explain the failure that a log shows.

    Args:
        log: the file; None: standard input.
        model: a shipped name, a folder, another name with its size (`my-model-7b`) or a number of parameters (`6.74B`), if the
            log does not name it.
        gpus: number of ranks, if the log does not tell.
        ds_config: the training's DeepSpeed config, if the log does not show it.

    Raises:
        UserError: the log cannot be read or shows no failure, or an option is wrong.
    """
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus {gpus}: expected at least 1")
    name = str(log or "standard input")
    try:
        data = sys.stdin.buffer.read(MOST_LOG_BYTES + 1) if log is None else bounded_bytes(log, MOST_LOG_BYTES)
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}: {_EXPECTED}") from None
    if len(data) > MOST_LOG_BYTES:
        raise UserError(f"{name} has more than {MOST_LOG_BYTES // MIB} MiB: give the part around the first error")
    encoding = "utf-16" if data.startswith(BOM_UTF16_LE) else "utf-8"  # `>` of PowerShell writes UTF-16
    text = _CONTROL.sub("", data.decode(encoding, errors="replace")).replace("\r", "\n")
    config = load_ds_config(ds_config) if ds_config else None
    training = read_training(f"{text[:_END]}\n{text[-_END:]}", model, gpus, config)
    failure = find_failure(text)
    if failure is None:
        raise UserError(f"{name} shows no failure: {_EXPECTED}")
    return explain(failure, training)
