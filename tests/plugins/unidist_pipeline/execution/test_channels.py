"""What the messages of a pipeline demand of an engine."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from unidist.buffer import HOST
from unidist.communicator import Capabilities, Communicator, MessageOrder
from unidist.errors import ConfigurationError
from unidist.testing.threads import ThreadWorld
from unidist_pipeline.execution.channels import Channels
from unidist_pipeline.execution.routes import Routes, routes_between
from unidist_pipeline.execution.subgroups import Subgroups


def split(communicator: Communicator, ranks: Any) -> Communicator | None:
    return communicator.split(ranks)


def test_an_engine_without_messages_is_refused() -> None:
    collectives = Capabilities(memory_kinds=frozenset(("cuda",)), messages=MessageOrder.NONE)
    device: Any = SimpleNamespace(size=2, capabilities=collectives, description="mute, ranks 0, 1")
    with pytest.raises(ConfigurationError, match=r"engine of cuda memory \(mute, ranks 0, 1\) has collectives only"):
        Routes("cuda", device, (), split)


def test_all_ranks_drop_the_forms_that_they_know_when_one_says_so() -> None:
    def main(communicator: Communicator) -> list[bool]:
        framework: Any = None
        channels = Channels({HOST: Routes(HOST, communicator, (), split)}, framework)
        found = []
        for renews in (False, communicator.rank == 1):
            before = channels._agreement
            channels.begin_run("the same", (), renews=renews)
            found.append(channels._agreement is before)
        return found

    with ThreadWorld(2) as world:
        assert world.run(main) == [[True, False]] * 2


def test_routes_are_those_of_activations_and_gradients() -> None:
    assert routes_between([0, 1, 2]) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert routes_between([0, 1, 0, 1]) == [(0, 1), (1, 0)]
    assert routes_between([0, 1, 1, 0]) == [(0, 1), (1, 0)]
    assert routes_between([0]) == []


@pytest.mark.parametrize("placement", [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 0]])
def test_where_the_order_of_messages_counts_each_route_has_a_communicator_of_its_own(placement: list[int]) -> None:
    """Else two ranks that send to each other before they receive would wait for each other."""
    routes = routes_between(placement)
    issued: dict[tuple[int, ...], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))

    def main(communicator: Communicator) -> int:
        communicator.capabilities = replace(communicator.capabilities, messages=MessageOrder.MATCHED)
        made = Subgroups(None)  # type: ignore[arg-type]  # nobody asks the runtime
        used = Routes(HOST, communicator, routes, made.split)
        assert used.matched
        for route, over in used._own.items():
            assert over.members == route
            issued[route][communicator.rank].add("send" if over.rank == 0 else "recv")
        made.close()
        return len(made._made)

    with ThreadWorld(4) as world:
        counts = world.run(main)
    assert counts == [sum(rank in route for route in routes) for rank in range(4)]
    assert issued == {(here, there): {here: {"send"}, there: {"recv"}} for here, there in routes}
