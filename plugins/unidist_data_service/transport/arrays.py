"""Arrays of numpy over a buffer."""

from __future__ import annotations

from typing import Any

import numpy as np

from unidist_data_service.transport.encoding import ArrayInfo


def numpy_array(info: ArrayInfo, buffer: Any, offset: int) -> Any:
    """Return an array over a buffer, at an offset in bytes."""
    dtype = _dtype(info.dtype)
    count = info.nbytes // dtype.itemsize
    flat = np.frombuffer(buffer, dtype=np.uint8, count=info.nbytes, offset=offset) if count else np.empty(0, np.uint8)
    return flat.view(dtype).reshape(info.shape)


def _dtype(name: str) -> Any:
    try:
        return np.dtype(name)
    except TypeError:  # "bfloat16" and the like
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
