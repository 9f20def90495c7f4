"""Finds OpenSSL's libssl, by which connections are encrypted.

The C code declares the functions that it needs and looks for them at run time, so nothing of OpenSSL is needed to build
or install unidist. Where Python has its module `ssl`, the library of that is taken.
"""

from __future__ import annotations

import contextlib

_NAMES = ("libssl.so.3", "libssl.so.1.1")


def load() -> None:
    """Load the library, unless it is loaded.

    Raises:
        ImportError: there is none, or one without TLS 1.3; says what is needed.
    """
    from unidist_tcp import _tcp

    names = _NAMES
    with contextlib.suppress(ImportError):  # a Python that was built without it
        import ssl  # loads the library, which may be one that the system does not find by its name

        if ssl.OPENSSL_VERSION_INFO[0] < 3:
            names = (_NAMES[1], _NAMES[0])
    _tcp.load_tls(*names)


def problem() -> str:
    """Return why connections cannot be encrypted here; "" if they can."""
    try:
        load()
    except ImportError as exc:
        return f"--tls needs OpenSSL 1.1.1 or later on every host ({exc})"
    return ""
