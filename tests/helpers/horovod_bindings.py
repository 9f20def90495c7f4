"""Ranks for Horovod's two bindings."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tensorflow_ranks import ENVIRONMENT

from unidist_horovod.bindings.choice import SPECS

ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "torch": {},  # the one that is taken where nothing speaks for another
    "tensorflow": {**ENVIRONMENT, "UNIDIST_HOROVOD_BINDING": "tensorflow"},
}


def skip_without(name: str) -> None:
    """Skip the test where Horovod has no such binding."""
    (spec,) = (spec for spec in SPECS if spec.name == name)
    if spec.missing():
        pytest.skip(spec.missing())
