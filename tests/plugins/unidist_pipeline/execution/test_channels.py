"""What the messages of a pipeline demand of an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unidist.buffer import HOST
from unidist.communicator import Capabilities
from unidist.engines.single import SingleCommunicator
from unidist.errors import ConfigurationError
from unidist_pipeline.execution.channels import Channels


def test_an_engine_without_messages_is_refused() -> None:
    collectives = Capabilities(memory_kinds=frozenset(("cuda",)), point_to_point=False)
    device: Any = SimpleNamespace(size=2, capabilities=collectives, description="nccl, ranks 0, 1")
    framework: Any = None
    with pytest.raises(ConfigurationError, match=r"engine of cuda memory \(nccl, ranks 0, 1\) has collectives only"):
        Channels({HOST: SingleCommunicator(), "cuda": device}, framework)
