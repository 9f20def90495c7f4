"""Rules for operations of JAX on parts: one for each operation, by name.

A rule returns the results, or None where the parts do not fit together. Its operands have at least one that is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax.lax import GatherScatterMode

from unidist_tensor_parallel._jax.axis import starts
from unidist_tensor_parallel._jax.propagation import CutValue, Propagation, Rules, local_shape
from unidist_tensor_parallel._jax.reshaping import reshaped
from unidist_tensor_parallel.layout.cuts import Cut

_ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "igamma", "imag", "integer_pow", "is_finite", "le", "lgamma", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "or", "population_count",
    "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
)  # fmt: skip


def _results(equation: Any, arrays: Sequence[Any], cuts: Sequence[Cut | None]) -> list[CutValue]:
    shapes = [tuple(variable.aval.shape) for variable in equation.outvars]
    return [CutValue(array, cut, shape) for array, cut, shape in zip(arrays, cuts, shapes, strict=True)]


def _first_cut(values: Sequence[CutValue]) -> Cut:
    return next(value.cut for value in values if value.cut is not None)


def _alike(run: Propagation, values: Sequence[CutValue], cut: Cut) -> list[Any]:
    """Return operands of one shape as parts with one cut; numbers, and rows that are repeated, stay whole."""
    alike = []
    for value in values:
        is_repeated = not value.shape or value.shape[cut.dim] != cut.total
        alike.append((run.enter(run.whole(value)) if is_repeated else run.like(value, cut)).array)
    return alike


def _elementwise(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    cut = _first_cut(values)
    return _results(equation, run.bind(equation, _alike(run, values, cut)), [cut])


def _each(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    """Operations that return their operands."""
    arrays = run.bind(equation, [value.array for value in values])
    return _results(equation, arrays, [value.cut for value in values])


def _broadcast(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    (value,) = values
    assert value.cut is not None
    dim = equation.params["broadcast_dimensions"][value.cut.dim]
    cut = value.cut.along(dim)
    shape = local_shape(equation.params["shape"], cut, run.rank)
    return _results(equation, run.bind(equation, [value.array], shape=shape), [cut])


def _reshape(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    (value,) = values
    assert value.cut is not None
    if equation.params.get("dimensions") is not None:
        return None
    after = equation.params["new_sizes"]
    cut = reshaped(value.cut, value.shape, after)
    if cut is None:
        return None
    sizes = local_shape(after, cut, run.rank)
    return _results(equation, run.bind(equation, [value.array], new_sizes=sizes), [cut])


def _squeeze(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    (value,) = values
    assert value.cut is not None
    gone = equation.params["dimensions"]
    if value.cut.dim in gone:
        return None
    cut = value.cut.along(value.cut.dim - sum(dim < value.cut.dim for dim in gone))
    return _results(equation, run.bind(equation, [value.array]), [cut])


def _transpose(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    (value,) = values
    assert value.cut is not None
    cut = value.cut.along(equation.params["permutation"].index(value.cut.dim))
    return _results(equation, run.bind(equation, [value.array]), [cut])


def _reduction(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    """Reductions along dims: of those along the cut one, sums and maxima are known."""
    (value,) = values
    assert value.cut is not None
    axes = equation.params["axes"]
    if value.cut.dim not in axes:
        cut = value.cut.along(value.cut.dim - sum(axis < value.cut.dim for axis in axes))
        return _results(equation, run.bind(equation, [value.array]), [cut])
    if equation.primitive.name == "reduce_sum":
        return [run.summed(run.bind(equation, [value.array])[0])]
    if equation.primitive.name == "reduce_max" and jnp.issubdtype(value.array.dtype, jnp.inexact):
        return [run.largest(value.array, axes)]
    return None


def _along_others(name: str) -> Any:
    """Return the rule of operations that work along one dim, which is the parameter of this name."""

    def rule(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
        cut = _first_cut(values)
        given = equation.params[name]
        if cut.dim in (given if isinstance(given, tuple) else (given,)):
            return None
        arrays = run.bind(equation, _alike(run, values, cut))
        return _results(equation, arrays, [cut] * len(arrays))

    return rule


def _slice(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    (value,) = values
    assert value.cut is not None
    dim = value.cut.dim
    begins, ends = list(equation.params["start_indices"]), list(equation.params["limit_indices"])
    strides = equation.params["strides"]
    if strides is not None and strides[dim] != 1:
        return None
    cut = _blocks_between(value.cut, begins[dim], ends[dim])
    if cut is None:
        return None
    before = _blocks_between(value.cut, 0, begins[dim])
    begins[dim] = 0 if before is None else before.counts[run.rank]
    ends[dim] = begins[dim] + cut.counts[run.rank]
    changed = {"start_indices": tuple(begins), "limit_indices": tuple(ends)}
    return _results(equation, run.bind(equation, [value.array], **changed), [cut])


def _split(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    (value,) = values
    assert value.cut is not None
    sizes = [int(size) for size in equation.params["sizes"]]
    if equation.params["axis"] != value.cut.dim:
        arrays = run.bind(equation, [value.array])
        return _results(equation, arrays, [value.cut] * len(arrays))
    begins = starts(sizes)
    cuts = [_blocks_between(value.cut, begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
    if None in cuts:
        return None
    own = tuple(cut.counts[run.rank] for cut in cuts if cut is not None)
    return _results(equation, run.bind(equation, [value.array], sizes=own), cuts)


def _blocks_between(cut: Cut, begin: int, end: int) -> Cut | None:
    """Return the cut of the elements from `begin` to before `end` of the cut dim, if these are whole blocks."""
    totals = [sum(counts) for counts in cut.blocks]
    edges = [*starts(totals), sum(totals)]
    if begin not in edges or end not in edges or begin >= end:
        return None
    return Cut(cut.dim, cut.blocks[edges.index(begin) : edges.index(end)])


def _concatenate(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    cut = _first_cut(values)
    if equation.params["dimension"] != cut.dim:
        return _results(equation, run.bind(equation, _alike(run, values, cut)), [cut])
    if any(value.cut is None or value.cut.dim != cut.dim for value in values):
        return None
    blocks = tuple(block for value in values if value.cut is not None for block in value.cut.blocks)
    return _results(equation, run.bind(equation, [value.array for value in values]), [Cut(cut.dim, blocks)])


def _pad(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    value, filling = values
    if value.cut is None or equation.params["padding_config"][value.cut.dim] != (0, 0, 0):
        return None
    return _results(equation, run.bind(equation, [value.array, run.enter(filling).array]), [value.cut])


def _product(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    """`dot_general`: parts along a batch dim give parts, along a contracted one a sum, along another one parts."""
    left, right = values
    (left_inner, right_inner), (left_batch, right_batch) = equation.params["dimension_numbers"]
    inner, batch = dict(zip(left_inner, right_inner, strict=True)), dict(zip(left_batch, right_batch, strict=True))
    if left.cut is not None and left.cut.dim in batch:
        right = run.like(right, left.cut.along(batch[left.cut.dim]))
    elif right.cut is not None and right.cut.dim in right_batch:
        left = run.like(left, right.cut.along(left_batch[right_batch.index(right.cut.dim)]))
    elif left.cut is not None and left.cut.dim in inner:
        if right.cut is None or right.cut.dim in right_inner:
            right = run.like(right, left.cut.along(inner[left.cut.dim]))
        else:
            left = run.enter(run.whole(left))
    elif right.cut is not None and right.cut.dim in right_inner:
        if left.cut is None:
            left = run.split(left, right.cut.along(left_inner[right_inner.index(right.cut.dim)]))
        else:
            right = run.enter(run.whole(right))
    elif left.cut is None:
        left = run.enter(left)
    elif right.cut is None:
        right = run.enter(right)
    elif prod(left.shape) < prod(right.shape):
        left = run.enter(run.whole(left))
    else:
        right = run.enter(run.whole(right))
    (array,) = run.bind(equation, [left.array, right.array])
    if left.cut is not None and left.cut.dim in inner:
        return [run.summed(array)]
    left_free = [dim for dim in range(len(left.shape)) if dim not in inner and dim not in batch]
    right_free = [dim for dim in range(len(right.shape)) if dim not in right_inner and dim not in right_batch]
    if left.cut is not None:
        dims = [*left_batch, *left_free]
        cut = left.cut.along(dims.index(left.cut.dim))
    else:
        assert right.cut is not None
        cut = right.cut.along(len(left_batch) + len(left_free) + right_free.index(right.cut.dim))
    return _results(equation, [array], [cut])


def _lookup(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    """`gather`: rows of a table that is cut along another dim, or along the one that is looked up (a vocabulary)."""
    table, indices = values[0], run.whole(values[1])
    if table.cut is None:
        return None
    numbers, sizes = equation.params["dimension_numbers"], list(equation.params["slice_sizes"])
    dim = table.cut.dim
    if dim in numbers.operand_batching_dims:
        return None
    if dim not in numbers.start_index_map and dim not in numbers.collapsed_slice_dims:
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [each for each in range(len(table.shape)) if each not in gone]
        if sizes[dim] != table.shape[dim]:
            return None
        sizes[dim] = table.cut.counts[run.rank]
        cut = table.cut.along(numbers.offset_dims[kept.index(dim)])
        arrays = run.bind(equation, [table.array, indices.array], slice_sizes=tuple(sizes))
        return _results(equation, arrays, [cut])
    if tuple(numbers.start_index_map) != (dim,) or dim not in numbers.collapsed_slice_dims or len(table.cut.blocks) > 1:
        return None
    return _lookup_in_rows(run, equation, table, indices)


def _lookup_in_rows(run: Propagation, equation: Any, table: CutValue, indices: CutValue) -> list[CutValue] | None:
    assert table.cut is not None
    mode, fill = equation.params["mode"], equation.params["fill_value"]
    numbers = equation.params["dimension_numbers"]
    total, counts = table.shape[table.cut.dim], table.cut.counts
    asked = indices.array[..., 0]
    if mode == GatherScatterMode.CLIP:
        asked = jnp.clip(asked, 0, total - 1)
    own = asked - starts(counts)[run.rank]
    inside = (own >= 0) & (own < counts[run.rank])
    rows = jnp.where(inside, own, 0)[..., None].astype(indices.array.dtype)
    (array,) = run.bind(equation, [table.array, rows], mode=GatherScatterMode.PROMISE_IN_BOUNDS)

    def per_row(flags: Any) -> Any:
        return jnp.expand_dims(flags, numbers.offset_dims)

    found = run.summed(jnp.where(per_row(inside), array, jnp.zeros((), array.dtype)))
    if mode == GatherScatterMode.FILL_OR_DROP:
        missing = jnp.nan if fill is None and jnp.issubdtype(array.dtype, jnp.inexact) else fill
        if missing is None:
            return None
        is_known = (asked >= 0) & (asked < total)
        return [found._replace(array=jnp.where(per_row(is_known), found.array, jnp.asarray(missing, array.dtype)))]
    return [found]


RULES: Rules = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"), _reduction),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along_others("axis")),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dot_general": _product,
    "gather": _lookup,
    "optimization_barrier": _each,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _along_others("dimensions"),
    "slice": _slice,
    "sort": _along_others("dimension"),
    "split": _split,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
"""By the names of JAX's operations; those with programs inside are in `inner_programs`."""
