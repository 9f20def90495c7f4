"""Pickles that ranks send to each other: with a message authentication code of the job's secret, checked first.

Unpickling runs code. The bytes may have come over a network by an engine that does not know who its peers are, so
nothing of them is unpickled unless a process that knows the job's secret has made them. Launchers other than ours give
no secret; then the code only shows that the bytes were not changed by accident.
"""

from __future__ import annotations

import functools
import hmac
import pickle
from typing import Any

import cloudpickle

from unidist.errors import ForgedDataError
from unidist.settings.placement import job_secret

_TAG_BYTES = 32


def seal(obj: Any, purpose: str) -> bytearray:
    """Return an object as bytes, for `unseal` on another rank.

    Args:
        obj: anything that cloudpickle can pickle.
        purpose: what it is sent for; the same where it is unpickled.
    """
    payload = cloudpickle.dumps(obj)
    return bytearray(b"".join((_tag(payload, purpose), payload)))


def unseal(data: bytes | bytearray | memoryview, purpose: str) -> Any:
    """Return the object that another rank has sealed for this purpose.

    Raises:
        ForgedDataError: a process outside of the job made these bytes, or they were changed on their way. Nothing of
            them was unpickled.
    """
    view = memoryview(data)
    payload = view[_TAG_BYTES:]
    if not hmac.compare_digest(bytes(view[:_TAG_BYTES]), _tag(payload, purpose)):
        raise ForgedDataError(
            f"an object that this rank has received for {purpose!r} ({len(view)} bytes) was not made by a rank of this "
            "job, or was changed on its way. Nothing of it was unpickled. Somebody else may be on this network: see "
            "SECURITY.md, and use one that you trust"
        )
    return pickle.loads(payload)


def _tag(payload: bytes | memoryview, purpose: str) -> bytes:
    code = hmac.new(_key(), digestmod="sha256")
    label = purpose.encode()
    code.update(len(label).to_bytes(8, "big") + label)
    code.update(payload)
    return code.digest()


@functools.cache
def _key() -> bytes:
    return hmac.digest(job_secret(), b"unidist pickles", "sha256")


__all__ = ["seal", "unseal"]
