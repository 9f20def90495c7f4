"""What JAX is doing now: whether it traces a function, over which axes, and whether it has devices yet.

Relies on these private parts of JAX, in 0.10 and later: `core.trace_state_clean`, `core.get_axis_env`, and
`xla_bridge.backends_are_initialized`. The public ways to the second and the third are `jax.lax.axis_size`, whose error
takes 70 us, and `jax.devices`, which makes the devices.
"""

from __future__ import annotations

from jax._src import core, xla_bridge

__all__ = ["has_devices", "is_in_axis", "is_tracing"]


def is_tracing() -> bool:
    """Return whether JAX is tracing a function on this thread, so that operations are added to a program."""
    return not core.trace_state_clean()


def is_in_axis(name: str) -> bool:
    """Return whether JAX is tracing a function that is mapped over an axis of this name."""
    return bool(core.get_axis_env().axis_exists(name))


def has_devices() -> bool:
    """Return whether JAX has looked for devices, after which `jax.distributed` can no longer be initialized."""
    return bool(xla_bridge.backends_are_initialized())
