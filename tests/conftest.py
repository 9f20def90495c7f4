"""Fixtures for every test: the public test kit's own."""

from __future__ import annotations

pytest_plugins = ["unidist.testing.fixtures"]
