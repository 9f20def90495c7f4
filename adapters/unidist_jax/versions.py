"""The versions of JAX that this adapter was tested with. Imports no jax."""

from __future__ import annotations

from unidist.runtime import check_package


def check_version(found: str | None = None) -> None:
    """Raise ConfigurationError if this adapter does not work with the installed JAX.

    Parts of JAX without a public interface change with minor versions; the modules that use any say which.

    Args:
        found: its version; default: what is installed.
    """
    check_package("unidist_jax", "jax", "jax", oldest=(0, 10), end=(0, 12), found=found)
