"""Tells unidist what the transformers library knows of its models. Imports nothing of it."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist_tensor_parallel import TensorRolesSpec
from unidist_torch.file_names import FileNamesSpec

NAME = "transformers"


@hookimpl
def unidist_register_tensor_roles(registry: Registry[TensorRolesSpec]) -> None:
    """Register the `tp_plan` of models."""
    registry.add(TensorRolesSpec(NAME, "unidist_transformers.models:tensor_roles", "the tp_plan of a model"))


@hookimpl
def unidist_register_file_names(registry: Registry[FileNamesSpec]) -> None:
    """Register the names that tensors have in files of `save_pretrained`."""
    registry.add(FileNamesSpec(NAME, "unidist_transformers.models:file_names", "names in folders of save_pretrained"))
