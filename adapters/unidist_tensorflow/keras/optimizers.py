"""The optimizers of `horovod.keras`: those of `distributed_optimizer`, with the arguments in another order."""

from __future__ import annotations

from typing import Any

from unidist.horovod_api.arguments import Groups, OptimizerArguments
from unidist.horovod_api.reduce_ops import Op
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist_keras.arguments import local_variables
from unidist_tensorflow.keras_api import layers
from unidist_tensorflow.operations.compression import Compression
from unidist_tensorflow.optimizer.arguments import CompressionLike
from unidist_tensorflow.training.distributed_optimizer import distribute_optimizer


def DistributedOptimizer(  # noqa: D417, N802 - Horovod's name and arguments
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionLike = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Op.Average,
    num_groups: int = 0,
    groups: Groups = None,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return the optimizer, bound so that it uses gradients reduced over all ranks.

    Args:
        optimizer: see `distributed_optimizer.DistributedOptimizer`, as all further arguments. Those after `groups` are
            not in `horovod.keras`.
    """
    del device_dense, device_sparse
    return distribute_optimizer(
        optimizer,
        OptimizerArguments(
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            name=name,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            scale_local_gradients=scale_local_gradients,
        ),
    )


def PartialDistributedOptimizer(  # noqa: D417, N802 - Horovod's name and arguments
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionLike = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Op.Average,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Return a DistributedOptimizer that leaves out some layers: every rank trains its own.

    Args:
        optimizer: see `distributed_optimizer.DistributedOptimizer`, as all further arguments.
        local_layers: one layer or several, built.
    """
    variables = local_variables(local_layers, layers())
    bound = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in variables:
        bound.register_local_var(variable)
    return bound
