"""Batches as trees and arrays, and the memory that they travel in."""

from __future__ import annotations

import gc
import json
import os
from typing import Any

import numpy as np
import pytest

from unidist.errors import UsageError
from unidist_data_service.transport import (
    MappedRegions,
    Regions,
    can_map,
    flatten,
    layout,
    numpy_array,
    unflatten,
)


def through_bytes(batch: Any) -> Any:
    tree, leaves = flatten(batch)
    infos = [leaf.info for leaf in leaves]
    offsets, size = layout(infos)
    memory = bytearray(size)
    for leaf, offset in zip(leaves, offsets, strict=True):
        memory[offset : offset + leaf.info.nbytes] = leaf.data
    arrays = [numpy_array(info, memory, offset) for info, offset in zip(infos, offsets, strict=True)]
    return unflatten(json.loads(json.dumps(tree)), arrays)


def test_a_batch_comes_back_as_it_was() -> None:
    batch = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "more": [np.float64(2.5), (np.zeros((0, 4), np.int8), np.array(True))],
        "plain": [1, 2.5, None, "text", True, b"bytes"],
    }
    found = through_bytes(batch)
    assert (found["x"] == batch["x"]).all()
    assert found["x"].dtype == np.float32
    number, (empty, flag) = found["more"]
    assert (number, number.dtype, empty.shape, empty.dtype, bool(flag)) == (2.5, np.float64, (0, 4), np.int8, True)
    assert found["plain"] == batch["plain"]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": [{1, 2}]}, r"the batch\['a'\]\[0\] is a builtins.set"),
        ({3: 1}, "keys of dicts have to be text"),
        ([np.array(["text"])], r"the batch\[0\] is a numpy.ndarray"),
        ([np.array([object()])], r"the batch\[0\] is a numpy.ndarray"),
    ],
)
def test_what_cannot_be_sent_is_named(batch: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        flatten(batch)


def test_nothing_is_read_from_the_pipe_of_another_process() -> None:
    read_end, write_end = os.pipe()
    try:
        assert not can_map(f"/proc/self/fd/{read_end}", b"x" * 16)  # empty: it does not wait either
        os.write(write_end, b"x" * 16)
        assert not can_map(f"/proc/self/fd/{read_end}", b"x" * 16)
        assert os.read(read_end, 16) == b"x" * 16
    finally:
        os.close(read_end)
        os.close(write_end)


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    regions, mapped = Regions(), MappedRegions()
    try:
        assert can_map(regions.token_path, regions.token)
        assert not can_map(regions.token_path, b"x" * 16)
        numbers = []
        for value in range(4):
            regions.free(mapped.take_freed())
            region = regions.take(100)
            numbers.append(region.number)
            region.write(0, memoryview(bytes([value] * 100)))
            buffer = mapped.view(region.number, f"/proc/self/fd/{region.fd}", region.size, 100)
            array = np.frombuffer(buffer, np.uint8)[5:]
            assert (array == value).all()
            if value == 1:
                kept = array
            del buffer, array
            gc.collect()
        assert numbers == [0, 0, 1, 1]
        assert (kept == 1).all(), "the script still has it"
    finally:
        del kept
        regions.close()
