"""A rank's pulse tells whether its main thread gets on, and where it is."""

import _thread
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from autotune.rank import base
from autotune.rank.base import Heartbeat, describe, waits
from autotune.workers.protocol import Channel, Message
from tests.conftest import wait_until


class Held:
    """Stands for a tensor."""


class Looks:
    """Counts the looks at this thread."""

    def __init__(self) -> None:
        self.count = 0
        self.places = 0  # at which this thread was, one after another
        self.many = threading.Event()
        self._glance, self._last = base.thread_position, base.ThreadPosition((), "", False)

    def thread_position(self, thread: int) -> base.ThreadPosition | None:
        found = self._glance(thread)
        assert found is not None
        self.count += 1
        self.places += found.place != self._last.place
        self._last = found
        if self.count == 10:
            self.many.set()
        return found


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    made = Looks()
    monkeypatch.setattr(base, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(base, "thread_position", made.thread_position)
    return made


def beats(work: Callable[[], None]) -> list[Message]:
    """What a pulse sends while this thread works."""
    ours, theirs = Channel.pair()
    beating = Heartbeat(Channel(theirs))
    beating.start()
    work()
    beating.stop()
    beating._thread.join()
    return ours.drain()


def test_a_thread_that_gets_on_moves(looks: Looks) -> None:
    def compute() -> None:
        while looks.places < 4:
            sorted(range(100), key=lambda n: -n)
            "".join(str(n) for n in range(100))

    assert sum(message["moved"] for message in beats(compute)) >= 4


def test_a_thread_that_hangs_is_told_of_once_and_where(looks: Looks) -> None:
    found = beats(lambda: looks.many.wait(120.0) and None)
    stuck = [message for message in found if not message["moved"]]
    assert len(stuck) == 1
    assert "threading.py" in stuck[0]["where"]
    assert not stuck[0]["waits"]


def test_a_glance_keeps_no_variable_of_the_thread_alive(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BEAT_SECONDS", 0.2)  # the next look is still to come when the variable has gone
    held: list[weakref.ref[Held]] = []
    alive: list[bool] = []

    def step() -> None:
        tensor = Held()
        held.append(weakref.ref(tensor))
        before = looks.count
        wait_until(lambda: looks.count > before, "a look while it lives")

    def work() -> None:
        step()
        alive.append(held[0]() is not None)

    assert beats(work), "no beat, so nothing was looked at"
    assert alive == [False]


def test_a_thread_of_torchs_own_counts_and_one_that_python_started_does_not() -> None:
    """Autograd's thread of a GPU runs a backward, while the main thread waits for it; a loader's thread polls all the time."""
    code = compile("import sys\nseen.append(1)\nwhile not ended: pass", "/x/torch/distributed/c10d.py", "exec")

    def polls(run: Callable[[], None], _: tuple[()]) -> None:
        threading.Thread(target=run).start()

    for start, counts in ((polls, False), (_thread.start_new_thread, True)):
        seen, ended = list[int](), list[int]()
        start(lambda seen=seen, ended=ended: exec(code, {"seen": seen, "ended": ended}), ())  # type: ignore[misc]
        wait_until(lambda seen=seen: bool(seen), "it runs")  # type: ignore[misc]
        now = base.thread_position(threading.main_thread().ident or 0)
        ended.append(1)
        assert now.waits is counts
        assert ("c10d.py" in now.where) is counts


def test_collectives_are_known_by_their_files() -> None:
    frame = sys._getframe()
    assert not waits(frame)
    code = compile("import sys\nframe = sys._getframe()", "/x/torch/distributed/distributed_c10d.py", "exec")
    inside: dict[str, object] = {}
    exec(code, inside)
    assert waits(inside["frame"])  # type: ignore[arg-type]
    assert describe(inside["frame"]) == "<module> (torch/distributed/distributed_c10d.py:2)"  # type: ignore[arg-type]


def test_a_compilation_is_seen_and_a_compiled_call_is_not() -> None:
    import torch

    seen = dict[str, bool]()

    def look(name: str) -> None:
        now = base.thread_position(threading.main_thread().ident or 0)
        seen[name] = now.compiles

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        look("compiling")

        def run(*args: torch.Tensor) -> object:
            look("compiled")
            return graph.forward(*args)

        return run

    double = torch.compile(lambda x: x * 2, backend=compiler)
    double(torch.ones(2))
    double(torch.ones(2))
    assert seen == {"compiling": True, "compiled": False}
