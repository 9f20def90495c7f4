"""The versions of Hugging Face's libraries that this package was written for."""

from __future__ import annotations

from unidist.runtime import check_package

_RANGES = {"transformers": ((5, 6), (6,)), "accelerate": ((1, 1), (2,))}


def check_version(library: str, found: str | None = None) -> None:
    """Raise ConfigurationError if this package does not work with the installed library.

    Args:
        library: "transformers" or "accelerate".
        found: its version; default: what is installed.
    """
    oldest, end = _RANGES[library]
    check_package("unidist_transformers", library, "transformers", oldest=oldest, end=end, found=found)
