"""The versions of Hugging Face's libraries that this package was written for."""

from __future__ import annotations

import importlib.metadata

from unidist.errors import ConfigurationError

RANGES = {"transformers": ((5, 6), 6), "accelerate": ((1, 1), 2)}
"""By library: the oldest version, and the major version that is too new."""


def check_version(library: str, found: str | None = None) -> None:
    """Raise ConfigurationError if this package does not work with the installed library.

    Args:
        library: "transformers" or "accelerate".
        found: its version; default: what is installed.
    """
    oldest, end = RANGES[library]
    wanted = f"{library} >= {oldest[0]}.{oldest[1]}, < {end}"
    if found is None:
        try:
            found = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigurationError(
                f"unidist_transformers needs {wanted}: pip install 'unidist-train[transformers]'"
            ) from None
    major, minor = (int(number) for number in found.split(".")[:2])
    if not (oldest <= (major, minor) and major < end):
        raise ConfigurationError(
            f"unidist_transformers works with {wanted}, and {found} is installed: "
            f"pip install '{wanted.replace(' ', '')}'"
        )
