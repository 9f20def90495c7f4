"""Leaves out the tests of a framework that is not installed."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [
    pattern
    for package, pattern in (("torch", "test_torch*.py"), ("tensorflow", "test_keras*.py"))
    if importlib.util.find_spec(package) is None
]
