"""Commands that start a training over several nodes, through launchers and Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.group.environment import assignments
from autotune.masking import names_secret, shell_text
from autotune.problem.command_line import ACCELERATE, DEEPSPEED, TORCHRUN, options_without, started, take_apart
from autotune.streams import printable

PORT = 29500  # torchrun's default (torch/distributed/run.py)


def first_host(hostfile: Path | None) -> str:
    """Return the host for the rendezvous: the first in the hostfile that `run` wrote next to its study, without ssh's user
    name."""
    lines = hostfile.read_text(encoding="utf-8").split() if hostfile is not None and hostfile.is_file() else []
    return lines[0].rpartition("@")[2] if lines else "FIRST_NODE"


def over_nodes(words: Sequence[str], nodes: int, per_node: int, hostfile: Path | None) -> tuple[list[str], bool]:
    """Convert a command for one machine with `per_node` ranks to one of `nodes` machines. Also return True if each machine
    must start it.

    Args:
        words: see `problem.script.training_command`.
        hostfile: DeepSpeed's launcher reads it, and starts the other machines itself.
    """
    line = take_apart(words)
    head, port = list(line.launcher[: line.head]), str(PORT)
    if line.kind == TORCHRUN:
        meet = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", "autotune"]
        host = first_host(hostfile)
        meet += ["--rdzv-endpoint", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
        launcher = [*head, *meet, *options_without(line, "--standalone")]
    elif line.kind == DEEPSPEED:
        meet = ["--hostfile", str(hostfile or "HOSTFILE"), "--num_gpus", str(per_node)]
        launcher = [*head, *meet, *options_without(line, "--num_gpus", "--include")]
    elif line.kind == ACCELERATE:
        meet = ["--num_processes", str(nodes * per_node), "--num_machines", str(nodes)]
        meet += ["--machine_rank", "RANK_OF_THIS_NODE", "--main_process_ip", first_host(hostfile)]
        meet += ["--main_process_port", port, "--deepspeed_multinode_launcher", "standard"]
        launcher = [*head, *meet, *options_without(line, "--num_processes", "--num_machines")]
    else:
        return list(words), True
    return started(line, launcher, line.target), line.kind != DEEPSPEED


def sbatch_script(
    words: Sequence[str], *, name: str, nodes: int, per_node: int, device: str, cwd: str, variables: Mapping[str, str]
) -> str:
    """Return a Slurm batch script: one torchrun per node, with the rendezvous on the allocation's first node.

    The port depends on the job. Nodes are shared, so with one port for all, a second job would join the first job's ranks and
    die when these end.

    Args:
        words: command of each rank, without the launcher.
        variables: environment of all ranks.
    """
    gpus = f"#SBATCH --gpus-per-node={per_node}\n" if device == "cuda" else ""
    asked: dict[str, tuple[str, str]] = {}
    trained = shell_text(words, asked)
    public = {name: value for name, value in variables.items() if not names_secret(name)}
    exports = f"export {assignments(public)}\n" if public else ""
    asked |= {name: (name, value) for name, value in variables.items() if name not in public}
    if asked:  # sbatch passes on the environment in which it is called
        exports += "# secrets are not written here: export these variables before you call sbatch\n"
        exports += "".join(f': "${{{name}:?export it with the value of {of}}}"\n' for name, (of, _) in asked.items())
    # The port is below 32768, as Linux assigns ports from there on to outgoing connections.
    meet = f"""first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \\
  --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 12000))"
"""
    start = meet.rstrip() if nodes > 1 else f"srun torchrun --standalone --nproc-per-node {per_node}"
    return printable(f"""#!/bin/bash
#SBATCH --job-name={shlex.quote(" ".join(name.split()))}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}# add what your cluster asks for: --partition, --account, --time, --cpus-per-task
set -euo pipefail
cd {shlex.quote(cwd)}
{exports}{start} {trained}
""")
