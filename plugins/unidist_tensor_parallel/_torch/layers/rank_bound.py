"""Objects of this process that a cut model refers to: a copy of the model shares them, and no file can hold them."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from unidist.errors import UsageError


class RankBound:
    """Shared by copies (an average of the weights, say), which are then cut like the model; never pickled."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "this model is cut over the ranks (strategy tensor), and torch.save(model) would write this rank's part of "
            "each layer alone: use ud.save(path, model), which writes the whole model"
        )
