"""Values logged by ranks of an elastic job: Ray does not run these ranks, so values go to the node's actor by files."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from unidist_launch.elastic_calls import call_folder
from unidist_ray import ray_logger

_VALUE = "logged-"


class Files:
    """Puts values of a rank into the folder of its call."""

    def put(self, value: Any) -> None:
        """Write a value."""
        folder, name = call_folder(), f"{_VALUE}{time.time_ns():020}-{os.getpid()}"
        part = folder / f"part-{name}"
        part.write_bytes(cloudpickle.dumps(value))
        part.rename(folder / name)


def with_files(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on a rank whose values go into files."""
    ray_logger.configure(Files())
    return function(*args, **kwargs)


def forward(queue: Any, folder: Path) -> None:
    """Put what ranks have written into a queue of Ray's. Called on each node, again and again."""
    for file in sorted(folder.glob(f"{_VALUE}*")):
        queue.put(pickle.loads(file.read_bytes()))
        file.unlink()
