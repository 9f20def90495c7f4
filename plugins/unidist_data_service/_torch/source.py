"""The work of a data worker for a DataLoader."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from unidist_data_service.worker import IndexedSource

_SEEDS = 2**32


class LoaderSource(IndexedSource):
    """Makes the batches of a DataLoader from indices, as its own workers would.

    Args:
        dataset: of the loader.
        collate: its `collate_fn`.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._collate = collate
        torch.set_num_threads(1)

    @override
    def fetch(self, indices: Any, seed: int) -> Any:
        random.seed(seed)
        torch.manual_seed(seed)
        _seed_numpy(seed)
        if not isinstance(indices, list):  # a loader without batches
            return self._collate(self._dataset[indices])
        fetch_all = getattr(self._dataset, "__getitems__", None)
        samples = [self._dataset[index] for index in indices] if fetch_all is None else fetch_all(indices)
        return self._collate(samples)


def _seed_numpy(seed: int) -> None:
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(seed % _SEEDS)
