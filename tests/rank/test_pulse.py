"""A rank's pulse tells whether its main thread gets on, and where it is."""

import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from autotune.group.protocol import Channel, Message
from autotune.rank import pulse
from autotune.rank.pulse import Pulse, describe, waits


class Held:
    """Stands for a tensor."""


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.02)


def beats(work: Callable[[], None]) -> list[Message]:
    """What a pulse sends while this thread works."""
    ours, theirs = Channel.pair()
    beating = Pulse(Channel(theirs))
    beating.start()
    work()
    beating.stop()
    beating._thread.join()
    return ours.drain()


def test_a_thread_that_gets_on_moves() -> None:
    def compute() -> None:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            sorted(range(100), key=lambda n: -n)

    assert sum(message["moved"] for message in beats(compute)) >= 3


def test_a_thread_that_hangs_is_told_of_once_and_where() -> None:
    never = threading.Event()
    found = beats(lambda: never.wait(1.0) and None)
    stuck = [message for message in found if not message["moved"]]
    assert len(stuck) == 1
    assert "threading.py" in stuck[0]["where"]
    assert not stuck[0]["waits"]


def test_a_glance_keeps_no_variable_of_the_thread_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.2)
    held: list[weakref.ref[Held]] = []
    alive: list[bool] = []

    def step() -> None:
        tensor = Held()
        held.append(weakref.ref(tensor))
        time.sleep(0.3)  # a beat comes while it lives, the next is still to come when it does not

    def work() -> None:
        step()
        alive.append(held[0]() is not None)

    assert beats(work), "no beat, so nothing was looked at"
    assert alive == [False]


def test_collectives_are_known_by_their_files() -> None:
    frame = sys._getframe()
    assert not waits(frame)
    code = compile("import sys\nframe = sys._getframe()", "/x/torch/distributed/distributed_c10d.py", "exec")
    inside: dict[str, object] = {}
    exec(code, inside)
    assert waits(inside["frame"])  # type: ignore[arg-type]
    assert describe(inside["frame"]) == "<module> (torch/distributed/distributed_c10d.py:2)"  # type: ignore[arg-type]
