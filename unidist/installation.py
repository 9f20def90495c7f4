"""How unidist was installed: what completes it, and whether another distribution has written into its package.

It imports nothing of unidist: whatever was overwritten, it can say so.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings

__all__ = ["DISTRIBUTION", "check_package", "damage", "install_command"]

DISTRIBUTION = "unidist-train"
"""The name under which pip knows unidist. `unidist` on the package index is another project with the same import."""

_RECORD_OF_OTHER = re.compile(r"unidist-[^-]+\.(dist|egg)-info")


def install_command(requirement: str) -> str:
    """Return the command that installs what an extra of an installed distribution needs, wherever that came from.

    It names the libraries, which the package index has, and not the extra: that would need an index, a folder or a
    file with the distribution in it, and the one it was installed from may be gone.

    Args:
        requirement: "unidist-train[spark]", or a library by its name.
    """
    import importlib.metadata

    distribution, _, extra = requirement.removesuffix("]").partition("[")
    try:
        listed = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    belongs = re.compile(rf"""\bextra\s*==\s*["']{re.escape(extra)}["']""")
    split = [line.partition(";") for line in listed]
    wanted = [requirement.strip() for requirement, _, marker in split if belongs.search(marker)]
    return "pip install " + " ".join(shlex.quote(each) for each in wanted or [requirement])


def check_package() -> None:
    """Notice that files of another distribution are in the package `unidist`.

    `unidist.lazy` calls it when it is imported, which is the first that happens whichever part of unidist is used, and
    whatever has become of `unidist/__init__.py`. It costs one listing of the folder above the package.

    Raises:
        ImportError: our `unidist/__init__.py` was replaced or removed.
    """
    if not hasattr(sys.modules["unidist"], "installation_is_ours"):
        raise ImportError(damage())
    if _record_of_other():
        warnings.warn(damage(), stacklevel=2)


def damage() -> str:
    """Return in one line what another distribution has done to the package `unidist`, and what to do; "": nothing."""
    package = os.path.dirname(os.path.abspath(__file__))
    record = _record_of_other()
    if hasattr(sys.modules["unidist"], "installation_is_ours"):
        if not record:
            return ""
        done = "The other one cannot work now, and uninstalling it alone removes files of ours"
    else:
        done = "It has replaced or removed files of ours, and neither can work now"
    other = record.rpartition(".")[0].replace("-", " ") if record else "another distribution named unidist"
    return (
        f"{package} belongs to {DISTRIBUTION}, and {other} was installed into it: both are imported as `unidist`. "
        f"{done}. Run: pip uninstall --yes unidist {DISTRIBUTION} && {_reinstall_command()}"
    )


def _record_of_other() -> str:
    """Return the name of the folder in which pip keeps the record of another distribution; "": there is none."""
    above = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return next((name for name in os.listdir(above) if _RECORD_OF_OTHER.fullmatch(name)), "")


def _reinstall_command() -> str:
    """Return the command that installs unidist from where it was installed."""
    import importlib.metadata
    import json
    from urllib.request import url2pathname

    try:
        origin = json.loads(importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except importlib.metadata.PackageNotFoundError:
        origin = {}
    url = origin.get("url", "")
    if "vcs_info" in origin:
        target = f"{DISTRIBUTION} @ {origin['vcs_info']['vcs']}+{url}"
    elif url.startswith("file://"):
        target = url2pathname(url.removeprefix("file://"))
    else:
        target = url or DISTRIBUTION
    editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(target)}"
