"""The agent of a host: started there by a launcher, it starts the host's ranks and is the launcher's ear and hand.

    python -m unidist_launch.agent.agent < ORDER

It lives as long as its connection to the launcher's control server, and its ranks live as long as it does.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from unidist.control.client import connect
from unidist.control.codec import WireError
from unidist.control.connection import Connection, ConnectionLost
from unidist.errors import ConfigurationError, UnidistError
from unidist.jobs import interface_address, run_program
from unidist_launch.agent.order import ORDER_VARIABLE, AgentOrder
from unidist_launch.agent.ranks import AgentRanks
from unidist_launch.agent.workers import AgentWorkers

ERROR_MARK = "unidist-agent: error: "
_ORDER_SEC = 60.0
_MAX_ORDER_BYTES = 8 << 20
_EXIT_ERROR = 2


def main() -> None:
    """Read the order and carry it out; exits with 2 and one line on standard error when it cannot."""
    try:
        order = AgentOrder.from_line(_read_order()).of_this_agent(os.environ)
        try:
            os.chdir(order.folder)
        except OSError as exc:
            raise ConfigurationError(
                f"folder {order.folder!r} cannot be entered: {exc.strerror}. Every host needs the job's folder, at the "
                "same path"
            ) from exc
        launcher, own = _addresses(order)
        os.environ.update(order.exported)
        connection, reached = _connect(order, launcher)
        serve(order, connection, reached, own or routed_address(reached, order.port))
    except UnidistError as exc:
        with contextlib.suppress(OSError):  # a launcher that has died reads no more
            print(f"{ERROR_MARK}{exc}", file=sys.stderr, flush=True)
        sys.exit(_EXIT_ERROR)


def serve(order: AgentOrder, connection: Connection, reached: str, own: str) -> None:
    """Carry an order out, over a connection to the launcher, until that has no more use for this agent.

    Args:
        order: the order.
        connection: to the control server.
        reached: address at which this host reaches it.
        own: address at which the other hosts reach this one.

    Raises:
        ConnectionLost: the launcher is gone, or silent for too long.
        ConfigurationError: it does not want this agent; says why.
    """
    runs = AgentWorkers if order.is_elastic else AgentRanks
    with runs(order, connection, server=reached, address=own) as ranks:
        ranks.introduce()
        ranks.run()


def _read_order() -> bytes:
    """Return the order: from standard input, or from where a variable says that it is."""
    given = os.environ.pop(ORDER_VARIABLE, "")
    if not given.startswith("/"):
        return given.encode() or _read_line()
    try:
        return Path(given).read_bytes()
    except OSError as exc:
        raise ConfigurationError(f"the launcher's order cannot be read ({exc}); has the launcher ended?") from exc


def _read_line() -> bytes:
    """Read standard input to the first newline; what the launcher sends later stays there."""
    deadline = time.monotonic() + _ORDER_SEC
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _MAX_ORDER_BYTES:
        if not select.select([0], [], [], max(0.0, deadline - time.monotonic()))[0]:
            break
        data = os.read(0, 1 << 16)
        if not data:
            break
        line += data
    return bytes(line)


def _addresses(order: AgentOrder) -> tuple[Sequence[str], str]:
    """Return where the launcher may be reached, and this host's own address ("" when the connection will tell it)."""
    # SSH_CONNECTION: its address and port, ours and our port. Without ssh in between it is of somebody's login.
    login = os.environ.get(order.address_variable, "").split() if order.address_variable else []
    launcher = tuple(dict.fromkeys((*login[:1], *order.launcher_addresses)))
    if not launcher:
        raise ConfigurationError(
            f"the launcher's address is not known: {order.address_variable or 'no variable'} is not set here. Use "
            "--network-interface with the launcher's interface to the hosts"
        )
    own = login[2] if len(login) == 4 else ""
    if order.network_interfaces:
        own = interface_address(order.network_interfaces)
    return launcher, own


def _connect(order: AgentOrder, addresses: Sequence[str]) -> tuple[Connection, str]:
    """Connect to the control server at the first address where it answers; returns that too."""
    reasons = []
    for address in addresses:
        try:
            secret = bytes.fromhex(order.secret)
            return connect((address, order.port), secret, timeout=order.connect_sec / len(addresses)), address
        except (ConnectionLost, WireError, TimeoutError) as exc:
            reasons.append(str(exc))
    raise ConfigurationError(
        f"the launcher cannot be reached from host {socket.gethostname()} ({'; '.join(reasons)}). A firewall, or "
        "another network than that of ssh? Name the interface to use: --network-interface"
    )


def routed_address(launcher: str, port: int) -> str:
    """Return the own address from which packets to the launcher leave; nothing is sent."""
    family = socket.AF_INET6 if ":" in launcher else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((launcher, port))
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    run_program(main)
