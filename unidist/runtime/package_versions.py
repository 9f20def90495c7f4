"""Versions of the libraries that adapters and plugins were tested with."""

from __future__ import annotations

import importlib.metadata

from unidist.errors import ConfigurationError
from unidist.installation import DISTRIBUTION, install_command


def check_package(
    user: str, package: str, extra: str, *, oldest: tuple[int, ...], end: tuple[int, ...], found: str | None = None
) -> None:
    """Raise ConfigurationError if a package is not installed in a version that was tested.

    Args:
        user: what needs it, by import name.
        package: the library, by the name of its distribution.
        extra: of unidist-train, which installs it.
        oldest: the first version that works, major and minor.
        end: the first one after that does not, or was not tested.
        found: the version; default: what is installed.
    """
    wanted = f"{package} >= {_text(oldest)}, < {_text(end)}"
    if found is None:
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigurationError(f"{user} needs {wanted}: {install_command(f'{DISTRIBUTION}[{extra}]')}") from None
    if not oldest <= tuple(int(number) for number in found.split(".")[:2]) < end:
        raise ConfigurationError(
            f"{user} works with {wanted}, and {found} is installed: pip install '{wanted.replace(' ', '')}'"
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
