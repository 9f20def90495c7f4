"""The plugin manager keeps going whatever a plugin does, and says whose fault it was."""

from __future__ import annotations

import importlib.metadata
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pluggy
import pytest
import torch

from unidist.engine import EngineSpec
from unidist.errors import ConfigurationError, PluginError, UsageError
from unidist.framework import FrameworkSpec
from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginInfo, PluginManager, hookimpl
from unidist.strategy import BindingSpec, StrategySpec


def plugin(**hooks: Callable[..., Any]) -> types.ModuleType:
    """Return a plugin module with these hook implementations."""
    module = types.ModuleType("made_up")
    vars(module).update({name: hookimpl(function) for name, function in hooks.items()})
    return module


def registers(name: str) -> types.ModuleType:
    def unidist_register_engines(registry: Registry[EngineSpec]) -> None:
        registry.add(EngineSpec(name, "nowhere:Engine", ""))

    return plugin(unidist_register_engines=unidist_register_engines)


def fails(registry: Any) -> None:
    raise ZeroDivisionError("oh")


@pytest.fixture
def manager() -> PluginManager:
    return PluginManager()


def test_registries_hold_what_plugins_register_and_who_did(manager: PluginManager) -> None:
    manager.register(registers("one"), name="a", distribution="dist-a", version="1")
    manager.register(registers("two"), name="b", distribution="dist-b", version="2")
    assert [spec.name for spec in manager.engines] == ["one", "two"]
    assert manager.engines.origin_of("two") == manager.plugins["b"].origin == "'b' (dist-b)"
    assert "one" in manager.engines
    assert len(manager.engines) == 2
    assert len(manager.launchers) == 0
    assert manager.problems() == []


def test_a_plugin_that_raises_is_reported_and_the_others_are_asked(manager: PluginManager) -> None:
    manager.register(plugin(unidist_register_engines=fails), name="bad", distribution="dist-bad", version="3")
    manager.register(registers("good"), name="good")
    assert [spec.name for spec in manager.engines] == ["good"]
    (problem,) = manager.problems()
    assert problem == "plugin 'bad' of dist-bad 3: unidist_register_engines raised ZeroDivisionError: oh"


def test_a_name_taken_twice_stays_with_the_first_and_both_are_named(manager: PluginManager) -> None:
    manager.register(registers("same"), name="a", distribution="dist-a")
    manager.register(registers("same"), name="b", distribution="dist-b")
    assert manager.engines.origin_of("same") == "'a' (dist-a)"
    (problem,) = manager.problems()
    assert problem.startswith("plugin 'b' of dist-b")
    assert "'a' (dist-a)" in problem


def test_a_misspelt_hook_is_reported_with_the_nearest(manager: PluginManager) -> None:
    manager.register(plugin(unidist_register_engine=fails), name="typo")
    (problem,) = manager.problems()
    assert "'unidist_register_engine', which does not exist; did you mean 'unidist_register_engines'?" in problem
    assert len(manager.engines) == 0


def test_a_hook_with_a_wrong_argument_is_reported(manager: PluginManager) -> None:
    def unidist_register_engines(registri: Any) -> None: ...

    manager.register(plugin(unidist_register_engines=unidist_register_engines), name="wrong", distribution="dist-wrong")
    manager.register(registers("good"), name="good")
    assert [spec.name for spec in manager.engines] == ["good"]
    (problem,) = manager.problems()
    assert "dist-wrong" in problem
    assert "registri" in problem


def test_two_plugins_of_one_name_are_reported(manager: PluginManager) -> None:
    manager.register(registers("one"), name="a", distribution="dist-a")
    manager.register(registers("two"), name="a", distribution="dist-b")
    assert [spec.name for spec in manager.engines] == ["one"]
    (problem,) = manager.problems()
    assert "dist-b" in problem
    assert "already registered by dist-a" in problem


def test_events_reach_every_plugin_in_order_and_survive_failures(manager: PluginManager) -> None:
    seen: list[tuple[str, int]] = []

    def listener(name: str) -> Callable[..., None]:
        def unidist_step_applied(context: Any, step: int) -> None:
            seen.append((name, step))

        return unidist_step_applied

    def failing(context: Any, step: int) -> None:
        raise RuntimeError("no")

    assert not manager.listens("unidist_step_applied")
    for name, hook in (("a", listener("a")), ("bad", failing), ("b", listener("b"))):
        manager.register(plugin(unidist_step_applied=hook), name=name)
    assert manager.listens("unidist_step_applied")
    manager.notify("unidist_step_applied", context=None, step=3)
    assert seen == [("a", 3), ("b", 3)]
    assert len(manager.problems()) == 1


def test_hooks_of_a_plugin_are_listed(manager: PluginManager) -> None:
    manager.register(plugin(unidist_shutdown=lambda context: None, unidist_failure=lambda error: None), name="a")
    assert manager.hooks_of("a") == ["unidist_failure", "unidist_shutdown"]
    assert manager.hooks_of("unknown") == []


def test_unknown_names_list_the_choices(manager: PluginManager) -> None:
    manager.register(registers("carrier"), name="a")
    with pytest.raises(
        ConfigurationError, match=r"unknown engine 'carier'\. Did you mean 'carrier'\? Choices: carrier\."
    ):
        manager.engines.get("carier")
    with pytest.raises(ConfigurationError, match=r"Choices: \(none\)"):
        manager.strategies.get("zero")


def test_a_spec_that_cannot_be_loaded_names_itself_and_its_path() -> None:
    with pytest.raises(PluginError, match="engine 'x' cannot be loaded from 'nowhere:Engine'"):
        EngineSpec("x", "nowhere:Engine", "").load()
    with pytest.raises(PluginError, match="strategy 'y' cannot be loaded from 'json:Missing'"):
        StrategySpec("y", "json:Missing", "").load()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution `dist-test` 1.5 with the plugins `fine` and `torn`, and no other distribution."""
    info = tmp_path / "dist_test-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dist-test\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[unidist]\nfine = unidist.builtin.plugin\ntorn = no_such_module_at_all\n")
    found = importlib.metadata.Distribution.at(info).entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found.select(group=group))
    return tmp_path


def test_plugins_come_from_entry_points_and_a_torn_one_does_not_spoil_the_rest(installed: Path) -> None:
    manager = PluginManager().load()
    assert set(manager.plugins) == {"fine", "torn"}
    assert {"single", "shm"} <= {spec.name for spec in manager.engines}
    (problem,) = manager.problems()
    assert problem.startswith(
        "plugin 'torn' of dist-test 1.5: cannot be imported from 'no_such_module_at_all': ModuleNotFoundError"
    )


def test_a_disabled_plugin_is_not_imported(installed: Path) -> None:
    manager = PluginManager(["torn"]).load()
    assert set(manager.plugins) == {"fine"}
    assert manager.problems() == []


def test_disabling_what_is_not_there_is_an_error(installed: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown plugin 'fin'. Did you mean 'fine'"):
        PluginManager(["fin"]).load()


def test_a_broken_framework_that_is_not_imported_is_no_concern_of_others(manager: PluginManager) -> None:
    def unidist_register_frameworks(registry: Registry[FrameworkSpec]) -> None:
        registry.add(FrameworkSpec("broken", "nowhere:Framework", requires="not_imported_here", summary=""))

    manager.register(plugin(unidist_register_frameworks=unidist_register_frameworks), name="frameworks")
    with pytest.raises(UsageError, match=r"builtins\.list is no model of a framework .* it knows: broken"):
        manager.framework_of([])


def test_a_single_tensor_is_no_model(manager: PluginManager) -> None:
    manager.load()
    with pytest.raises(UsageError, match=r"here it is a single tensor of torch, .* such as \{'w': array\}"):
        manager.framework_of(torch.ones(2))


def test_a_binding_is_found_by_strategy_and_framework_and_a_missing_one_lists_the_others(
    manager: PluginManager,
) -> None:
    def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
        registry.add(BindingSpec("zero", "torch", "collections:OrderedDict"))
        registry.add(BindingSpec("zero", "numpy", "nowhere:Binding"))

    class Framework:
        name = "torch"

    class Other:
        name = "mxnet"

    manager.register(plugin(unidist_register_bindings=unidist_register_bindings), name="bindings")
    assert type(manager.binding("zero", Framework())).__name__ == "OrderedDict"  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"'zero' has no binding for the framework 'mxnet'.*: numpy, torch"):
        manager.binding("zero", Other())  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [SystemExit("bye"), GeneratorExit("gone"), ZeroDivisionError("oh")])
def test_whatever_an_import_raises_is_a_problem_of_its_plugin(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(entry: importlib.metadata.EntryPoint) -> Any:
        raise error

    entry = importlib.metadata.EntryPoint("bad", "unidist_bad", "unidist")
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", load)
    monkeypatch.setattr("unidist.runtime.plugin_manager._entry_points", lambda: [(entry, ("dist-bad", "1"))])
    (problem,) = PluginManager().load().problems()
    assert problem.startswith("plugin 'bad' of dist-bad 1: cannot be imported")
    assert type(error).__name__ in problem


def test_a_plugin_can_add_a_kind_of_plugins_whichever_is_loaded_first(manager: PluginManager) -> None:
    class WidgetSpec(EngineSpec):
        kind = "widget"
        hook = "unidist_register_widgets"

    class Specifications:
        @staticmethod
        @pluggy.HookspecMarker("unidist")
        def unidist_register_widgets(registry: Any) -> None: ...

    def unidist_register_widgets(registry: Any) -> None:
        registry.add(WidgetSpec("small", "nowhere:Widget", ""))

    def unidist_add_kinds(manager: PluginManager) -> None:
        manager.add_kind(WidgetSpec, Specifications)

    early = plugin(unidist_register_widgets=unidist_register_widgets)
    manager._register(early, PluginInfo("early", "dist-early", "1"))
    manager.register(plugin(unidist_add_kinds=unidist_add_kinds), name="widgets")
    manager._check_hooks(manager.plugins["early"])
    assert [spec.name for spec in manager.registry(WidgetSpec)] == ["small"]
    assert manager.problems() == []
    assert WidgetSpec in manager.kinds
