"""The strategy `local_sgd`: ranks train by themselves, and their parameters meet from time to time.

`schedule` says which fragment meets when, `outer` makes the step of a meeting, `meetings` does both for one optimizer:
they know buffers and communicators only. `exchange` has the gradient exchanges between two meetings. `_torch` and
`_keras` bind the strategy to a framework, by the interface in `binding`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_local_sgd.binding import LocalSGDBinding
    from unidist_local_sgd.meetings import Meetings, meet
    from unidist_local_sgd.strategy import LocalSGD

__all__ = [
    "LocalSGD", "LocalSGDBinding", "Meetings", "meet",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "binding": "LocalSGDBinding",
        "meetings": "Meetings meet",
        "strategy": "LocalSGD",
    },
)
