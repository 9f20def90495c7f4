"""What PyTorch's half finds out about a model without other ranks."""

from __future__ import annotations

import operator
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[3] / "parallel"))

from _torch_tensor import WIDTH, ByHead, ByInput, make  # noqa: E402 - after it is known that there is torch
from torch import nn  # noqa: E402

from unidist.errors import ConfigurationError  # noqa: E402
from unidist_tensor_parallel._torch.describe import describe  # noqa: E402
from unidist_tensor_parallel._torch.layers.heads import HeadCounts  # noqa: E402
from unidist_tensor_parallel._torch.probe import find_attentions, trial  # noqa: E402
from unidist_tensor_parallel._torch.tracing import feeds_of  # noqa: E402
from unidist_tensor_parallel.layout.roles import Role, automatic  # noqa: E402


class Gated(nn.Module):
    """Control flow that no tracing follows, and names that tell the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.gate_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        """Return a tensor of the shape of `x`."""
        if x.sum() > 0:
            return x
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


class Branching(nn.Module):
    """Of three layers in a row, the first one's outputs are also used elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        """Return a tensor of the shape of `x`."""
        hidden = self.a(x)
        return self.c(torch.tanh(self.b(torch.relu(hidden))) * 2.0) + hidden


class Weighted(Branching):
    """A parameter of full width acts between the layers."""

    def forward(self, x: Any) -> Any:
        """Return a tensor of the shape of `x`."""
        return self.b(self.a(x) * self.scale)


def test_outputs_are_followed_through_element_wise_operations() -> None:
    assert feeds_of(Branching()) == {"a": ("", "b"), "b": ("c",), "c": ("",)}
    assert feeds_of(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 4))) == {
        "0": ("3",),
        "3": ("",),
    }
    assert feeds_of(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)))["0"] == ("",)


def test_a_parameter_between_two_layers_keeps_them_whole() -> None:
    assert feeds_of(Weighted())["a"] == ("",)


def test_names_tell_where_tracing_fails() -> None:
    found = automatic(describe(nn.Sequential(Gated())), 2)
    assert found.roles == {"0.up_proj": Role.COLUMN, "0.gate_proj": Role.COLUMN, "0.down_proj": Role.ROW}


def test_subclasses_stay_whole_and_say_so() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 2

    found = automatic(describe(nn.Sequential(Scaled(4, 8), nn.ReLU(), nn.Linear(8, 4))), 2)
    assert not found.roles
    assert "Scaled computes is not known" in found.reasons["0"]
    table = automatic(describe(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 8))), 2)
    assert "max_norm" in table.reasons["0"]


def test_torch_layers_and_own_attentions_have_roles() -> None:
    roles = automatic(describe(make("encoder")), 2).roles
    assert roles["0.inner.layers.1.self_attn"] is Role.ATTENTION
    assert roles["0.inner.layers.1.linear1"] is Role.COLUMN
    assert roles["0.inner.layers.1.linear2"] is Role.ROW
    gpt = automatic(describe(make("gpt")), 2).roles
    assert (gpt["blocks.0.qkv"], gpt["blocks.0.project"]) == (Role.QKV, Role.ROW)
    assert (gpt["embed"], gpt["head"]) == (Role.VOCABULARY, Role.VOCABULARY)
    assert "position" not in gpt


class WithMask(ByHead):
    """Takes two arguments, so it cannot be run by itself."""

    def forward(self, x: Any, y: Any) -> Any:
        """Return a tensor of the shape of `x`."""
        return super().forward(x) + y


@pytest.mark.parametrize(
    ("model", "expected"),
    [("gpt", True), ("grouped", True), (ByInput, False), (ByHead, False), (WithMask, None)],
)
def test_attentions_are_tried_before_they_are_cut(model: Any, expected: bool | None) -> None:
    module = make(model) if isinstance(model, str) else model()
    found = find_attentions(module, automatic(describe(module), 2).roles)
    assert len(found) == (2 if isinstance(model, str) else 1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for attention in found:
        for rank in range(2):
            owner = module.get_submodule(attention.owner)
            assert trial(owner, attention, SimpleNamespace(rank=rank, size=2)) is expected
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(type(each) in (nn.Linear,) for each in module.modules() if isinstance(each, nn.Linear))


def test_heads_that_are_not_found_or_do_not_fit_are_named() -> None:
    module = nn.ModuleDict({"qkv": nn.Linear(WIDTH, 30)})
    with pytest.raises(ConfigurationError, match=r"none of '' has an attribute.*num_heads.*column_gather"):
        HeadCounts(dict(module.named_modules())).fused("qkv", module["qkv"], 2)
    module.num_heads = 4
    with pytest.raises(ConfigurationError, match=r"30 outputs of 'qkv' are no whole number"):
        HeadCounts(dict(module.named_modules())).fused("qkv", module["qkv"], 2)
    with pytest.raises(ConfigurationError, match="30 outputs of 'qkv' do not divide into 4 heads"):
        HeadCounts(dict(module.named_modules())).single("qkv", module["qkv"], 2)
    assert operator.attrgetter("num_heads")(module) == 4, "nothing is changed before all is known"
