"""Ports for processes that meet."""

import socket


def find_free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return held.getsockname()[1]
