"""Context parallelism for Keras on TensorFlow."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import keras
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_context_parallel._keras.attention.axis import KerasAxis
from unidist_context_parallel._keras.attention.layers import ATTENTIONS, divide_attention, num_heads
from unidist_context_parallel._keras.kinds import InputKind, kind_of
from unidist_context_parallel._keras.model import divide_function
from unidist_context_parallel.binding import ContextBinding
from unidist_context_parallel.layout.sequence import AXIS

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_context_parallel.strategy import ContextParallel


class KerasContext(ContextBinding):
    """See `ContextBinding`."""

    @override
    def partition(self, strategy: ContextParallel, model: Any, context: RuntimeAPI) -> Any:
        asked = f"context={strategy.size}"
        if strategy.inputs is not None or strategy.dim is not None:
            raise ConfigurationError(f"{asked}: inputs and dim are for PyTorch; Keras' layers say where tokens are")
        function = model._functional if isinstance(model, keras.Sequential) else model
        if not hasattr(function, "_nodes_by_depth"):
            raise ConfigurationError(
                f"{asked}: {type(model).__name__} has no graph of layers to follow. Make it a Functional or Sequential "
                "model, built with its input shape"
            )
        kinds: dict[int, InputKind] = {}
        for depth in function._nodes_by_depth.values():
            for node in depth:
                if not node.is_input:
                    found = kind_of(node.operation, node)
                    same = kinds.get(id(node.operation), found)
                    kinds[id(node.operation)] = found if same is found else InputKind.ALL
        operations = [each for each in function._operations if id(each) in kinds]
        reached = [each for each in operations if kinds[id(each)] in (InputKind.ATTENTION, InputKind.COMPOSITE)]
        if not reached:
            raise ConfigurationError(
                f"{asked}: no attention of {type(model).__name__} can get some of the tokens. It needs "
                "keras.layers.MultiHeadAttention or GroupQueryAttention, in the graph or in layers that do nothing "
                "else with the sequence, and inputs of a known length"
            )
        attentions = [layer for each in reached for layer in each._flatten_layers() if isinstance(layer, ATTENTIONS)]
        if strategy.exchange == "ulysses":
            for layer in attentions:
                if num_heads(layer) % strategy.size:
                    raise ConfigurationError(
                        f"{asked}:exchange=ulysses divides the heads of an attention over the ranks, and the "
                        f"{num_heads(layer)} heads of {layer.name!r} do not divide by {strategy.size}. Use "
                        "exchange=ring or exchange=gather"
                    )
        axis = KerasAxis(context.new_communicator(AXIS))
        for layer in attentions:
            divide_attention(layer, axis, strategy.exchange)
        divide_function(function, axis, kinds)
        if context.topology.rank == 0:
            whole = [each.name for each in operations if kinds[id(each)] is InputKind.ALL]
            text = f"{asked}: tokens are divided in {len(operations) - len(whole)} of {len(operations)} layers"
            print(text + (f"; all ranks compute {', '.join(whole[:8])}" if whole else ""), file=sys.stderr, flush=True)
        return model
