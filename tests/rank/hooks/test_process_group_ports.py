import socket

import pytest

from autotune.rank.hooks import process_group
from tests.rank.hooks.conftest import make_context


def left_behind() -> int:
    """A port on this machine that the kernel still keeps for a connection that was closed."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = int(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # whoever closes first waits
            client.recv(1)
    return port


@pytest.mark.parametrize("quiet", [True, False])
def test_the_port_of_the_trial_before_is_free_in_a_measurement(quiet: bool) -> None:
    port = left_behind()
    context, _ = make_context(quiet=quiet)
    process_group.install_ports(context)
    try:
        with socket.socket() as again:
            if quiet:
                again.bind(("127.0.0.1", port))
            else:  # a training has its script's own sockets
                with pytest.raises(OSError, match="already in use"):
                    again.bind(("127.0.0.1", port))
    finally:
        context.patches.close()
    assert "bind" not in vars(socket.socket)


def test_two_that_listen_at_one_port_are_still_an_error() -> None:
    context, _ = make_context(quiet=True)
    process_group.install_ports(context)
    try:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            one.listen()
            with pytest.raises(OSError, match="already in use"):
                other.bind(one.getsockname())
    finally:
        context.patches.close()
