"""A process that forks children which save in a loop, and kills them at random moments; `test_killed.py` runs it.

    python checkpoint_killing.py FOLDER MODE KILLS SEED

Imports no framework and no numpy, so that a fork costs a millisecond. Prints, per kill, how many saves the child had
completed, and which one was loaded afterwards (-1: none, which is allowed only if none was complete).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from unidist.buffer import Buffer, DType
from unidist.checkpoint.format import directory
from unidist.checkpoint.format.interface import MemoryState
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece
from unidist.checkpoint.format.reader import Checkpoint
from unidist.checkpoint.save_request import SaveOptions
from unidist.checkpoint.saving import Saver
from unidist.engines.single import SingleCommunicator

SIZES = {"a": 3000, "b": 1, "c": 700}


def save_for_ever(path: Path, mode: str, first: int, pipe: int) -> None:
    """Save tensors that are full of the number of the save; say on the pipe when one is complete."""
    saver = Saver(SingleCommunicator(), {})
    number = first
    while True:
        held = []
        for name, count in SIZES.items():
            memory = Buffer.allocate(count, DType.INT64)
            memory.bytes().cast("q")[:] = memoryview(bytearray(number.to_bytes(8, "little") * count)).cast("q")
            held.append(Piece.whole(name, (count,), memory))
        step, keep = (number, 2) if mode == "series" else (None, None)
        options = SaveOptions(path, step, keep, asynchronous=mode == "asynchronous")
        state = {"model": MemoryState(held, {"number": number})}
        handle = saver.save(options, lambda made=state: made, {})  # type: ignore[misc]  # a default binds it
        handle.wait()
        os.write(pipe, number.to_bytes(8, "little"))
        number += 1


def load(path: Path) -> int:
    """Return the number of the save that is there, or -1; fail if it is not whole."""
    try:
        folder = directory.find(path)
    except Exception:
        return -1
    with Checkpoint(folder) as checkpoint:
        section = checkpoint.section("model")
        number: int = section.values["number"]
        for name, count in SIZES.items():
            memory = Buffer.allocate(count, DType.INT64)
            section.read(name, Part.whole((count,)), memory)
            assert set(memory.bytes().cast("q")) == {number}, (name, number)
    return number


def main() -> None:
    """Fork, kill, load; again and again."""
    path, mode, kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    chance = random.Random(seed)
    first, longest = 0, 0.05
    for _ in range(kills):
        read_end, write_end = os.pipe()
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            save_for_ever(path, mode, first, write_end)
        os.close(write_end)
        # Not before the first save of this child, but for a few of them; then anywhere within about two saves.
        complete = first - 1
        if chance.random() < 0.8:
            complete = int.from_bytes(os.read(read_end, 8), "little")
            longest = 0.5 * longest + 0.5 * (time.monotonic() - started)
        time.sleep(chance.random() * 2 * longest)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while said := os.read(read_end, 8):
            complete = int.from_bytes(said, "little")
        os.close(read_end)
        found = load(path)
        print(complete, found, flush=True)
        first = max(complete, found) + 1


if __name__ == "__main__":
    main()
