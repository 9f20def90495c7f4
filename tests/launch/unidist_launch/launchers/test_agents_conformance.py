"""The contract of launchers, for jobs whose ranks are started by agents: two of them, both on this host."""

from __future__ import annotations

import pytest

from unidist.testing import LauncherConformance

pytestmark = pytest.mark.parallel


class TestAgents(LauncherConformance):
    """See the module's text."""

    launcher = "ssh"
    hosts = (("localhost", 1), ("127.0.0.1", 2))
    num_proc = 3
