"""Facts that transformers has about its models: which layers to cut, and the names of tensors in files.

It is asked where a script has imported it, and never imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from unidist.errors import UsageError

_ROLES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "column_gather",
    "colwise_gather_output": "column_gather",
    "rowwise_rep": "row_split",
    "rowwise_split_input": "row_split",
}
"""Roles of `tensor=N` by style of a `tp_plan`."""

_ELSEWHERE = ("embedding_rowwise",)
"""Styles of layers whose role the strategy finds itself."""

_WHOLE_ATTENTION = {"column": "column_gather", "row": "row_split"}


def tensor_roles(model: Any, size: int) -> Mapping[str, str]:
    """Return the roles of layers by the `tp_plan` of a model; {} for one without, or with styles that are not known.

    Attentions whose heads do not divide into the ranks, and those with parameters between their projections that each
    rank would have for its heads alone (`q_norm`), are computed whole on each rank, between cut layers.
    """
    plan: dict[str, str] = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    if not _is_model(model) or any(
        style not in _ROLES and style not in _ELSEWHERE and "attn" not in pattern for pattern, style in plan.items()
    ):
        return {}
    roles = {pattern: _ROLES[style] for pattern, style in plan.items() if style in _ROLES}
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    others = any("attn" in pattern and style not in _ROLES for pattern, style in plan.items())
    if others or not heads or heads % size or key_heads % size:
        roles |= {pattern: _WHOLE_ATTENTION.get(role, role) for pattern, role in roles.items() if "attn" in pattern}
    return roles


def file_names(model: Any, names: list[str]) -> Mapping[str, str]:
    """Return the names that tensors of a model have in files of `save_pretrained`, where these are others.

    Raises:
        UsageError: tensors are combined or split when they are saved.
    """
    if not _is_model(model):
        return {}
    import torch

    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # a version whose names are the same
        return {}
    try:
        found = revert_weight_conversion(model, {name: torch.tensor(number) for number, name in enumerate(names)})
    except Exception as exc:  # of operations on tensors that have dims
        raise UsageError(
            f"files of {type(model).__name__} have its tensors in other shapes: load it by from_pretrained, and "
            "distribute it afterwards"
        ) from exc
    return {names[int(number)]: name for name, number in found.items() if names[int(number)] != name}


def _is_model(model: Any) -> bool:
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)
