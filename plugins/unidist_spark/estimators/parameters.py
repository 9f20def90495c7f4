"""The arguments of estimators as Spark's `Param`s: with getters and setters, in maps of `fit`, and in saved stages."""

from __future__ import annotations

import base64
import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar, cast

from pyspark.ml.param import Param, Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from typing_extensions import override

from unidist.errors import ConfigurationError

_IRREGULAR = {
    "inmemory_cache_all": "InMemoryCacheAll",
    "shuffle_buffer_size": "ShufflingBufferSize",
    "train_reader_num_workers": "TrainReaderNumWorker",
    "val_reader_num_workers": "ValReaderNumWorker",
}
_STATE = "unidist"


_Constructor = TypeVar("_Constructor", bound=Callable[..., None])


def keeps_arguments(constructor: _Constructor) -> _Constructor:
    """Have `Parameters` know which arguments a constructor was given."""

    @functools.wraps(constructor)
    def keeping(self: Any, **given: Any) -> None:
        self._arguments = given
        constructor(self, **given)

    return cast("_Constructor", keeping)


class Parameters(Params):
    """Keeps the arguments of the constructor: each is a `Param`, with a getter and a setter named as Horovod's are.

    A subclass has a constructor of keyword arguments with defaults, under `keeps_arguments`.

    Raises:
        TypeError: there is no such argument.
    """

    not_followed: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """Further arguments of Horovod's class: the value that says nothing (None does, too), and what to do instead."""

    _defaults: ClassVar[Mapping[str, Any]] = {}
    _arguments: Mapping[str, Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        named = {}
        if "__init__" in vars(cls):
            parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
            named = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
        cls._defaults = {**dict.fromkeys(cls.not_followed), **cls._defaults, **named}
        for name in cls._defaults:
            setattr(cls, name, Param(Params._dummy(), name, name.replace("_", " ")))
            words = _IRREGULAR.get(name) or "".join(word.capitalize() for word in name.split("_"))
            setattr(cls, f"get{words}", _getter(name))
            setattr(cls, f"set{words}", _setter(name))

    def __init__(self) -> None:
        super().__init__()
        unknown = [name for name in self._arguments if not self.hasParam(name)]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no arguments {unknown}")
        self._setDefault(**self._defaults)
        self._set(**self._arguments)

    def setParams(self, **values: Any) -> Self:  # noqa: N802 - Spark's name
        """Set arguments by their names."""
        return self._set(**values)

    def given(self) -> dict[str, Any]:
        """Return the arguments that were given, or set."""
        return {param.name: value for param, value in self._paramMap.items()}

    def values(self) -> dict[str, Any]:
        """Return all arguments.

        Raises:
            ConfigurationError: one is set that cannot be followed.
        """
        found = {param.name: self.getOrDefault(param) for param in self.params}
        for name, (nothing, instead) in self.not_followed.items():
            value = found.pop(name)
            if value is not None and value != nothing:
                raise ConfigurationError(f"{type(self).__name__}: {name}={value!r} cannot be followed: {instead}.")
        return found


class Saved(Params, MLWritable, MLReadable[Any]):
    """Can be saved by `save(path)` and read by `load(path)`, alone or as a stage of a pipeline."""

    @abstractmethod
    def _to_bytes(self) -> bytes:
        """Return what `_of_bytes` needs."""

    @classmethod
    @abstractmethod
    def _of_bytes(cls, state: bytes) -> Self:
        """Return the object that `_to_bytes` was called on."""

    @override
    def write(self) -> MLWriter:
        return _Writer(self)

    @classmethod
    @override
    def read(cls) -> MLReader[Any]:
        return _Reader(cls)


class _Writer(MLWriter):
    def __init__(self, saved: Saved) -> None:
        super().__init__()
        self._saved = saved

    @override
    def saveImpl(self, path: str) -> None:
        state = base64.b64encode(self._saved._to_bytes()).decode()
        DefaultParamsWriter.saveMetadata(self._saved, path, self.sparkSession, {_STATE: state}, paramMap={})


class _Reader(MLReader[Any]):
    def __init__(self, kind: type[Saved]) -> None:
        super().__init__()
        self._kind = kind

    @override
    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        found = self._kind._of_bytes(base64.b64decode(metadata[_STATE]))
        return found._resetUid(metadata["uid"])


def _getter(name: str) -> Callable[[Params], Any]:
    return lambda self: self.getOrDefault(name)


def _setter(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, value: self._set(**{name: value})
