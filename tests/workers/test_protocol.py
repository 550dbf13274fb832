import json
import socket
import threading

from hypothesis import given
from hypothesis import strategies as st

from autotune.workers.protocol import MAX_LINE_BYTES, Channel

words = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda k: k not in ("kind", "self", "type")), st.integers() | st.text()
)


def pair() -> tuple[Channel, Channel]:
    one, other = Channel.pair()
    return one, Channel(other)


@given(words)
def test_what_is_sent_arrives(fields: dict) -> None:
    one, other = pair()
    one.send("note", **fields)
    assert other.receive(5.0) == {"type": "note", **fields}
    one.close()
    other.close()


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_stray_bytes_are_dropped(noise: list[bytes]) -> None:
    sock, theirs = socket.socketpair()
    channel = Channel(theirs)
    for part in noise:
        sock.sendall(part.replace(b"\n", b"") + b"\n")
    sock.sendall(json.dumps({"type": "phase"}).encode() + b"\n")
    sock.close()
    assert channel.drain()[-1:] == [{"type": "phase"}] or channel.receive(1.0) == {"type": "phase"}
    channel.close()


def test_silence_ends_and_a_closed_peer_is_noticed() -> None:
    one, other = pair()
    assert one.receive(0.05) is None
    assert not one.closed
    other.close()
    assert one.receive(1.0) is None
    assert one.closed
    one.send("into the void")


def test_a_line_without_an_end_does_not_fill_memory() -> None:
    sock, theirs = socket.socketpair()
    channel = Channel(theirs)
    writer = threading.Thread(target=lambda: (sock.sendall(b"x" * (MAX_LINE_BYTES + 100_000)), sock.close()))
    writer.start()
    assert channel.receive(10.0) is None
    writer.join()
    assert len(channel._buffer) <= MAX_LINE_BYTES
