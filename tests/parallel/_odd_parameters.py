"""Trainings with unusual parameters, groups and modules, beside one process: for `test_odd_parameters`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call, grad, jacrev, jvp, vmap

import unidist.torch as ud
import unidist_zero
from unidist.errors import UnidistError
from unidist.settings import set_variables

STEPS = 4
mse = torch.nn.functional.mse_loss


def train_as_usual(model: Any, x: Any, y: Any) -> None:
    """Compute the gradients of the mean loss."""
    mse(model(x), y).backward()


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        model: builds the model.
        optimizer: builds the optimizer of a model.
        scheduler: builds a scheduler of the optimizer; None: there is none.
        after: what the script does after a step: takes its number, the model and the optimizer.
        backward: gives the parameters their gradients, from the model and a batch.
    """

    model: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    scheduler: Callable[[Any], Any] | None = None
    after: Callable[[int, Any, Any], None] | None = None
    backward: Callable[[Any, Any, Any], None] = train_as_usual


# Models


def _complex() -> Any:
    return torch.complex64 if torch.get_default_dtype() is torch.float32 else torch.complex128


def net() -> Any:
    """Return two layers."""
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


class ZeroSized(torch.nn.Module):
    """Layers with parameters that have no elements: an adapter of rank 0, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.down = torch.nn.Linear(8, 0)
        self.up = torch.nn.Linear(0, 8)
        self.unused = torch.nn.Parameter(torch.zeros(0))
        self.last = torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        """Compute the layers."""
        hidden = torch.tanh(self.first(x))
        return self.last(hidden + self.up(self.down(hidden)))


class OnlyZeroSized(torch.nn.Module):
    """A layer that has parameters without elements only, first in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.Linear(6, 0, bias=True)
        self.layers = net()

    def forward(self, x: Any) -> Any:
        """Compute the layers."""
        return self.layers(x + self.nothing(x).sum(-1, keepdim=True))


class Complex(torch.nn.Module):
    """A layer of complex numbers between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 5)
        self.turned = torch.nn.Parameter(torch.randn(5, 7, dtype=_complex()) / 3)
        self.scale = torch.nn.Parameter(torch.tensor(0.5 + 0.25j, dtype=_complex()))
        self.last = torch.nn.Linear(14, 4)

    def forward(self, x: Any) -> Any:
        """Compute the layers."""
        turned = self.first(x).to(self.turned.dtype) @ self.turned * self.scale
        return self.last(torch.view_as_real(turned).flatten(1))


class Scalars(torch.nn.Module):
    """Parameters without dims, and fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.layers = net()

    def forward(self, x: Any) -> Any:
        """Compute the layers."""
        return self.layers(x) * self.scale


class Delegating(torch.nn.Module):
    """A wrapper that has all attributes of what it wraps."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["wrapped"], name)

    def forward(self, x: Any) -> Any:
        """Call what it wraps."""
        return self.wrapped(x)


class Greedy(Delegating):
    """A module that answers to each name, as scripted stubs and proxies of remote objects do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return torch.nn.Module.__getattr__(self, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return lambda *args, **kwargs: None


# Optimizers and schedulers


def sgd(model: Any) -> Any:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: Any) -> Any:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def tensor_rate(model: Any) -> Any:
    """Return Adam with its learning rate in a tensor."""
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False)


def _halves(model: Any) -> list[list[Any]]:
    listed = list(model.parameters())
    return [listed[:2], listed[2:]]


def two_groups(model: Any) -> Any:
    """Return AdamW with other options for each half of the parameters."""
    first, second = _halves(model)
    groups = [{"params": first, "lr": 0.02}, {"params": second, "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups)


def tensor_rates(model: Any) -> Any:
    """Return SGD with a learning rate in a tensor for each half of the parameters."""
    first, second = _halves(model)
    return torch.optim.SGD(
        [{"params": first, "lr": torch.tensor(0.1)}, {"params": second, "lr": torch.tensor(0.05)}], momentum=0.9
    )


def first_layer(model: Any) -> Any:
    """Return SGD over the first layer."""
    return torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)


def add_last(step: int, model: Any, optimizer: Any) -> None:
    """Add the last layer after two steps."""
    if step == 1:
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})


def frozen_last(model: Any) -> Any:
    """Return SGD over the first layer, the only one that is trained."""
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    return first_layer(model)


def thaw_last(step: int, model: Any, optimizer: Any) -> None:
    """Train and add the last layer after two steps."""
    if step == 1:
        for parameter in model[2].parameters():
            parameter.requires_grad_(True)
    add_last(step, model, optimizer)


class Grown(torch.nn.Module):
    """A model that gets another layer during training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.more = torch.nn.Sequential()

    def forward(self, x: Any) -> Any:
        """Compute whichever layers were added."""
        hidden = self.layers(x)
        return hidden + self.more(hidden) if len(self.more) else hidden


def grow(step: int, model: Any, optimizer: Any) -> None:
    """Add a new layer after two steps, whose values are random on each rank."""
    if step == 1:
        model.more.append(torch.nn.Linear(4, 4))
        optimizer.add_param_group({"params": list(model.more.parameters()), "lr": 0.05})


def lambdas(optimizer: Any) -> Any:
    """Return a schedule for each group."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0 + step])


def one_cycle(optimizer: Any) -> Any:
    """Return a schedule of learning rates and momenta for each group."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.05], total_steps=8)


def halving(optimizer: Any) -> Any:
    """Return a schedule that multiplies the rates of all groups."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


# torch.func


def call_functionally(model: Any, x: Any, y: Any) -> None:
    """Call the model with its own parameters."""
    mse(functional_call(model, dict(model.named_parameters()), (x,)), y).backward()


def call_with_others(model: Any, x: Any, y: Any) -> None:
    """Call the model with parameters that are computed from its own ones."""
    mse(functional_call(model, {name: 0.9 * each for name, each in model.named_parameters()}, (x,)), y).backward()


def _gradients_of(function: Callable[..., Any], model: Any, *args: Any) -> None:
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    for name, found in function(parameters, *args).items():
        model.get_parameter(name).grad = found


def take_grad(model: Any, x: Any, y: Any) -> None:
    """Let `torch.func.grad` compute the gradients."""
    _gradients_of(grad(lambda each, x, y: mse(functional_call(model, each, (x,)), y)), model, x, y)


def take_grad_while_gathered(model: Any, x: Any, y: Any) -> None:
    """Do so with whole parameters, as zero=3 asks for."""
    with unidist_zero.gathered(model) if hasattr(model, "no_sync") else nullcontext():
        take_grad(model, x, y)


def normalise(model: Any, x: Any, y: Any) -> None:
    """Compute gradients through batch norm with statistics of all ranks."""
    if hasattr(model, "no_sync"):
        layer = ud.SyncBatchNorm(6, track_running_stats=False)
        grad(lambda x: layer(x).square().sum())(x)


def reduce_in_grad(model: Any, x: Any, y: Any) -> None:
    """Compute the gradient of an operation by name."""
    if hasattr(model, "no_sync"):
        grad(lambda x: ud.allreduce(x).square().sum())(x)


def take_grad_of_parameters(model: Any, x: Any, y: Any) -> None:
    """Let `torch.func.grad` compute the gradients, of the parameters themselves."""
    found = grad(lambda each: mse(functional_call(model, each, (x,)), y))(dict(model.named_parameters()))
    for name, value in found.items():
        model.get_parameter(name).grad = value.detach()


def take_grad_per_sample(model: Any, x: Any, y: Any) -> None:
    """Compute the gradients of each sample, and take their mean."""
    of_sample = vmap(grad(lambda each, x, y: mse(functional_call(model, each, (x,)), y)), (None, 0, 0))
    _gradients_of(lambda *args: {n: each.mean(0) for n, each in of_sample(*args).items()}, model, x, y)


def penalize_gradient(model: Any, x: Any, y: Any) -> None:
    """Add the gradient with regard to the inputs to the loss."""
    slope = grad(lambda x: model(x).sum())(x)
    (mse(model(x), y) + 0.1 * slope.square().sum(1).mean()).backward()


def penalize_jacobian(model: Any, x: Any, y: Any) -> None:
    """Add the Jacobian with regard to the inputs, of each sample, to the loss."""
    found = vmap(jacrev(lambda x: model(x)))(x)
    (mse(model(x), y) + 0.1 * found.square().sum((1, 2)).mean()).backward()


def penalize_tangent(model: Any, x: Any, y: Any) -> None:
    """Add a directional derivative to the loss, by forward mode."""
    outputs, slope = jvp(lambda x: model(x), (x,), (torch.ones_like(x),))
    (mse(outputs, y) + 0.1 * slope.square().sum(1).mean()).backward()


def map_model(model: Any, x: Any, y: Any) -> None:
    """Call the model for each sample by `vmap`."""
    mse(vmap(lambda x: model(x))(x), y).backward()


CASES = {
    "zero-sized": Case(ZeroSized, sgd),
    "zero-sized, Adam": Case(ZeroSized, adam),
    "a layer without elements": Case(OnlyZeroSized, adam),
    "without dims": Case(Scalars, adam),
    "complex": Case(Complex, sgd),
    "complex, Adam": Case(Complex, adam),
    "rate in a tensor": Case(net, tensor_rate),
    "rate in a tensor, scheduled": Case(net, tensor_rate, halving),
    "rates in tensors, scheduled": Case(net, tensor_rates, lambdas),
    "schedules of groups": Case(net, two_groups, lambdas),
    "momenta of groups": Case(net, two_groups, one_cycle),
    "group added": Case(net, first_layer, after=add_last),
    "group thawed and added": Case(net, frozen_last, after=thaw_last),
    "group added, scheduled": Case(net, first_layer, halving, add_last),
    "new layer added": Case(Grown, sgd, after=grow),
    "delegating module": Case(lambda: Delegating(net()), sgd),
    "module with all names": Case(lambda: Greedy(net()), sgd),
    "layer with all names": Case(lambda: torch.nn.Sequential(Greedy(net()), torch.nn.Linear(4, 4)), sgd),
    "functional_call": Case(net, sgd, backward=call_functionally),
    "functional_call with other values": Case(net, sgd, backward=call_with_others),
    "grad": Case(net, sgd, backward=take_grad),
    "grad while gathered": Case(net, sgd, backward=take_grad_while_gathered),
    "grad through SyncBatchNorm": Case(net, sgd, backward=normalise),
    "grad through an operation": Case(net, sgd, backward=reduce_in_grad),
    "grad of parameters": Case(net, sgd, backward=take_grad_of_parameters),
    "grad per sample": Case(net, sgd, backward=take_grad_per_sample),
    "grad in the loss": Case(net, sgd, backward=penalize_gradient),
    "jacrev in the loss": Case(net, sgd, backward=penalize_jacobian),
    "jvp in the loss": Case(net, sgd, backward=penalize_tangent),
    "vmap of the model": Case(net, sgd, backward=map_model),
}


@contextmanager
def _job(strategy: str) -> Iterator[None]:
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_TIMEOUT_SEC": "20"}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()


def _batches() -> Any:
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)


def _train(case: Case, strategy: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the outputs after training and the state of the model; None: in this process alone."""
    torch.manual_seed(5 if strategy is None or ud.rank() == 0 else 6)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = case.model()
    optimizer = case.optimizer(model)
    own, passes, step = slice(None), 1, None
    predict: Callable[[Any], Any] = model
    if strategy is not None:
        if "pipeline" in strategy:
            step = ud.TrainStep(model, optimizer, mse)
            if case.backward is train_as_usual:
                predict = step.predict
            else:
                step, model, predict = None, step.model, step.model
        else:
            model, optimizer = ud.distribute(model, optimizer)
            predict = model
        own = slice(ud.data_rank(), None, ud.data_size())
        passes = 2 if "accumulate" in strategy else 1
    scheduler = None if case.scheduler is None else case.scheduler(optimizer)
    for number, (x, y) in enumerate(_batches()):
        x, y = x[own], y[own]
        if step is not None:
            step(x, y)
        else:
            for each in range(passes):
                optimizer.zero_grad()
                case.backward(model, x[each::passes], y[each::passes])
                optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if case.after is not None:
            case.after(number, model, optimizer)
    with torch.no_grad():
        outputs = predict(next(_batches())[0])
    state = {} if step is not None else {name: each.clone() for name, each in model.state_dict().items()}
    return outputs, state


def outcomes(strategy: str) -> dict[str, float | str]:
    """Return for each case how far its weights are from those of one process, or the error that a script gets.

    Any other exception than unidist's own ends the call.
    """
    torch.set_default_dtype(torch.float32 if "precision" in strategy else torch.float64)
    found: dict[str, float | str] = {}
    try:
        for name, case in CASES.items():
            wanted, weights = _train(case, None)
            try:
                with _job(strategy):
                    outputs, state = _train(case, strategy)
            except UnidistError as exc:
                found[name] = str(exc)
                continue
            pairs = [(outputs, wanted)]
            pairs += [(each, weights[key]) for key, each in state.items() if each.shape == weights[key].shape]
            found[name] = max(float((one - other).abs().max()) for one, other in pairs if one.numel())
    finally:
        torch.set_default_dtype(torch.float32)
    return found
