"""The adapter of TensorFlow against the contract of frameworks."""

from __future__ import annotations

from unidist.testing import FrameworkConformance


class TestTensorFlow(FrameworkConformance):
    framework = "tensorflow"
