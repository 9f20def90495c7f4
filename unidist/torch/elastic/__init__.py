"""Elastic state of models, optimizers and samplers, by Horovod's names: `unidist.torch.elastic`."""

from unidist.elastic import run_fn
from unidist.errors import HorovodInternalError
from unidist.horovod_api.lifecycle import init, shutdown
from unidist_torch.elastic import (
    ElasticSampler,
    HostsUpdatedInterrupt,
    ObjectState,
    Policy,
    State,
    TorchState,
    run,
)

__all__ = [
    "ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "Policy", "State", "TorchState",
    "init", "run", "run_fn", "shutdown",
]  # fmt: skip
