"""Elastic training in PyTorch: state that survives a change of ranks, data loaders that redistribute their samples.

Scripts use it as `unidist.torch.elastic`, by Horovod's names. May import `checkpoint`, `loading`, `models`,
`operations`, `optimizer` and the folders below them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_torch.elastic.handlers import (
        ModelStateHandler,
        OptimizerStateHandler,
        SamplerStateHandler,
        StateHandler,
        get_handler_registry,
        set_handler_registry,
    )
    from unidist_torch.elastic.state import (
        ElasticSampler,
        HostsUpdatedInterrupt,
        ObjectState,
        Policy,
        State,
        TorchState,
        run,
    )

__all__ = [
    "ElasticSampler", "HostsUpdatedInterrupt", "ModelStateHandler", "ObjectState", "OptimizerStateHandler", "Policy",
    "SamplerStateHandler", "State", "StateHandler", "TorchState", "get_handler_registry", "run", "set_handler_registry",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "handlers": (
            "ModelStateHandler OptimizerStateHandler SamplerStateHandler StateHandler get_handler_registry "
            "set_handler_registry"
        ),
        "state": "ElasticSampler HostsUpdatedInterrupt ObjectState Policy State TorchState run",
    },
)
