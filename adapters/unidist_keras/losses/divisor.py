"""The number by which Keras divides the sum of a batch's losses: the weight of this rank's mean.

It is the number of samples, unless masks, `ignore_class` or sample weights decide what counts. Masks are known when the
loss is computed, so it is noted there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from unidist_keras.losses.masks import mask_of

__all__ = ["LossDivisor"]

_MEAN, _WEIGHTED, _SUM = "sum_over_batch_size", "mean_with_sample_weight", "sum"

_ADDS_UP = (
    "the loss is a sum (reduction='sum'), of which the ranks' mean is taken: it is that of one process divided by the "
    "number of ranks. Use reduction='sum_over_batch_size'; or, for fit and loops of your own, distribute(op=ud.Sum)"
)
_DIFFER = (
    "the losses of this model are divided by different numbers (masks, ignore_class, sample weights, sums), and a "
    "rank's loss has one weight, the number of its samples: losses and gradients are not those of one process. Use "
    "reduction='sum_over_batch_size' for all, without masks, and sample weights of 0 for what does not count"
)


class LossDivisor:
    """The divisor of the losses that are computed in the block of `noted_in`.

    Args:
        losses: what a model was compiled with, in any structure, or one loss; None: unknown.
        sample_weight: as a train step takes it, or None.

    Attributes:
        value: a scalar; None: the number of samples.
        problem: why the ranks' mean is not that of one process, whatever a rank's weight; "": it is.
    """

    def __init__(self, losses: Any, sample_weight: Any = None) -> None:
        given = [] if losses is None else [each for each in keras.tree.flatten(losses) if each is not None]
        objects = {id(each): each for each in given if isinstance(each, keras.losses.Loss)}
        self._losses = list(objects.values())
        self._reductions = {_reduction_of(each) for each in given}
        self.value: Any = None
        self.problem = ""
        self._settle([], [], sample_weight)

    @contextmanager
    def noted_in(self, compiled: Any) -> Iterator[None]:
        """Note the divisor when a compiled loss of Keras is called in the block.

        Args:
            compiled: `model._compile_loss`, whose `call` takes targets, outputs and sample weights, or None.
        """
        if compiled is None:
            yield
            return

        def call(plain: Callable[..., Any], y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            with self._masks_of_values() as masks:
                loss = plain(y_true, y_pred, sample_weight)
            self._settle([mask_of(each) for each in keras.tree.flatten(y_pred)], masks, sample_weight)
            return loss

        with _replaced(compiled, call):
            yield

    def noting(self, loss_fn: Callable[[Any, Any], Any], targets: Any, outputs: Any) -> Any:
        """Return what a loss function returns, and note its divisor."""
        with self._masks_of_values() as masks:
            loss = loss_fn(targets, outputs)
        if self._losses:  # another function knows nothing of masks
            self._settle([mask_of(each) for each in keras.tree.flatten(outputs)], masks, None)
        return loss

    @contextmanager
    def _masks_of_values(self) -> Iterator[list[Any]]:
        """Yield a list of the masks that losses give their values in the block, as `ignore_class` does."""
        found: list[Any] = []

        def call(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
            values = plain(*args, **options)
            found.append(mask_of(values))
            return values

        with ExitStack() as stack:
            for each in self._losses:
                stack.enter_context(_replaced(each, call))
            yield found

    def _settle(self, of_outputs: Sequence[Any], of_values: Sequence[Any], sample_weight: Any) -> None:
        weights = _distinct(keras.tree.flatten(sample_weight)) if _WEIGHTED in self._reductions else []
        masks = _distinct([*of_outputs, *of_values]) if self._reductions & {_MEAN, _WEIGHTED} else []
        kinds = self._reductions if weights else {_MEAN if each == _WEIGHTED else each for each in self._reductions}
        several = max(len(of_outputs), len(of_values)) > 1
        equally_masked = len({id(each) for each in of_outputs}) == 1 and not _distinct(of_values)
        self.value, self.problem = None, ""
        if kinds == {_SUM}:
            self.value, self.problem = 1, _ADDS_UP
        elif len(kinds) > 1 or len(weights) > 1 or (several and masks and not equally_masked):
            self.problem = _DIFFER
        else:
            self.value = _sum_of(weights, masks)


def _reduction_of(loss: Any) -> str:
    reduction = loss.reduction if isinstance(loss, keras.losses.Loss) else _MEAN  # as Keras makes of a function
    return _MEAN if reduction == "mean" else str(reduction)


def _distinct(found: Iterable[Any]) -> list[Any]:
    return list({id(each): each for each in found if each is not None}.values())


def _sum_of(weights: Sequence[Any], masks: Sequence[Any]) -> Any:
    """Return the sum of the product of weights and masks; None if there are none: all samples count, and equally."""
    ops, total = keras.ops, None
    is_wide = any(keras.backend.standardize_dtype(each.dtype) == "float64" for each in weights)
    dtype = "float64" if is_wide else "float32"
    for each in [*weights, *masks]:
        factor = ops.cast(each, dtype)
        if total is not None and len(total.shape) == len(factor.shape) + 1 and total.shape[-1] == 1:
            total = ops.squeeze(total, -1)
        elif total is not None and len(factor.shape) == len(total.shape) + 1 and factor.shape[-1] == 1:
            factor = ops.squeeze(factor, -1)
        total = factor if total is None else total * factor
    return None if total is None else ops.sum(total)


@contextmanager
def _replaced(owner: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Let `owner.call` be another function within the block, which gets the one of before as its first argument."""
    before = vars(owner).get("call")
    plain = owner.call
    owner.call = lambda *args, **options: call(plain, *args, **options)
    try:
        yield
    finally:
        if before is None:
            del owner.call
        else:
            owner.call = before
