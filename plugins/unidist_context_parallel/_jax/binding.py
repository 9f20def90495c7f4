"""Context parallelism for JAX: makes the exchanges that `unidist.jax.context` uses. Parameters stay whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_context_parallel._jax.axis import JaxAxis
from unidist_context_parallel.binding import ContextBinding

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_context_parallel.strategy import ContextParallel


class JaxContext(ContextBinding):
    """See `ContextBinding`."""

    @override
    def partition(self, strategy: ContextParallel, model: Any, context: RuntimeAPI) -> Any:
        asked = f"context={strategy.size}"
        if type(model).__module__.partition(".")[0] == "keras":
            raise ConfigurationError(
                f"{asked}: Keras' models are divided on TensorFlow alone: KERAS_BACKEND=tensorflow"
            )
        if strategy.inputs is not None or strategy.dim is not None:
            raise ConfigurationError(
                f"{asked}: inputs and dim are for PyTorch; with JAX the loss function divides its batch by "
                "ud.context.split(batch, dim=1)"
            )
        others = context.mesh.model_axes
        if others:
            raise ConfigurationError(
                f"context and {' and '.join(others)} do not go together with JAX; use one of them, or zero"
            )
        context.owned(JaxAxis).prepare(strategy.exchange)
        return model
