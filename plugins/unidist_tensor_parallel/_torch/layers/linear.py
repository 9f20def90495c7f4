"""Linear layers that are cut: by columns (outputs) or by rows (inputs).

A layer stays the same object, of a subclass of its class: paths, hooks and `isinstance` are as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from typing_extensions import override

from unidist_tensor_parallel._torch.layers.region import Region
from unidist_tensor_parallel.layout.cuts import Cut
from unidist_torch.models.guarded_parameter import plain_part, plain_use


class ColumnLinear(torch.nn.Linear):
    """Computes some of the outputs. `unidist_` attributes are set by `cut_column`."""

    unidist_region: Region
    unidist_cut: Cut
    unidist_gathers: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs, or all of them. Collective in its backward pass."""
        region = self.unidist_region
        outputs = part_linear(region.enter(x), self.weight, self.bias)
        if not self.unidist_gathers:
            region.begin_cut(self, outputs)
            return outputs
        return _ordered(region.axis.gathered(outputs, self.unidist_cut.counts), self.unidist_cut)

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, outputs of {self.unidist_cut.total} cut over {self.unidist_cut.size}"


class RowLinear(torch.nn.Linear):
    """Takes some of the inputs. `unidist_` attributes are set by `cut_row`."""

    unidist_region: Region
    unidist_cut: Cut
    unidist_splits: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs, the same on all ranks. Collective."""
        region = self.unidist_region
        region.end_cut()
        if self.unidist_splits:
            x = region.axis.split(x, self.unidist_cut.counts)
        outputs = region.leave(part_linear(x, self.weight))
        return outputs if self.bias is None else outputs + region.whole_parameter(self.bias)

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, inputs of {self.unidist_cut.total} cut over {self.unidist_cut.size}"


LINEARS = (torch.nn.Linear, torch.nn.modules.linear.NonDynamicallyQuantizableLinear)
"""The classes whose forward is that of `torch.nn.Linear`; what a subclass computes is not known."""


def part_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `torch.nn.functional.linear` with parameters of which this rank has a part."""
    if type(x) is torch.Tensor and not torch.compiler.is_compiling():
        with plain_use():
            return F.linear(x, weight, bias)
    if isinstance(x, torch.Tensor):  # a compiled graph keeps no context, and another class does something else
        weight, bias = plain_part(weight), None if bias is None else plain_part(bias)
    return F.linear(x, weight, bias)


def cut_column(layer: Any, cut: Cut, region: Region, *, gathers: bool = False) -> None:
    """Let a linear layer compute the outputs of this rank. Its parameters are cut already.

    Args:
        layer: of one of `LINEARS`.
        cut: of its outputs.
        region: that it is in.
        gathers: return all outputs.
    """
    layer.__class__ = ColumnLinear
    layer.out_features = cut.counts[region.axis.rank]
    layer.unidist_region, layer.unidist_cut, layer.unidist_gathers = region, cut, gathers


def cut_row(layer: Any, cut: Cut, region: Region, *, splits: bool = False) -> None:
    """Let a linear layer take the inputs of this rank. Its weight is cut already, its bias whole.

    Args:
        layer: of one of `LINEARS`.
        cut: of its inputs.
        region: that it is in.
        splits: inputs arrive whole.
    """
    layer.__class__ = RowLinear
    layer.in_features = cut.counts[region.axis.rank]
    layer.unidist_region, layer.unidist_cut, layer.unidist_splits = region, cut, splits


def _ordered(gathered: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return outputs in their order, if each rank has parts of several blocks."""
    if len(cut.blocks) == 1:
        return gathered
    indices = [index for rank in range(cut.size) for index in cut.indices(rank)]
    order = torch.empty(len(indices), dtype=torch.long)
    order[torch.tensor(indices)] = torch.arange(len(indices))
    return gathered.index_select(-1, order.to(gathered.device))
