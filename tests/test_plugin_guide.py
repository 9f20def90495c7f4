"""The examples of docs/plugins.md: each is a module that can be imported, and its classes do what the page says."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unidist import hookimpl
from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.gradients import CompressorSpec, ParameterInfo, build_compressor
from unidist.launcher import Job
from unidist.negotiation import NegotiationOptions
from unidist.optim import Accumulation, GradientRule
from unidist.options import LineItem, construct
from unidist.rendezvous import SingleRendezvous
from unidist.runtime import PluginManager
from unidist.strategy import (
    ChoosesPrecision,
    GradientOwner,
    InitializesModels,
    KeepsDivision,
    NamesPlugins,
    OutlivesRanks,
    OwnsParameters,
    RunsSideProcesses,
    RunsSteps,
    ShardsUpdates,
    Strategy,
    SurvivesLoss,
    UpdateGate,
)
from unidist.testing import CompressorConformance, RecordingCommunicator, ThreadWorld
from unidist.topology import Topology

PAGE = Path(__file__).resolve().parents[1] / "docs" / "plugins.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
OPTIONS = {"EveryOther": "2", "Averages": "3", "Noise": "0.1", "Lars": "0.1"}


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ModuleType]]:
    """Every example as a module, in the order of the page."""
    folder = tmp_path_factory.mktemp("guide")
    names = [f"plugin_guide_{number}" for number in range(len(BLOCKS))]
    for name, block in zip(names, BLOCKS, strict=True):
        (folder / f"{name}.py").write_text(block, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)


def own_classes(module: ModuleType) -> list[type[Any]]:
    return [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__]


def example(modules: list[ModuleType], name: str) -> Any:
    """Return what an example defines."""
    (found,) = [vars(module)[name] for module in modules if inspect.getmodule(vars(module).get(name)) is module]
    return found


def test_every_example_can_be_imported_and_its_classes_lack_nothing(modules: list[ModuleType]) -> None:
    classes = [each for module in modules for each in own_classes(module)]
    assert len(classes) >= 30
    for each in classes:
        assert not inspect.isabstract(each), f"{each.__name__} lacks {sorted(each.__abstractmethods__)}"


def test_every_strategy_can_be_made_from_a_strategy_line(modules: list[ModuleType]) -> None:
    found = [each for module in modules for each in own_classes(module) if issubclass(each, Strategy)]
    for each in found:
        made = construct(LineItem(each.name, OPTIONS.get(each.__name__)), each)
        assert (made.state() == {}) != (each.__name__ == "SpikeGuard")
    capabilities = (
        GradientOwner, UpdateGate, ShardsUpdates, OwnsParameters, RunsSteps, ChoosesPrecision, SurvivesLoss,
        NamesPlugins, InitializesModels, KeepsDivision, RunsSideProcesses, OutlivesRanks,
    )  # fmt: skip
    for capability in capabilities:
        assert [each for each in found if issubclass(each, capability)], f"no example of {capability.__name__}"


def test_every_example_that_has_hooks_is_a_plugin_without_a_problem(modules: list[ModuleType]) -> None:
    manager = PluginManager().load()
    names = {}
    for module in modules:
        hooks = [name for name in vars(module) if re.match("unidist_(register|add|step|init|fail)", name)]
        if hooks:
            manager.register(module, name=module.__name__)
            names[module.__name__] = hooks
    assert len(names) >= 10
    kinds = [kind for kind in manager.kinds if kind.__name__ != "ColourSpec"]
    taken = {"small-zero/torch", "zero/numpy", "numpy"}  # of the second sample plugin, where it is installed
    for kind in kinds:
        manager.registry(kind)
    problems = [text for text in manager.problems() if "plugin_guide" in text]
    assert not [text for text in problems if not any(repr(name) in text for name in taken)]
    assert manager.strategies.get("every-other").name == "every-other"


def test_a_new_kind_has_a_registry(modules: list[ModuleType]) -> None:
    manager = PluginManager()
    spec = example(modules, "ColourSpec")
    manager.register(inspect.getmodule(spec), name="colours")

    @hookimpl
    def my_plugin_register_colours(registry: Any) -> None:
        registry.add(spec("red", "builtins:int", "a colour"))

    red = ModuleType("red")
    red.my_plugin_register_colours = my_plugin_register_colours  # type: ignore[attr-defined]  # as in a file
    manager.register(red, name="red")
    assert [item.name for item in manager.registry(spec)] == ["red"]
    assert manager.problems() == []


class HostMemory:
    """The little of a framework that the examples need."""

    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        return Buffer.allocate(count, dtype)

    def zero(self, buffer: Buffer) -> None:
        buffer.bytes()[:] = bytes(buffer.nbytes)

    def multiply(self, buffer: Buffer, factor: float) -> None:
        np.frombuffer(buffer.bytes(), str(buffer.dtype))[:] *= factor


def test_an_exchange_that_exchanges_nothing_undoes_the_mean_over_ranks(modules: list[ModuleType]) -> None:
    infos = [ParameterInfo(name, (2,), DType.FLOAT64) for name in "ab"]
    exchange = example(modules, "OwnGradients")(infos, HostMemory(), 4)
    exchange.scale = 1 / (4 * 2)  # four ranks, two passes
    values = np.frombuffer(exchange.buffer(0).bytes())
    values[:] = [3, 5]
    exchange.accumulate(0)
    assert exchange.in_round
    values += 1
    exchange.ready(0)
    assert exchange.finish().present == (True, False)
    assert values.tolist() == [2, 3]
    assert not exchange.in_round
    exchange.close()


def test_what_is_longer_than_usual_is_clipped_or_skipped(modules: list[ModuleType]) -> None:
    strategy = example(modules, "SpikeGuard")()
    rule: GradientRule = strategy.gradient_rule()

    class Gradient:
        def __init__(self, length: float) -> None:
            self.length = length

        def norm(self, order: float) -> float:
            return self.length

        def multiply(self, factor: float) -> None:
            self.length *= factor

        def skip(self) -> None:
            self.length = 0.0

    for length, wanted in ((1.0, 1.0), (1.9, 1.9), (10.0, 2 * 1.09), (20.0, 0.0), (math.nan, 0.0)):
        gradient: Any = Gradient(length)
        rule.apply(gradient)
        assert gradient.length == pytest.approx(wanted)
    other = example(modules, "SpikeGuard")()
    other.load_state(strategy.state())
    assert other == strategy


def test_parameters_are_averaged_every_so_often(modules: list[ModuleType]) -> None:
    def main(communicator: Communicator) -> list[float]:
        weights = np.full(3, float(communicator.rank))
        bound: Any = SimpleNamespace(communicator=communicator)
        state: Any = SimpleNamespace(values=lambda: [Buffer.of(weights)], store=lambda values: None)
        strategy = example(modules, "Averages")(2)
        seen = []
        for step in (1, 2):
            if strategy.acts_after(step, bound):
                strategy.act_after(step, bound, state)
            seen.append(float(weights[0]))
        return seen

    with ThreadWorld(2) as world:
        assert world.run(main) == [[0.0, 0.5], [1.0, 0.5]]


class TestHalved(CompressorConformance):
    compresses = (DType.FLOAT64,)
    dtypes = (DType.FLOAT64, DType.FLOAT32, DType.INT32)
    sizes = (2,)
    error = 1e-6

    @pytest.fixture(autouse=True)
    def _use_example(self, modules: list[ModuleType]) -> None:
        self._modules = modules

    def make(self) -> Any:
        manager = PluginManager()
        manager.register(inspect.getmodule(example(self._modules, "Halved")), name="guide")
        return build_compressor("halved/gain=1.0", manager.registry(CompressorSpec))


def test_the_engine_connects_one_process(modules: list[ModuleType]) -> None:
    engine = example(modules, "LonelyEngine")()
    topology = Topology()
    assert engine.supports(topology).usable
    communicator = engine.connect(topology, SingleRendezvous(), timeout=timedelta(seconds=1))
    assert communicator.size == 1
    communicator.close()


def test_communicators_have_their_capabilities(modules: list[ModuleType]) -> None:
    def main(communicator: Communicator) -> None:
        telling: Any = example(modules, "Telling")(RecordingCommunicator(communicator))
        assert list(telling.waiting_for()) == []
        assert example(modules, "Sharing")(communicator).sharing_obstacle()
        named = example(modules, "Negotiating")(communicator).named_operations(NegotiationOptions())
        named.close()

    with ThreadWorld(2) as world:
        world.run(main)


def test_small_examples_answer_as_the_page_says(modules: list[ModuleType]) -> None:
    pairs = example(modules, "Pairs")()
    assert Accumulation(pairs.passes_per_update, pairs.averages_passes).passes == 2
    assert example(modules, "Grouped")(size=2).elastic_obstacle(None)
    assert not example(modules, "Grouped")().elastic_obstacle(None)
    assert example(modules, "Narrow")().precision(None).compute is DType.BFLOAT16
    example(modules, "Squeezed")().check_plugins(PluginManager().load())
    launcher = example(modules, "HereLauncher")()
    assert launcher.run(Job((sys.executable, "-c", "raise SystemExit(3)"), 1)) == 3
    assert launcher.hosts()[0].slots == 1


def test_a_schedule_is_made(modules: list[ModuleType]) -> None:
    from unidist_pipeline.schedules import PipelineSize

    schedule = example(modules, "eager")(PipelineSize(num_ranks=2, num_microbatches=4))
    assert schedule.name == "eager"


def test_an_observer_rings(modules: list[ModuleType]) -> None:
    rung: list[str] = []

    class Job:
        def message(self, text: str) -> None:
            rung.append(text)

    make = example(modules, "bell")
    assert make({"bell": None}, True, PluginManager()) is None
    observer: Any = make({"bell": True}, True, PluginManager())
    observer.start(Job())
    observer.happened("joined", {})
    observer.happened("lost", {})
    assert rung == ["\a"]


def test_every_capability_of_a_strategy_has_a_section() -> None:
    text = PAGE.read_text(encoding="utf-8")
    import unidist.strategy as public

    found = [
        name
        for name in public.__all__
        if inspect.isabstract(value := getattr(public, name)) and value is not Strategy and inspect.isclass(value)
    ]
    assert "SurvivesLoss" in found
    for name in found:
        assert re.search(rf"^### .*`{name}`|`{name}` is a capability", text, re.MULTILINE), f"{name} has no section"
