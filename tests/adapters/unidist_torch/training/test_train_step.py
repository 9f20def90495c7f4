"""`TrainStep`: the numbers of one process, with every strategy that leaves the model whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _training import BATCH, alone, assert_close, data, loss_of, network, runtime, share, values
from torch import nn

import unidist.torch as ud
from unidist.errors import UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.settings.environment import set_variables
from unidist_torch.models.step_runner import gradient_computed, gradient_memory

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def losses_alone() -> list[float]:
    """The loss of each whole batch before its update."""
    found: list[float] = []

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = loss_of(model, x, y)
        found.append(float(value.detach()))
        return value

    alone(adam, loss=loss)
    return found


@pytest.mark.parametrize("strategy", ["data", "zero=1", "zero=3", "clip_norm=0.05"])
def test_losses_and_parameters_are_those_of_one_process(pool: Pool, strategy: str) -> None:
    def on_rank() -> tuple[list[float], list[Any], Any]:
        with runtime():
            model = network()
            step = ud.TrainStep(model, adam(model.parameters()), nn.functional.cross_entropy, strategy)
            losses = [float(step(share(x, ud.rank(), 2), share(y, ud.rank(), 2))) for x, y in zip(*data(), strict=True)]
            outputs = step.predict(data()[0][0])
            return losses, values(model) if strategy != "zero=3" else [], outputs

    def clip(model: nn.Module) -> None:
        if strategy.startswith("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    wanted = alone(adam, before_step=clip)
    reference = network()
    with torch.no_grad():
        for parameter, value in zip(reference.parameters(), wanted, strict=True):
            parameter.copy_(value)
    for losses, found, outputs in pool(2).run(on_rank):
        if not strategy.startswith("clip"):
            torch.testing.assert_close(losses, losses_alone(), rtol=1e-12, atol=1e-12)
        if found:
            assert_close(found, wanted)
        torch.testing.assert_close(outputs, reference(data()[0][0]).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["data", "zero=2", "clip_norm=0.05", "pipeline=2"])
def test_shares_of_different_sizes_weigh_as_much_as_they_have_samples(pool: Pool, strategy: str) -> None:
    ranks = 4 if strategy.startswith("pipeline") else 2

    def on_rank() -> tuple[list[float], list[float], list[Any]]:
        with runtime():
            model = network()
            step = ud.TrainStep(model, adam(model.parameters()), nn.functional.cross_entropy, strategy)
            own = slice(0, 1) if ud.data_rank() == 0 else slice(1, BATCH)
            batches = list(zip(*data(), strict=True))
            losses = [float(step(x[own], y[own])) for x, y in batches]
            evaluated = float(step.evaluate(*(each[own] for each in batches[0])))
            return losses, [evaluated], values(model) if ranks == 2 else []

    def clip(model: nn.Module) -> None:
        if strategy.startswith("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    wanted = alone(adam, before_step=clip)
    for losses, _, found in pool(ranks).run(on_rank):
        if not strategy.startswith("clip"):
            torch.testing.assert_close(losses, losses_alone(), rtol=1e-12, atol=1e-12)
        if found:
            assert_close(found, wanted)


def test_a_rest_that_some_ranks_have_is_a_mean_over_its_samples(pool: Pool) -> None:
    def on_rank() -> list[Any]:
        with runtime():
            model = network()
            step = ud.TrainStep(model, adam(model.parameters()), nn.functional.cross_entropy)
            for number, (x, y) in enumerate(zip(*data(), strict=True)):
                whole = number + 1 < len(data()[0])
                if whole or ud.rank() == 0:
                    step(*((share(each, ud.rank(), 2) if whole else each) for each in (x, y)))
            ud.join()
            return values(model)

    assert_close(pool(2).run(on_rank)[0], alone(adam))


def test_accumulated_calls_make_one_update(pool: Pool) -> None:
    def on_rank() -> list[Any]:
        with runtime():
            model = network()
            step = ud.TrainStep(model, adam(model.parameters()), nn.functional.cross_entropy, "accumulate=2")
            for x, y in zip(*data(), strict=True):
                x, y = share(x, ud.rank(), 2), share(y, ud.rank(), 2)
                for part in range(2):
                    step(share(x, part, 2), share(y, part, 2))
            return values(model)

    for found in pool(2).run(on_rank):
        assert_close(found, alone(adam))


def test_evaluation_changes_nothing_and_is_averaged(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            model = nn.Sequential(network(), nn.Dropout(0.5), nn.BatchNorm1d(3).double())
            step = ud.TrainStep(model, adam(model.parameters()), nn.functional.cross_entropy)
            x, y = data()[0][0], data()[1][0]
            step(share(x, ud.rank(), 2), share(y, ud.rank(), 2))
            before = {name: value.clone() for name, value in model.state_dict().items()}
            found = step.evaluate(share(x, ud.rank(), 2), share(y, ud.rank(), 2))
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            assert torch.allclose(ud.allreduce(found, name="loss"), found, rtol=1e-15)
            assert model.training

    pool(2).run(on_rank)


def test_inputs_may_be_tuples_and_mappings_and_a_rank_may_join(pool: Pool) -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.inner(a + b)
            return scores

    def on_rank() -> float:
        with runtime():
            model = TwoInputs()
            step = ud.TrainStep(model, adam(model.parameters()), nn.functional.cross_entropy)
            x, y = data()[0][0], data()[1][0]
            step((x, x), y)
            loss = 0.0
            if ud.rank() == 0:
                loss = float(step({"a": x, "b": x}, y))  # the mean over those that have not joined
                with torch.no_grad():
                    model.eval()
            ud.join()
            return loss

    first, second = pool(2).run(on_rank)
    model = network()
    optimizer = adam(model.parameters())
    x, y = data()[0][0], data()[1][0]
    loss_of(model, x + x, y).backward()
    optimizer.step()
    assert second == 0.0
    assert first == pytest.approx(float(loss_of(model, x + x, y).detach()), rel=1e-12)


def test_it_works_in_one_process_and_refuses_what_is_bound(pool: Pool) -> None:
    with runtime():
        model = network()
        optimizer = adam(model.parameters())
        step = ud.TrainStep(model, optimizer, nn.functional.cross_entropy)
        x, y = data()[0][0], data()[1][0]
        assert x.shape[0] == BATCH
        assert float(step(x, y)) > float(step(x, y))
        with pytest.raises(UsageError, match="distributed already"):
            ud.TrainStep(model, optimizer, nn.functional.cross_entropy)


def test_a_gradient_may_be_computed_in_its_place(pool: Pool) -> None:
    def on_rank(strategy: str, num_passes: int) -> tuple[list[bool], bool, list[float]]:
        with runtime():
            layer = nn.Linear(2, 1, bias=False)
            nn.init.zeros_(layer.weight)
            optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
            bound: Any = ud.TrainStep(layer, optimizer, nn.functional.mse_loss, strategy).optimizer
            weight, has_place, stays = layer.weight, list[bool](), True
            for _ in range(2 * num_passes):
                memory = gradient_memory(bound, weight)
                has_place.append(memory is not None)
                gradient = torch.full_like(weight, ud.rank() + 1.0)
                weight.grad = gradient if memory is None else memory.copy_(gradient)
                address = weight.grad.data_ptr()
                gradient_computed(bound, weight)
                bound.step()
                if weight.grad is not None:
                    stays &= weight.grad.data_ptr() == address
                bound.zero_grad()
            return has_place, stays, weight.detach().flatten().tolist()

    for found in pool(2).run(on_rank, ("data", 1)):
        assert found == ([True, True], True, [-3.0, -3.0])
    for has_place, _, weights in pool(2).run(on_rank, ("accumulate=2", 2)):
        assert has_place == [True, False, True, False], "the sum of the passes before is there"
        assert weights == [-3.0, -3.0]


@pytest.mark.parametrize(
    ("strategy", "verify", "weight", "warns"),
    [
        ("accumulate=2", "first", None, True),
        ("accumulate=2", "off", None, False),
        ("accumulate=2", "first", lambda y: (y != -100).sum(), False),
        ("data", "first", None, False),
    ],
)
def test_ignored_targets_without_a_weight_are_named_once(
    caplog: pytest.LogCaptureFixture, strategy: str, verify: str, weight: Any, warns: bool
) -> None:
    with set_variables({"UNIDIST_VERIFY": verify}), runtime():
        model = network()
        step = ud.TrainStep(model, adam(model.parameters()), nn.functional.cross_entropy, strategy, weight=weight)
        x, y = (each[0] for each in data())
        y = y.clone()
        y[0] = -100
        for _ in range(2):
            step(x, y)
    found = [record for record in caplog.records if "some targets are -100" in record.getMessage()]
    assert len(found) == warns


def test_a_loss_is_weighted_for_one_optimizer() -> None:
    with runtime():
        with pytest.raises(UsageError, match="this script has no distributed optimizers"):
            ud.weighted(torch.ones(()), 1)
        first, second = (ud.distribute(model, adam(model.parameters())) for model in (network(), network()))
        with pytest.raises(UsageError, match=r"has 2 distributed optimizers\. Say whose loss it is"):
            ud.weighted(torch.ones(()), 1)
        with pytest.raises(UsageError, match="this optimizer is not distributed"):
            ud.weighted(torch.ones(()), 1, optimizer=adam(network().parameters()))
        assert float(ud.weighted(torch.full((), 3.0), 2, optimizer=second[1])) == 3
        assert float(ud.weighted(torch.full((), torch.nan), 0, optimizer=first[1])) == 0
        with pytest.raises(UsageError, match=r"a tensor of shape \[2\]. It is one number"):
            ud.weighted(torch.ones(()), torch.ones(2), optimizer=first[1])


def test_several_weighted_losses_have_a_mean_each() -> None:
    def gradients(weighted: bool) -> list[torch.Tensor]:
        with runtime():
            model, _ = ud.distribute(made := network(), adam(made.parameters()))
            x, y = (each[0] for each in data())
            losses = [nn.functional.cross_entropy(model(part), label) for part, label in ((x, y), (x[:2], y[:2]))]
            losses = (
                [ud.weighted(each, count) for each, count in zip(losses, (8, 2), strict=True)] if weighted else losses
            )
            sum(losses, torch.zeros(())).backward()
            return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    assert_close(gradients(True), gradients(False))
