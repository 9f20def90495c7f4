"""The versions of Lightning that the strategies were written for."""

from __future__ import annotations

import importlib.metadata

from unidist.errors import ConfigurationError

OLDEST = (2, 5)
NEWEST = (2, 6)
"""The last minor version that was tested: Lightning's strategies change with minor versions."""


def check_version(found: str | None = None) -> None:
    """Raise ConfigurationError if the strategies do not work with the installed Lightning.

    Args:
        found: its version; default: what is installed.
    """
    wanted = f"{_text(OLDEST)} to {_text(NEWEST)}"
    if found is None:
        try:
            found = importlib.metadata.version("lightning")
        except importlib.metadata.PackageNotFoundError:
            raise ConfigurationError(
                f"unidist_lightning needs the package lightning, {wanted}: pip install 'unidist-train[lightning]'"
            ) from None
    major, minor = (int(number) for number in found.split(".")[:2])
    if not OLDEST <= (major, minor) <= NEWEST:
        raise ConfigurationError(
            f"unidist_lightning works with lightning {wanted}, and {found} is installed: "
            f"pip install 'lightning>={_text(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}'"
        )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
