"""The functions of `context=N` for scripts of PyTorch; `unidist.torch.context` has the same names.

import unidist.torch as ud

logits = ud.context.whole(model(tokens))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_context_parallel.torch.tokens import SequenceTensor, each_token, whole

__all__ = ["SequenceTensor", "each_token", "whole"]

__getattr__ = lazy_names(__name__, {"tokens": "SequenceTensor each_token whole"})
