"""The masks of an attention of Keras whose queries are some tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from unidist_context_parallel._keras.attention.axis import KerasAxis
from unidist_context_parallel.attention.blocks import Mask


@dataclass(frozen=True)
class SequenceMask:
    """In place of the mask that Keras makes of its parts.

    Args:
        axis: the ranks.
        tokens: of the sequence of the queries.
        whole_keys: keys and values are those of all tokens, of this or another sequence.
        queries: None, or `(batch, tokens of this rank)`.
        keys: each `(batch, tokens of this rank)`, or of all tokens with `whole_keys`.
        causal: a query sees keys up to its own position.
        window: if given, a query sees keys at a smaller distance alone.
        pairs: None, or `(batch, [heads,] queries, all keys)`, with all queries, this rank's, or one.
    """

    axis: KerasAxis
    tokens: int
    whole_keys: bool
    queries: tf.Tensor | None
    keys: Sequence[tf.Tensor]
    causal: bool
    window: int | None
    pairs: tf.Tensor | None

    def of_rows(self, num_keys: int) -> tf.Tensor | None:
        """Return the mask of this rank's queries and all keys, `(batch or 1, heads or 1, queries, keys)`; or None."""
        places = self.axis.layout(self.tokens).positions(self.axis.rank)
        queries = None if self.queries is None else tf.cast(self.queries, tf.bool)
        return _together(queries, self.gathered_keys(), self._by_place(places, num_keys), self.own_pairs())

    def of_all(self) -> tf.Tensor | None:
        """Return the mask of all queries and keys, `(batch or 1, heads or 1, tokens, tokens)`; or None. Collective."""
        queries = None
        if self.queries is not None:
            queries = self.axis.gather(tf.cast(self.queries, tf.bool), self.tokens)
        pairs = self.pairs
        if pairs is not None:
            pairs = _four_dims(tf.cast(pairs, tf.bool))
            if pairs.shape[2] not in (1, self.tokens):  # an operation of the graph had this rank's rows
                rows = self.axis.gather(tf.einsum("bhts->bths", tf.cast(pairs, tf.uint8)), self.tokens)
                pairs = tf.cast(tf.einsum("bths->bhts", rows), tf.bool)
        return _together(queries, self.gathered_keys(), self._by_place(np.arange(self.tokens), self.tokens), pairs)

    def of_blocks(self, heads: int) -> Mask | None:
        """Return what hides keys besides their places, for the ring; None: nothing does. Collective.

        Args:
            heads: of keys.
        """
        queries, keys, pairs = self.queries, self.gathered_keys(), self.own_pairs()
        if queries is None and keys is None and pairs is None:
            return None
        if pairs is not None:
            if pairs.shape[1] == 1:
                pairs = pairs[:, :, None]
            else:
                sizes = tf.shape(pairs)
                shape = [sizes[0], heads, pairs.shape[1] // heads, sizes[2], sizes[3]]
                known = pairs.shape
                pairs = tf.ensure_shape(tf.reshape(pairs, shape), [known[0], heads, shape[2], known[2], known[3]])
        return Mask(
            None if queries is None else tf.cast(queries, tf.bool)[:, None, None, :, None],
            None if keys is None else keys[:, None, None, None, :],
            pairs,
        )

    def gathered_keys(self) -> tf.Tensor | None:
        """Return which keys are seen at all, `(batch, all keys)`; or None. Collective."""
        found = None
        for each in self.keys:
            own = tf.cast(each, tf.bool)
            found = own if found is None else tf.logical_and(found, own)
        return found if found is None or self.whole_keys else self.axis.gather(found, self.tokens)

    def own_pairs(self) -> tf.Tensor | None:
        """Return the rows of this rank's queries, `(batch, heads or 1, queries or 1, all keys)`; or None."""
        if self.pairs is None:
            return None
        whole = _four_dims(tf.cast(self.pairs, tf.bool))
        rows = whole.shape[2] == self.tokens and self.tokens > 1
        return self.axis.take(whole, self.tokens, dim=2) if rows else whole

    def _by_place(self, queries: Any, num_keys: int) -> tf.Tensor | None:
        """Return what places alone say, `(queries, keys)`; or None."""
        if not self.causal and self.window is None:
            return None
        rows, columns = tf.constant(np.asarray(queries))[:, None], tf.range(num_keys, dtype=tf.int64)[None, :]
        seen = columns <= rows if self.causal else tf.ones([len(queries), num_keys], tf.bool)
        return seen if self.window is None else tf.logical_and(seen, tf.abs(rows - columns) < self.window)


def _together(
    queries: tf.Tensor | None, keys: tf.Tensor | None, places: tf.Tensor | None, pairs: tf.Tensor | None
) -> tf.Tensor | None:
    terms = [
        None if queries is None else queries[:, None, :, None],
        None if keys is None else keys[:, None, None, :],
        None if places is None else places[None, None],
        pairs,
    ]
    found = None
    for term in terms:
        if term is not None:
            found = term if found is None else tf.logical_and(found, term)
    return found


def _four_dims(mask: tf.Tensor) -> tf.Tensor:
    """Return a mask with a dim of heads, as Keras adds it: `(batch, queries, keys)` becomes `(batch, 1, ...)`."""
    while len(mask.shape) < 4:
        mask = tf.expand_dims(mask, -3)
    return mask
