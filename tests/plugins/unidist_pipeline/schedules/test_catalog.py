"""Schedules by name: ours and those of others, checked alike."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from unidist.errors import ConfigurationError, PluginError
from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginManager
from unidist_pipeline.schedules.catalog import build_schedule
from unidist_pipeline.schedules.classic import gpipe
from unidist_pipeline.schedules.model import Action, ActionKind, PipelineSize, Schedule
from unidist_pipeline.schedules.registration import ScheduleSpec
from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.simulator import peak_activations, simulate


@pytest.fixture(scope="module")
def registry() -> Registry[ScheduleSpec]:
    return PluginManager().load().registry(ScheduleSpec)


def unfinished(size: PipelineSize) -> Schedule:
    """Like GPipe, but the last backward is missing."""
    schedule = gpipe(size)
    lists = [
        tuple(a for a in actions if (a.kind, a.microbatch) != (ActionKind.BACKWARD, 1)) for actions in schedule.ranks
    ]
    return Schedule("unfinished", size.num_microbatches, schedule.placement, tuple(lists))


@pytest.fixture
def others() -> Iterator[Registry[ScheduleSpec]]:
    """Schedules of a made-up plugin, each wrong in its own way."""
    module = types.ModuleType("somebodys_schedules")
    vars(module).update(
        unfinished=unfinished,
        text=lambda size: "0F0 0B0",
        small=lambda size: gpipe(PipelineSize(1, size.num_microbatches)),
        number=5,
        picky=lambda size: one_only(size),
    )
    sys.modules[module.__name__] = module
    registry: Registry[ScheduleSpec] = Registry("schedule")
    registry.origin = "'somebody' (dist)"
    for name in ("unfinished", "text", "small", "number", "picky"):
        registry.add(ScheduleSpec(name, f"{module.__name__}:{name}", "wrong"))
    registry.add(ScheduleSpec("gone", f"{module.__name__}:gone", "wrong"))
    yield registry
    del sys.modules[module.__name__]


def one_only(size: PipelineSize) -> Schedule:
    raise ConfigurationError("picky works with one rank only.")


def test_every_registered_schedule_is_made_for_its_default_number_of_stages(registry: Registry[ScheduleSpec]) -> None:
    ours = "gpipe 1f1b interleaved zb-h1 zb-h2 zb-1p zb-2p zbv dualpipev v-half v-min"
    assert set(ours.split()) <= {spec.name for spec in registry}
    for spec in registry:
        schedule = build_schedule(spec.name, registry, num_ranks=3, num_microbatches=4)
        assert (schedule.num_ranks, schedule.num_stages) == (3, 3 * spec.stages_per_rank)
        if registry.origin_of(spec.name) == "'pipeline' (unidist-train)":
            assert schedule.name == spec.name
    assert build_schedule("interleaved", registry, num_ranks=3, num_microbatches=4, stages_per_rank=3).num_stages == 9


def test_an_unknown_name_lists_the_choices(registry: Registry[ScheduleSpec]) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown schedule '1f2b'\. Did you mean '1f1b'"):
        build_schedule("1f2b", registry, num_ranks=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unfinished", "plugin 'somebody' .*num_ranks=2.*rank 0, stage 0, micro-batch 1: 0I1 is missing"),
        ("text", "returned str; return a Schedule"),
        ("small", "asked for .*num_ranks=2.* 1 ranks, 2 micro-batches and 1 stages"),
        ("number", "is no function that takes a PipelineSize, but 5"),
        ("gone", "schedule 'gone' cannot be loaded"),
    ],
)
def test_what_another_plugin_does_wrong_names_it(others: Registry[ScheduleSpec], name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        build_schedule(name, others, num_ranks=2, num_microbatches=2)


def test_a_size_that_a_schedule_refuses_is_an_error_of_the_command(others: Registry[ScheduleSpec]) -> None:
    with pytest.raises(ConfigurationError, match="one rank only"):
        build_schedule("picky", others, num_ranks=2, num_microbatches=2)


def test_modules_of_schedules_load_neither_a_framework_nor_numpy() -> None:
    import subprocess

    code = """
import sys
from unidist.runtime.plugin_manager import PluginManager
from unidist_pipeline.schedules.catalog import build_schedule
from unidist_pipeline.schedules.registration import ScheduleSpec
from unidist_pipeline.simulation.simulator import simulate
registry = PluginManager().load().registry(ScheduleSpec)
for spec in registry:
    simulate(build_schedule(spec.name, registry, num_ranks=2, num_microbatches=4))
print(*sorted({"numpy", "torch", "tensorflow", "matplotlib", "yaml", "rich"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_an_action_knows_its_peer(registry: Registry[ScheduleSpec]) -> None:
    schedule = build_schedule("zbv", registry, num_ranks=2, num_microbatches=3)
    assert Action(ActionKind.SEND_ACTIVATION, 0, 0, peer=1) in schedule.ranks[0]
    assert Action(ActionKind.SEND_GRADIENT, 3, 0, peer=1) in schedule.ranks[0]  # the last stage is on rank 0 again


def test_a_schedule_that_is_only_looked_at_is_not_validated(others: Registry[ScheduleSpec]) -> None:
    with pytest.raises(PluginError, match="is missing"):
        build_schedule("unfinished", others, num_ranks=2, num_microbatches=2)
    looked_at = build_schedule("unfinished", others, num_ranks=2, num_microbatches=2, validated=False)
    assert looked_at.num_stages == 2
    with pytest.raises(PluginError, match=r"asked for .* but it returned"):  # the planner would price another size
        build_schedule("small", others, num_ranks=2, num_microbatches=2, validated=False)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (4, 7), (3, 12)])
def test_without_messages_the_order_of_computing_and_what_is_held_are_the_same(
    registry: Registry[ScheduleSpec], ranks: int, microbatches: int
) -> None:
    for spec in registry:
        whole, bare = (
            build_schedule(spec.name, registry, num_ranks=ranks, num_microbatches=microbatches, messages=messages)
            for messages in (True, False)
        )
        assert bare.compute() == whole.compute()
        assert bare.ranks == tuple(map(tuple, bare.compute()))
        costs = Costs(kept_for_weight=0.4).for_stages(whole.num_stages)
        assert peak_activations(bare, costs) == simulate(whole, costs.costs).peak_activations
