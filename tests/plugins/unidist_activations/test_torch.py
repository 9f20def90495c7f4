"""Recomputing and offloading blocks of PyTorch: same numbers, less memory, and the model stays what it is."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.plugins.unidist_activations._torch_memory import LiveBytes
from tests.plugins.unidist_activations._torch_models import WIDTH, Model, make
from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist_activations import _torch_offload
from unidist_activations.strategy import Activations

CONTEXT = cast(Any, SimpleNamespace(topology=SimpleNamespace(rank=0), plugins=PluginManager().load()))


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Activations]:
    monkeypatch.setattr(_torch_offload, "SMALLEST_BYTES", 64)  # the tensors of these tests are small
    return {"recompute": Activations("recompute"), "offload": Activations("offload", path=str(tmp_path))}


def outcome(model: Model, *, autocast: bool = False, steps: int = 2) -> dict[str, torch.Tensor]:
    """Return gradients, statistics, outputs, and the next random number, of some steps."""
    torch.manual_seed(5)
    dtype = model.head.weight.dtype
    features = torch.randn(6, WIDTH, dtype=dtype, requires_grad=True)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(features)
        output.square().sum().backward()
    found = {f"{name} (gradient)": value.grad for name, value in model.named_parameters() if value.grad is not None}
    found |= dict(model.state_dict())
    assert features.grad is not None
    return {**found, "input": features.grad, "output": output.detach(), "random": torch.rand(1)}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, limit: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=limit, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_gradients_statistics_and_random_numbers_are_the_same(policies: dict[str, Activations], policy: str) -> None:
    model = policies[policy].partition(make(), CONTEXT)
    check_equal(outcome(model), outcome(make()), limit=1e-12)


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_autocast_is_the_same_when_a_block_runs_again(policies: dict[str, Activations], policy: str) -> None:
    model = policies[policy].partition(make(dtype=torch.float32), CONTEXT)
    check_equal(outcome(model, autocast=True), outcome(make(dtype=torch.float32), autocast=True), limit=1e-6)


def test_the_comparison_sees_other_random_numbers() -> None:
    """Without this the tests above might pass whatever dropout does."""
    other = make()
    other.blocks[0].dropout.p = 0.51
    with pytest.raises(AssertionError):
        check_equal(outcome(other), outcome(make()), limit=1e-12)


@pytest.mark.parametrize(
    ("strategy", "blocks_kept"),
    [(None, 4), (Activations("recompute"), 0), (Activations("recompute", blocks="blocks.[12]"), 1)],
    ids=["plain", "all", "two of three"],
)
def test_only_inputs_of_blocks_are_kept(strategy: Activations | None, blocks_kept: int) -> None:
    width, rows = 64, 256
    model = make(width, dropout=0.1)
    if strategy is not None:
        strategy.partition(model, CONTEXT)
    with LiveBytes() as live:
        output = model(torch.ones(rows, width, dtype=torch.float64))
        kept = live.now()
    unit = rows * width * 8
    # Of a block that is kept: what the norm, tanh and dropout give, and dropout's mask, four times as wide as its
    # input. Of the others their inputs, which are outputs of others.
    assert 16 * blocks_kept <= kept / unit < 16 * blocks_kept + 5.5
    output.sum().backward()


def test_offloaded_tensors_are_alive_nowhere_but_in_files(policies: dict[str, Activations]) -> None:
    width, rows = 64, 256
    model = policies["offload"].partition(make(width, dropout=0.1), CONTEXT)
    with LiveBytes() as live:
        output = model(torch.ones(rows, width, dtype=torch.float64))
        kept = live.now()
    assert kept / (rows * width * 8) < 2.5  # the last block's output, and small things
    output.sum().backward()


def test_a_tensor_that_several_operations_keep_is_moved_once(policies: dict[str, Activations]) -> None:
    moved: list[int] = []

    class Store(_torch_offload.ActivationStore):
        def put(self, tensor: torch.Tensor) -> Any:
            moved.append(tensor.data_ptr())
            copied = tensor.clone()
            return lambda: copied

    linear = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
    features = torch.randn(32, 64)
    with _torch_offload.Offload(Store()).of(linear):
        total = sum(part(features) for part in linear)
    assert isinstance(total, torch.Tensor)
    assert moved == [features.data_ptr()]  # and no weights
    total.sum().backward()
    expected = features.sum(0).expand(64, 64)
    for part in linear:
        torch.testing.assert_close(part.weight.grad, expected)


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_memory_order_and_views_survive_offloading(policies: dict[str, Activations], policy: str) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Identity()
            self.weight = torch.nn.Parameter(torch.arange(16.0).reshape(4, 4) / 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (self.inner(x) @ self.weight).transpose(0, 1)[1:, ::2]
            return torch.exp(y / 9) * y.unsqueeze(-1).expand(-1, -1, 5).mean(-1)

    def gradient(model: torch.nn.Module) -> torch.Tensor:
        model(torch.linspace(-1, 1, 40).reshape(10, 4)).sum().backward()
        found = model.get_submodule("0").get_parameter("weight").grad
        assert found is not None
        return found

    plain, changed = (torch.nn.Sequential(Odd()) for _ in range(2))
    strategy = policies[policy]
    Activations(strategy.policy, blocks="0", path=strategy.path).partition(changed, CONTEXT)
    assert torch.equal(gradient(changed), gradient(plain))


def test_the_model_stays_what_it_is(policies: dict[str, Activations]) -> None:
    plain, model = make(), policies["recompute"].partition(make(), CONTEXT)
    assert type(model) is Model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)


def test_hooks_of_a_block_run_once(policies: dict[str, Activations]) -> None:
    model = policies["recompute"].partition(make(), CONTEXT)
    seen: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.blocks[0].first.weight.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    outcome(model, steps=1)
    assert seen == ["forward", "gradient"]


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_a_graph_may_be_used_twice(policies: dict[str, Activations], policy: str) -> None:
    """As `retain_graph=True` does, and schedules that compute the gradients of inputs first."""
    found = []
    for model in (policies[policy].partition(make(), CONTEXT), make()):
        torch.manual_seed(5)
        features = torch.randn(6, WIDTH, dtype=model.head.weight.dtype, requires_grad=True)
        loss = model(features).square().sum()
        first = torch.autograd.grad(loss, [features], retain_graph=True)
        second = torch.autograd.grad(loss, [*model.parameters()])
        gradients = {str(number): value for number, value in enumerate((*first, *second))}
        found.append({**gradients, **model.state_dict()})
    check_equal(*found, limit=1e-12)


def test_nothing_is_kept_or_run_again_without_gradients(policies: dict[str, Activations]) -> None:
    for policy in policies.values():
        model = policy.partition(make(), CONTEXT).eval()
        plain = make().eval()
        features = torch.randn(6, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            assert torch.equal(model(features), plain(features))


def test_a_copy_of_the_model_runs_its_own_blocks(policies: dict[str, Activations]) -> None:
    model = policies["recompute"].partition(make(), CONTEXT)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert torch.count_nonzero(other(torch.ones(4, WIDTH, dtype=torch.float64))) == 0
    check_equal(outcome(model), outcome(make()), limit=1e-12)


def test_a_pickled_model_loads_as_a_plain_one(policies: dict[str, Activations]) -> None:
    file = io.BytesIO()
    torch.save(policies["recompute"].partition(make(), CONTEXT), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    check_equal(outcome(loaded), outcome(make()), limit=1e-12)


def test_a_second_distribute_replaces_the_first(policies: dict[str, Activations]) -> None:
    model = make()
    calls: list[int] = []
    own = model.blocks[1].forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    model.blocks[1].forward = counting
    for policy in ("recompute", "offload", "recompute"):
        policies[policy].partition(model, CONTEXT)
    check_equal(outcome(model, steps=1), outcome(make(), steps=1), limit=1e-12)
    assert len(calls) == 2  # forward, and once more


def test_a_model_that_is_given_up_goes(policies: dict[str, Activations]) -> None:
    model = policies["recompute"].partition(make(), CONTEXT)
    outcome(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_offload_of_a_model_in_host_memory_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"is there already \(device cpu\).*activations=offload:path=FOLDER"):
        Activations("offload").partition(make(), CONTEXT)


def test_a_pattern_that_matches_nothing_lists_the_modules() -> None:
    with pytest.raises(ConfigurationError, match=r"'block\.\*' matches no part.*Parts: blocks\.0, blocks\.0\.first"):
        Activations("recompute", blocks="block.*").partition(make(), CONTEXT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offload_to_host_memory_on_a_device() -> None:
    expected = outcome_on("cuda", None)
    check_equal(outcome_on("cuda", Activations("offload")), expected, limit=1e-12)


def outcome_on(device: str, strategy: Activations | None) -> dict[str, torch.Tensor]:
    model = make(512, dropout=0.1).to(device)
    if strategy is not None:
        strategy.partition(model, CONTEXT)
    torch.manual_seed(5)
    output = model(torch.linspace(-1, 1, 512 * 64, dtype=torch.float64, device=device).reshape(64, 512))
    kept = torch.cuda.memory_allocated()
    output.square().sum().backward()
    if strategy is not None:
        assert kept < 1.5 * sum(parameter.nbytes for parameter in model.parameters())
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
