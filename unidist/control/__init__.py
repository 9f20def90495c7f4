"""The control plane of a job on several hosts: small authenticated messages, and which hosts and ranks are present.

`messages` says what there is to say, `codec` writes and reads it, `wire` defines the protocol, `connection` transfers
its bytes, `server` and `client` are the two ends. `meeting` and
`coordinator` decide, without touching a socket; `rendezvous` is a rank's interface to them. `key_values` are what
the processes of a job share: ranks while an engine connects, and the others that work beside them. `channel` carries
raw bytes behind messages, for what they send each other in bulk.
Imports `settings` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.control import messages
    from unidist.control.channel import Channel, ChannelLost
    from unidist.control.channel_listener import ChannelListener
    from unidist.control.client import connect
    from unidist.control.codec import MAX_FRAME_BYTES, Message, WireError, unexpected
    from unidist.control.connection import Address, Connection, ConnectionClosed, ConnectionLost, format_address
    from unidist.control.coordinator import (
        BEATS_PER_LIMIT,
        SILENCE_PER_HEARTBEAT,
        Coordinator,
        HostJoined,
        HostLost,
        HostMessage,
    )
    from unidist.control.key_values import KeyValues, KeyValueService, WithKeyValues, job_values
    from unidist.control.meeting import refusal
    from unidist.control.rendezvous import ControlRendezvous
    from unidist.control.server import ControlServer
    from unidist.control.service import Action, Drop, Publish, Send, Service
    from unidist.control.standstill import Standstill
    from unidist.control.wire import Wire

__all__ = [
    "Action", "Address", "BEATS_PER_LIMIT", "Channel", "ChannelListener", "ChannelLost", "Connection",
    "ConnectionClosed", "ConnectionLost", "ControlRendezvous", "ControlServer", "Coordinator", "Drop", "HostJoined",
    "HostLost", "HostMessage", "KeyValueService", "KeyValues", "MAX_FRAME_BYTES", "Message", "Publish",
    "SILENCE_PER_HEARTBEAT", "Send", "Service", "Standstill", "Wire", "WireError", "WithKeyValues", "connect",
    "format_address", "job_values", "messages", "refusal", "unexpected",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "messages",
        "channel": "Channel ChannelLost",
        "channel_listener": "ChannelListener",
        "client": "connect",
        "codec": "MAX_FRAME_BYTES Message WireError unexpected",
        "connection": "Address Connection ConnectionClosed ConnectionLost format_address",
        "coordinator": "BEATS_PER_LIMIT Coordinator HostJoined HostLost HostMessage SILENCE_PER_HEARTBEAT",
        "key_values": "KeyValues KeyValueService WithKeyValues job_values",
        "meeting": "refusal",
        "rendezvous": "ControlRendezvous",
        "server": "ControlServer",
        "service": "Action Drop Publish Send Service",
        "standstill": "Standstill",
        "wire": "Wire",
    },
)
