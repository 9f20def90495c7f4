"""Copies and files of a distributed model: an average of the weights (EMA), `torch.save(model)`, its signature."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.parallel

WHOLE = ("data", "precision=bf16", "zero=1", "zero=3:shared=true")


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


def averaged(strategy: str) -> tuple[float, float, str]:
    """Average weights in a copy; return how far it is from the average in one process, and what saving says."""
    import unidist.torch as ud
    from unidist.errors import UsageError
    from unidist.settings.environment import set_variables

    def train(model: Any, optimizer: Any, average: Any) -> Any:
        x = torch.linspace(-1, 1, 8).reshape(2, 4)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.5)
        with torch.no_grad():
            return average(x), model(x)

    def network() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    plain, plain_optimizer = network()
    expected, _ = train(plain, plain_optimizer, copy.deepcopy(plain))
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model, optimizer = ud.distribute(*network())
            assert str(inspect.signature(model.forward)) == "(input)"
            average, output = train(model, optimizer, copy.deepcopy(model))
            file = io.BytesIO()
            try:
                torch.save(model, file)
            except UsageError as exc:
                return float((average - expected).abs().max()), 0.0, str(exc)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            assert not hasattr(loaded, "no_sync")
            with torch.no_grad():
                again = loaded(torch.linspace(-1, 1, 8).reshape(2, 4))
            return float((average - expected).abs().max()), float((again - output).abs().max()), ""
        finally:
            ud.shutdown()


@pytest.mark.parametrize("strategy", WHOLE)
def test_where_a_rank_has_the_whole_model_it_is_copied_and_saved(rank_pool: RankPoolFactory, strategy: str) -> None:
    tolerance = 0.02 if "bf16" in strategy else 1e-6
    for from_average, from_loaded, message in rank_pool(2).run(averaged, (strategy,)):
        assert from_average < tolerance
        assert from_loaded < tolerance
        assert not message


def test_a_cut_model_is_copied_and_saving_it_says_what_to_call(rank_pool: RankPoolFactory) -> None:
    for from_average, _, message in rank_pool(2).run(averaged, ("tensor=2",)):
        assert from_average < 1e-6
        assert "ud.save(path, model)" in message
        assert "\n" not in message


def test_a_model_whose_parameters_are_away_says_what_to_call(rank_pool: RankPoolFactory) -> None:
    def on_rank() -> tuple[str, str]:
        import unidist.torch as ud
        from unidist.errors import UsageError
        from unidist.settings.environment import set_variables

        with set_variables({"UNIDIST_STRATEGY": "zero=3:shared=false", "UNIDIST_ENGINE": "shm"}):
            ud.init()
            try:
                model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
                model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                messages = []
                for use in (copy.deepcopy, lambda each: torch.save(each, io.BytesIO())):
                    with pytest.raises(UsageError) as caught:
                        use(model)
                    messages.append(str(caught.value))
                return messages[0], messages[1]
            finally:
                ud.shutdown()

    for copied, saved in rank_pool(2).run(on_rank):
        assert "unidist_zero.gathered(model)" in copied
        assert "ud.save(path, model)" in saved


def of_weights(strategy: str) -> dict[str, str]:
    """Compute terms of weights, averages and numbers for a log after a step; return what each says, "" if nothing."""
    from torch.optim.swa_utils import AveragedModel

    import unidist.torch as ud
    from unidist.errors import UsageError
    from unidist.settings.environment import set_variables
    from unidist_zero import gathered

    def uses(model: Any) -> dict[str, Any]:
        weight = model[0].weight
        return {
            "orthogonality": lambda: ((weight.t() @ weight - torch.eye(4)) ** 2).sum(),
            "L2": lambda: sum((each**2).sum() for each in model.parameters()),
            "norms": lambda: [each.data.norm() for each in model.parameters()],
            "average": lambda: [each.detach().clone().lerp_(each, 0.5) for each in model.parameters()],
            "copy": lambda: AveragedModel(model).update_parameters(model),
            "early copy": lambda: AveragedModel(network()).update_parameters(model),
            "part of the state": lambda: model[0].state_dict()["weight"].numpy(),
            "count": lambda: sum(each.numel() for each in model.parameters()),
        }

    def network() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))

    found = {}
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model = network()
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            for name, use in uses(model).items():
                try:
                    use()
                    found[name] = ""
                except UsageError as exc:
                    found[name] = str(exc)
            with gathered(model):
                if strategy.startswith("zero"):
                    for use in uses(model).values():
                        use()
        finally:
            ud.shutdown()
    return found


def test_terms_and_averages_of_weights_that_are_away_say_what_to_do(rank_pool: RankPoolFactory) -> None:
    for rank, found in enumerate(rank_pool(2).run(of_weights, ("zero=3:shared=false",))):
        assert not found.pop("count")
        for use, message in found.items():
            assert "unidist_zero.gathered(model)" in message, use
            assert f"parameter '0.weight' on rank {rank}" in message, use
            assert "\n" not in message


def test_terms_of_a_cut_weight_say_what_to_do_and_averages_work(rank_pool: RankPoolFactory) -> None:
    for rank, found in enumerate(rank_pool(2).run(of_weights, ("tensor=2",))):
        for use in ("average", "copy", "part of the state", "count"):
            assert not found.pop(use), use
        assert "(4, 4) and (8, 4)" in found["early copy"]
        assert "after distribute()" in found["early copy"]
        for use, message in found.items():
            assert "parameter '0.weight'" in message, use
            assert f"rank {rank}" in message, use
