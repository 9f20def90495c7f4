"""The elastic state of PyTorch, where Horovod has it: `unidist.torch.elastic.state`."""

from unidist.horovod_api.lifecycle import rank
from unidist_torch.elastic import ElasticSampler, ObjectState, State, TorchState
from unidist_torch.operations import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "ElasticSampler", "ObjectState", "State", "TorchState", "allgather_object", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "rank",
]  # fmt: skip
