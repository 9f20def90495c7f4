"""The way of a pod to the first one."""

from __future__ import annotations

import socket
import time

from unidist.control.client import connect
from unidist.control.codec import WireError
from unidist.control.connection import Connection
from unidist.errors import ConfigurationError, UnidistError
from unidist_kubernetes.place import Pod

_RETRY_SEC = 0.2


def connect_to_leader(pod: Pod, seconds: float) -> tuple[Connection, str]:
    """Connect to pod 0, which may not have started yet, nor be known to the cluster's DNS; returns its address too.

    Raises:
        ConfigurationError: it did not answer in time, or does not know the secret.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            address = str(socket.getaddrinfo(pod.leader, pod.port, type=socket.SOCK_STREAM)[0][4][0])
            return connect((address, pod.port), pod.secret, timeout=max(0.1, left)), address
        except WireError as exc:
            raise ConfigurationError(
                f"pod {pod.index} and {pod.leader}:{pod.port} do not trust each other: {exc}. Do all pods mount the "
                "same Secret?"
            ) from exc
        except (OSError, UnidistError) as exc:  # gaierror and TimeoutError are OSErrors
            if left <= 0:
                raise ConfigurationError(
                    f"pod {pod.index} cannot reach the first pod, {pod.leader}:{pod.port}, in {seconds:g} seconds "
                    f"(--start-timeout): {exc}. Is it running, is there the headless Service, do all pods mount "
                    "the same Secret, and does a network policy allow this port?"
                ) from exc
        time.sleep(_RETRY_SEC)


__all__ = ["connect_to_leader"]
