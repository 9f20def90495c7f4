"""Trainings in PyTorch in 16 bits: digits, gradients that vanish, infinities on one rank."""

from __future__ import annotations

from typing import Any

import torch

import unidist.torch as ud
import unidist_zero
from unidist.settings.environment import set_variables
from unidist_expert_parallel.torch import MixtureOfExperts


class Started:
    """A `with` statement from `init` to `shutdown`, with a strategy."""

    def __init__(self, strategy: str) -> None:
        self._variables = set_variables({"UNIDIST_STRATEGY": strategy})

    def __enter__(self) -> None:
        self._variables.__enter__()
        ud.init()

    def __exit__(self, *error: Any) -> None:
        ud.shutdown()
        self._variables.__exit__(None, None, None)


def digits(strategy: str) -> dict[str, Any]:
    """Train a small network on digits; return its accuracy, types and checksum."""
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    with Started(strategy):
        torch.manual_seed(0)
        seen: list[torch.dtype] = []
        model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = ud.distribute(model, optimizer)
        for _ in range(8):
            for start in range(0, 1400, 100):
                mine = slice(start + ud.rank(), start + 100, ud.size())
                optimizer.zero_grad()
                logits = model(images[mine])
                torch.nn.functional.cross_entropy(logits, labels[mine]).backward()
                optimizer.step()
        with torch.no_grad():
            accuracy = float((model(images[1400:]).argmax(1) == labels[1400:]).double().mean())
        scaler = optimizer._unidist._update.scaler
        return {
            "accuracy": accuracy,
            "computed": str(seen[0]),
            "returned": str(logits.dtype),
            "kept": str(model[0].weight.dtype),
            "skipped": None if scaler is None else scaler.num_skipped,
            "sum": float(sum(parameter.detach().double().abs().sum() for parameter in model.parameters())),
        }


def small_gradients(strategy: str) -> float:
    """Train where gradients are too small for float16, with a rate to match; return what is left of the loss."""
    with Started(strategy):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2 * 2.0**30)
        model, optimizer = ud.distribute(model, optimizer)
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(ud.rank()))
        targets = inputs[:, :1] - inputs[:, 1:2]
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            (loss * 2.0**-30).backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses[-1] / losses[0]


def one_overflow(strategy: str, where: int) -> dict[str, Any]:
    """Do four updates, the second with a gradient on rank `where` that is too large for float16."""
    with Started(strategy):
        model: Any = torch.nn.Linear(3, 2, bias=False)
        model.weight.data.fill_(0.5)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
        model, optimizer = ud.distribute(model, optimizer)
        found: dict[str, Any] = {"scales": [], "changed": []}
        update = optimizer._unidist._update
        for number in range(4):
            before = model.weight.detach().clone()
            for _ in range(update.accumulation.passes):
                optimizer.zero_grad()
                factor = 1e6 if number == 1 and ud.rank() == where else 1.0
                (model(torch.ones(2, 3)).mean() * factor).backward()
                optimizer.step()
            found["scales"].append(update.scaler.scale)
            found["changed"].append(not torch.equal(before, model.weight))
            found["gradient"] = None if model.weight.grad is None else float(model.weight.grad.sum())
        found["steps"] = int(optimizer.state_dict()["state"][0]["step"])
        found["counted"] = update.step
        found["finite"] = bool(torch.isfinite(model.weight).all())
        found["weight"] = model.weight.detach().numpy().tolist()
        return found


class Twice(torch.nn.Module):
    """Calls itself on what it has returned, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.other = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor, *, again: bool = False) -> dict[str, Any]:
        hidden = torch.tanh(self.inner(inputs))
        outputs = {"hidden": hidden, "sum": (hidden.double() * self.other).sum(), "shape": tuple(hidden.shape)}
        return self(hidden) if again else outputs


def structured(strategy: str) -> dict[str, Any]:
    """Take gradients through dicts, through outputs that go in again, and to an input; return them."""
    with Started(strategy):
        torch.manual_seed(0)
        model: Any = Twice()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = ud.distribute(model, optimizer)
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
        outputs = model(model(inputs)["hidden"])
        (outputs["sum"] + outputs["hidden"].square().mean() + model(inputs, again=True)["sum"]).backward()
        optimizer.step()
        assert inputs.grad is not None
        return {
            "input": inputs.grad.numpy(),
            **{name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()},
        }


class Parts(torch.nn.Module):
    """A network in parts, which scripts call by itself, part by part, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            inputs = block(inputs)
        outputs: torch.Tensor = self.head(inputs)
        return outputs

    def training_step(self, inputs: torch.Tensor, called: str) -> torch.Tensor:
        """Return the outputs, computed as a script of the field does it."""
        if called == "compiled":
            return torch.compile(self.body[1], backend="eager")(self.body[0](inputs))  # type: ignore[no-any-return]
        if called == "parameters":
            weight: Any = self.head.weight
            return torch.nn.functional.linear(inputs, weight, self.head.bias)
        return Parts.forward(self, inputs) if called == "parts" else self(inputs)  # type: ignore[no-any-return]


def called(strategy: str, how: str) -> dict[str, Any]:
    """Train three steps through the model or its parts; return types, parameters, warnings and errors."""
    import logging
    import pickle

    from unidist.errors import UsageError

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())

    warned: list[str] = []
    found: dict[str, Any] = {"warned": warned}
    with Started(strategy):
        torch.manual_seed(0)
        model: Any = Parts()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ud.distribute(model, optimizer)
        seen: set[str] = set()
        hook = model.body[1][0].register_forward_hook(lambda module, args, output: seen.add(str(output.dtype)))
        inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(ud.rank()))
        handler = Keep(logging.WARNING)
        logging.getLogger("unidist").addHandler(handler)
        try:
            for _ in range(3):
                outputs = model.training_step(inputs, how)
                found["returned"] = str(outputs.dtype)
                outputs.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except UsageError as exc:
            found["error"] = str(exc)
        finally:
            logging.getLogger("unidist").removeHandler(handler)
            hook.remove()
        return {
            **found,
            "computed": sorted(seen),
            "kinds": sorted({type(part).__name__ for part in model.modules()}),
            "loads": b"unidist" not in pickle.dumps(model.head),
            "weights": [parameter.detach().float().numpy() for parameter in model.parameters()],
        }


def error_of(strategy: str, kind: str) -> str:
    """Use the strategy in a way that is refused; return the message."""
    from unidist.errors import UsageError

    with Started(strategy):
        model: Any = torch.nn.Linear(2, 2)
        if kind == "float64":
            model.double()
        if kind == "compiled":
            model.forward = model.forward
        if kind == "returns":
            model = _Returns()
        optimizer: Any = (torch.optim.LBFGS if kind == "closure" else torch.optim.SGD)(model.parameters(), lr=0.1)
        try:
            if kind == "optimizer":
                ud.DistributedOptimizer(optimizer)
            model, optimizer = ud.distribute(model, optimizer)
            loss = model.weight.sum() if kind == "penalty" else model(torch.ones(1, 2))
            if kind == "closure":
                optimizer.step(lambda: loss)
            loss.sum().backward()
            scaler = torch.amp.GradScaler("cpu")
            optimizer.step(**({"grad_scaler": scaler} if kind == "scaler" else {}))
        except UsageError as exc:
            return str(exc)
        return ""


class _Returns(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> Any:
        return object()


def copies(strategy: str) -> list[str]:
    """Copy and pickle a prepared model; return what forward of the copies computes in, and a state's keys."""
    import copy
    import pickle

    with Started(strategy):
        model: Any = torch.nn.Linear(2, 2)
        model, _ = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        with torch.no_grad():
            first = model.weight.detach() * 1.001
            for each in (model, *made):
                each.weight.copy_(first)
            exact = torch.nn.functional.linear(torch.ones(1, 2), first, model.bias)
            equal = [str(torch.equal(each(torch.ones(1, 2)), exact)) for each in (model, *made)]
        return [*equal, *(type(each).__name__ for each in made), str(isinstance(model, torch.nn.Linear))]


def kept_in_bf16(strategy: str) -> dict[str, Any]:
    """Train where the sums of gradients over ranks are exact; return parameters and state, as bits, and their types."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(-2, 3, (8, 4, 24), generator=generator).float()  # steps, samples, features
    targets = torch.randint(-1, 2, (8, 4, 10), generator=generator).float()
    with Started(strategy):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(24, 10), torch.nn.Linear(10, 10, bias=False))
        model[1].requires_grad_(False)
        torch.nn.init.eye_(model[1].weight)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = ud.distribute(model, optimizer)
        for step in range(8):
            mine = slice(ud.data_rank(), None, ud.data_size())
            optimizer.zero_grad()
            (model(inputs[step, mine]) * targets[step, mine]).sum(1).mean().backward()
            optimizer.step()
        state = optimizer.state_dict()["state"]
        kept = {f"{number} {name}": value for number, each in state.items() for name, value in each.items()}
        with unidist_zero.gathered(model):
            kept |= {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        return {
            "types": {name: str(value.dtype) for name, value in kept.items() if value.dim()},
            "bits": {name: value.float().flatten().tolist() for name, value in kept.items()},
        }


def small_updates(strategy: str) -> float:
    """Train with updates far below the distance of neighbours in bfloat16; return how far the weights came."""
    with Started(strategy):
        model: Any = torch.nn.Linear(1000, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        model, optimizer = ud.distribute(model, optimizer)
        for _ in range(64):
            optimizer.zero_grad()
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            return float(1 - model.weight.float().mean())


class _Words(torch.nn.Module):
    """A small language model, with experts where they are divided."""

    def __init__(self, *, has_experts: bool) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(32, 16)
        self.up = torch.nn.Linear(16, 32, bias=False)
        self.down = torch.nn.Linear(32, 16, bias=False)
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.experts = MixtureOfExperts(16, 4, hidden=32) if has_experts else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of the next tokens."""
        found: torch.Tensor = self.words(tokens)
        found = found + self.down(torch.nn.functional.gelu(self.up(found)))
        if self.experts is not None:
            found = found + self.experts(found)
        logits: torch.Tensor = self.head(found)
        return logits


def words(strategy: str, optimizer: str = "AdamW", *, has_experts: bool = False) -> tuple[list[float], set[str]]:
    """Train a language model; return the losses, and the types of parameters and of state like them."""
    with Started(strategy):
        torch.manual_seed(0)
        model: Any = _Words(has_experts=has_experts)
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
        step = ud.TrainStep(model, made, lambda logits, targets: torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        ))  # fmt: skip
        generator = torch.Generator().manual_seed(3)
        mine = slice(ud.data_rank(), None, ud.data_size())
        losses = []
        for _ in range(12):
            tokens = torch.randint(0, 32, (16, 8), generator=generator)
            losses.append(float(step(tokens[mine], (3 * tokens[mine] + 1) % 32)))
        kept = [value for each in made.state.values() for value in each.values() if torch.is_tensor(value)]
        return losses, {str(value.dtype) for value in (*model.parameters(), *kept) if value.dim()}
