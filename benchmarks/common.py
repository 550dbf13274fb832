"""What the benchmarks share: a table, a JSON file, and a plain training."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autotune.group.environment import rank_environment, threads_per_rank
from autotune.problem.job import Job


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(name for row in rows for name in row))  # a row may lack some
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        values = (row.get(name) for name in columns)
        table.add_row(*("—" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))
    Console(width=max(120, Console().width)).print(table)


def write_json(path: Path | None, data: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")


def train_plainly(job: Job, config: dict[str, Any], checkpointing: bool, steps: int, device: str) -> dict[str, float]:
    """Trains with `config` under torchrun, by a script that knows nothing of autotune."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ds.json").write_text(json.dumps(config))
        (Path(folder) / "model.json").write_text(json.dumps(job.model.config))
        threads = threads_per_rank(job.ranks)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(job.ranks),
            str(Path(__file__).parent / "train_plain.py"),
            f"{folder}/ds.json",
            f"{folder}/model.json",
            str(job.seq_len),
            str(steps),
            "--precision",
            job.precision,
            *(["--checkpointing"] if checkpointing else []),
        ]
        env = {**rank_environment(device), "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    line = next((line for line in done.stdout.splitlines() if line.startswith("TRAINED ")), None)
    if line is None:
        raise RuntimeError(done.stderr[-3000:])
    return dict(json.loads(line.removeprefix("TRAINED ")))
