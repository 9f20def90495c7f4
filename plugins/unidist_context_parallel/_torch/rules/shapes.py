"""Views, indexing and joining: where the divided dim goes, and which rows stay on this rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from unidist_context_parallel._torch.divided.axis import take_rows
from unidist_context_parallel._torch.divided.tensor import SequenceTensor, align, gathers, name_of, refuse, whole
from unidist_context_parallel._torch.rules.registration import divided, rule, wrapped_dim
from unidist_context_parallel.layout.sequence import SequenceLayout, joined, zigzag

# Moving dims


@rule("transpose", "swapaxes", "swapdims", "transpose_", "t", "adjoint")
def _transpose(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _input(args, kwargs)
    ndim = tensor.local.ndim
    if name_of(func) == "t":
        first, second = (0, 1) if ndim == 2 else (0, 0)
    elif name_of(func) == "adjoint":
        first, second = ndim - 2, ndim - 1
    else:
        given = [*args[1:], *(kwargs[key] for key in ("dim0", "dim1", "axis0", "axis1") if key in kwargs)]
        first, second = (wrapped_dim(dim, ndim) for dim in given)
    moved = {first: second, second: first}.get(tensor.dim_divided, tensor.dim_divided)
    return tensor.like(tensor.local.transpose(first, second), moved)


@rule("permute", "movedim", "moveaxis", "unsqueeze", "rot90", "flip", "fliplr", "flipud")
def _move(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _input(args, kwargs)
    name, ndim = name_of(func), tensor.local.ndim
    if name == "unsqueeze":
        at = wrapped_dim(kwargs["dim"] if "dim" in kwargs else args[1], ndim + 1)
        return tensor.like(tensor.local.unsqueeze(at), tensor.dim_divided + (at <= tensor.dim_divided))
    if name == "permute":
        order = [wrapped_dim(dim, ndim) for dim in _numbers(args[1:], kwargs, "dims")]
        return tensor.like(tensor.local.permute(order), order.index(tensor.dim_divided))
    if name in ("movedim", "moveaxis"):
        marks = torch.empty(tuple(range(2, ndim + 2)), device="meta")  # a size for each dim
        order = [size - 2 for size in func(marks, *args[1:], **_rest(kwargs)).shape]
        return tensor.like(tensor.local.permute(order), order.index(tensor.dim_divided))
    if name == "flip":
        dims = [wrapped_dim(dim, ndim) for dim in _numbers(args[1:], kwargs, "dims")]
        layout = tensor.rows
        if tensor.dim_divided in dims:
            layout = layout.taken(np.arange(layout.size)[::-1])
        return tensor.like(tensor.local.flip(dims), layout=layout)
    return refuse(func, "has no rule for a divided sequence")


@rule("squeeze")
def _squeeze(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _input(args, kwargs)
    ndim = tensor.local.ndim
    given = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if given is None:
        dims = list(range(ndim))
    else:
        dims = [wrapped_dim(dim, ndim) for dim in ([given] if isinstance(given, int) else given)]
    dims = [dim for dim in dims if tensor.shape[dim] == 1]
    if tensor.dim_divided in dims:
        return tensor.full_tensor().squeeze(dims)
    if not dims:
        return tensor.like(tensor.local)
    return tensor.like(tensor.local.squeeze(dims), tensor.dim_divided - sum(dim < tensor.dim_divided for dim in dims))


# Other shapes


@rule("view", "reshape", "flatten", "unflatten", "_unsafe_view", "_reshape_alias", "ravel", "view_copy")
def _reshape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _input(args, kwargs)
    name, shape = name_of(func), list(tensor.shape)
    ndim = len(shape)
    if name == "view" and len(args) > 1 and isinstance(args[1], torch.dtype):
        if args[1].itemsize != tensor.local.element_size():
            refuse(func, "changes the size of the elements")
        return tensor.like(tensor.local.view(args[1]))
    if name in ("flatten", "ravel"):
        given = dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | kwargs
        start = wrapped_dim(given.get("start_dim", 0), ndim)
        end = wrapped_dim(given.get("end_dim", -1), ndim)
        target = [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]]
    elif name == "unflatten":
        given = dict(zip(("dim", "sizes"), args[1:], strict=False)) | kwargs
        dim = wrapped_dim(given["dim"], ndim)
        target = [*shape[:dim], *_resolved(list(given["sizes"]), shape[dim]), *shape[dim + 1 :]]
    else:
        target = _resolved(_numbers(args[1:], kwargs, "shape", "size"), math.prod(shape))
    if math.prod(target) != math.prod(shape):
        raise RuntimeError(f"shape '{target}' is invalid for input of size {math.prod(shape)}")
    found = tensor.rows.derived(
        ("reshape", tuple(shape), tensor.dim_divided, tuple(target)),
        lambda: _reshaped(shape, tensor.dim_divided, tensor.rows, target),
    )
    if found is None:
        gathers(func, f"turns the shape {tuple(shape)} into {tuple(target)}, which mixes tokens", tensor.axis)
        return tensor.full_tensor().reshape(target)
    at, layout = found
    local = [*target[:at], layout.counts[tensor.axis.rank], *target[at + 1 :]]
    return tensor.like(tensor.local.reshape(local), at, layout)


def _reshaped(
    shape: list[int], dim: int, layout: SequenceLayout, target: list[int]
) -> tuple[int, SequenceLayout] | None:
    """Return which dim of a reshaped tensor is divided, and how; None if the rows of a rank are none there."""
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    for at, size in enumerate(target):  # the dim as it was
        if size == layout.size and math.prod(target[:at]) == before and math.prod(target[at + 1 :]) == after:
            return at, layout
    # The smallest groups of neighbouring dims, of both shapes, with equal products.
    start = first = 0
    while True:
        stop, end, left, right = start + 1, first + 1, shape[start], target[first]
        while left != right:
            if left < right:
                left *= shape[stop]
                stop += 1
            else:
                right *= target[end]
                end += 1
        if dim < stop:
            break
        start, first = stop, end
        if first == len(target):
            return None
    while end < len(target) and target[end] == 1:
        end += 1
    merged = layout.merged(math.prod(shape[start:dim]), math.prod(shape[dim + 1 : stop]))
    split = merged.split(target[first:end])
    return None if split is None else (first + split[0], split[1])


def _resolved(sizes: list[int], total: int) -> list[int]:
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        if known and total % known == 0:
            return [total // known if size == -1 else size for size in sizes]
        raise RuntimeError(f"shape '{sizes}' is invalid for input of size {total}")
    return sizes


@rule("expand", "broadcast_to", "tile", "repeat", "repeat_interleave")
def _expand(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _input(args, kwargs)
    name, ndim = name_of(func), tensor.local.ndim
    if name == "repeat_interleave":
        given = dict(zip(("repeats", "dim"), args[1:], strict=False)) | kwargs
        dim = given.get("dim")
        if dim is not None and wrapped_dim(dim, ndim) != tensor.dim_divided:
            return tensor.like(tensor.local.repeat_interleave(given["repeats"], dim))
        if dim is None or not isinstance(given["repeats"], int):
            return func(tensor.full_tensor(), *map(whole, args[1:]), **_rest(kwargs))
        layout = tensor.rows.merged(1, given["repeats"])
        return tensor.like(tensor.local.repeat_interleave(given["repeats"], dim), layout=layout)
    sizes = _numbers(args[1:], kwargs, "size", "sizes", "dims", "repeats")
    sizes = [1] * (ndim - len(sizes)) + sizes if name == "tile" else sizes
    at = tensor.dim_divided + len(sizes) - ndim
    if name in ("expand", "broadcast_to"):
        if tensor.rows.size == 1 and sizes[at] not in (1, -1):
            return tensor.full_tensor().expand(sizes)
        if sizes[at] not in (-1, tensor.rows.size):
            raise RuntimeError(f"expand: size {sizes[at]} of dim {at} is {tensor.rows.size} already")
        sizes[at] = -1
        return tensor.like(tensor.local.expand(sizes), at)
    return tensor.like(tensor.local.repeat(sizes), at, tensor.rows.merged(sizes[at], 1))


# Choosing rows


@rule("select", "narrow", "unbind", "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split",
      "unsafe_chunk", "slice", "narrow_copy", "select_copy")  # fmt: skip
def _choose(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _input(args, kwargs)
    name, ndim = name_of(func), tensor.local.ndim
    names = {
        "select": ("dim", "index"),
        "select_copy": ("dim", "index"),
        "narrow": ("dim", "start", "length"),
        "narrow_copy": ("dim", "start", "length"),
        "unbind": ("dim",),
        "slice": ("dim", "start", "end", "step"),
    }.get(name, ("sizes", "dim"))
    rest = {
        ("sizes" if key in ("split_size_or_sections", "split_size", "split_sizes", "chunks", "indices_or_sections",
                            "sections", "indices") else key): value
        for key, value in _rest(kwargs).items()
    }  # fmt: skip
    given = dict(zip(names, args[1:], strict=False)) | rest
    dim = wrapped_dim(given.get("dim", 0), ndim)
    size = tensor.shape[dim]
    if name in ("select", "select_copy"):
        return _index(tensor, (*[slice(None)] * dim, int(given["index"])))
    if name in ("narrow", "narrow_copy"):
        start = int(given["start"]) % size if size else 0
        return _index(tensor, (*[slice(None)] * dim, slice(start, start + int(given["length"]))))
    if name == "slice":
        return _index(tensor, (*[slice(None)] * dim, slice(given.get("start"), given.get("end"), given.get("step"))))
    if name == "unbind":
        if dim == tensor.dim_divided:
            return tensor.full_tensor().unbind(dim)
        return tuple(_index(tensor, (*[slice(None)] * dim, number)) for number in range(size))
    bounds = [part.shape[0] for part in getattr(torch.empty(size, 0), name)(given["sizes"])]
    ends = np.cumsum(bounds).tolist()
    return tuple(
        _index(tensor, (*[slice(None)] * dim, slice(end - length, end)))
        for end, length in zip(ends, bounds, strict=True)
    )


@rule("__getitem__")
def _getitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, index = args
    index = index if isinstance(index, tuple) else (index,)
    if not isinstance(tensor, SequenceTensor):  # a plain table, read at divided places
        used = [each for each in index if isinstance(each, SequenceTensor)]
        if len(index) == 1 and len(used) == 1 and used[0].local.dtype in (torch.int64, torch.int32):
            rows = used[0]
            return rows.like(tensor[rows.local])
        return tensor[tuple(map(whole, index))]
    return _index(tensor, index)


def _index(tensor: SequenceTensor, index: tuple[Any, ...]) -> Any:
    divided(tensor)
    items = [
        torch.as_tensor(each, device=tensor.local.device) if isinstance(each, list | np.ndarray) else whole(each)
        for each in index
    ]
    used = sum(_dims_used(each) for each in items)
    if any(each is Ellipsis for each in items):
        at = next(number for number, each in enumerate(items) if each is Ellipsis)
        items[at : at + 1] = [slice(None)] * (tensor.local.ndim - used)
    else:
        items += [slice(None)] * (tensor.local.ndim - used)
    advanced = [each for each in items if isinstance(each, torch.Tensor)]
    # Which item indexes the divided dim?
    dim, number = 0, -1
    for position, each in enumerate(items):
        if each is not None and dim <= tensor.dim_divided < dim + _dims_used(each):
            number = position
            break
        dim += _dims_used(each)
    own = items[number]
    layout, rank = tensor.rows, tensor.axis.rank
    before, after = items[:number], items[number + 1 :]
    if isinstance(own, slice):
        start, stop, step = own.indices(layout.size)
        chosen = layout.local_slice(rank, start, stop, step)
        rows = chosen if isinstance(chosen, slice) else torch.from_numpy(chosen).to(tensor.local.device)
        new_layout = layout if (start, step) == (0, 1) and stop >= layout.size else layout.sliced(start, stop, step)
        if len(advanced) > 1 or (advanced and advanced[0].dtype == torch.bool and advanced[0].ndim > 1):
            return _all(tensor, items)
        local = tensor.local
        if new_layout is not layout:
            local = local[(*[slice(None)] * tensor.dim_divided, rows)]
        result = local[(*before, slice(None), *after)]
        behind = sum(_dims_made(each) for each in after)
        return tensor.like(result, result.ndim - 1 - behind, new_layout)
    if isinstance(own, torch.Tensor) and len(advanced) == 1:
        if own.ndim == 1 and own.dtype not in (torch.bool, torch.uint8):
            chosen_rows = own.cpu().numpy() % layout.size
            local_rows = torch.from_numpy(layout.locally_taken(rank, chosen_rows)).to(tensor.local.device)
            result = tensor.local[(*before, local_rows, *after)]
            return tensor.like(result, _place_of(before), layout.taken(chosen_rows))
        if own.dtype == torch.bool and own.ndim == 1:
            return _index(tensor, (*before, own.nonzero()[:, 0], *after))
        if own.dtype == torch.bool:  # over several dims, which become one
            start = tensor.dim_divided - (tensor.dim_divided - dim)
            merged = tensor.flatten(start, start + own.ndim - 1)
            return merged[(*before, own.flatten(), *after)]
    if isinstance(own, int) or (isinstance(own, torch.Tensor) and not own.ndim and own.dtype != torch.bool):
        place = int(own) if -layout.size <= int(own) < layout.size else None
        if place is None:
            raise IndexError(f"index {int(own)} is out of bounds for dimension {tensor.dim_divided}")
        place %= layout.size
        local = tensor.local.narrow(tensor.dim_divided, *_one_row(layout, rank, place))
        row = tensor.axis.summed(local.sum(tensor.dim_divided).to(local.dtype))
        return row[(*before, *after)]
    return _all(tensor, items)


def _one_row(layout: SequenceLayout, rank: int, place: int) -> tuple[int, int]:
    """Return a range of this rank's rows: the one at a position, or none."""
    return (int(layout.local_indices()[place]), 1) if layout.owner[place] == rank else (0, 0)


def _all(tensor: SequenceTensor, items: list[Any]) -> Any:
    if tensor.local.is_floating_point():
        gathers(torch.Tensor.__getitem__, "picks single elements of the sequence", tensor.axis)
    return tensor.full_tensor()[tuple(items)]


def _dims_used(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.ndim
    return 1


def _dims_made(item: Any) -> int:
    if item is None or isinstance(item, slice):
        return 1
    if isinstance(item, torch.Tensor):
        return 1 if item.dtype == torch.bool else item.ndim
    return 0


def _place_of(before: Sequence[Any]) -> int:
    return sum(_dims_made(each) for each in before)


@rule("__setitem__")
def _setitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, index, value = args
    if not isinstance(tensor, SequenceTensor):
        tensor[tuple(map(whole, index)) if isinstance(index, tuple) else whole(index)] = whole(value)
        return None
    fills = not isinstance(value, torch.Tensor) or not value.ndim
    if fills and isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.ndim == tensor.local.ndim:
        tensor.masked_fill_(index, value)
        return None
    items = index if isinstance(index, tuple) else (index,)
    if all(
        each is Ellipsis or isinstance(each, int) or (isinstance(each, slice) and each.step in (None, 1))
        for each in items
    ):
        # What is left of the rows by ranges is a view of them.
        view = _index(tensor, items)
        if isinstance(view, SequenceTensor):
            view.copy_(value) if isinstance(value, torch.Tensor) else view.fill_(value)
            return None
    refuse(func, "assigns to single places of a divided sequence")


@rule("index_select", "take_along_dim", "gather", "masked_select", "index_add", "scatter", "scatter_add", "scatter_",
      "scatter_add_", "index_fill", "scatter_reduce")  # fmt: skip
def _by_index(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    first = args[0] if args else kwargs.get("input")
    if name == "masked_select":
        mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
        tensor = divided(first)
        if tensor is None:
            return func(first, whole(mask))
        mask = whole(mask)
        shape: Any = np.broadcast_shapes(tensor.shape, mask.shape)
        expanded: Any = tensor.expand(shape)
        return _index(expanded, (mask.expand(shape),))
    order = ("indices", "dim") if name == "take_along_dim" else ("dim", "index", "src")
    given = dict(zip(order, args[1:], strict=False)) | _rest(kwargs)
    tensor = divided(first)
    if tensor is None:
        return func(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})
    dim = wrapped_dim(given["dim"], tensor.local.ndim) if given.get("dim") is not None else tensor.dim_divided
    index = given.get("index", given.get("indices"))
    if dim == tensor.dim_divided:
        if name == "index_select":
            return _index(tensor, (*[slice(None)] * dim, whole(index)))
        gathers(func, "picks single elements of the sequence", tensor.axis)
        return func(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})
    if name == "index_select":
        return tensor.like(tensor.local.index_select(dim, whole(index)))
    at = tensor.dim_divided - tensor.local.ndim
    others = [align(each, tensor, at) if isinstance(each, torch.Tensor) else each for each in args[1:]]
    named = {key: align(each, tensor, at) for key, each in _rest(kwargs).items()}
    result = func(tensor.local, *others, **named)
    return tensor if name.endswith("_") else tensor.like(result)


# Joining


@rule("cat", "concat", "concatenate", "stack", "hstack", "vstack")
def _join(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    tensors = list(args[0] if args else kwargs.get("tensors", ()))
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    reference = next(each for each in tensors if isinstance(each, SequenceTensor))
    if name in ("hstack", "vstack"):
        refuse(func, "has no rule for a divided sequence; use torch.cat")
    ndim = reference.local.ndim
    at = reference.dim_divided - ndim
    if name == "stack":
        dim = wrapped_dim(dim, ndim + 1)
        local = torch.stack([align(each, reference, at) for each in tensors], dim)
        return reference.like(local, reference.dim_divided + (dim <= reference.dim_divided))
    dim = wrapped_dim(dim, ndim)
    if dim != reference.dim_divided:
        parts = [align(each, reference, at) for each in tensors]
        return reference.like(torch.cat(parts, dim))
    layouts, rows = [], []
    axis = reference.axis
    for each in tensors:
        own = divided(each)
        if own is not None and own.dim_divided == dim:
            layouts.append(own.rows)
            rows.append(own.local)
        else:
            given = whole(each)
            if given.ndim != ndim:
                continue  # torch's empty tensors of one dim
            layouts.append(zigzag(given.shape[dim], axis.size))
            rows.append(take_rows(given, layouts[-1], dim, axis.rank))
    return reference.like(torch.cat(rows, dim), dim, joined(layouts))


@rule("roll", "pad", "constant_pad_nd")
def _shift(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _input(args, kwargs)
    if name_of(func) == "roll":
        given = dict(zip(("shifts", "dims"), args[1:], strict=False)) | _rest(kwargs)
        shifts, dims = given["shifts"], given.get("dims", ())
        shifts = [shifts] if isinstance(shifts, int) else list(shifts)
        dims = [dims] if isinstance(dims, int) else list(dims or ())
        if not dims:
            return tensor.flatten().roll(shifts[0], 0).reshape(tensor.shape)
        result: Any = tensor
        for by, dim in zip(shifts, dims, strict=True):
            dim = wrapped_dim(dim, tensor.local.ndim)
            if dim != tensor.dim_divided:
                result = tensor.like(result.local.roll(by, dim), layout=result.rows)
            else:
                order = torch.arange(tensor.rows.size).roll(by)
                result = _index(result, (*[slice(None)] * dim, order))
        return result
    given = dict(zip(("pad", "mode", "value"), args[1:], strict=False)) | _rest(kwargs)
    pad = list(given["pad"])
    ndim = tensor.local.ndim
    if len(pad) // 2 < ndim - tensor.dim_divided:
        return tensor.like(func(tensor.local, *args[1:], **_rest(kwargs)))
    where = 2 * (ndim - tensor.dim_divided - 1)
    left, right = pad[where : where + 2]
    own = list(pad)
    own[where : where + 2] = [0, 0]
    if given.get("mode", "constant") != "constant" or left < 0 or right < 0:
        if (left, right) == (0, 0):
            return tensor.like(func(tensor.local, *args[1:], **_rest(kwargs)))
        refuse(func, "pads the sequence by its own tokens")
    value = given.get("value") or 0
    filled = tensor.like(torch.nn.functional.pad(tensor.local, own, value=value)) if any(own) else tensor
    parts: list[Any] = [filled]
    for count, front in ((left, True), (right, False)):
        if count:
            shape = list(filled.shape)
            shape[tensor.dim_divided] = count
            padding = tensor.local.new_full(shape, value)
            parts = [padding, *parts] if front else [*parts, padding]
    return torch.cat(parts, tensor.dim_divided) if len(parts) > 1 else filled


@rule("atleast_1d", "atleast_2d", "atleast_3d", "unfold", "as_strided", "view_as_complex", "view_as_real")
def _special(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _input(args, kwargs)
    name, ndim = name_of(func), tensor.local.ndim
    if name == "view_as_real":
        return tensor.like(torch.view_as_real(tensor.local))
    if name == "view_as_complex" and tensor.dim_divided < ndim - 1:
        return tensor.like(torch.view_as_complex(tensor.local))
    if name.startswith("atl") and ndim >= int(name[8]):
        return tensor
    return refuse(func, "has no rule for a divided sequence")


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SequenceTensor:
    tensor = divided(args[0] if args else kwargs.get("input", kwargs.get("self")))
    assert tensor is not None, "the other arguments are no tensors"
    return tensor


def _rest(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("input", "self")}


def _numbers(args: Sequence[Any], kwargs: dict[str, Any], *names: str) -> list[int]:
    """Return the sizes or dims of a call: `(2, 3)`, `2, 3`, or by keyword."""
    for name in names:
        if name in kwargs:
            args = (kwargs[name],)
    if len(args) == 1 and not isinstance(args[0], int):
        first = args[0]
        return [int(first)] if isinstance(first, torch.Tensor) and not first.ndim else [int(each) for each in first]
    return [int(each) for each in args]
