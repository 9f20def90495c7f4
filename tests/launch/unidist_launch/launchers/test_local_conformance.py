"""The local launcher against the contract of launchers."""

from __future__ import annotations

import pytest

from unidist.testing import LauncherConformance

pytestmark = pytest.mark.parallel


class TestLocal(LauncherConformance):
    launcher = "local"
