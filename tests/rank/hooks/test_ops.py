"""DeepSpeed's ops that a script loads: whoever is ended while it builds one leaves nobody waiting."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rank.hooks.conftest import make_context


def load_twice(folder: str) -> dict[str, Any]:
    """A child is killed while it builds an op as torch does, behind torch's lock; then this process loads the op."""
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils.file_baton import FileBaton

    from autotune.group.extensions import FOLDER
    from autotune.rank.hooks import ops

    os.environ[FOLDER] = folder
    place, working = Path(folder, "tiny"), Path(folder, "working")

    class TinyBuilder(OpBuilder):  # type: ignore[misc]
        def absolute_name(self) -> str:
            return "tiny"

        def sources(self) -> list[str]:
            return []

    def build(builder: Any, verbose: bool = True) -> str:
        place.mkdir(exist_ok=True)
        baton = FileBaton(str(place / "lock"))
        if not baton.try_acquire():
            baton.wait()  # as torch waits: without end
        elif os.getpid() != here:
            working.touch()
            time.sleep(3600)
        else:
            baton.release()
        return "loaded"

    here = os.getpid()
    OpBuilder.jit_load = build
    context, watcher = make_context(folder)
    ops.install(context)
    if (child := os.fork()) == 0:
        TinyBuilder("tiny").load(verbose=False)
        os._exit(0)
    while not working.exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = (place / "lock").exists()
    loaded = TinyBuilder("tiny").load(verbose=False)
    return {"left": left, "loaded": loaded, "told": watcher.seen, "locked": (place / "lock").exists()}


@pytest.mark.timeout(60)
def test_a_rank_that_is_killed_while_it_builds_leaves_nobody_waiting(
    in_rank: Callable[..., Any], tmp_path: Path
) -> None:
    found = in_rank(load_twice, str(tmp_path))
    assert found["left"], "torch's own lock is left behind"
    assert found["loaded"] == "loaded"
    assert not found["locked"]
    assert found["told"] == [["unbuilt", "TinyBuilder"]]
