"""The versions of Lightning that the strategies were written for."""

from __future__ import annotations

from unidist.runtime import check_package


def check_version(found: str | None = None) -> None:
    """Raise ConfigurationError if the strategies, which change with minor versions, do not work with this Lightning.

    Args:
        found: its version; default: what is installed.
    """
    check_package("unidist_lightning", "lightning", "lightning", oldest=(2, 5), end=(2, 7), found=found)
