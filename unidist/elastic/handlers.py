"""Handlers of an elastic state for values besides model and optimizer: stateful objects and random generators."""

from __future__ import annotations

import copy
import random
import sys

from typing_extensions import override

from unidist.elastic.state import Handler
from unidist.negotiation import objects
from unidist.runtime import context


class StatefulHandler(Handler):
    """An object with `state_dict` and `load_state_dict`; newcomers get that of rank 0."""

    @override
    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    @override
    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    @override
    def sync(self) -> None:
        operations = context.current().negotiator
        self.value.load_state_dict(
            objects.broadcast_object(operations, self.value.state_dict(), root=0, name="elastic.stateful")
        )


class GeneratorsHandler(Handler):
    """The random generators of this process: a step that is taken again draws the same; each rank has its own.

    Those of Python and NumPy; adapters add their framework's.
    """

    @override
    def save(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    @override
    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def sync(self) -> None:
        """Leave them as they are."""
