"""Relay between standard input and output and the driver's socket, which leads to the agent.

Run by path with the standard library only: `ray_relay.py SOCKET BUNDLE`. Standard input is sent to the socket
unchanged. Frames come back:

- one letter (`o` for standard output, `e` for standard error, `x` for the exit status),
- four bytes of length,
- the data.
"""

import os
import socket
import sys
import threading


def _up(link: socket.socket) -> None:
    try:
        while data := os.read(0, 65536):
            link.sendall(data)
        link.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def _exactly(link: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = link.recv(count - len(found))
        if not data:
            raise EOFError
        found += data
    return found


def _out(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> int:
    """Return the agent's exit status, or 1 if Ray has ended it."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(sys.argv[1])
        link.sendall(f"{sys.argv[2]}\n".encode())
        threading.Thread(target=_up, args=(link,), daemon=True).start()
        while True:
            frame, length = _exactly(link, 1), int.from_bytes(_exactly(link, 4), "big")
            data = _exactly(link, length)
            if frame == b"x":
                return int(data)
            _out(1 if frame == b"o" else 2, data)
    except (OSError, EOFError):
        _out(2, b"ray: the driver is gone\n")
        return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status if 0 <= status < 256 else 1)  # the other thread may block in a read
