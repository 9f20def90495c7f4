"""Describes the layers of a Keras model that might be cut, for `layout.roles.automatic`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unidist_keras.checkpoint import stable_paths
from unidist_tensor_parallel._keras.flow import OUTSIDE, Flow, is_element_wise
from unidist_tensor_parallel._keras.layers.cut import ATTENTIONS, DENSE, EMBEDDING, KINDS
from unidist_tensor_parallel.layout.roles import CuttableLayer, LayerKind


def candidates(model: Any) -> dict[str, Any]:
    """Return the layers that might be cut, by path, in the order of the model; each once."""
    found: dict[str, Any] = {}
    paths = {id(variable): path for path, variable in stable_paths(model.weights).items()}
    seen: set[int] = set()
    inside: set[int] = set()  # of attentions, which are cut as a whole
    layers: list[Any] = model._flatten_layers()
    for layer in layers:
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        if isinstance(layer, ATTENTIONS):
            inside |= {id(each) for each in layer._flatten_layers(include_self=False)}
        if isinstance(layer, KINDS) and layer.built:
            found[_path(layer, paths)] = layer
    return {path: layer for path, layer in found.items() if id(layer) not in inside}


def describe(layers: Mapping[str, Any], flow: Flow) -> list[CuttableLayer]:
    """Describe layers; see `CuttableLayer`."""
    paths = {id(layer): path for path, layer in layers.items()}
    found = []
    for path, layer in layers.items():
        whole = why_whole(layer)
        if isinstance(layer, ATTENTIONS):
            found.append(CuttableLayer(path, LayerKind.ATTENTION, units=heads_of(layer)[1], whole_because=whole))
        elif isinstance(layer, EMBEDDING):
            found.append(
                CuttableLayer(
                    path, LayerKind.EMBEDDING, layer.input_dim, layer.output_dim, weight=id(layer), whole_because=whole
                )
            )
        else:
            inputs, outputs = layer.kernel.shape
            feeds = _feeds(layer, flow, paths) if is_element_wise(layer.activation) else ("",)
            found.append(
                CuttableLayer(
                    path, LayerKind.LINEAR, inputs, outputs, feeds=feeds, weight=id(layer), whole_because=whole
                )
            )
    return found


def heads_of(layer: Any) -> tuple[int, int]:
    """Return the numbers of query heads and of key-value heads of an attention."""
    heads = layer._query_dense.kernel.shape[1]
    return int(heads), int(layer._key_dense.kernel.shape[1])


def why_whole(layer: Any) -> str:
    """Say why a layer cannot be cut, and what to do; "" if it can."""
    plain = next(kind for kind in KINDS if isinstance(layer, kind))
    if type(layer).call is not plain.call:
        return f"{type(layer).__name__} has a call of its own, of which only {plain.__name__}'s is known"
    if getattr(layer, "quantization_mode", None) or getattr(layer, "lora_enabled", False):
        return "it is quantized or has LoRA weights; enable that without tensor parallelism"
    for name in ("kernel", "bias", "embeddings", "activity"):
        for prefix in ("", "_"):
            if getattr(layer, f"{prefix}{name}_regularizer", None) is not None:
                return f"its {name}_regularizer would see a part; leave it out, or use AdamW's weight_decay"
            if getattr(layer, f"{prefix}{name}_constraint", None) is not None:
                return f"its {name}_constraint would see a part; leave it out"
    if getattr(layer, "_flash_attention", False) and getattr(layer, "_use_gate", False):
        return "flash attention with a gate is not known to be cut by heads"
    return ""


def _feeds(layer: Any, flow: Flow, paths: Mapping[int, str]) -> tuple[str, ...] | None:
    """Return the linear layers that a layer feeds, "" for everything else; adding a whole tensor does not count."""
    found = set()
    for destination in flow.destinations(layer):
        linear = destination is not OUTSIDE and isinstance(destination, DENSE)
        whole = not linear or any(
            origin is OUTSIDE or not isinstance(origin, DENSE) for origin in flow.origins(destination)
        )
        found.add("" if whole else paths.get(id(destination), ""))
    return tuple(sorted(found))


def _path(layer: Any, paths: Mapping[int, str]) -> str:
    """Return the path of a built layer: that of its variables, which is the same in every process."""
    is_attention = isinstance(layer, ATTENTIONS)
    # With LoRA `layer.kernel` is a sum, and no variable.
    weights = layer._query_dense.weights if is_attention else layer.weights
    folder = next(paths[id(each)] for each in weights if id(each) in paths).rpartition("/")[0]
    return folder.rpartition("/")[0] if is_attention else folder
