"""Cuts the layers of a model in place, by their roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unidist.errors import ConfigurationError
from unidist_tensor_parallel._torch.layers.attention import attention_cuts, cut_attention, heads_of
from unidist_tensor_parallel._torch.layers.heads import HeadCounts, projection_cut
from unidist_tensor_parallel._torch.layers.linear import LINEARS, cut_column, cut_row
from unidist_tensor_parallel._torch.layers.region import Region
from unidist_tensor_parallel._torch.layers.vocabulary import cut_embedding, why_whole
from unidist_tensor_parallel.layout.cuts import Cut, Heads, even
from unidist_tensor_parallel.layout.roles import Role
from unidist_torch.models.guarded_parameter import plain_use


class Cutter:
    """Cuts one model.

    Args:
        model: whole, with the same values on all ranks.
        roles: by path of the layer.
        regions: of paths; `regions[""]` is that of all others.

    Attributes:
        cuts: of parameters, by path; all paths of a parameter that several layers share.
    """

    def __init__(self, model: torch.nn.Module, roles: Mapping[str, Role], regions: Mapping[str, Region]) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._roles = roles
        self._regions = regions
        self._axis = regions[""].axis
        self._size = self._axis.size
        self._counts = HeadCounts(self._modules)
        self._paths: dict[int, list[str]] = {}
        for path, parameter in model.named_parameters(remove_duplicate=False):
            self._paths.setdefault(id(parameter), []).append(path)
        self._cut: dict[int, tuple[str, Cut]] = {}
        self.cuts: dict[str, Cut] = {}

    def cut(self) -> None:
        """Cut every layer that has a role.

        Raises:
            ConfigurationError: a layer cannot be cut as its role says; says why and what to do. Nothing was changed
                in layers after it, so the model cannot be used.
        """
        done: set[int] = set()
        for path, role in sorted(self._roles.items(), key=self._order):
            layer = self._modules[path]
            if role in (Role.REPLICATE, Role.SEQUENCE) or id(layer) in done:
                continue
            done.add(id(layer))
            getattr(self, f"_{role}")(path, layer)
        self._counts.apply(self._axis.rank)

    def _order(self, item: tuple[str, Role]) -> tuple[int, int]:
        """Sort projections before the row layers that use their outputs; queries, which have most heads, first."""
        path, role = item
        if role is Role.QKV:
            return 0, 0
        return (1, -getattr(self._modules[path], "out_features", 0)) if role is Role.HEADS else (2, 0)

    def _column(self, path: str, layer: Any) -> None:
        self._outputs(
            path, layer, even(0, self._linear(path, layer).out_features, self._size, what=f"outputs of {path}")
        )

    def _column_gather(self, path: str, layer: Any) -> None:
        cut = even(0, self._linear(path, layer).out_features, self._size, what=f"outputs of {path}")
        self._outputs(path, layer, cut, gathers=True)

    def _qkv(self, path: str, layer: Any) -> None:
        heads = self._counts.fused(path, self._linear(path, layer), self._size)
        self._outputs(path, layer, heads.fused(0))

    def _heads(self, path: str, layer: Any) -> None:
        self._outputs(
            path, layer, projection_cut(self._counts.single(path, self._linear(path, layer), self._size), layer)
        )

    def _row(self, path: str, layer: Any, *, splits: bool = False) -> None:
        inputs = self._linear(path, layer).in_features
        cut = self._counts.inputs(path, inputs) or even(1, inputs, self._size, what=f"inputs of {path}")
        self._keep_part(f"{path}.weight", layer.weight, cut)
        cut_row(layer, cut, self._region(path), splits=splits)

    def _row_split(self, path: str, layer: Any) -> None:
        self._row(path, layer, splits=True)

    def _attention(self, path: str, layer: Any) -> None:
        if type(layer) is not torch.nn.MultiheadAttention:
            raise ConfigurationError(
                f"tensor: {path!r} is a {type(layer).__name__}, and the role attention is for "
                "torch.nn.MultiheadAttention. Give its linear layers roles: qkv (or heads), and row"
            )
        heads: Heads = heads_of(layer, self._size, path)
        for name, cut in attention_cuts(heads, layer).items():
            self._keep_part(f"{path}.{name}", layer.get_parameter(name), cut)
        cut_attention(layer, heads, self._region(path))

    def _vocabulary(self, path: str, layer: Any) -> None:
        if isinstance(layer, torch.nn.Embedding):
            why = why_whole(layer)
            if why or type(layer) is not torch.nn.Embedding:
                raise ConfigurationError(
                    f"tensor: the embedding {path!r} cannot be cut: {why or 'a subclass computes something else'}"
                )
            cut = even(0, layer.num_embeddings, self._size, what=f"rows of {path}")
            self._keep_part(f"{path}.weight", layer.weight, cut)
            cut_embedding(layer, cut, self._region(path))
        else:
            self._column_gather(path, layer)

    def _outputs(self, path: str, layer: Any, cut: Cut, *, gathers: bool = False) -> None:
        self._keep_part(f"{path}.weight", layer.weight, cut)
        if layer.bias is not None:
            self._keep_part(f"{path}.bias", layer.bias, cut)
        cut_column(layer, cut, self._region(path), gathers=gathers)

    def _keep_part(self, path: str, parameter: torch.Tensor, cut: Cut) -> None:
        """Keep this rank's part of a parameter; layers that share it must cut it in the same way."""
        known = self._cut.get(id(parameter))
        if known is not None:
            if known[1] != cut:
                raise ConfigurationError(
                    f"tensor: {known[0]!r} and {path!r} are one parameter, and their layers cut it differently. Give "
                    "both layers roles that cut it alike (vocabulary for an embedding and its output layer), or leave "
                    "both whole (replicate)"
                )
            return
        indices = torch.tensor(cut.indices(self._axis.rank), device=parameter.device)
        with torch.no_grad(), plain_use():
            parameter.data = parameter.data.index_select(cut.dim, indices)
        self._cut[id(parameter)] = (path, cut)
        self.cuts |= dict.fromkeys(self._paths[id(parameter)], cut)

    def check_shared(self) -> None:
        """Check that all layers that share a cut parameter are cut.

        Raises:
            ConfigurationError: a layer without a role has a parameter that another layer has cut.
        """
        for _, (path, _) in self._cut.items():
            for other in self._paths[id(self._parameter(path))]:
                owner = other.rpartition(".")[0]
                if not any(owner == each or owner.startswith(f"{each}.") for each in self._roles):
                    raise ConfigurationError(
                        f"tensor: {path!r} is cut, and {other!r} is the same parameter in a layer that is not. Give "
                        f"{owner!r} a role too"
                    )

    def _parameter(self, path: str) -> torch.Tensor:
        owner, _, name = path.rpartition(".")
        found: torch.Tensor = getattr(self._modules[owner], name)
        return found

    def _region(self, path: str) -> Region:
        inside = [each for each in self._regions if path == each or path.startswith(f"{each}.")]
        return self._regions[max(inside, key=len, default="")]

    def _linear(self, path: str, layer: Any) -> Any:
        if type(layer) not in LINEARS:
            raise ConfigurationError(
                f"tensor: {path!r} is a {type(layer).__name__}, and this role is for torch.nn.Linear. Give the role to "
                "the linear layers in it, or leave it whole (replicate)"
            )
        return layer
