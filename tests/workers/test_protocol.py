import io
import json
import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.workers.protocol import MALFORMED, MAX_LINE_BYTES, RANK_MESSAGES, Channel, Stream, malformed

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


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=5))
def test_each_line_that_is_no_message_arrives_as_malformed(noise: list[bytes]) -> None:
    sock, theirs = socket.socketpair()
    channel = Channel(theirs)
    for line in noise:
        sock.sendall(line + b"\n")
    sock.sendall(json.dumps({"type": "phase"}).encode() + b"\n")
    sock.close()
    assert [one["type"] for one in channel.drain()] == [*[MALFORMED] * len(noise), "phase"]
    channel.close()


def test_what_a_shell_prints_into_a_stream_is_malformed() -> None:
    reads, theirs = os.pipe()
    os.write(theirs, b'Welcome!\n{"type": "agent"}\n' + b"x" * 100)
    os.close(theirs)
    stream = Stream(io.FileIO(reads), io.FileIO(os.devnull, "w"), 1.0)
    assert stream.receive(5.0) == {"type": MALFORMED, "text": "'Welcome!' is no message", "line": "Welcome!"}
    assert stream.receive(5.0) == {"type": "agent"}
    assert stream.receive(5.0) is None


def test_a_message_that_is_too_large_is_an_error_of_its_sender() -> None:
    one, other = pair()
    with pytest.raises(ValueError, match="a measured message has 8 MiB, and at most 8 MiB can be sent"):
        one.send("measured", text="x" * MAX_LINE_BYTES)
    one.send("bye")
    assert other.receive(5.0) == {"type": "bye"}, "nothing of it was sent"
    one.close()
    other.close()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(RANK_MESSAGES)), st.data())
def test_a_field_of_any_shape_is_accepted_or_named(verb: str, data: st.DataObject) -> None:
    names = [name.rstrip("?") for name in RANK_MESSAGES[verb]]
    message = {name: data.draw(_JSON, label=name) for name in names if data.draw(st.booleans())}
    found = malformed({"type": verb, **message})
    assert not found or found.startswith(verb)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"type": "hello", "rank": "0", "pid": 1}', "hello.rank has an unexpected value"),
        (b'{"type": "hello", "rank": 0}', "hello.pid has an unexpected value"),
        (b'{"type": "measured", "step_seconds": [1, NaN]}', "measured.step_seconds[1] has an unexpected value"),
        (b'{"type": "measured", "live_bytes": {"a": "1"}}', "measured.live_bytes.a has an unexpected value"),
        (b'{"type": 3}', "is no message"),
        (b"[1]", "is no message"),
        (b"[" * 100_000, "is no message"),
        (b'{"type": "progress", "steps": ' + b"9" * 10_000 + b"}", "is no message"),
    ],
)
def test_a_malformed_message_says_why(line: bytes, why: str) -> None:
    sock, theirs = socket.socketpair()
    channel = Channel(theirs)
    sock.sendall(line + b"\n")
    (message,) = channel.drain()
    assert malformed(message).endswith(why)
    sock.close()
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
    assert channel.receive(10.0) == {"type": MALFORMED, "text": "a line of more than 8 MiB"}
    assert channel.receive(10.0) is None
    writer.join()
    assert len(channel._buffer) <= MAX_LINE_BYTES
