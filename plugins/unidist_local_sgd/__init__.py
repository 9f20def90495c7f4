"""The strategy `local_sgd`: ranks train by themselves, and synchronize their parameters from time to time.

`schedule` says which fragment is synchronized when, `outer` makes the step of the outer optimizer, `synchronization`
does both for one optimizer, on the parameters to which `unidist.optim.TrainedState` gives access: they know buffers and
communicators only, and no framework. `exchange` has the gradient exchanges between two synchronizations, and
`generations` has what elastic jobs need besides. `jax` has what scripts of JAX import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_local_sgd.strategy import LocalSGD
    from unidist_local_sgd.synchronization import Synchronizer, synchronize

__all__ = [
    "LocalSGD", "Synchronizer", "synchronize",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "synchronization": "Synchronizer synchronize",
        "strategy": "LocalSGD",
    },
)
