"""Options and commands of earlier versions, and what replaces them."""

from __future__ import annotations

_SBATCH = "submit a batch script that calls `autotune run --executor slurm`, with this as an #SBATCH line"

# by flag or command: what to do instead, as the end of a message
_REPLACEMENTS = {
    "gallery": "every search starts from its own predictions",
    "share": "send others runs/NAME/NAME.html of `autotune report NAME`",
    "--no-gallery": "remove it; every search starts from its own predictions",
    "--track": "call autotune.tune(callbacks=[...]) from Python, or open the study in optuna-dashboard",
    "--verbose": "use --log-file FILE, which has every reason and phase",
    "-v": "use --log-file FILE, which has every reason and phase",
    "--quiet": "use --json, which prints one object and no progress",
    "-q": "use --json, which prints one object and no progress",
    "-y": "remove it; nothing is asked, and CPU ranks need --device cpu",
    "--yes": "remove it; nothing is asked, and CPU ranks need --device cpu",
    "--quantize": "write --lora r=16,quantize=nf4",
    "--packing": "remove it; --lengths with --seq-len packs sequences into rows of that length",
    "--compile": "give a --space with `fixed: {compile: true}`",
    "--tolerance": "remove it, or use --exhaustive to spend the whole budget",
    "--isolation": "remove it; ranks start cold where a fork is unsafe",
    "--parallel-offload": "remove it; candidates that offload are measured alone",
    "--ray-address": "set RAY_ADDRESS=HOST:PORT",
    "--max-positions": "give --model a folder whose config.json has the scaled max_position_embeddings",
    "--compare": "name several cards: --gpu rtx4090,a100-80gb,h100",
    "--price": "multiply the printed GPU-hours by your price",
    "record": "`benchmarks/search/record.py` of a checkout writes tables of studies",
    "diff": "compare the output of `autotune show STUDY --json` for each study",
    "--html": "redirect the output of `autotune plan`, or use --json",
    "--partition": _SBATCH,
    "--account": _SBATCH,
    "--time": _SBATCH,
    "--slurm": _SBATCH,
    "--trust": "a study supplies no code; add the --python, --map and --ds-config with which it was tuned",
    "--sync": "copy the folder to the same path on every machine (`rsync -a FOLDER/ HOST:FOLDER/`), or use a shared file system",
}


def removed(word: str) -> str | None:
    """Return one line about a removed command or option, as typed; None if no earlier version had it."""
    replacement = _REPLACEMENTS.get(word)
    return f"{word} is gone: {replacement}" if replacement is not None else None
