"""What an elastic state keeps besides model and optimizer: objects with a state of their own, random generators."""

from __future__ import annotations

import copy
import random
import sys

from unidist.elastic.state import Handler
from unidist.negotiation import objects
from unidist.runtime import context


class StatefulHandler(Handler):
    """An object with `state_dict` and `load_state_dict`; newcomers get that of rank 0."""

    def save(self) -> None:
        """See `Handler.save`."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """See `Handler.restore`."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """See `Handler.sync`."""
        operations = context.current().negotiator
        self.value.load_state_dict(
            objects.broadcast_object(operations, self.value.state_dict(), root=0, name="elastic.stateful")
        )


class GeneratorsHandler(Handler):
    """The random generators of this process: a step that is taken again draws the same; each rank has its own.

    Those of Python and NumPy; adapters add their framework's.
    """

    def save(self) -> None:
        """See `Handler.save`."""
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """See `Handler.restore`."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def sync(self) -> None:
        """Leave them as they are."""
