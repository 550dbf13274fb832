"""What a wire of Ray's starts: it joins standard input and output to the driver's socket, and to the agent behind that.

Run by its path with nothing but Python itself: `ray_relay.py SOCKET BUNDLE`. Up the socket goes standard input as it comes, down
come frames: a letter (`o` for standard output, `e` for standard error, `x` for the end with an exit status), four bytes of
length, and so many bytes.
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
    """Its exit status: the agent's, or 1 where Ray has ended it."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(sys.argv[1])
        link.sendall(f"{sys.argv[2]}\n".encode())
        threading.Thread(target=_up, args=(link,), daemon=True).start()
        while True:
            kind, length = _exactly(link, 1), int.from_bytes(_exactly(link, 4), "big")
            data = _exactly(link, length)
            if kind == b"x":
                return int(data)
            _out(1 if kind == b"o" else 2, data)
    except (OSError, EOFError):
        _out(2, b"ray: the driver is gone\n")
        return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status if 0 <= status < 256 else 1)  # its thread sits in a read
