"""Every argument of `DistributedOptimizer` gives the numbers of one process on the whole batch, or a clear error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _training import (
    BATCH,
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
from unidist.gradients import NOTICE_BYTES
from unidist.jobs.pool.pool import RankPool
from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context
from unidist.testing import RecordingCommunicator
from unidist_torch.operations.compression import Compression

Pool = Callable[..., RankPool]
Arguments = Callable[[nn.Module], dict[str, Any]]
pytestmark = pytest.mark.parallel


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def nothing(model: nn.Module) -> dict[str, Any]:
    return {}


def train(
    arguments: Arguments = nothing,
    make_model: Callable[[], nn.Module] = network,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    passes: int = 1,
) -> list[torch.Tensor]:
    """Train as a Horovod script does, on this rank's share of each batch, in `passes` parts."""
    with runtime():
        model = make_model()
        optimizer = ud.DistributedOptimizer(
            make_optimizer(model.parameters()), named_parameters=model.named_parameters(), **arguments(model)
        )
        for x, y in zip(*data(), strict=True):
            x, y = share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())
            optimizer.zero_grad()
            for part in range(passes):
                loss_of(model, share(x, part, passes), share(y, part, passes)).backward()
            optimizer.step()
        return values(model)


def check(results: list[list[torch.Tensor]], wanted: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    """Every rank came to the wanted values, and all to the same bits."""
    for result in results:
        assert_close(result, wanted, tolerance)
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def scaled(factor: float) -> Callable[..., torch.Tensor]:
    return lambda model, x, y: factor * loss_of(model, x, y)


# Numbers


EXACT: dict[str, Arguments] = {
    "predivide": lambda model: {"gradient_predivide_factor": 2.5},
    "one group": lambda model: {"groups": 1},
    "three groups": lambda model: {"groups": 3},
    "more groups than parameters": lambda model: {"groups": 9},
    "groups": lambda model: {"groups": [[model[0].weight, model[2].bias], [model[2].weight]]},
    "sparse_as_dense of dense gradients": lambda model: {"sparse_as_dense": True},
    "compression by name": lambda model: {"compression": "none"},
    "everything": lambda model: {
        "groups": [[model[0].weight, model[2].bias]],
        "gradient_predivide_factor": 2.0,
        "sparse_as_dense": True,
    },
}


@pytest.mark.parametrize("name", EXACT)
def test_the_average_is_that_of_one_process(pool: Pool, name: str) -> None:
    check(pool(3).run(train, (EXACT[name],)), alone(sgd))


def test_passes_are_summed_with_groups_and_predivision(pool: Pool) -> None:
    def arguments(model: nn.Module) -> dict[str, Any]:
        return {"backward_passes_per_step": 2, "groups": 2, "gradient_predivide_factor": 3.0}

    check(pool(3).run(train, (arguments, network, sgd, 2)), alone(sgd, loss=scaled(2)))


def test_the_sum_over_groups(pool: Pool) -> None:
    check(pool(3).run(train, (lambda model: {"op": ud.Sum, "groups": 2},)), alone(sgd, loss=scaled(3)))


def test_num_groups_is_deprecated_but_works(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with pytest.warns(DeprecationWarning, match="groups"):
            return train(lambda model: {"num_groups": 2})

    check(pool(2).run(on_rank), alone(sgd))


def test_gradients_of_a_group_travel_together_and_the_others_as_usual(pool: Pool) -> None:
    def on_rank() -> list[int]:
        with runtime():
            records: list[Any] = []
            make = context.current().new_communicator

            def recording(axis: str, *, memory: str = "host") -> RecordingCommunicator:
                return RecordingCommunicator(make(axis, memory=memory), records)

            context.current().new_communicator = recording  # type: ignore[method-assign]  # this run only
            model = nn.ParameterList([nn.Parameter(torch.zeros(8 * n, dtype=torch.float64)) for n in (1, 2, 4, 8)])
            parameters = list(model)
            optimizer = ud.DistributedOptimizer(
                sgd(parameters), groups=[[parameters[0], parameters[2]], [parameters[3]]]
            )
            records.clear()
            sum(parameter.sum() for parameter in parameters).backward()
            optimizer.step()
            return [record.nbytes for record in records if record.operation == "allreduce"]

    # At last a byte for each parameter, which says who has a gradient, and the notice.
    assert pool(2).run(on_rank) == [[64 * 8, 64 * 2, 64 * (1 + 4), 4 + NOTICE_BYTES]] * 2


def test_predivision_keeps_a_sum_of_float16_in_range(pool: Pool) -> None:
    def on_rank(factor: float) -> float:
        with runtime():
            weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
            optimizer = ud.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), gradient_predivide_factor=factor)
            (weight * 40000.0).sum().backward()
            optimizer.synchronize()
            return float(weight.grad[0])  # type: ignore[index]

    gloo = pool(2, "gloo")  # adds up in float16
    assert gloo.run(on_rank, (1.0,)) == [float("inf")] * 2
    assert gloo.run(on_rank, (2.0,)) == [40000.0] * 2


# Sparse gradients


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.words = nn.Embedding(20, 6, sparse=True)
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x * 10).long().abs() % 20
        return self.head(self.words(ids).mean(1))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("sparse_as_dense", [True, False])
def test_sparse_embeddings(pool: Pool, sparse_as_dense: bool, passes: int) -> None:
    def arguments(model: nn.Module) -> dict[str, Any]:
        return {"sparse_as_dense": sparse_as_dense, "backward_passes_per_step": passes}

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    check(pool(2).run(train, (arguments, Embedder, plain, passes)), alone(plain, Embedder, scaled(passes)))


def test_gradients_that_travelled_as_dense_are_sparse_again_on_every_rank(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            words = nn.Embedding(20, 6, sparse=True).double()
            with torch.no_grad():
                words.weight.fill_(1.0)
            optimizer = ud.DistributedOptimizer(
                torch.optim.SparseAdam(words.parameters(), lr=0.1), sparse_as_dense=True
            )
            for step in range(3):
                optimizer.zero_grad()
                if ud.rank() == 0 or step == 2:
                    words(torch.tensor([step, 5])).square().sum().backward()
                optimizer.step()
            return values(words)

    def reference() -> list[torch.Tensor]:
        words = nn.Embedding(20, 6, sparse=True).double()
        with torch.no_grad():
            words.weight.fill_(1.0)
        optimizer = torch.optim.SparseAdam(list(words.parameters()), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            (words(torch.tensor([step, 5])).square().sum() * (1.0 if step == 2 else 0.5)).backward()
            optimizer.step()
        return values(words)

    check(pool(2).run(on_rank), reference())


# Process sets


def test_a_process_set_trains_together_and_the_others_alone(pool: Pool) -> None:
    def on_rank() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        with runtime():
            members = context.current().process_sets.add(ProcessSet([0, 2]))
            model = network()
            optimizer = ud.DistributedOptimizer(sgd(model.parameters()), process_set=members)
            wanted = network()
            plain = sgd(wanted.parameters())
            for x, y in zip(*data(), strict=True):
                parts = [(share(x, rank, 3), share(y, rank, 3)) for rank in range(3)]
                optimizer.zero_grad()
                loss_of(model, *parts[ud.rank()]).backward()
                optimizer.step()
                together = [parts[0], parts[2]] if ud.rank() != 1 else [parts[1]]
                plain.zero_grad()
                sum(loss_of(wanted, *part) / len(together) for part in together).backward()
                plain.step()
            return values(model), values(wanted)

    results = pool(3).run(on_rank)
    for found, wanted in results:
        assert_close(found, wanted)
    assert not torch.allclose(results[0][0][0], results[1][0][0])


def test_sparse_gradients_and_passes_within_a_process_set(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            members = context.current().process_sets.add(ProcessSet([1, 2]))
            model = Embedder()
            optimizer = ud.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), process_set=members, backward_passes_per_step=2
            )
            for x, y in zip(*data(), strict=True):
                optimizer.zero_grad()
                place = max(ud.rank() - 1, 0)
                x, y = share(x, place, 2), share(y, place, 2)
                for part in range(2):
                    loss_of(model, share(x, part, 2), share(y, part, 2)).backward()
                optimizer.step()
            return values(model)

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    outside, *inside = pool(3).run(on_rank)
    check(inside, alone(plain, Embedder, scaled(2)))
    assert not torch.allclose(outside[0], inside[0][0])


# Horovod's calls


def test_step_after_synchronize_warns_unless_the_exchange_is_skipped(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model = network()
            optimizer = ud.DistributedOptimizer(sgd(model.parameters()))
            for step, (x, y) in enumerate(zip(*data(), strict=True)):
                optimizer.zero_grad()
                loss_of(model, share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())).backward()
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                if step % 2:
                    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
                        optimizer.step()
                else:
                    with warnings.catch_warnings(), optimizer.skip_synchronize():
                        warnings.simplefilter("error")
                        optimizer.step()
            return values(model)

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    check(pool(2).run(on_rank), alone(sgd, before_step=clip))


def test_skipping_an_exchange_that_was_not_made_is_refused(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            model = network()
            optimizer = ud.DistributedOptimizer(sgd(model.parameters()))
            loss_of(model, *(part[0] for part in data())).backward()
            with pytest.raises(UsageError, match="synchronize"), optimizer.skip_synchronize():
                optimizer.step()
            optimizer.step()

    pool(2).run(on_rank)


def test_the_passes_per_step_may_change_between_updates(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model = network()
            optimizer = ud.DistributedOptimizer(sgd(model.parameters()))
            for step, (x, y) in enumerate(zip(*data(), strict=True)):
                x, y = share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())
                passes = 1 + step % 3 % 2
                optimizer.set_backward_passes_per_step(passes)
                assert optimizer.backward_passes_per_step == passes
                optimizer.zero_grad()
                for part in range(passes):
                    loss_of(model, share(x, part, passes), share(y, part, passes)).backward()
                optimizer.step()
            loss_of(model, x, y).backward()
            with pytest.raises(UsageError, match=r"between backward\(\) and step\(\)"):
                optimizer.set_backward_passes_per_step(2)
            optimizer.zero_grad()
            return values(model)

    step = iter(range(1000))

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (1 + next(step) % 3 % 2) * loss_of(model, x, y)

    check(pool(2).run(on_rank), alone(sgd, loss=loss))


def test_loading_a_state_between_backward_and_step_keeps_the_ranks_together(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model = network()
            optimizer = ud.DistributedOptimizer(sgd(model.parameters()))
            for x, y in zip(*data(), strict=True):
                optimizer.zero_grad()
                loss_of(model, share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())).backward()
                optimizer.load_state_dict(optimizer.state_dict())
                optimizer.step()
            return values(model)

    check(pool(2).run(on_rank), alone(sgd))


# Compression


def within(results: list[list[torch.Tensor]], low: float, high: float) -> None:
    """Alike on every rank, and as far from one process as rounding explains."""
    wanted = alone(sgd)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    error = max(float((a - b).abs().max()) for a, b in zip(results[0], wanted, strict=True))
    assert low < error < high


@pytest.mark.parametrize(
    ("compression", "low", "high"),
    [(Compression.fp16, 1e-6, 2e-3), ("fp16", 1e-6, 2e-3), (Compression.bf16, 1e-5, 2e-2), ("bf16", 1e-5, 2e-2)],
)
def test_sixteen_bits_round_and_no_more(pool: Pool, compression: Any, low: float, high: float) -> None:
    within(pool(2).run(train, (lambda model: {"compression": compression},)), low, high)


def test_compression_by_the_strategy_line(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model = network()
            model, optimizer = ud.distribute(model, sgd(model.parameters()), "data:compression=fp16")
            for x, y in zip(*data(), strict=True):
                optimizer.zero_grad()
                loss_of(model, share(x, ud.rank(), ud.size()), share(y, ud.rank(), ud.size())).backward()
                optimizer.step()
            return values(model)

    within(pool(2).run(on_rank), 1e-6, 2e-3)


class Halving:
    """A user's compressor: keeps the shape, changes type and size of the numbers."""

    seen: list[tuple[int, ...]] = []  # noqa: RUF012 - a test looks at it

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        Halving.seen.append(tuple(tensor.shape))
        return (tensor * 0.5).float(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) * 2


@pytest.mark.parametrize("groups", [None, 2])
def test_a_users_own_compressor_sees_every_gradient(pool: Pool, groups: int | None) -> None:
    def on_rank() -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
        Halving.seen.clear()
        return train(lambda model: {"compression": Halving, "groups": groups}), Halving.seen[:4]

    results = pool(2).run(on_rank)
    within([found for found, _ in results], 1e-10, 1e-5)
    for _, seen in results:
        assert sorted(seen) == sorted(tuple(parameter.shape) for parameter in network().parameters())


# Arguments that are refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_predivide_factor": 2.0, "op": ud.Sum}, "op=Sum"),
        ({"gradient_predivide_factor": 0.0}, "above 0"),
        ({"backward_passes_per_step": 0}, "must be > 0"),
        ({"groups": 0}, "positive number of groups"),
        ({"groups": "both"}, "torch.Tensor"),
        ({"groups": [["weight"]]}, "must consist of torch.Tensor"),
        ({"named_parameters": [torch.zeros(1)]}, "tuples"),
        ({"named_parameters": [("a", torch.zeros(1)), ("a", torch.zeros(1))]}, "found twice: a"),
        ({"named_parameters": [("a", torch.zeros(1))]}, "does not name every parameter"),
        ({"compression": object}, "no compress and decompress"),
        ({"process_set": ProcessSet([0])}, "not registered"),
    ],
)
def test_what_horovod_refuses_is_a_value_error(pool: Pool, arguments: dict[str, Any], message: str) -> None:
    def on_rank() -> None:
        with runtime(), pytest.raises(ValueError, match=message):
            ud.DistributedOptimizer(sgd(network().parameters()), **arguments)

    pool(1).run(on_rank)


def test_one_parameter_in_two_groups_is_refused(pool: Pool) -> None:
    def on_rank() -> None:
        parameters = list(network().parameters())
        with runtime(), pytest.raises(ValueError, match="only appear once"):
            ud.DistributedOptimizer(sgd(parameters), groups=[parameters, parameters[:1]])

    pool(1).run(on_rank)


def test_an_unknown_compression_lists_the_choices(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime(), pytest.raises(ConfigurationError, match=r"unknown compression 'fp61'.*'fp16'.*bf16"):
            ud.DistributedOptimizer(sgd(network().parameters()), compression="fp61")

    pool(1).run(on_rank)


def test_arguments_that_differ_between_ranks_are_refused_on_all(pool: Pool) -> None:
    def message() -> str:
        with runtime(), pytest.raises(ConfigurationError) as caught:
            ud.DistributedOptimizer(sgd(network().parameters()), groups=2 + ud.rank())
        return str(caught.value)

    for text in pool(2).run(message):
        assert "groups=2" in text
        assert "groups=3" in text
        assert "same arguments" in text


def test_training_on_half_of_the_data_would_be_seen() -> None:
    half = alone(sgd, loss=lambda model, x, y: loss_of(model, x[: BATCH // 2], y[: BATCH // 2]))
    assert not torch.allclose(half[0], alone(sgd)[0], atol=1e-3)
