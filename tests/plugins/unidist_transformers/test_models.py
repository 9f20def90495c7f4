"""What is read from models of the transformers library."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from transformers_runs import make_model

from unidist_transformers.models import file_names, tensor_roles


def test_roles_are_those_of_the_tp_plan() -> None:
    roles = tensor_roles(make_model("llama"), 2)
    assert roles["model.layers.*.self_attn.q_proj"] == roles["model.layers.*.mlp.up_proj"] == "column"
    assert roles["model.layers.*.self_attn.o_proj"] == roles["model.layers.*.mlp.down_proj"] == "row"


def test_an_attention_whose_heads_do_not_divide_is_computed_whole() -> None:
    roles = tensor_roles(make_model("llama"), 4)  # it has 4 heads, and 2 for keys and values
    assert roles["model.layers.*.self_attn.q_proj"] == roles["model.layers.*.self_attn.k_proj"] == "column_gather"
    assert roles["model.layers.*.self_attn.o_proj"] == "row_split"
    assert roles["model.layers.*.mlp.up_proj"] == "column"


def test_other_models_have_none() -> None:
    assert tensor_roles(make_model("gpt2"), 2) == {}
    assert tensor_roles(torch.nn.Linear(2, 2), 2) == {}


def test_names_in_files_are_those_of_the_library() -> None:
    model = make_model("vit")
    found = file_names(model, list(model.state_dict()))
    assert found["vit.layers.0.attention.q_proj.weight"] == "vit.encoder.layer.0.attention.attention.query.weight"
    assert "vit.embeddings.cls_token" not in found
    assert file_names(torch.nn.Linear(2, 2), ["weight"]) == {}
