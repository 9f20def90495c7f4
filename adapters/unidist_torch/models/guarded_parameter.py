"""Parameters that are not whole on this rank: their values cannot be used by mistake.

A parameter of a model stays the same object and changes its class. The layers and optimizers that know what they have
use it within `plain_use`, where it is an ordinary parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types

from unidist.errors import UsageError

plain_use = torch._C.DisableTorchFunctionSubclass
"""Context manager: guards let everything pass."""

_GUARD = "_unidist_guard"
_OWN_CLASS = "_unidist_own_class"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DESCRIBING = _words(
    """
    __len__ __hash__ __dir__ __format__ dim ndimension numel nelement size stride storage_offset element_size
    get_device data_ptr untyped_storage storage _typed_storage storage_type type_code register_hook has_names
    register_post_accumulate_grad_hook requires_grad_ retain_grad backward grad result_type can_cast promote_types
    zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor
    new_empty_strided _has_compatible_shallow_copy_type _is_view as_subclass
    """
)
_VALUE_PROPERTIES = _words("data T mT H mH real imag")
_SHAPED_LIKE = _words("view_as expand_as reshape_as type_as resize_as_ align_as")

_STORAGE = _words("untyped_storage storage _typed_storage")
_COPYING = _words("detach clone contiguous to cpu cuda type float half bfloat16 double pin_memory alias data")
_MOVING = _words("to cpu cuda type float half bfloat16 double")
_READING = _words(
    "numpy tolist __array__ __repr__ __reduce_ex__ __deepcopy__ equal allclose isnan isfinite isinf isclose"
)
_SAME_PARTS = _words(
    """
    detach clone contiguous to type cpu cuda float half bfloat16 double pin_memory alias view reshape flatten ravel
    view_as reshape_as type_as t transpose permute unsqueeze squeeze swapaxes movedim T mT
    add sub subtract mul multiply div divide true_divide rsub neg negative positive abs absolute pow square sqrt rsqrt
    reciprocal sign sgn clamp clip exp log log1p lerp addcmul addcdiv maximum minimum where nan_to_num
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __neg__ __pos__ __abs__
    """
)


@dataclass(frozen=True)
class Guard:
    """What messages say of a parameter.

    Args:
        name: of the parameter.
        rank: this one.
        strategy: divides the parameter.
        remedy: something else to do than to use another strategy, if there is.
        unsaved: why the values may be in no file; "": they may.
    """

    name: str
    rank: int
    strategy: str = ""
    remedy: str = ""
    unsaved: str = ""


_NOBODY = Guard("", -1)


def name_guard(parameter: torch.Tensor, name: str, rank: int, *, strategy: str = "", remedy: str = "") -> None:
    """Note what messages say of a parameter; see `Guard`."""
    setattr(parameter, _GUARD, Guard(name, rank, strategy, remedy))


def guard(parameter: torch.Tensor, kind: type[torch.nn.Parameter]) -> None:
    """Let a parameter be of another class until `unguard`. One that is of a library's own class is left as it is."""
    present: Any = type(parameter)
    if present is torch.nn.Parameter or issubclass(present, CutParameter):
        setattr(parameter, _OWN_CLASS, present)
    elif present not in (AbsentParameter, LentParameter):
        return
    parameter.__class__ = kind


def unguard(parameter: torch.Tensor) -> None:
    """Let a parameter that is absent or lent be of the class that it had before."""
    if type(parameter) in (AbsentParameter, LentParameter):
        parameter.__class__ = getattr(parameter, _OWN_CLASS)


def plain_part(values: torch.Tensor) -> torch.Tensor:
    """Return the values of a cut parameter as a tensor without guard. It has the same memory and the same gradient."""
    with plain_use():
        return values.as_subclass(torch.Tensor)


def unsaved(values: torch.Tensor, why: str) -> torch.Tensor:
    """Return values of a `state_dict()` that may be in no file; they have the same memory.

    Pickling them raises UsageError, and so does asking for their storage, as other writers of files (safetensors) do to
    find tensors that share one. Copies of them are refused as well.

    Args:
        values: of a part, or of a whole parameter or buffer. Those of another class are returned as they are.
        why: what the error says.
    """
    if isinstance(values, CutValues):
        setattr(values, _GUARD, replace(_guard_of(values), unsaved=why))
    elif type(values) is torch.Tensor:
        return _unsaved_layer(values, Guard("", -1, unsaved=why))
    return values


class _Guarded:
    """A tensor whose shape and type can be read, and which takes a gradient."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let descriptions pass; torch calls it for every use."""
        name = _name_of(func)
        with plain_use():
            if _describes(name, args):
                return func(*args, **(kwargs or {}))
            return cls._used(func, name, args, kwargs or {})

    @classmethod
    def _used(cls, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do what asks for values of a part, or refuse it. Guards are off meanwhile."""
        return _used_part(func, name, args, kwargs)


class GuardedParameter(_Guarded, torch.nn.Parameter):
    """A parameter with this guard."""


class AbsentParameter(GuardedParameter):
    """A parameter that has no values now: its memory is one element. Moved to another device it has none there."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has no types
        return f"Parameter of shape {tuple(self.shape)} ({self.dtype}), whose values are away (zero=3)"

    @classmethod
    def _used(cls, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        found = next(_guards_in((args, kwargs), AbsentParameter), Guard("", -1))
        if name in _MOVING and isinstance(args[0], AbsentParameter):
            return _moved(func, args, kwargs)
        if name == "data.__set__" and isinstance(args[1], AbsentParameter):  # module.to()
            return func(*args, **kwargs)
        raise UsageError(
            f"{_plain(name)} was asked for the values of parameter {found.name!r} on rank {found.rank}, which are "
            "away: zero=3 divides them over the ranks, and they are here only while the layer computes. Read, copy or "
            "average them (EMA) in `with unidist_zero.gathered(model):` on every rank, compute a loss of weights in "
            "the forward of their layer, or keep the parameters whole with zero=2"
        )


def _moved(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an absent parameter on another device or of another type, or the same one; takes no memory."""
    parameter: AbsentParameter = args[0]
    one = parameter.detach().as_strided((), ())
    moved = func(one, *args[1:], **kwargs)
    if moved is one:
        return parameter
    made: Any = torch.nn.Parameter(moved.expand(parameter.shape), requires_grad=parameter.requires_grad)
    made.__dict__.update({name: vars(parameter)[name] for name in (_GUARD, _OWN_CLASS) if name in vars(parameter)})
    made.__class__ = AbsentParameter
    return made


class LentParameter(torch.nn.Parameter):
    """A parameter that has its values while its layer computes: what a script takes from it is a copy, and stays."""

    def detach(self) -> torch.Tensor:
        """Return a copy without a gradient."""
        return super().detach().clone()


_data: Any = torch.Tensor.data
LentParameter.data = property(lambda self: _data.__get__(self).clone(), _data.__set__)  # type: ignore[assignment]


class CutParameter(GuardedParameter):
    """This rank's part of a parameter.

    Results of element-wise operations are parts as well, of class `CutValues`. Sums, norms, products and the like would
    be of this rank's part alone, and raise UsageError.
    """

    def __deepcopy__(self, memo: Any) -> CutParameter:
        with plain_use():
            made: Any = super().__deepcopy__(memo)
            setattr(made, _GUARD, getattr(self, _GUARD, Guard("", -1)))
            return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        with plain_use():
            return super().__reduce_ex__(protocol)


# As DTensor does: else optimizers step on parts one by one, which costs ten kernels for each on a GPU.
if CutParameter not in _foreach_supported_types:
    _foreach_supported_types.append(CutParameter)


class CutValues(_Guarded, torch.Tensor):
    """Values computed of a cut parameter, element by element. Copied as such, and pickled as a plain tensor.

    Those of a `state_dict()` are neither pickled nor written by others; see `unsaved`.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `_Guarded`; the storage of values that may be in no file is refused."""
        if _name_of(func) in _STORAGE:
            _check_saved(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: Any) -> CutValues:
        with plain_use():
            return _part(_copied(self, memo), _guard_of(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        _check_saved(self)
        with plain_use():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class UnsavedLayer(torch.Tensor):
    """Whole values of the `state_dict()` of a model that lacks layers: they can be used, and be in no file."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what torch does; results are plain tensors, but copies."""
        if any(issubclass(kind, _Guarded) for kind in types):
            return NotImplemented
        name = _name_of(func).removesuffix(".__get__")
        if name in _STORAGE:
            _check_saved(args[0])
        with plain_use():
            made = func(*args, **(kwargs or {}))
            copies = name in _COPYING and type(made) is torch.Tensor
            return _unsaved_layer(made, _guard_of(args[0])) if copies else made

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        with plain_use():
            return _unsaved_layer(_copied(self, memo), _guard_of(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        _check_saved(self)
        with plain_use():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _copied(values: torch.Tensor, memo: Any) -> torch.Tensor:
    """Return a plain deep copy. Guards are off meanwhile."""
    plain = values.as_subclass(torch.Tensor)
    memo.setdefault(id(memo), []).append(plain)  # its identity is in memo: as `copy.deepcopy` does, let it live as long
    made: torch.Tensor = plain.__deepcopy__(memo)
    return made


def _unsaved_layer(values: torch.Tensor, of: Guard) -> torch.Tensor:
    made = values.as_subclass(UnsavedLayer)
    setattr(made, _GUARD, of)
    return made


def _check_saved(values: Any) -> None:
    """Raise UsageError if values may be in no file."""
    if why := _guard_of(values).unsaved:
        raise UsageError(why)


def _guard_of(values: Any) -> Guard:
    found: Guard = getattr(values, _GUARD, _NOBODY)
    return found


def _used_part(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do what gives a part of the same whole, or reads this rank's; refuse everything else."""
    first = next(_guards_in((args, kwargs), (CutParameter, CutValues)))
    plain = name.removesuffix(".__get__")
    if name in _READING or name.endswith(".__set__"):
        return func(*args, **kwargs)
    writes = plain.endswith("_") and not plain.endswith("__")
    stem = plain.rstrip("_") if writes else plain
    if plain.startswith("_f"):  # of lists: _foreach_, _fused_
        allowed = writes or stem.removeprefix("_foreach_") in _SAME_PARTS
    elif writes:
        allowed = isinstance(args[0], CutParameter | CutValues) or stem == "copy" or stem in _SAME_PARTS
    else:
        allowed = plain in _SAME_PARTS or plain == "data" or (plain.startswith("__i") and plain != "__invert__")
    if not allowed:
        raise _refusal(plain, first)
    try:
        made = func(*args, **kwargs)
    except RuntimeError as exc:
        shapes = {tuple(each.shape) for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)}
        if len(shapes) > 1:
            raise UsageError(
                f"{_plain(plain)} was given the part of parameter {first.name!r} that rank {first.rank} has, and a "
                f"tensor of another shape ({' and '.join(map(str, sorted(shapes)))}): the model is cut over ranks "
                f"(strategy {first.strategy}). Make copies and averages (EMA) of the model after distribute()"
            ) from exc
        raise
    if isinstance(made, list | tuple):
        return type(made)(_part(each, first) for each in made)
    return _part(made, first) if isinstance(made, torch.Tensor) and not writes else made


def _part(values: Any, of: Guard) -> Any:
    if type(values) is not torch.Tensor:
        return values
    made = values.as_subclass(CutValues)
    setattr(made, _GUARD, of)
    return made


def _refusal(name: str, of: Guard) -> UsageError:
    return UsageError(
        f"{_plain(name)} was asked of parameter {of.name!r} on rank {of.rank}, which has a part of it: the model is "
        f"cut over ranks (strategy {of.strategy}), and the result would be of this part alone. Element-wise operations "
        f"work; for L2 use the weight_decay of the optimizer. Else {of.remedy and f'{of.remedy}, or '}use another "
        "strategy"
    )


_names: dict[Any, str] = {}


def _name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function of torch; that of an attribute with what is done to it, as in `data.__get__`."""
    found = _names.get(func)
    if found is None:
        found = getattr(func, "__name__", str(func))
        owner = getattr(func, "__self__", None)
        if found in ("__get__", "__set__", "__delete__") and owner is not None:
            found = f"{owner.__name__}.{found}"
        _names[func] = found
    return found


def _describes(name: str, args: Sequence[Any]) -> bool:
    """Return whether a use asks for no values: of shape, type, memory, gradient."""
    attribute, _, access = name.partition(".")
    if access:
        return attribute not in _VALUE_PROPERTIES
    if name in _DESCRIBING or (name.startswith("is_") and name != "is_nonzero"):
        return True
    return name in _SHAPED_LIKE and not isinstance(args[0], GuardedParameter | CutValues)


def _plain(name: str) -> str:
    return f".{name.partition('.')[0]}" if "." in name else f"{name}()"


def _guards_in(value: Any, kinds: Any) -> Iterator[Guard]:
    if isinstance(value, kinds):
        yield getattr(value, _GUARD, Guard("", -1))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _guards_in(each, kinds)
    elif isinstance(value, Mapping):
        yield from _guards_in(list(value.values()), kinds)
