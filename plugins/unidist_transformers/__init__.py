"""Hugging Face's Trainer and Accelerate over unidist: `UnidistTrainer` and `UnidistAccelerator`.

docs/how-to/train-with-transformers.md says what works how. The modules of this package import transformers or
accelerate; this one does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_transformers.accelerator import UnidistAccelerator
    from unidist_transformers.trainer import UnidistTrainer

__all__ = ["UnidistAccelerator", "UnidistTrainer"]

__getattr__ = lazy_names(__name__, {"accelerator": "UnidistAccelerator", "trainer": "UnidistTrainer"})
