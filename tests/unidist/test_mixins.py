"""Objects that get methods of ours stay what they are in every other respect."""

from __future__ import annotations

from unidist.mixins import with_mixin


class Plain:
    """A class of a script."""

    def speak(self) -> str:
        return "plain"


class Louder:
    """Methods of ours."""

    def speak(self) -> str:
        return super().speak().upper()  # type: ignore[misc]  # of the plain class


def test_an_object_keeps_its_state_its_name_and_its_place_in_isinstance() -> None:
    thing = Plain()
    thing.__dict__["value"] = 3
    thing.__class__ = with_mixin(Plain, Louder, extra=7)
    assert isinstance(thing, Plain)
    assert thing.speak() == "PLAIN"
    assert thing.__dict__ == {"value": 3}
    assert getattr(thing, "extra") == 7  # noqa: B009 - an attribute that the class has since
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(thing), name) == getattr(Plain, name)
