"""The interface between checkpoints and the models and optimizers that they save and load.

`save(path, model, optimizer)` asks for the state of each: `kept_state(object)`, if a plugin provides it, else the
framework adapter's own for ordinary models and optimizers. A plugin provides it with an object that is a `KeepsState`,
or that has one in its attribute `_unidist`, where a bound optimizer has its binding. The attribute may also hold a
`HasKeptState`, which returns the state. A plugin that only cuts or moves parameters (tensor and pipeline parallelism)
sets that attribute of the model to a `PlacesParameters` instead. The adapter's own state, and sharded optimizers, then
know where this rank's parameters belong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist.checkpoint.format.pieces import Piece, Placement, TensorInfo
from unidist.mesh import REPLICA_AXES

if TYPE_CHECKING:
    from unidist.buffer import Buffer, DType
    from unidist.checkpoint.format.parts import Part

Plain = None | bool | int | float | str | list[Any] | dict[str, Any]
"""What JSON has; lists and dicts of the same, with strings for keys."""

STATE_ATTRIBUTE = "_unidist"
"""The attribute of a model or an optimizer that holds its state, its placements or its binding."""


class SavedSection(ABC):
    """One section (a model, an optimizer) of a checkpoint that is being loaded. Reading needs no other rank.

    Attributes:
        values: the plain values that `KeepsState.values` of all ranks returned when it was saved, merged.
        elsewhere: names that other ranks load, see `KeepsState.names`; this rank's state need not have them.
    """

    values: dict[str, Any]
    elsewhere: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the section, by name."""

    @abstractmethod
    def read(self, name: str, part: Part, target: Buffer) -> None:
        """Fill `target` with the elements of `part` of a tensor, in whatever pieces they were saved.

        Reads only the bytes that are needed, and verifies their checksums.

        Args:
            name: of the tensor.
            part: the elements; it need not be a part that was saved.
            target: host memory of `part.count` elements; floating-point numbers are rounded to its type.

        Raises:
            CheckpointError: there is no such tensor or part, types that cannot be converted, damaged data.
        """

    @abstractmethod
    def match(self, wanted: Collection[TensorInfo], *, strict: bool = True) -> list[TensorInfo]:
        """Compare the section's tensors with the caller's; return those that both have.

        Args:
            wanted: the caller's tensors.
            strict: tensors that only one side has are an error; otherwise rank 0 warns about them.

        Raises:
            CheckpointError: lists tensors that are missing, unexpected or of another shape.
        """


class KeepsState(ABC):
    """The state of a model or an optimizer in checkpoints. Its methods are called again for each save and load.

    No method communicates: the core does all communication, so that an error on one rank is raised on all.
    """

    @abstractmethod
    def pieces(self) -> Sequence[Piece]:
        """Return every piece that this rank holds, including copies of other ranks' pieces.

        Each distinct piece is written once, by one of the ranks that hold it; the core chooses the rank, so that all
        write about the same amount. Together the pieces of all ranks cover each tensor exactly once: ranks hold equal
        pieces or disjoint ones. Missing state is not created for it (no optimizer state before the first step).
        """

    @abstractmethod
    def values(self) -> dict[str, Plain]:
        """Return plain values (step counts, options of groups); the checkpoint has those of all ranks, merged.

        Dicts are merged key by key, at any depth, so ranks may have different keys (one per parameter, for example).
        All other values must be equal on the ranks that have them.
        """

    def names(self) -> Collection[str]:
        """Return the names of the tensors that this rank can load; for an optimizer, the paths of its parameters.

        Ranks may have different ones (pipeline stages). A name that any rank has counts as unexpected on none.
        """
        return {piece.tensor.name for piece in self.pieces()}

    @abstractmethod
    def check(self, section: SavedSection, *, strict: bool) -> None:
        """Raise if this state cannot be loaded from the section, before anything was changed; see `match`."""

    @abstractmethod
    def load(self, section: SavedSection, *, strict: bool) -> None:
        """Load the state from the section, after `check` has passed on every rank. Reads only this rank's part.

        A model reads the parts of its `pieces`, and leaves tensors alone that the section does not have: what other
        ranks have in memory (`redistribute`) is loaded some tensors at a time.

        State of an optimizer that the section does not have is reset to that before the first step.
        """


class MemoryState(KeepsState):
    """The trivial state: pieces in host memory, which are saved from there and loaded to there.

    Args:
        held: this rank's pieces.
        plain: plain values.

    Attributes:
        loaded: the plain values that were loaded.
    """

    def __init__(self, held: Sequence[Piece], plain: Mapping[str, Plain] | None = None) -> None:
        self._held = held
        self._plain = dict(plain or {})
        self.loaded: dict[str, Any] = {}

    @override
    def pieces(self) -> Sequence[Piece]:
        return self._held

    @override
    def values(self) -> dict[str, Plain]:
        return self._plain

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        section.match(self._tensors(), strict=strict)

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        there = {info.name for info in self._tensors()} & section.tensors.keys()
        for piece in self._held:
            if piece.tensor.name in there:
                section.read(piece.tensor.name, piece.part, piece.memory)
        self.loaded = section.values

    def _tensors(self) -> list[TensorInfo]:
        return list(dict.fromkeys(piece.tensor for piece in self._held))


class HasKeptState(ABC):
    """Capability of an attached object: provides the checkpoint state of the object that it is attached to."""

    @abstractmethod
    def kept_state(self) -> KeepsState | None:
        """Return it; None leaves the object to the framework adapter. Called for each save and load."""


class PlacesParameters(ABC):
    """Capability of an attached object: knows which part of the whole model each parameter of this rank is."""

    @abstractmethod
    def placement(self, path: str, shape: Sequence[int], dtype: DType) -> Placement:
        """Return where the parameter or buffer that this rank's model has under `path` belongs."""

    def copies(self, path: str) -> int:
        """Return how many ranks along the axes of the model have equal values of this parameter, with this rank."""
        return 1

    def gradient_axis(self, path: str) -> str:
        """Return the mesh axis, or composite axis, over whose ranks the gradient of this parameter is summed.

        These ranks hold the same parameter and find different parts of its gradient. Whatever the axis, a mean is one
        over the number of ranks along `REPLICA_AXES`: the loss is the mean over all of them. The default is
        `REPLICA_AXES`; it is `SHARD_REPLICA_AXES` for a parameter that is divided along an axis whose ranks train on
        different samples, where each holder has seen the samples of that whole axis (experts).

        A placement that wraps another one returns what that says.
        """
        return REPLICA_AXES

    def cut_axis(self, path: str) -> str | None:
        """Return the mesh axis over whose ranks this parameter is cut; None if it is whole, or if nobody says.

        These ranks hold parts of it that together are the whole, each element once. A placement that wraps another one
        returns what that says of what it does not cut itself.
        """
        return None


class WholeParameters(PlacesParameters):
    """The trivial placement: every rank holds every parameter, under the path that the framework gives it."""

    @override
    def placement(self, path: str, shape: Sequence[int], dtype: DType) -> Placement:
        return Placement.whole(path, shape)


class WholeInPlace(PlacesParameters):
    """The whole parameters in the place of parts, for state that each rank keeps of the whole.

    Args:
        parts: where the parts belong.
    """

    def __init__(self, parts: PlacesParameters) -> None:
        self._parts = parts

    @override
    def placement(self, path: str, shape: Sequence[int], dtype: DType) -> Placement:
        """See `PlacesParameters.placement`; the shape is that of the part."""
        found = self._parts.placement(path, shape, dtype)
        return Placement.whole(found.name, found.shape)


def kept_state(value: Any) -> KeepsState | None:
    """Return the state of an object that a plugin provides; None leaves it to the framework adapter."""
    for candidate in (value, _attached(value)):
        if isinstance(candidate, KeepsState):
            return candidate
        if isinstance(candidate, HasKeptState):
            return candidate.kept_state()
    return None


def placements_of(model: Any) -> PlacesParameters:
    """Return how the parameters of a model are placed; the whole of each where nothing says otherwise."""
    for candidate in (model, _attached(model)):
        if isinstance(candidate, PlacesParameters):
            return candidate
    return WholeParameters()


def _attached(value: Any) -> Any:
    return getattr(value, STATE_ATTRIBUTE, None)  # a wrapper, as torch.compile makes one, has what it wraps
