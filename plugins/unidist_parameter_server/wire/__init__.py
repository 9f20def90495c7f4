"""Messages between workers and servers (`messages`): with arrays (`channel`), and their contents (`encoding`).

`directory` has the keys by which they find each other. Imports `store` and `optimizers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_parameter_server.wire.channel import ArrayChannel
    from unidist_parameter_server.wire.directory import (
        SERVER_ROLE,
        address_from,
        address_value,
        claim_key,
        failure_value,
        server_key,
    )
    from unidist_parameter_server.wire.encoding import failure, rules_of, told_error, told_rules
    from unidist_parameter_server.wire.layout import SegmentLayout

__all__ = [
    "ArrayChannel", "SERVER_ROLE", "SegmentLayout", "address_from", "address_value", "claim_key", "failure",
    "failure_value", "rules_of", "server_key", "told_error", "told_rules",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "channel": "ArrayChannel",
        "directory": "SERVER_ROLE address_from address_value claim_key failure_value server_key",
        "encoding": "failure rules_of told_error told_rules",
        "layout": "SegmentLayout",
    },
)
