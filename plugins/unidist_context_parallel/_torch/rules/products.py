"""Products of matrices: a divided dim of the result stays divided, a sum over one becomes a sum over the ranks.

Where two operands are divided along different dims, the second is gathered. So attention that a model spells out
(`softmax(q @ k.T) @ v`) is computed, with all keys and values on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist_context_parallel._torch.divided.axis import ContextAxis, take_rows
from unidist_context_parallel._torch.divided.tensor import SequenceTensor, gathers, name_of, refuse, whole
from unidist_context_parallel._torch.rules.registration import divided, rule
from unidist_context_parallel.layout.sequence import SequenceLayout


def contract(
    func: Callable[..., Any], compute: Callable[..., Any], operands: Sequence[Any], labels: Sequence[str], output: str
) -> Any:
    """Return a sum of products of which some operands are divided.

    Args:
        func: the operation, for messages.
        compute: takes the operands' rows.
        operands: tensors.
        labels: a letter for each dim of each operand; dims of the same letter are the same.
        output: the letters of the result; sums are over the others.
    """
    found: list[tuple[str, SequenceLayout, ContextAxis]] = []
    for each, letters in zip(operands, labels, strict=True):
        own = divided(each)
        if own is not None:
            letter = letters[own.dim_divided]
            size = max(
                other.shape[names.index(letter)]
                for other, names in zip(operands, labels, strict=True)
                if letter in names
            )
            if size == own.rows.size:  # else it has one row, which is broadcast
                found.append((letter, own.rows, own.axis))
    if not found:
        return compute(*map(whole, operands))
    letter, layout, axis = next((each for each in found if each[0] in output), found[0])
    rows = []
    for each, letters in zip(operands, labels, strict=True):
        at = letters.find(letter)
        if isinstance(each, SequenceTensor):
            if at == each.dim_divided and each.rows is layout:
                rows.append(each.local)
                continue
            if at < 0 and each.local.ndim > 2:
                gathers(func, "multiplies tokens with tokens", axis)
            each = each.full_tensor()
        if at >= 0 and (each.shape[at] != 1 or layout.size == 1):
            each = take_rows(each, layout, at, axis.rank)
        rows.append(each)
    result = compute(*rows)
    if letter in output:
        return SequenceTensor(result, output.index(letter), layout, axis)
    return axis.summed(result)


@rule("matmul", "mm", "bmm", "__matmul__", "__rmatmul__", "mv", "dot", "inner", "vdot", "linalg_matmul")
def _matmul(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, second = (*args, *kwargs.values())[:2]
    name = name_of(func)
    if name == "__rmatmul__":
        first, second = second, first
    if name == "inner" and second.ndim > 1:
        second = second.transpose(-2, -1)
    one, other, output = _matrix_labels(len(first.shape), len(second.shape))
    return contract(func, torch.matmul, (first, second), (one, other), output)


@rule("addmm", "baddbmm", "addbmm", "addmv", "addr")
def _added(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    if name in ("addbmm", "addr") or len(args) < 3:
        refuse(func, "has no rule for a divided sequence")
    addend, first, second = args[:3]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    product = torch.matmul(first, second)
    product = product * alpha if alpha != 1 else product
    return product + (addend * beta if beta != 1 else addend) if beta else product


@rule("einsum")
def _einsum(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation:
        refuse(func, "is written with an ellipsis, or with numbers in place of letters")
    left, arrow, output = equation.replace(" ", "").partition("->")
    labels = left.split(",")
    if not arrow:
        output = "".join(sorted(each for each in set(left) - {","} if left.count(each) == 1))
    return contract(func, lambda *rows: torch.einsum(f"{left}->{output}", *rows), operands, labels, output)


@rule("outer", "ger")
def _outer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return contract(func, torch.outer, args[:2], ("a", "b"), "ab")


@rule("tensordot")
def _tensordot(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("a", "b", "dims"), args, strict=False)) | kwargs
    a, b, dims = given["a"], given["b"], given.get("dims", 2)
    if isinstance(dims, int):
        dims = (list(range(len(a.shape) - dims, len(a.shape))), list(range(dims)))
    letters = "abcdefghijklmnopqrstuvwxyz"
    one = letters[: len(a.shape)]
    other = list(letters[len(a.shape) : len(a.shape) + len(b.shape)])
    for left, right in zip(*dims, strict=True):
        other[right] = one[left]
    summed = {one[left] for left in dims[0]}
    output = "".join(each for each in (*one, *other) if each not in summed)
    return contract(func, lambda x, y: torch.tensordot(x, y, dims), (a, b), (one, "".join(other)), output)


@rule("linear")
def _linear(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = given["input"], whole(given["weight"]), whole(given.get("bias"))
    tensor = divided(x)
    if tensor is None:
        return func(x, weight, bias)
    if tensor.dim_divided < tensor.local.ndim - 1:
        return tensor.like(func(tensor.local, weight, bias))
    product = torch.matmul(tensor, weight.transpose(-2, -1) if weight.ndim > 1 else weight)  # a sum over tokens
    return product if bias is None else product + bias


def _matrix_labels(first: int, second: int) -> tuple[str, str, str]:
    """Return letters for the dims of a matrix product of tensors with so many dims, batch dims included."""
    batch = "abcdefgh"[: max(first, second, 2) - 2]
    one = (batch[len(batch) - (first - 2) :] if first > 2 else "") + ("mk" if first > 1 else "k")
    other = (batch[len(batch) - (second - 2) :] if second > 2 else "") + ("kn" if second > 1 else "k")
    output = batch + ("m" if first > 1 else "") + ("n" if second > 1 else "")
    return one, other, output
