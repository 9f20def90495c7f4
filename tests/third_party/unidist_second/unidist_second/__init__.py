"""numpy as a framework, which trains under unidist's own strategies, and a strategy for PyTorch: a small ZeRO.

Scripts use `distribute`, `SGD` and a `Model`.
"""

from __future__ import annotations

from unidist_second.distribute import distribute
from unidist_second.models import SGD, Model

__all__ = ["SGD", "Model", "distribute"]
