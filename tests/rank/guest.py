"""A function of a test, run as if in a rank: in a process of its own, alone in its process group.

What it does to libraries, to their global state and to the environment ends with the process.
"""

import importlib
import os
import traceback
from typing import NoReturn

from autotune.rank.base import connect_to_parent, exit_process
from autotune.workers.jit_ops import link_without_space, use_own_folder


def become(address: str, number: int) -> NoReturn:
    """For the fork server, as the ranks' own: runs `module`.`function` of the spec and sends what it returns."""
    channel, spec = connect_to_parent(address, number)
    os.chdir(spec["folder"])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # accelerate asks for them, nobody listens there
    try:
        _join_group(spec["folder"])
        function = getattr(importlib.import_module(spec["module"]), spec["function"])
        channel.send("result", value=function(*spec["arguments"]))
    except BaseException:
        channel.send("failed", text=traceback.format_exc())
    exit_process(0)


def _join_group(folder: str) -> None:
    import torch.distributed

    link_without_space(use_own_folder())
    store = torch.distributed.FileStore(f"{folder}/store", 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
