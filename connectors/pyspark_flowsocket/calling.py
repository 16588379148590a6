"""Calling a peer, as the source and its sender both do again and again until somebody answers."""

from __future__ import annotations

import socket

__all__ = ["connected"]


def connected(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Return a connection to a host and port; it waits for nothing longer than the time-out."""
    sock = socket.create_connection(address, timeout=timeout_s)
    # To a port of this machine on which nobody listens, the system may choose that very port for
    # this end. Then TCP connects the socket with itself, and keeps the port from who should listen.
    if sock.getsockname() == sock.getpeername():
        sock.close()
        raise ConnectionRefusedError(f"nobody listens on port {address[1]}")
    return sock
