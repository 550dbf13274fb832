"""DeepSpeed's ops that a script loads: whoever is ended while it builds one leaves nobody waiting."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rank.hooks.conftest import make_context


def load_twice(folder: str, known: bool, spread: bool) -> dict[str, Any]:
    """A child is killed while it builds an op as torch does, behind torch's lock; then this process loads the op."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils.file_baton import FileBaton

    from autotune.rank.hooks import deepspeed
    from autotune.workers.jit_ops import FOLDER

    Path(folder).mkdir()
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
    if known:
        get_accelerator().get_op_builder = lambda name: TinyBuilder  # type: ignore[method-assign]
    os.environ["GROUP_WORLD_SIZE"] = "2" if spread else "1"
    context, watcher = make_context(folder)
    deepspeed.install_ops(context)
    if (child := os.fork()) == 0:
        TinyBuilder("tiny").load(verbose=False)
        os._exit(0)
    while not working.exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = (place / "lock").exists()
    if spread:  # the other machine's goes on to its end
        threading.Timer(0.5, (place / "lock").unlink).start()
    loaded = TinyBuilder("tiny").load(verbose=False)
    told = [name for _, name in watcher.seen]
    library = place / "tiny.so"
    library.touch()
    OpBuilder._loaded_ops.clear()
    TinyBuilder("tiny").load(verbose=False)
    assert len(watcher.seen) == len(told), "it is built"
    return {
        "left": left,
        "loaded": loaded,
        "told": told,
        "marks": sorted(path.name for path in Path(folder).iterdir() if not path.is_symlink()),
    }


@pytest.mark.timeout(60)
def test_a_rank_that_is_killed_while_it_builds_leaves_nobody_waiting(
    in_rank: Callable[..., Any], tmp_path: Path
) -> None:
    found = in_rank(load_twice, str(tmp_path / "ops"), True, False)
    assert found["left"], "torch's own lock is left behind"
    assert found["loaded"] == "loaded"
    assert found["told"] == ["TinyBuilder"]
    assert found["marks"] == [".lock", "tiny", "working"]
    assert sorted(path.name for path in (tmp_path / "ops" / "tiny").iterdir()) == ["tiny.so"]


def test_an_op_of_the_scripts_own_is_its_own_affair(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    assert in_rank(load_twice, str(tmp_path / "ops"), False, False)["told"] == []


@pytest.mark.slow
def test_ranks_of_several_machines_leave_a_lock_to_torch(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    """Their home may be one, where the kernel's locks may reach no further than each machine."""
    found = in_rank(load_twice, str(tmp_path / "ops"), True, True)
    assert found["left"]
    assert found["loaded"] == "loaded"
    assert found["marks"] == ["tiny", "working"], "no mark that another machine could misread"
