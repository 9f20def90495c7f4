"""Cuts of the leaves of a tree of parameters, by the roles that a user gives to layers. Pure.

A layer is a folder of the tree with arrays in it (`blocks/0/up` with `kernel` and `bias`), or an array by itself. Dims
are counted from the end, so layers that are stacked for a `scan` are cut like others. A kernel is `(..., inputs,
outputs)`, as in flax; one by the name of `weight` is `(..., outputs, inputs)`, as in equinox and PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from unidist.errors import ConfigurationError
from unidist_tensor_parallel.layout.cuts import Cut, even
from unidist_tensor_parallel.layout.roles import Role, assign

Shape = tuple[int, ...]


class CutLeaf(NamedTuple):
    """A leaf that is cut.

    Args:
        cut: of its dim.
        role: of its layer.
    """

    cut: Cut
    role: Role


_COLUMNS = (Role.COLUMN, Role.COLUMN_GATHER, Role.HEADS, Role.QKV)


def cuts_of(shapes: Mapping[str, Shape], patterns: Mapping[str, Role], size: int) -> dict[str, CutLeaf]:
    """Return how leaves are cut, by path.

    Args:
        shapes: of all leaves, by path with slashes.
        patterns: the user's plan.
        size: ranks of the axis.

    Raises:
        ConfigurationError: a pattern matches nothing, or a leaf cannot be cut as asked.
    """
    folders = {folder for path in shapes for folder in _folders(path)}
    roles = assign(patterns, [*shapes, *sorted(folders)])
    found: dict[str, CutLeaf] = {}
    for path in shapes:
        place = next((each for each in (path, *_folders(path)) if each in roles), None)
        if place is None or roles[place] is Role.REPLICATE:
            continue
        cut = _cut(path, roles[place], place, shapes, size)
        if cut is not None:
            found[path] = CutLeaf(cut, roles[place])
    return found


def _folders(path: str) -> list[str]:
    """Return the folders that a leaf is in, the innermost first."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _cut(path: str, role: Role, place: str, shapes: Mapping[str, Shape], size: int) -> Cut | None:
    shape = shapes[path]
    if role is Role.SEQUENCE:
        raise ConfigurationError(f"tensor:plan: the role {role} of {place!r} is not for JAX; leave it out")
    if not shape:
        return None
    if role is Role.ATTENTION:
        dim = _head_dim(path, place, shapes)
    elif role is Role.VOCABULARY:
        dim = max(range(len(shape)), key=shape.__getitem__) if len(shape) > 1 else None
    else:
        is_vector, kernel = _kernel_beside(path, shapes)
        is_turned = kernel.rpartition("/")[2] == "weight"
        is_column = role in _COLUMNS
        if is_vector:
            dim = len(shape) - 1 if is_column else None
        else:
            dim = len(shape) - (2 if is_column == is_turned else 1)
        if role is Role.HEADS and len(shapes[kernel]) - is_vector > 2 and len(shape) > 1 and not is_turned:
            dim = len(shape) - 2
    if dim is None:
        return None
    if role is Role.QKV:
        if shape[dim] % 3:
            raise ConfigurationError(
                f"tensor:plan: {path!r} has the role {role}, and its {shape[dim]} outputs do not divide into queries, "
                "keys and values"
            )
        return Cut.of(dim, [shape[dim] // 3] * 3, size, what=f"the queries, keys and values of {path!r}")
    return even(dim, shape[dim], size, what=f"dim {dim} of {path!r}")


def _kernel_beside(path: str, shapes: Mapping[str, Shape]) -> tuple[bool, str]:
    """Return whether a leaf is a bias or the like, and the path of the kernel of its layer."""
    folder = path.rpartition("/")[0]
    beside = [each for each in shapes if each.rpartition("/")[0] == folder]
    kernel = max(beside, key=lambda each: len(shapes[each])) if folder else path
    return len(shapes[path]) < len(shapes[kernel]) or len(shapes[path]) < 2, kernel


def _head_dim(path: str, place: str, shapes: Mapping[str, Shape]) -> int | None:
    """Return the dim of a leaf that counts the heads of an attention, in a kernel that has a dim for them.

    Its projections are `(..., width, heads, elements)`, that of the output is `(..., heads, elements, width)`.
    """
    kernels = {each: shapes[each] for each in shapes if place in _folders(each) and len(shapes[each]) > 2}
    outputs = [
        each
        for each, shape in kernels.items()
        if any(other != each and shape[-3:] == (*kin[-2:], kin[-3]) for other, kin in kernels.items())
        and _is_fewer(shape, kernels.values())
    ]
    if len(kernels) < 2 or len(outputs) != 1:
        raise ConfigurationError(
            f"tensor:plan: {place!r} has no attention whose kernels have a dim for the heads: kernels (width, heads, "
            "elements) and one of (heads, elements, width). Give its layers the roles heads, qkv and row"
        )
    (output,) = outputs
    shape = shapes[path]
    if path == output:
        return len(shape) - 3
    if path in kernels:
        return len(shape) - 2
    if path.rpartition("/")[0] == output.rpartition("/")[0]:
        return None
    return len(shape) - 2 if shape[-2:] == _kernel_shape(path, kernels)[-2:] else None


def _kernel_shape(path: str, kernels: Mapping[str, Shape]) -> Shape:
    """Return the shape of the kernel beside a bias, or nothing if there is none."""
    folder = path.rpartition("/")[0]
    return next((shape for each, shape in kernels.items() if each.rpartition("/")[0] == folder), ())


def _is_fewer(shape: Shape, others: Collection[Shape]) -> bool:
    return sum(other[-3:] == shape[-3:] for other in others) == 1
