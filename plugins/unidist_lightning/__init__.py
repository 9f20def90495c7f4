"""Lightning over unidist: `Trainer(strategy="unidist")`, `UnidistStrategy("zero=2")`, and the same for Fabric.

Where unidist is installed the name is known to Lightning, see `registration`. docs/how-to/train-with-lightning.md says
what works how. The modules of this package import Lightning; this one does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names
from unidist_lightning import registration

if TYPE_CHECKING:
    from unidist_lightning.environment import UnidistEnvironment
    from unidist_lightning.fabric import UnidistFabricStrategy
    from unidist_lightning.registration import register
    from unidist_lightning.strategy import UnidistStrategy

__all__ = ["UnidistEnvironment", "UnidistFabricStrategy", "UnidistStrategy", "register"]

__getattr__ = lazy_names(
    __name__,
    {
        "environment": "UnidistEnvironment",
        "fabric": "UnidistFabricStrategy",
        "registration": "register",
        "strategy": "UnidistStrategy",
    },
)

registration.register()
