"""A bound optimizer on several ranks does what the plain one does on the whole batch."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from _training import (
    BATCH,
    CLASSES,
    FEATURES,
    alone,
    assert_close,
    data,
    loss_of,
    network,
    runtime,
    share,
    values,
)  # fmt: skip
from torch import nn

import unidist.torch as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    make_model: Callable[[], nn.Module] = network,
    loss: Callable[..., torch.Tensor] = loss_of,
    strategy: str | None = None,
    before_step: Callable[[nn.Module, Any], object] = lambda model, optimizer: None,
) -> list[torch.Tensor]:
    """Train on this rank's share of each batch."""
    with runtime():
        model, optimizer = make_model(), None
        model, optimizer = ud.distribute(model, make_optimizer(model.parameters()), strategy)
        for x, y in zip(*data(), strict=True):
            optimizer.zero_grad()
            loss(model, share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())).backward()
            before_step(model, optimizer)
            optimizer.step()
        return values(model)


def check(results: list[list[torch.Tensor]], wanted: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    """Every rank came to the wanted values, and all to the same bits."""
    for result in results:
        assert_close(result, wanted, tolerance)
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("num_proc", [1, 2, 3, 4])
def test_training_equals_one_process(pool: Pool, num_proc: int) -> None:
    check(pool(num_proc).run(train), alone(sgd))


@pytest.mark.parametrize("engine", ["gloo", "shm"])
def test_training_equals_one_process_on_engine(pool: Pool, engine: str) -> None:
    check(pool(2, engine).run(train), alone(sgd))


def test_without_the_exchange_the_ranks_differ(pool: Pool) -> None:
    def train_apart() -> list[torch.Tensor]:
        with runtime():
            model = network()
            optimizer = sgd(model.parameters())
            for x, y in zip(*data(), strict=True):
                optimizer.zero_grad()
                loss_of(model, share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())).backward()
                optimizer.step()
            return values(model)

    first, second = pool(2).run(train_apart)
    assert not torch.allclose(first[0], second[0])


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stock_optimizers(pool: Pool, name: str) -> None:
    check(pool(2).run(train, (OPTIMIZERS[name],)), alone(OPTIMIZERS[name]), 1e-10)


def test_lbfgs_with_a_closure_equals_one_process(pool: Pool) -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

    def run(distributed: bool) -> list[torch.Tensor]:
        model = network()
        optimizer: Any = lbfgs(model.parameters())
        rank, size = (ud.rank(), ud.size()) if distributed else (0, 1)
        if distributed:
            optimizer = ud.DistributedOptimizer(optimizer)
        for x, y in list(zip(*data(), strict=True))[:3]:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, share(x, rank, size), share(y, rank, size))
                loss.backward()
                return loss

            optimizer.step(closure)
        return values(model)

    def on_rank() -> list[torch.Tensor]:
        with runtime():
            return run(True)

    check(pool(2).run(on_rank), run(False), 1e-9)


class Tricky(nn.Module):
    """Tied weights, a frozen layer, parameters that nobody or not every rank uses, an empty one, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.again = nn.Linear(FEATURES, FEATURES, bias=False)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(FEATURES, FEATURES)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(FEATURES, 2)
        self.sometimes = nn.Linear(FEATURES, CLASSES)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.double()

    def forward(self, x: torch.Tensor, with_sometimes: bool = True) -> torch.Tensor:
        x = torch.tanh(self.again(torch.tanh(self.first(x))) + self.frozen(x))
        result = self.head(x) * self.gain + self.empty.sum()
        return result + self.sometimes(x) if with_sometimes else result


def test_tied_frozen_unused_empty_and_scalar_parameters(pool: Pool) -> None:
    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)

    wanted = alone(adamw, Tricky)
    check(pool(3).run(train, (adamw, Tricky)), wanted)
    # The unused layer's weights were not even decayed: no gradient anywhere is no gradient.
    names = [name for name, _ in Tricky().named_parameters()]
    index = names.index("unused.weight")
    assert torch.equal(wanted[index], values(Tricky())[index])


def test_a_parameter_unused_on_one_rank_counts_as_zero_there(pool: Pool) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x, with_sometimes=ud.rank() == 0), y)

    def loss_alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        half = BATCH // 2
        logits = torch.cat([model(x[:half]), model(x[half:], with_sometimes=False)])
        return nn.functional.cross_entropy(logits, y)

    check(pool(2).run(train, (sgd, Tricky, loss)), alone(sgd, Tricky, loss_alone))


def test_parameters_frozen_on_one_rank_only_stay_equal(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        def model() -> nn.Module:
            made = network()
            made[0].requires_grad_(ud.rank() == 0)
            return made

        return train(make_model=model)

    def loss_alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        half = BATCH // 2
        hidden = model[0](x)
        hidden = torch.cat([hidden[:half], hidden[half:].detach()])
        return nn.functional.cross_entropy(model[2](model[1](hidden)), y)

    check(pool(2).run(on_rank), alone(sgd, network, loss_alone))


def test_a_layer_unfrozen_later_is_exchanged(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model = network()
            model[0].requires_grad_(False)
            model, optimizer = ud.distribute(model, sgd(model.parameters()))
            for step, (x, y) in enumerate(zip(*data(), strict=True)):
                if step == 4:
                    model[0].requires_grad_(True)
                optimizer.zero_grad()
                loss_of(model, share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())).backward()
                optimizer.step()
            return values(model)

    def reference() -> list[torch.Tensor]:
        model = network()
        model[0].requires_grad_(False)
        optimizer = sgd(model.parameters())
        for step, (x, y) in enumerate(zip(*data(), strict=True)):
            if step == 4:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        return values(model)

    check(pool(2).run(on_rank), reference())


def test_a_parameter_group_added_later_is_exchanged(pool: Pool) -> None:
    def training(distributed: bool) -> list[torch.Tensor]:
        model = network()
        optimizer: Any = torch.optim.SGD(model[2].parameters(), lr=0.1)
        rank, size = (ud.rank(), ud.size()) if distributed else (0, 1)
        if distributed:
            model, optimizer = ud.distribute(model, optimizer)
        for step, (x, y) in enumerate(zip(*data(), strict=True)):
            if step == 3:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
            optimizer.zero_grad()
            loss_of(model, share(x, rank, size), share(y, rank, size)).backward()
            optimizer.step()
        return values(model)

    def on_rank() -> list[torch.Tensor]:
        with runtime():
            return training(True)

    check(pool(2).run(on_rank), training(False))


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.words = nn.Embedding(20, FEATURES, sparse=True)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x * 10).long().abs() % 20
        return self.head(self.words(ids).mean(1))


@pytest.mark.parametrize("strategy", [None, "accumulate=1", "data:overlap=false"])
def test_sparse_embeddings(pool: Pool, strategy: str | None) -> None:
    def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    check(pool(3).run(train, (plain_sgd, Embedder, loss_of, strategy)), alone(plain_sgd, Embedder))


def test_sparse_embeddings_that_one_rank_does_not_use(pool: Pool) -> None:
    def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x) if ud.rank() == 1 else model.head(x)
        return nn.functional.cross_entropy(logits, y)

    def loss_alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        half = BATCH // 2
        return nn.functional.cross_entropy(torch.cat([model.head(x[:half]), model(x[half:])]), y)

    check(pool(2).run(train, (plain_sgd, Embedder, loss)), alone(plain_sgd, Embedder, loss_alone))


def test_sparse_embeddings_with_two_backward_passes_before_one_step(pool: Pool) -> None:
    def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def twice() -> list[torch.Tensor]:
        with runtime():
            model = Embedder()
            model, optimizer = ud.distribute(model, plain_sgd(model.parameters()))
            for x, y in zip(*data(), strict=True):
                x, y = share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                loss_of(model, x * 0.5, y).backward()
                optimizer.step()
            return values(model)

    def both(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y) + loss_of(model, x * 0.5, y)

    check(pool(2).run(twice), alone(plain_sgd, Embedder, both))


def test_a_sparse_gradient_of_a_backward_pass_after_synchronize_is_exchanged(pool: Pool) -> None:
    def on_rank() -> list[list[float]]:
        with runtime():
            words = nn.Embedding(2, 1, sparse=True).double()
            nn.init.zeros_(words.weight)
            optimizer = ud.DistributedOptimizer(torch.optim.SGD(words.parameters(), lr=1.0))
            for _ in range(2):  # the ranks agree on sparse gradients in the first update
                optimizer.zero_grad()
                for word in (0, 1):
                    (words(torch.tensor([word])) * (ud.rank() + 1)).sum().backward()
                    if word == 0:
                        optimizer.synchronize()
                optimizer.step()
            return words.weight.tolist()

    assert pool(2).run(on_rank) == [[[-3.0], [-3.0]]] * 2


def test_clipping_after_synchronize_equals_one_process(pool: Pool) -> None:
    def clip(model: nn.Module, optimizer: Any = None) -> None:
        if optimizer is not None:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    check(pool(3).run(train, (sgd, network, loss_of, None, clip)), alone(sgd, before_step=clip))


def test_clipping_after_backward_needs_no_change_of_the_script(pool: Pool) -> None:
    def clip(model: nn.Module, optimizer: Any = None) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    check(pool(3).run(train, (sgd, network, loss_of, None, clip)), alone(sgd, before_step=clip))
    check(pool(2).run(train, (sgd, network, loss_of, "data:bucket_mb=0.0001", clip)), alone(sgd, before_step=clip))


def test_gradients_are_complete_after_backward_also_after_one_that_failed(pool: Pool) -> None:
    def on_rank() -> tuple[torch.Tensor, torch.Tensor]:
        with runtime():
            model, optimizer = network(), None
            model, optimizer = ud.distribute(model, sgd(model.parameters()))
            x, y = (share(part[0], ud.rank(), ud.size()) for part in data())

            def fail(gradient: torch.Tensor) -> None:
                raise RuntimeError("out of memory, say")

            hidden = model[1](model[0](x))
            hidden.register_hook(fail)  # the last layer has its gradients by then
            with pytest.raises(RuntimeError, match="out of memory"):
                nn.functional.cross_entropy(model[2](hidden), y).backward()
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            after_backward = model[0].weight.grad.clone()
            optimizer.synchronize()
            return after_backward, model[0].weight.grad.clone()

    (first, complete), (second, _) = pool(2).run(on_rank)
    assert torch.equal(first, second)
    assert torch.equal(first, complete)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(pool: Pool, use_reentrant: bool) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(model[:2], x.requires_grad_(), use_reentrant=use_reentrant)
        return nn.functional.cross_entropy(model[2](hidden), y)

    check(pool(2).run(train, (sgd, network, loss)), alone(sgd))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_backward_and_step_discards_the_gradients(pool: Pool, set_to_none: bool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model, optimizer = network(), None
            model, optimizer = ud.distribute(model, sgd(model.parameters()), "data:bucket_mb=0.0001")
            for x, y in zip(*data(), strict=True):
                x, y = share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())
                loss_of(model, 3 * x, y).backward()
                optimizer.zero_grad(set_to_none=set_to_none)
                loss_of(model, x, y).backward()
                optimizer.step()
                model.zero_grad(set_to_none=set_to_none)
            return values(model)

    check(pool(2).run(on_rank), alone(sgd))


def test_two_backward_passes_before_one_step(pool: Pool) -> None:
    def twice(strategy: str | None) -> list[torch.Tensor]:
        with runtime():
            model = network()
            model, optimizer = ud.distribute(model, sgd(model.parameters()), strategy)
            for x, y in zip(*data(), strict=True):
                x, y = share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                loss_of(model, x * 0.5, y).backward()
                optimizer.step()
            return values(model)

    def both(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y) + loss_of(model, x * 0.5, y)

    check(pool(2).run(twice, (None,)), alone(sgd, loss=both))
    check(pool(2).run(twice, ("data:overlap=false",)), alone(sgd, loss=both))

    def refused_in_a_window() -> None:
        with pytest.raises(UsageError, match="second backward pass before step"):
            twice("accumulate=2")

    pool(2).run(refused_in_a_window)

    def refused_in_horovods_way() -> None:
        with runtime():
            model = network()
            ud.DistributedOptimizer(sgd(model.parameters()))
            x, y = (part[0] for part in data())
            loss_of(model, x, y).backward()
            with pytest.raises(UsageError, match=r"became ready twice .* backward_passes_per_step"):
                loss_of(model, x, y).backward()

    pool(2).run(refused_in_horovods_way)


def test_horovod_style_accumulation_sums_the_passes(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model = network()
            optimizer = ud.DistributedOptimizer(
                sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=2
            )
            for x, y in zip(*data(), strict=True):
                x, y = share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())
                optimizer.zero_grad()
                loss_of(model, x[: len(x) // 2], y[: len(y) // 2]).backward()
                loss_of(model, x[len(x) // 2 :], y[len(y) // 2 :]).backward()
                optimizer.step()
            return values(model)

    def doubled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2 * loss_of(model, x, y)

    check(pool(2).run(on_rank), alone(sgd, loss=doubled))


def test_sum_instead_of_average(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model = network()
            optimizer = ud.DistributedOptimizer(sgd(model.parameters()), op=ud.Sum)
            for x, y in zip(*data(), strict=True):
                optimizer.zero_grad()
                loss_of(model, share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())).backward()
                optimizer.step()
            return values(model)

    def doubled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2 * loss_of(model, x, y)

    check(pool(2).run(on_rank), alone(sgd, loss=doubled))


def test_torch_compile(pool: Pool) -> None:
    def compiled_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        compiled = model.__dict__.get("_compiled_for_test")
        if compiled is None:
            compiled = model.__dict__["_compiled_for_test"] = torch.compile(model, backend="aot_eager")
        return nn.functional.cross_entropy(compiled(x), y)

    check(pool(2).run(train, (sgd, network, compiled_loss)), alone(sgd))


def test_autocast(pool: Pool) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x.float())
        return nn.functional.cross_entropy(logits.float(), y)

    def model() -> nn.Module:
        return network().float()

    check(pool(2).run(train, (sgd, model, loss)), alone(sgd, model, loss), 2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_stay_equal_on_all_ranks(pool: Pool, dtype: torch.dtype) -> None:
    def on_rank() -> list[torch.Tensor]:
        def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(model(x.to(dtype)).float(), y)

        return train(lambda p: torch.optim.SGD(p, lr=0.1), lambda: network().to(dtype), loss)

    results = pool(3).run(on_rank)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))
    assert not torch.equal(results[0][0], values(network().to(dtype))[0])


def test_grad_scaler_skips_on_every_rank_when_one_overflows(pool: Pool) -> None:
    def on_rank() -> tuple[list[torch.Tensor], float]:
        with runtime():
            model = network().float()
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step, (x, y) in enumerate(zip(*data(), strict=True)):
                x, y = share(x, ud.rank(), ud.size()).float(), share(y, ud.rank(), ud.size())
                loss = loss_of(model, x, y)
                if step == 2 and ud.rank() == 1:
                    loss = loss * float("inf")
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return values(model), scaler.get_scale()

    def reference() -> tuple[list[torch.Tensor], float]:
        model = network().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step, (x, y) in enumerate(zip(*data(), strict=True)):
            loss = loss_of(model, x.float(), y) * (float("inf") if step == 2 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return values(model), scaler.get_scale()

    results = pool(2).run(on_rank)
    wanted, scale = reference()
    check([found for found, _ in results], wanted, 1e-5)
    assert {found for _, found in results} == {scale}


def test_grad_scaler_and_accumulation_are_refused(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            model = network().float()
            model, optimizer = ud.distribute(model, sgd(model.parameters()), "accumulate=2")
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(loss_of(model, data()[0][0].float(), data()[1][0])).backward()
            with pytest.raises(UsageError, match="bfloat16"):
                scaler.step(optimizer)

    pool(1).run(on_rank)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_learning_rate_schedulers_made_before_or_after(pool: Pool, scheduler_first: bool) -> None:
    def training(distributed: bool) -> list[torch.Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a scheduler warns when it does not see the steps
            return watched(distributed)

    def watched(distributed: bool) -> list[torch.Tensor]:
        model = network()
        optimizer: Any = sgd(model.parameters())
        rank, size = (ud.rank(), ud.size()) if distributed else (0, 1)
        if scheduler_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if distributed:
            model, optimizer = ud.distribute(model, optimizer)
        if not scheduler_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for x, y in zip(*data(), strict=True):
            optimizer.zero_grad()
            loss_of(model, share(x, rank, size), share(y, rank, size)).backward()
            optimizer.step()
            scheduler.step()
        return values(model)

    def on_rank() -> list[torch.Tensor]:
        with runtime():
            return training(True)

    check(pool(2).run(on_rank), training(False))


def test_the_optimizer_keeps_its_class_state_dict_and_pickles_plainly(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            model = network()
            plain = torch.optim.AdamW(model.parameters())
            _, optimizer = ud.distribute(model, plain)
            assert optimizer is plain
            assert isinstance(optimizer, torch.optim.AdamW)
            assert type(optimizer).__name__ == "AdamW"
            restored = pickle.loads(pickle.dumps(optimizer))
            assert type(restored) is torch.optim.AdamW
            assert type(copy.deepcopy(optimizer)) is torch.optim.AdamW
            torch.optim.AdamW(network().parameters()).load_state_dict(optimizer.state_dict())
            with pytest.raises(UsageError, match="distributed already"):
                ud.distribute(model, optimizer)

    pool(2).run(on_rank)


def test_distribute_copies_parameters_buffers_and_optimizer_state_of_rank_0(pool: Pool) -> None:
    def on_rank() -> tuple[list[torch.Tensor], torch.Tensor, dict[str, Any]]:
        with runtime():
            torch.manual_seed(ud.rank())
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            model[1].running_mean.fill_(float(ud.rank() + 5))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (ud.rank() + 1))
            if ud.rank() == 0:
                model(torch.randn(8, 4)).sum().backward()
                optimizer.step()
            model, optimizer = ud.distribute(model, optimizer)
            return values(model), model[1].running_mean.clone(), optimizer.state_dict()

    (first, mean, state), (second, other_mean, other_state) = pool(2).run(on_rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(mean, other_mean)
    assert other_state["param_groups"][0]["lr"] == 0.1
    assert state["state"].keys() == other_state["state"].keys()
    for index, entry in state["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, other_state["state"][index][key])


def test_models_that_differ_are_refused_on_every_rank(pool: Pool) -> None:
    def on_rank() -> str:
        with runtime():
            model = nn.Linear(3, 4 + ud.rank())
            with pytest.raises(ConfigurationError) as caught:
                ud.distribute(model, sgd(model.parameters()))
            return str(caught.value)

    for message in pool(2).run(on_rank):
        assert "'weight' is float32[4, 3] on rank 0" in message
        assert "float32[5, 3]" in message


def test_an_optimizer_of_another_model_is_refused(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime(), pytest.raises(UsageError, match="4 parameters that are not the model's"):
            ud.distribute(network(), sgd(network().parameters()))

    pool(1).run(on_rank)


def test_channels_last_parameters_with_a_fused_optimizer(pool: Pool) -> None:
    def training(distributed: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 2)).to(
            memory_format=torch.channels_last
        )
        model = model.double()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        rank, size = (ud.rank(), ud.size()) if distributed else (0, 1)
        if distributed:
            model, optimizer = ud.distribute(model, optimizer)
        generator = torch.Generator().manual_seed(2)
        for _ in range(5):
            x = torch.randn(4, 3, 4, 4, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            share(model(x), rank, size).square().mean().backward()
            optimizer.step()
        return values(model)

    def on_rank() -> list[torch.Tensor]:
        with runtime():
            return training(True)

    check(pool(2).run(on_rank), training(False), 1e-10)


def test_gradients_set_by_hand_are_exchanged(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model = nn.Linear(2, 2, bias=False)
            with torch.no_grad():
                model.weight.fill_(0)
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
            model.weight.grad = torch.full((2, 2), float(ud.rank() + 1))
            optimizer.step()
            return values(model)

    check(pool(2).run(on_rank), [torch.full((2, 2), -1.5)])


def test_a_gradient_dropped_after_the_backward_pass_is_not_in_the_norm(pool: Callable[..., RankPool]) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def drop(model: nn.Module) -> None:
        next(model.parameters()).grad = None

    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model, optimizer = network(), None
            model, optimizer = ud.distribute(model, sgd(model.parameters()), "clip_norm=0.1")
            for x, y in zip(*data(), strict=True):
                optimizer.zero_grad()
                loss_of(model, share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())).backward()
                drop(model)
                optimizer.step()
            return values(model)

    def drop_and_clip(model: nn.Module) -> None:
        drop(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    wanted = alone(sgd, before_step=drop_and_clip)
    for found in pool(2).run(on_rank):
        assert_close(found, wanted)
