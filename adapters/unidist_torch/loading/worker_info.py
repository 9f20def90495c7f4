"""Finds out whether a stream gives each DataLoader worker its own part: then it asks which worker it is read by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.data
from torch.utils.data._utils import worker as torch_worker


class WatchedInfo:
    """The result of `get_worker_info()` in a worker of a stream's loader: has the user's dataset, and notes questions.

    Args:
        info: that of PyTorch.
        dataset: the user's.

    Attributes:
        was_asked: the user's code has asked which worker this is, or for its dataset; a seed is no part of the data.
        place: number of this worker, and of all; does not count as a question.
    """

    def __init__(self, info: Any, dataset: Any) -> None:
        self.was_asked = False
        self.place: tuple[int, int] = info.id, info.num_workers
        self._info, self._dataset = info, dataset

    def __getattr__(self, name: str) -> Any:
        self.was_asked = self.was_asked or name in ("id", "num_workers", "dataset")
        return self._dataset if name == "dataset" else getattr(self._info, name)

    @classmethod
    def of_worker(cls, dataset: Any) -> WatchedInfo | None:
        """Return that of this process, which is installed at the first call; None: it is no worker."""
        info = torch.utils.data.get_worker_info()
        if info is None or isinstance(info, cls):
            return info
        made = cls(info, dataset)
        torch_worker._worker_info = made  # type: ignore[assignment]  # has the same attributes
        return made


class InitWorker:
    """The `worker_init_fn` of a stream's loader: the user's, to which `get_worker_info()` gives the user's dataset.

    Args:
        function: the user's.
    """

    def __init__(self, function: Callable[[int], object]) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        """Call it in a worker."""
        info = torch.utils.data.get_worker_info()
        assert info is not None, "PyTorch calls it in a worker"
        WatchedInfo.of_worker(info.dataset.dataset)  # type: ignore[attr-defined]  # of StreamBatches
        self._function(worker)
