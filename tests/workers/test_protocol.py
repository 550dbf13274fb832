import json
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.workers.protocol import MALFORMED, Channel, Stream

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
    stream = Stream(reads, os.open(os.devnull, os.O_WRONLY), 1.0)
    assert stream.receive(5.0) == {"type": MALFORMED, "text": "'Welcome!' is no message", "line": "Welcome!"}
    assert stream.receive(5.0) == {"type": "agent"}
    assert stream.receive(5.0) is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
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
    assert message["type"] == MALFORMED
    assert message["text"].endswith(why)
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
