"""A gradient that is not finite: who has it, whether a rank or the exchange has made it, and what happens then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.errors import ConfigurationError, NonfiniteError
from unidist.gradients.interface import ReducedGradients
from unidist.optim.nonfinite import NonfiniteWatch
from unidist.settings.environment import Settings
from unidist.testing import ThreadWorld

GOOD, NAN, INFINITE = (np.array([1.0, value]) for value in (2.0, math.nan, -math.inf))


class NumpyFramework:
    """All that the watch asks of a framework."""

    def norms(self, buffers: Sequence[Buffer], order: float) -> list[float]:
        return [float(np.linalg.norm(np.frombuffer(each.bytes()), order)) for each in buffers]


def updates(skips: bool, own: Sequence[Any], reduced: Sequence[Any], number: int = 1) -> list[Any]:
    """Return, by rank, whether each update is skipped, or the text of the error that ends them.

    Args:
        skips: leave updates out.
        own: gradients by rank; each has two parameters, of which the first is good.
        reduced: likewise.
        number: of updates.
    """

    def main(world: Communicator) -> Any:
        framework: Any = NumpyFramework()
        watch = NonfiniteWatch(framework, world, world.rank, skips=skips)
        found = []
        for step in range(1, number + 1):
            for name, values in (("first", GOOD), ("second", own[world.rank]), ("third", own[world.rank])):
                watch.look_at_own(name, Buffer.of(values.copy()))
            try:
                found.append(watch.is_skipped([ReducedGradients((Buffer.of(reduced[world.rank].copy()),))], step))
            except NonfiniteError as exc:
                return str(exc)
        return found

    with ThreadWorld(len(own)) as world:
        return world.run(main)


def test_finite_gradients_are_none_of_its_business() -> None:
    assert updates(False, [GOOD] * 2, [GOOD] * 2, 2) == [[False, False]] * 2


def test_all_ranks_hear_of_which_parameter_and_rank_it_is() -> None:
    [text] = set(updates(False, [GOOD, NAN, INFINITE], [NAN] * 3))
    assert text.startswith(
        "update 1: gradients are not finite after these ranks' own backward passes: "
        "of 'second' on rank 1 (nan); of 'second' on rank 2 (inf). Parameters and optimizer are those before"
    )


def test_what_the_exchange_makes_is_told_apart() -> None:
    [text] = set(updates(False, [GOOD] * 3, [GOOD, INFINITE, GOOD]))  # ranks with different shards
    assert "backward pass are finite, and their sum is not (seen on rank(s) 1)" in text


def test_updates_are_skipped_on_all_ranks_but_not_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    assert updates(True, [GOOD, NAN], [NAN] * 2, 49) == [[True] * 49] * 2
    assert caplog.text.count("The update is left out on all ranks") == 49
    assert all("50 updates in a row" in text for text in updates(True, [GOOD, NAN], [NAN] * 2, 50))


def test_another_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"UNIDIST_ON_NONFINITE='maybe'; choices: off, error, skip"):
        Settings.read({"UNIDIST_ON_NONFINITE": "maybe"})


def test_the_loss_is_told_where_it_is_known() -> None:
    framework: Any = NumpyFramework()

    def main(world: Communicator) -> str:
        watch = NonfiniteWatch(framework, world, world.rank, skips=False)
        watch.look_at_loss(1.0)
        watch.look_at_loss(math.inf)
        watch.look_at_own("first", Buffer.of(NAN.copy()))
        with pytest.raises(NonfiniteError) as caught:
            watch.is_skipped([ReducedGradients((Buffer.of(NAN.copy()),))], 3)
        return str(caught.value)

    with ThreadWorld(1) as world:
        [text] = world.run(main)
    assert "of 'first' on rank 0 (nan, and the loss there is inf). Parameters" in text
