"""Operations on objects, parameters and optimizers, where Horovod has them: `unidist.torch.functions`."""

from unidist_torch.operations.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
