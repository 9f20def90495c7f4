"""Adds our methods to objects of a script: the object's class becomes a new subclass with a mixin in front."""

from __future__ import annotations

from typing import Any

__all__ = ["with_mixin"]


def with_mixin(plain: type[Any], mixin: type[Any], **attributes: Any) -> type[Any]:
    """Return a subclass of `plain` with the methods of `mixin`, to be assigned to an object's `__class__`.

    It is named and placed as the plain class, so messages, `isinstance` and formats that keep a class's name see the
    plain one. Why the class of an object changes: docs/decisions/the-class-of-the-optimizer.md.

    Args:
        plain: the object's class.
        mixin: its methods come first; `super()` in them is the plain class.
        attributes: further attributes of the class.
    """
    names = {name: getattr(plain, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(plain.__name__, (mixin, plain), {**names, **attributes})
