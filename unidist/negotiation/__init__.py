"""Named operations: ranks submit the same operations by name, in any order; they agree on one and run it.

`Negotiator.submit(Request(...))` gives a `Handle`. `_agreement.py` has the agreement of the ranks, `_wire.py` their
messages, `negotiator.py` the thread that drives it. `process_sets` are named operations over some of the ranks,
`objects` move pickled objects by name, `join` lets ranks that have finished take part in what the others do.
`pickles` makes sure of their origin. Imports `algorithms`, `settings` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.negotiation.devices import CommunicatorRendezvous, DeviceConnector, DeviceOrder, RunsOnDevice
    from unidist.negotiation.handle import Handle
    from unidist.negotiation.join import Announcement, Announcements
    from unidist.negotiation.named import NamedHandle, NamedOperations, NegotiatesNames, NegotiationOptions
    from unidist.negotiation.negotiator import Negotiator
    from unidist.negotiation.objects import allgather_object, broadcast_object, gather_objects
    from unidist.negotiation.pickles import seal, unseal
    from unidist.negotiation.process_sets import ProcessSet, ProcessSets, global_process_set
    from unidist.negotiation.request import AllocateOutput, OperationKind, Request, Signature, reducescatter_rows

__all__ = [
    "AllocateOutput", "Announcement", "Announcements", "CommunicatorRendezvous", "DeviceConnector", "DeviceOrder",
    "Handle", "NamedHandle", "NamedOperations", "NegotiatesNames", "NegotiationOptions", "Negotiator", "OperationKind",
    "ProcessSet", "ProcessSets", "Request", "RunsOnDevice", "Signature", "allgather_object", "broadcast_object",
    "gather_objects", "global_process_set", "reducescatter_rows", "seal", "unseal",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "devices": "CommunicatorRendezvous DeviceConnector DeviceOrder RunsOnDevice",
        "handle": "Handle",
        "join": "Announcement Announcements",
        "named": "NamedHandle NamedOperations NegotiatesNames NegotiationOptions",
        "negotiator": "Negotiator",
        "objects": "allgather_object broadcast_object gather_objects",
        "pickles": "seal unseal",
        "process_sets": "ProcessSet ProcessSets global_process_set",
        "request": "AllocateOutput OperationKind Request Signature reducescatter_rows",
    },
)
