"""What `torch.save(model)` writes is a plain model: nothing of ours is in the file, and safe loading takes it."""

from __future__ import annotations

import copy
import io
import pickletools
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


def names_in(saved: bytes) -> set[str]:
    """Return the classes and functions that a file of `torch.save` names."""
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("data.pkl"))
        operations = pickletools.genops(archive.read(name))
    return {str(argument) for operation, argument, _ in operations if operation.name == "GLOBAL"}


def files_of(strategy: str) -> tuple[set[str], float]:
    """Save a model before and after it is distributed; return new names, and how far the loaded model is off."""
    import unidist.torch as ud
    from unidist.settings.environment import set_variables

    def saved(model: Any) -> bytes:
        file = io.BytesIO()
        torch.save(model, file)
        return file.getvalue()

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    plain = names_in(saved(model))
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            for _ in range(2):
                model(torch.randn(4, 4)).square().mean().backward()
                optimizer.step()
            data = saved(model)
            with (
                model.no_sync(),
                torch.serialization.safe_globals([torch.nn.Sequential, torch.nn.Linear, torch.nn.BatchNorm1d]),
            ):
                loaded = torch.load(io.BytesIO(data), weights_only=True)
            with model.no_sync():
                duplicate = copy.deepcopy(model)
            x = torch.randn(4, 4)
            with torch.no_grad():
                outputs = [each.eval()(x) for each in (model, loaded, duplicate)]
            return names_in(data) - plain, max(float((each - outputs[0]).abs().max()) for each in outputs)
        finally:
            ud.shutdown()


@pytest.mark.parametrize(
    "strategy",
    ["data", "accumulate=2", "clip_norm=1", "zero=1", "zero=2", "zero=3", "local_sgd=2", "parameter_server=sync"],
)
def test_a_saved_model_is_plain(rank_pool: RankPoolFactory, strategy: str) -> None:
    for names, difference in rank_pool(2).run(files_of, (strategy,)):
        assert names == set()
        assert difference == 0.0


def files_of_changed(strategy: str) -> tuple[list[set[str]], bool]:
    """Save a model whose modules a strategy has changed, and a copy; return new names, and whether it loads whole."""
    import unidist.torch as ud
    from unidist.settings.environment import set_variables

    def saved(value: Any) -> bytes:
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()

    def network() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))

    x = torch.linspace(-1, 1, 32).reshape(2, 4, 4)
    plain = names_in(saved(network()))
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model = network()
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            model(x).square().mean().backward()
            optimizer.step()
            files = [saved(model), saved(copy.deepcopy(model))]
            state = torch.load(io.BytesIO(saved(model.state_dict())), weights_only=True)
        finally:
            ud.shutdown()
    expected = network()
    expected.load_state_dict(state)
    with torch.serialization.safe_globals([torch.nn.Sequential, torch.nn.Linear, torch.nn.GELU]):
        loaded = [torch.load(io.BytesIO(file), weights_only=True) for file in files]
    return [names_in(file) - plain for file in files], all(torch.equal(each(x), expected(x)) for each in loaded)


@pytest.mark.parametrize(
    "strategy", ["precision=bf16", "precision=fp16", "activations=recompute:blocks=0+2", "context=2"]
)
def test_a_saved_model_is_without_what_a_strategy_changed(rank_pool: RankPoolFactory, strategy: str) -> None:
    for names, is_equal in rank_pool(2).run(files_of_changed, (strategy,)):
        assert names == [set(), set()]
        assert is_equal


def files_of_optimizer(strategy: str) -> tuple[str, str]:
    """Copy and save an optimizer after a step; return the errors, "" where its state is that of the bound one."""
    import unidist.torch as ud
    from unidist.errors import UsageError
    from unidist.settings.environment import set_variables

    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
            model, optimizer = ud.distribute(model, torch.optim.Adam(model.parameters()))
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()

            def saved(each: Any) -> Any:
                file = io.BytesIO()
                torch.save(each, file)
                file.seek(0)
                return torch.load(file, weights_only=False)

            texts = []
            for use in (copy.deepcopy, saved):
                try:
                    made = use(optimizer)
                except UsageError as error:
                    texts.append(str(error))
                    continue
                assert type(made) is torch.optim.Adam
                expected = [each["exp_avg"].tolist() for each in optimizer.state.values()]
                assert [each["exp_avg"].tolist() for each in made.state.values()] == expected != []
                texts.append("")
            return texts[0], texts[1]
        finally:
            ud.shutdown()


@pytest.mark.parametrize("strategy", ["data", "precision=bf16", "activations=recompute:blocks=0+2", "context=2"])
def test_a_copied_or_saved_optimizer_is_plain_and_has_its_state(rank_pool: RankPoolFactory, strategy: str) -> None:
    assert rank_pool(2).run(files_of_optimizer, (strategy,)) == [("", "")] * 2


def test_an_optimizer_whose_state_is_elsewhere_says_what_to_call(rank_pool: RankPoolFactory) -> None:
    for strategy in ("zero=1", "zero=3"):
        for texts in rank_pool(2).run(files_of_optimizer, (strategy,)):
            assert all("is sharded over the ranks (zero)" in text for text in texts), texts
    for copied, saved in rank_pool(2).run(files_of_optimizer, ("tensor=2",)):
        assert not copied
        assert "ud.save(path, model, optimizer)" in saved


def files_of_states(strategy: str) -> Any:
    """Save states of a divided model; return the errors, and whether states that are kept in memory can be loaded."""
    import unidist.torch as ud
    from unidist.errors import UsageError
    from unidist.settings.environment import set_variables
    from unidist_expert_parallel.torch import MixtureOfExperts

    def said(state: Any) -> str:
        try:
            torch.save({"state": state}, io.BytesIO())
        except UsageError as error:
            return str(error)
        return ""

    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            between = MixtureOfExperts(8, 4, hidden=3) if "expert" in strategy else torch.nn.GELU()
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), between, torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
            step = ud.TrainStep(model, torch.optim.Adam(model.parameters()), torch.nn.functional.mse_loss)
            step(torch.ones(4, 4), torch.zeros(4, 4))  # the same on every rank
            model, optimizer = step.model, step.optimizer
            best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            assert not any(model.load_state_dict(best[0]))
            optimizer.load_state_dict(best[1])
            whole = [module.state_dict() for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
            states = model.state_dict(), best[0], optimizer.state_dict(), best[1]
            return [said(state) for state in states], [said(state) for state in whole]
        finally:
            ud.shutdown()


@pytest.mark.parametrize("strategy", ["tensor=2", "expert=2", "pipeline=2", "tensor=2,zero=2"])
def test_a_state_of_a_part_is_in_no_file(rank_pool: RankPoolFactory, strategy: str) -> None:
    for found, whole in rank_pool(2).run(files_of_states, (strategy,)):
        assert all("use ud.save(path, model), which writes the whole" in text for text in found[:2]), found
        assert all("use ud.save(path, model, optimizer), which" in text for text in found[2:]), found
        assert whole in ([""], []), whole


def files_of_tensors(strategy: str) -> list[str]:
    """Write the tensors of a divided model in ways that copy them first; return the errors."""
    import safetensors.torch

    import unidist.torch as ud
    from unidist.errors import UsageError
    from unidist.settings.environment import set_variables
    from unidist_expert_parallel.torch import MixtureOfExperts

    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            between = MixtureOfExperts(8, 4, hidden=3) if "expert" in strategy else torch.nn.GELU()
            model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 8), between, torch.nn.Linear(8, 8))
            step = ud.TrainStep(model, torch.optim.Adam(model.parameters()), torch.nn.functional.mse_loss)
            step(torch.ones(4, 8), torch.zeros(4, 8))
            model = step.model
            copied = {name: value.to("cpu").contiguous() for name, value in copy.deepcopy(model.state_dict()).items()}
            writers: list[Callable[[], Any]] = [
                lambda: safetensors.torch.save(model.state_dict()),
                lambda: safetensors.torch.save_model(model, "never.safetensors"),
                lambda: safetensors.torch.save(copied),
                lambda: torch.save(copied, io.BytesIO()),
                lambda: torch.save({"state": {**model.state_dict()}}, io.BytesIO()),
            ]
            texts = []
            for write in writers:
                try:
                    write()
                    texts.append("")
                except UsageError as error:
                    texts.append(str(error))
            assert not any(model.load_state_dict(copied))
            ud.allreduce(next(iter(copied.values())))  # is no file
            return texts
        finally:
            ud.shutdown()


@pytest.mark.parametrize("strategy", ["tensor=2", "expert=2", "pipeline=2"])
def test_tensors_of_a_part_are_in_no_file_either(rank_pool: RankPoolFactory, strategy: str) -> None:
    pytest.importorskip("safetensors")
    for texts in rank_pool(2).run(files_of_tensors, (strategy,)):
        assert all("use ud.save(path, model), which writes the whole" in text for text in texts), texts
        assert all("ud.save_pretrained(model, folder)" in text for text in texts), texts
