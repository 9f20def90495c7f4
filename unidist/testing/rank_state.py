"""What the calls of a shared pool must leave as they found it in its ranks: settings that would change later calls."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def leaving_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which raises AssertionError where it returns and has changed a setting of its process.

    It looks at the working directory, at the environment variables that say what a rank is, and at what frameworks keep
    for a process: whether torch.distributed is initialized, PyTorch's default type and whether it records gradients,
    and Keras' default type.
    """

    @functools.wraps(function)  # the name goes into messages; the module decides how the function travels
    def call(*args: Any, **kwargs: Any) -> Any:
        before = settings()
        result = function(*args, **kwargs)
        after = settings()
        # A framework that was imported meanwhile begins with its defaults.
        changed = {name: value for name, value in after.items() if value != before.get(name, _DEFAULTS.get(name))}
        if changed:
            name = getattr(function, "__qualname__", "a function")
            found = "; ".join(f"{key}: {value}" for key, value in changed.items())
            raise AssertionError(f"{name}() left this rank changed for the calls that come after it: {found}")
        return result

    return call


# Libraries set variables of their own when they are imported or used.
_OF_A_RANK = ("UNIDIST_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_")
_DEFAULTS = {
    "torch.distributed is initialized": False,
    "torch's default type": "torch.float32",
    "torch records gradients": True,
    "Keras' default type": "float32",
}


def settings() -> Mapping[str, object]:
    """Return the settings of this process, by what they are; those of a framework only if it is imported."""
    found: dict[str, object] = {"working directory": os.getcwd()}
    names = [name for name in os.environ if name.startswith(_OF_A_RANK)]
    found |= {f"environment variable {name}": os.environ[name] for name in names}
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "is_grad_enabled"):
        distributed = torch.distributed
        found["torch.distributed is initialized"] = distributed.is_available() and distributed.is_initialized()
        found["torch's default type"] = str(torch.get_default_dtype())
        found["torch records gradients"] = torch.is_grad_enabled()
    if (keras := sys.modules.get("keras")) is not None and hasattr(keras, "config"):
        found["Keras' default type"] = keras.config.floatx()
    return found
