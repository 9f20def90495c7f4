"""Addresses of this host."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from unidist.errors import ConfigurationError

_ANY_OUTSIDE = ("192.0.2.1", 9)  # of the addresses for documentation (RFC 5737); nothing is sent there


def interface_address(names: Sequence[str]) -> str:
    """Return the address of the first of these interfaces that this host has, IPv4 before IPv6.

    Raises:
        ConfigurationError: it has none of them; lists those it has.
    """
    import psutil

    present = psutil.net_if_addrs()
    for name in names:
        for family in (socket.AF_INET, socket.AF_INET6):
            for item in present.get(name, ()):
                if item.family == family:
                    return str(item.address)
    raise ConfigurationError(
        f"network interface {','.join(names)} was asked for: host {socket.gethostname()} has "
        f"{', '.join(sorted(present))}, with an address or without"
    )


def own_address() -> str:
    """Return the address of the interface by which packets leave this host; its loopback address if none do."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANY_OUTSIDE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return whether an address is one of the host itself, which no other host reaches."""
    return host.startswith("127.") or host in ("::1", "localhost")
