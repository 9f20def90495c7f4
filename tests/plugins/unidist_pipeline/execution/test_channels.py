"""What the messages of a pipeline demand of an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unidist.buffer import HOST
from unidist.communicator import Capabilities, Communicator
from unidist.engines.single import SingleCommunicator
from unidist.errors import ConfigurationError
from unidist.testing.threads import ThreadWorld
from unidist_pipeline.execution.channels import Channels


def test_an_engine_without_messages_is_refused() -> None:
    collectives = Capabilities(memory_kinds=frozenset(("cuda",)), point_to_point=False)
    device: Any = SimpleNamespace(size=2, capabilities=collectives, description="nccl, ranks 0, 1")
    framework: Any = None
    with pytest.raises(ConfigurationError, match=r"engine of cuda memory \(nccl, ranks 0, 1\) has collectives only"):
        Channels({HOST: SingleCommunicator(), "cuda": device}, framework)


def test_all_ranks_drop_the_forms_that_they_know_when_one_says_so() -> None:
    def main(communicator: Communicator) -> list[bool]:
        framework: Any = None
        channels = Channels({HOST: communicator}, framework)
        found = []
        for renews in (False, communicator.rank == 1):
            before = channels._agreement
            channels.begin_run("the same", (), renews=renews)
            found.append(channels._agreement is before)
        return found

    with ThreadWorld(2) as world:
        assert world.run(main) == [[True, False]] * 2
