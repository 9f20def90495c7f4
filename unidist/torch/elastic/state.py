"""The elastic state of PyTorch, where Horovod has it: `unidist.torch.elastic.state`."""

from unidist.horovod_api.lifecycle import rank
from unidist_torch.elastic import (
    ElasticSampler,
    ModelStateHandler,
    ObjectState,
    OptimizerStateHandler,
    SamplerStateHandler,
    State,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)
from unidist_torch.operations import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "ElasticSampler", "ModelStateHandler", "ObjectState", "OptimizerStateHandler", "SamplerStateHandler", "State",
    "StateHandler", "TorchState", "allgather_object", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "get_handler_registry", "rank", "set_handler_registry",
]  # fmt: skip
