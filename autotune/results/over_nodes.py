"""A training over several nodes, as launchers and Slurm start it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.group.environment import assignments

PORT = 29500  # torchrun's own default (torch/distributed/run.py)


def first_host(hostfile: Path | None) -> str:
    """Where the ranks meet: the first host of the file that `run` wrote beside its study."""
    lines = hostfile.read_text().split() if hostfile is not None and hostfile.is_file() else []
    return lines[0] if lines else "FIRST_NODE"


def over_nodes(words: Sequence[str], nodes: int, per_node: int, hostfile: Path | None) -> tuple[list[str], bool]:
    """A command of one machine with `per_node` ranks as one of `nodes` machines; whether it is to be started on each of them.

    Args:
        words: see `problem.script.training_command`.
        hostfile: DeepSpeed's launcher reads it, and starts the other machines itself.
    """
    launcher, rest = words[0], list(words[1:])
    if launcher == "torchrun":
        endpoint = f"{first_host(hostfile)}:{PORT}"
        meet = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", "autotune", "--rdzv-endpoint", endpoint]
        return [launcher, *meet, *(word for word in rest if word != "--standalone")], True
    if launcher == "deepspeed":
        rest = _without(rest, "--num_gpus", "--include")
        return [launcher, "--hostfile", str(hostfile or "HOSTFILE"), "--num_gpus", str(per_node), *rest], False
    if launcher == "accelerate" and rest[:1] == ["launch"]:
        rest = _without(rest[1:], "--num_processes", "--num_machines")
        all_ranks = ["--num_processes", str(nodes * per_node), "--num_machines", str(nodes)]
        meet = ["--machine_rank", "RANK_OF_THIS_NODE", "--main_process_ip", first_host(hostfile)]
        how = ["--main_process_port", str(PORT), "--deepspeed_multinode_launcher", "standard"]
        return [launcher, "launch", *all_ranks, *meet, *how, *rest], True
    return list(words), True


def _without(words: list[str], *options: str) -> list[str]:
    """The words without these options of a launcher and their values; what comes after the first that is none stays."""
    found, at = [], 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] in options:
            at += 2
            continue
        if words[at].partition("=")[0] not in options:
            found.append(words[at])
        at += 1
        if at < len(words) and not words[at].startswith("-") and found and "=" not in found[-1]:
            found.append(words[at])
            at += 1
    return [*found, *words[at:]]


def sbatch_script(
    words: Sequence[str], *, name: str, nodes: int, per_node: int, device: str, cwd: str, variables: Mapping[str, str]
) -> str:
    """A batch script for Slurm: one torchrun a node, which meet at the allocation's first.

    Args:
        words: what each rank runs, the launcher left out.
        variables: set for all of them.
    """
    gpus = f"#SBATCH --gpus-per-node={per_node}\n" if device == "cuda" else ""
    exports = f"export {assignments(variables)}\n" if variables else ""
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}# add what your cluster asks for: --partition, --account, --time, --cpus-per-task
set -euo pipefail
cd {shlex.quote(cwd)}
{exports}first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \\
  --rdzv-endpoint "$first:{PORT}" {shlex.join(words)}
"""
