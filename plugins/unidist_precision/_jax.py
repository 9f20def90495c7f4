"""Trees of JAX: types of their arrays. `TrainStep` casts what the loss is computed from, and scales the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from unidist.buffer import DType
from unidist.errors import UsageError
from unidist.gradients.precision import Precision, is_narrow
from unidist.optim.loss_scaling import LossScaler
from unidist_arrays.memory import NUMPY_DTYPES
from unidist_precision.binding import PrecisionBinding


class JaxPrecision(PrecisionBinding):
    """See `PrecisionBinding`."""

    rounds_updates: ClassVar[bool] = True

    @override
    def prepare(self, model: Any, precision: Precision) -> Any:
        """See `PrecisionBinding.prepare`: returns a tree with other arrays where strategies shard updates."""
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)}
        if jnp.dtype(jnp.float32) not in dtypes:
            found = ", ".join(sorted(str(dtype) for dtype in dtypes)) or "none"
            raise UsageError(
                f"strategy 'precision' computes in 16 bits what is float32, but the arrays of the parameters are: "
                f"{found}. Leave the strategy out, or make the parameters float32"
            )
        if not is_narrow(precision.parameters):
            return model
        narrow = NUMPY_DTYPES[precision.parameters]

        def cast(leaf: Any) -> Any:
            return leaf.astype(narrow) if getattr(leaf, "dtype", None) == jnp.float32 else leaf

        return jax.tree.map(cast, model)

    @override
    def attach(self, model: Any, compute: DType, scaler: LossScaler | None) -> Callable[[], str]:
        """See `PrecisionBinding.attach`: arrays cannot do it; `TrainStep` looks at the plan's precision."""
        return str
