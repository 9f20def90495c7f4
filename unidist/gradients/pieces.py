"""The pieces of reduced gradients that a rank holds, by parameter, for rules that look at single elements."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unidist.buffer import Buffer, DType
from unidist.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from unidist.gradients.buckets import ParameterInfo

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["GradientPiece"]

_BLOCK = 1 << 14
"""Elements whose noise is drawn together: a rank draws whole blocks, and uses those elements that it holds."""


@dataclass(frozen=True)
class GradientPiece:
    """Consecutive elements of the reduced gradient of one parameter, on this rank.

    Args:
        number: of the parameter in its exchange.
        parameter: its name, and the shape that it has on this rank's model.
        start: of the first element within the flat parameter.
        memory: the elements, to be changed in place.
    """

    number: int
    parameter: ParameterInfo
    start: int
    memory: Buffer

    def array(self) -> Array:
        """Return the elements as a flat numpy array over their own memory.

        Raises:
            UsageError: they are in the memory of a device, or of bfloat16, which numpy lacks. `Framework.tensor` of
                `memory` is for both.
        """
        import numpy as np

        if self.memory.dtype is DType.BFLOAT16:
            raise UsageError(f"the gradient of {self.parameter.name!r} is of bfloat16, which numpy lacks; use float32")
        return np.frombuffer(self.memory.bytes(), self.memory.dtype.value)

    def normal(self, *seed: int) -> Array:
        """Return standard normal numbers for the elements, in float64: the same for an element whoever holds it.

        They depend on the seed, on the parameter's name, and on the place of the element in the parameter.

        Args:
            seed: numbers of 0 or more; the number of the update among them, or all updates have the same noise.

        Raises:
            UsageError: the parameter is cut along an axis of the model, so that its place in the whole is not known.
        """
        import numpy as np

        if self.parameter.cut_axis is not None:
            raise UsageError(
                f"noise for {self.parameter.name!r}, which is cut along the axis {self.parameter.cut_axis!r}: it is "
                "drawn for whole parameters. Use data or zero instead of that strategy"
            )
        name = int.from_bytes(hashlib.blake2b(self.parameter.name.encode(), digest_size=8).digest(), "little")
        first, last = self.start // _BLOCK, -(-(self.start + self.memory.count) // _BLOCK)
        blocks = [
            np.random.Generator(np.random.Philox(np.random.SeedSequence([name, *seed, block]))).standard_normal(_BLOCK)
            for block in range(first, last)
        ]
        begin = self.start - first * _BLOCK
        return np.concatenate([*blocks, np.empty(0)])[begin : begin + self.memory.count]
