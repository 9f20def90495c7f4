"""A strategy that changes nothing: the model for third-party plugins, and a placeholder in tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from unidist.strategy.interface import Strategy


@dataclass(frozen=True)
class Identity(Strategy):
    """Leaves model and optimizer as they are; composes with everything."""

    name: ClassVar[str] = "identity"
