"""Operations that compute each element by itself: on the rows, with other operands' rows at the same positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidist_context_parallel._torch.divided.tensor import RULES, SequenceTensor, align, name_of, refuse, whole
from unidist_context_parallel._torch.rules.registration import divided, rule, wrap_all

_OTHERS = [
    "alias", "clone", "contiguous", "detach", "detach_", "copy_", "cpu", "cuda", "to", "type", "type_as", "float",
    "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool", "cfloat", "cdouble", "positive",
    "nan_to_num", "nan_to_num_", "fill", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "empty_like",
    "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__",
    "__truediv__", "__rtruediv__", "__itruediv__", "__floordiv__", "__rfloordiv__", "__ifloordiv__", "__mod__",
    "__rmod__", "__imod__", "__pow__", "__rpow__", "__ipow__", "__neg__", "__pos__", "__abs__", "__invert__", "__and__",
    "__rand__", "__iand__", "__or__", "__ror__", "__ior__", "__xor__", "__rxor__", "__ixor__", "__lshift__",
    "__rlshift__", "__ilshift__", "__rshift__", "__rrshift__", "__irshift__", "__eq__", "__ne__", "__lt__", "__le__",
    "__gt__", "__ge__", "__div__", "__rdiv__", "__idiv__", "relu", "relu_", "relu6", "gelu", "silu", "mish", "elu",
    "elu_", "selu", "selu_", "celu", "celu_", "leaky_relu", "leaky_relu_", "hardtanh", "hardtanh_", "hardswish",
    "hardsigmoid", "hardshrink", "softshrink", "tanhshrink", "softsign", "softplus", "logsigmoid", "log_sigmoid",
    "sigmoid", "sigmoid_", "tanh", "tanh_", "threshold", "threshold_", "where", "masked_fill", "masked_fill_", "clamp",
    "clamp_", "clip", "clip_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "lerp", "lerp_", "addcmul",
    "addcmul_", "addcdiv", "addcdiv_", "pow", "pow_", "float_power", "square", "square_", "divide", "divide_",
    "multiply", "multiply_", "subtract", "subtract_", "true_divide", "true_divide_", "floor_divide", "floor_divide_",
    "negative", "negative_", "absolute", "absolute_", "remainder", "fmod", "isclose", "isfinite", "isinf", "isnan",
    "isreal", "logical_and", "logical_or", "logical_not", "logical_xor", "greater", "greater_", "greater_equal",
    "greater_equal_", "less", "less_", "less_equal", "less_equal_", "not_equal", "not_equal_", "arccos", "arcsin",
    "arctan", "arctan2", "arccosh", "arcsinh", "arctanh", "fix", "fix_", "rsub", "heaviside", "xlogy", "xlogy_",
    "view_as_real_", "requantize", "expm1", "sinc", "sinc_", "special_expit", "logit", "logit_", "polygamma",
    "mvlgamma", "deg2rad", "rad2deg", "ldexp", "ldexp_", "_to_copy", "lift_fresh_copy",
]  # fmt: skip

_NOT = {"dropout", "native_dropout", "bernoulli", "normal", "normal_", "exponential_", "uniform_", "random_", "cauchy_",
        "geometric_", "log_normal_", "bernoulli_", "rrelu", "rrelu_", "rand_like", "randn_like", "randint_like",
        "view_as_real", "view_as_complex", "fill_diagonal_"}  # fmt: skip


def _names() -> set[str]:
    """Return the names of all operations that PyTorch says are pointwise, and of those that it decomposes into them."""
    found = set(_OTHERS)
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten" and not name.startswith("_") and "backward" not in name:
            overload = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default", None)
            if overload is not None and torch.Tag.pointwise in overload.tags:
                found.add(name)
    return found - _NOT


def elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an operation to the rows of all operands."""
    name = name_of(func)
    values = [*args, *kwargs.values()]
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    reference = _reference(tensors)
    if reference is None:  # the only divided operand has one row, which is broadcast
        return func(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})
    dim = reference.dim_divided - reference.local.ndim
    in_place = _is_in_place(name, kwargs)
    target = args[0] if args else next(iter(kwargs.values()))
    if in_place and not isinstance(target, SequenceTensor):
        return func(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})
    if in_place and (target.rows is not reference.rows or target.dim_divided - target.local.ndim != dim):
        refuse(func, "changes a tensor in place that is divided in another way than what it is changed by")
    if name in ("type_as", "to", "copy_") and not isinstance(target, SequenceTensor):
        return func(target, *map(whole, args[1:]), **kwargs)
    if name == "to":  # the other tensor says the type and the device only
        other = [each.local if isinstance(each, SequenceTensor) else each for each in args[1:]]
        return wrap_all(func(reference.local, *other, **kwargs), reference, dim)
    result = func(
        *(align(each, reference, dim) for each in args),
        **{key: align(each, reference, dim) for key, each in kwargs.items()},
    )
    if in_place:
        assert isinstance(target, SequenceTensor)
        if target.local.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                target.requires_grad_()
        return target
    if target is reference and result is reference.local:  # contiguous(), to(): nothing was to be done
        return reference
    return wrap_all(result, reference, dim)


def _is_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("inplace"):
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")
    return name.endswith("_")


def _reference(tensors: list[torch.Tensor]) -> SequenceTensor | None:
    """Return the divided operand whose division the result has: all of its rows, not one that is broadcast."""
    found: SequenceTensor | None = None
    for each in tensors:
        own = divided(each)
        if own is not None and (found is None or own.rows.size > found.rows.size):
            found = own
    assert found is not None, "else nothing would have been intercepted"
    if found.rows.size == 1:
        dim = found.dim_divided - found.local.ndim
        if any(each.ndim >= -dim and each.shape[dim] > 1 for each in tensors):
            return None
    return found


for _name in _names():
    RULES.setdefault(_name, elementwise)  # an existing rule is kept, in whatever order modules are imported


@rule("expand_as", "view_as", "reshape_as", "resize_as_")
def _as_another(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, other = args
    return getattr(tensor, name_of(func).removesuffix("_as"))(other.shape)


@rule("equal", "allclose")
def _compared(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*map(whole, args), **kwargs)
