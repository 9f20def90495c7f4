"""`DistributedOptimizer(op=Adasum)` combines what each rank's own step changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _training import assert_close, data, loss_of, network, runtime, share, values
from torch import nn

import unidist.torch as ud
from unidist.errors import UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context
from unidist_torch.operations.compression import Compression
from unidist_torch.operations.reductions import Adasum

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(passes: int = 1, compression: Any = Compression.none) -> list[torch.Tensor]:
    with runtime():
        model = network()
        optimizer = ud.DistributedOptimizer(
            sgd(model.parameters()),
            model.named_parameters(),
            op=Adasum,
            backward_passes_per_step=passes,
            compression=compression,
        )
        assert optimizer.backward_passes_per_step == passes
        for x, y in zip(*data(), strict=True):
            x, y = share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())
            optimizer.zero_grad()
            for part in range(passes):
                loss_of(model, share(x, part, passes), share(y, part, passes)).backward()
            optimizer.synchronize()
            optimizer.step()
        return values(model)


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The formula of the paper for two vectors."""
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


def by_hand(size: int, passes: int = 1) -> list[torch.Tensor]:
    """Two or four ranks in one process."""
    models = [network() for _ in range(size)]
    optimizers = [sgd(model.parameters()) for model in models]
    for x, y in zip(*data(), strict=True):
        start = values(models[0])
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for part in range(passes):
                x_part, y_part = (share(share(each, rank, size), part, passes) for each in (x, y))
                loss_of(model, x_part, y_part).backward()
            optimizer.step()
        for index, begin in enumerate(start):
            changes = [list(model.parameters())[index].detach() - begin for model in models]
            while len(changes) > 1:
                changes = [combine(*pair) for pair in zip(changes[::2], changes[1::2], strict=True)]
            for model in models:
                with torch.no_grad():
                    list(model.parameters())[index].copy_(begin + changes[0])
    return values(models[0])


@pytest.mark.parametrize(("size", "passes"), [(2, 1), (4, 1), (2, 2)])
def test_the_changes_of_the_ranks_are_combined(pool: Pool, size: int, passes: int) -> None:
    results = pool(size).run(train, (passes,))
    for result in results:
        assert_close(result, by_hand(size, passes), 1e-11)
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_changes_may_travel_in_sixteen_bits(pool: Pool) -> None:
    found = pool(2).run(train, (1, Compression.fp16))[0]
    error = max(float((a - b).abs().max()) for a, b in zip(found, by_hand(2), strict=True))
    assert 1e-6 < error < 5e-3


def test_one_process_steps_as_the_plain_optimizer(pool: Pool) -> None:
    assert_close(pool(1).run(train)[0], by_hand(1))


def test_three_ranks_are_refused_and_a_process_set_too(pool: Pool) -> None:
    def three() -> None:
        with pytest.raises(NotImplementedError, match="3 ranks are not a power of 2"):
            train()

    pool(3).run(three)

    def process_set() -> None:
        with runtime():
            members = context.current().process_sets.add(ProcessSet([0]))
            with pytest.raises(NotImplementedError, match="process set"):
                ud.DistributedOptimizer(sgd(network().parameters()), op=Adasum, process_set=members)

    pool(2).run(process_set)


def test_skipping_the_exchange_is_refused_as_in_horovod(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            optimizer = ud.DistributedOptimizer(sgd(network().parameters()), op=Adasum)
            with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
                pass

    pool(2).run(on_rank)


def test_one_backward_pass_too_many_is_refused(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            model = network()
            optimizer = ud.DistributedOptimizer(sgd(model.parameters()), op=Adasum)
            x, y = (part[0] for part in data())
            loss_of(model, x, y).backward()
            with pytest.raises(UsageError, match="computed 2 times before step"):
                loss_of(model, x, y).backward()
            optimizer.set_backward_passes_per_step(2)
            loss_of(model, x, y).backward()
            optimizer.load_state_dict(optimizer.state_dict())

    pool(2).run(on_rank)


def test_it_keeps_its_class_and_pickles_plainly(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            plain = sgd(network().parameters())
            optimizer = ud.DistributedOptimizer(plain, op=Adasum)
            assert optimizer is plain
            assert isinstance(optimizer, torch.optim.SGD)
            assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.SGD
            assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
            with pytest.raises(UsageError, match="distributed already"):
                ud.DistributedOptimizer(optimizer)
            with pytest.raises(UsageError, match="single tensors"):
                ud.DistributedOptimizer(sgd(network().parameters()), op=Adasum, compression="fp16")

    pool(2).run(on_rank)


def test_a_closure_computes_the_gradients(pool: Pool) -> None:
    def on_rank() -> float:
        with runtime():
            weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
            optimizer = ud.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=Adasum)
            for _ in range(2):

                def closure() -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = -weight.sum()
                    loss.backward()
                    return loss

                optimizer.step(closure)
            return float(weight[0])

    assert pool(2).run(on_rank) == [2.0, 2.0]  # of equal changes one is left


def test_a_rank_that_overflows_contributes_nothing_and_nobody_waits(pool: Pool) -> None:
    def on_rank() -> float:
        with runtime():
            weight = nn.Parameter(torch.zeros(2))
            optimizer = ud.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=Adasum)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            loss = weight.sum() * (float("inf") if ud.rank() else -1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return float(weight[0])

    assert pool(2).run(on_rank) == [1.0, 1.0]
