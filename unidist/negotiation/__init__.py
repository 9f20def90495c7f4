"""Named operations: ranks submit the same operations by name, in any order; they agree on one and run it.

`Negotiator.submit(Request(...))` gives a `Handle`. How the ranks agree is in `_agreement.py`, what they send
each other in `_wire.py`, who drives it in `negotiator.py`.
"""

from __future__ import annotations

from unidist.negotiation.handle import Handle
from unidist.negotiation.named import NamedHandle, NamedOperations, NegotiatesNames, NegotiationOptions
from unidist.negotiation.negotiator import Negotiator
from unidist.negotiation.request import AllocateOutput, OperationKind, Request, reducescatter_rows

__all__ = [
    "AllocateOutput", "Handle", "NamedHandle", "NamedOperations", "NegotiatesNames", "NegotiationOptions", "Negotiator",
    "OperationKind", "Request", "reducescatter_rows",
]  # fmt: skip
