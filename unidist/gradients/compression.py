"""Gradient compressors, which add up a bucket of gradients over the ranks with fewer bytes.

A compressor is a frozen dataclass that describes the method; its fields are the options of `NAME/OPTION=VALUE`.
`attach` makes the state of one bucket, which lives as long as the exchange: scratch memory, error feedback, random
vectors. A trivial implementation is `unidist.builtin.uncompressed.NoCompression`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unidist.buffer import Buffer
from unidist.communicator import Communicator, Work
from unidist.errors import ConfigurationError
from unidist.gradients.buckets import BucketLayout, ParameterInfo
from unidist.options import LineItem, check_numbers, construct
from unidist.registry import load_object

if TYPE_CHECKING:
    from unidist.framework import Framework
    from unidist.registry import Registry


@dataclass(frozen=True)
class Bucket:
    """A compressor's view of one bucket of gradients. Equal on every rank, except for the contents of the memory.

    Args:
        layout: the positions of the gradients; memory between them is unused.
        parameters: of the layout's slots, in their order: names and shapes.
        memory: the gradients, `(layout.count,)` elements; the same memory in every round.
        communicator: over the ranks that exchange this bucket; other buckets use it too.
        framework: does arithmetic if the bucket is not in host memory.
    """

    layout: BucketLayout
    parameters: tuple[ParameterInfo, ...]
    memory: Buffer
    communicator: Communicator
    framework: Framework


class BucketCompressor(ABC):
    """The state of one bucket's compression.

    Attributes:
        num_operations: collectives that `allreduce` issues before it returns, at least 1.
    """

    num_operations: int = 1

    @abstractmethod
    def allreduce(self, scale: float) -> Work:
        """Start one exchange: after the work's `wait`, the bucket holds about `scale` times the sum over all ranks.

        Called once per round, on every rank for the same buckets in the same order, during the backward pass if
        possible: it must return without waiting for other ranks. Every rank also calls `wait` in the same order,
        after `allreduce` of every bucket, so `wait` may issue further collectives and wait for them.

        The result must have the same bits on every rank, or the ranks' parameters drift apart. Infinity and NaN must
        be preserved: a loss scaler checks for them.
        """

    def close(self) -> None:  # noqa: B027 - having nothing to release is valid
        """Release what `attach` acquired. Idempotent."""


class GradientCompressor(ABC):
    """A method of compression; a dataclass. Every rank uses the same one.

    Attributes:
        name: in `--strategy data:compression=NAME`.
    """

    name: ClassVar[str]

    def validate(self) -> None:  # noqa: B027 - having nothing to check is valid
        """Check the options. Pure; runs in the launcher before any process starts.

        Raises:
            ConfigurationError: names the option, and says what to do.
        """

    @abstractmethod
    def attach(self, bucket: Bucket) -> BucketCompressor | None:
        """Return the state for one bucket, or None to exchange this bucket uncompressed (integers, for example).

        Called when the exchange is made, on every rank for the same buckets. Not called with a single rank.

        Raises:
            ConfigurationError: this kind of memory cannot be compressed.
        """


def build_compressor(text: str, registry: Registry[CompressorSpec]) -> GradientCompressor:
    """Return the compressor for `NAME` or `NAME/OPTION=VALUE/OPTION=VALUE`.

    Raises:
        ConfigurationError: an unknown name or option, or a value that does not fit; lists the choices.
    """
    name, *rest = (part.strip() for part in text.split("/"))
    options: dict[str, str] = {}
    for option in rest:
        key, equals, value = (part.strip() for part in option.partition("="))
        if not (key and equals and value):
            raise ConfigurationError(
                f"option {option!r} in compression={text!r} cannot be read. Syntax: NAME/OPTION=VALUE/OPTION=VALUE"
            )
        options[key.replace("-", "_")] = value
    request = LineItem(name, None, options)
    compressor = construct(request, registry.get(name).load(), kind="compression", has_value=False)
    compressor.validate()
    check_numbers(compressor, has_value=False)
    return compressor


@dataclass(frozen=True)
class CompressorSpec:
    """A gradient compressor, not yet imported: `path` is "module:Class" of a `GradientCompressor`.

    The launcher loads its module too, to check options, so it imports neither a framework nor numpy at the top.
    """

    kind: ClassVar[str] = "compression"
    hook: ClassVar[str] = "unidist_register_compressors"

    name: str
    path: str
    summary: str

    def load(self) -> type[GradientCompressor]:
        """Import and return the class."""
        compressor: type[GradientCompressor] = load_object(self.path, f"compression {self.name!r}")
        return compressor
