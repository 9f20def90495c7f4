"""Sources in pieces over the shm engine: memory that cannot be read, and gradients that are left where they are."""

from __future__ import annotations

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("unidist.engines._shm")
pytestmark = pytest.mark.parallel


def test_memory_that_is_gone_ends_the_operation_on_every_rank(rank_pool: RankPoolFactory) -> None:
    def lend_what_is_gone() -> str:
        import mmap

        from unidist.buffer import Buffer, DType
        from unidist.communicator_capabilities import Piece, ReadsPieces
        from unidist.errors import PeerLostError
        from unidist.runtime import context

        runtime = context.init()
        try:
            world = runtime.new_communicator("data")
            assert isinstance(world, ReadsPieces)
            assert not world.pieces_obstacle()
            count = 1 << 20
            target = world.allocate(count).cast(DType.UINT8)
            piece = Buffer.allocate(count, DType.UINT8)
            if world.rank == 1:
                memory = mmap.mmap(-1, count)
                piece = Buffer(Buffer.of(memory).address, count // 2, DType.UINT8)  # rank 0's share, which it reads
                memory.close()
            with pytest.raises(PeerLostError) as caught:
                world.allreduce_pieces([Piece(0, piece)], target).wait()
            return str(caught.value)
        finally:
            context.shutdown()

    reader, owner = rank_pool(2).run(lend_what_is_gone)
    assert "memory of rank 1" in reader
    assert "cannot be read" in reader
    assert "memory of rank 1" in owner


@pytest.mark.parametrize("readable", [True, False])
def test_gradients_that_are_lent_are_added_up_as_those_in_buffers(rank_pool: RankPoolFactory, readable: bool) -> None:
    def exchange(readable: bool) -> None:
        from unittest import mock

        import numpy as np

        from unidist.buffer import Buffer, DType
        from unidist.engines import _host
        from unidist.gradients.allreduce import AllReduceExchange
        from unidist.gradients.buckets import ParameterInfo
        from unidist.runtime import context
        from unidist.testing.cases._arrays import array_of

        class HostFramework:
            def zero(self, buffer: Buffer) -> None:
                array_of(buffer)[:] = 0

        with mock.patch.object(_host, "can_read", return_value=readable):
            runtime = context.init()
        try:
            world = runtime.new_communicator("data")
            shapes = [(3000,), (50, 100), (7,), (100_000,)]
            parameters = [ParameterInfo(f"p{i}", shape, DType.FLOAT64) for i, shape in enumerate(shapes)]
            parameters.append(ParameterInfo("nobody's", (5000,), DType.FLOAT64))
            exchange = AllReduceExchange(parameters, framework=HostFramework(), host=world)  # type: ignore[arg-type]
            exchange.scale = 0.5
            gradients = [[np.random.default_rng((i, r)).normal(size=s) for i, s in enumerate(shapes)] for r in range(2)]
            for step in range(3):
                for index, gradient in enumerate(gradients[world.rank]):
                    if (index, world.rank, step) == (1, 1, 1):
                        continue  # missing on this rank
                    assert exchange.accepts_in_place(index) == readable
                    if readable and (index + step) % 3:
                        exchange.submit_in_place(index, Buffer.of(gradient.reshape(-1).copy()))
                    else:
                        array_of(exchange.buffer(index))[:] = gradient.reshape(-1)
                        exchange.ready(index)
                result = exchange.finish()
                assert result.present == (True, True, True, True, False)
                for index in range(len(shapes)):
                    found = array_of(exchange.buffer(index))
                    both = [gradients[r][index] for r in range(2) if (index, r, step) != (1, 1, 1)]
                    np.testing.assert_allclose(found, 0.5 * sum(both).reshape(-1), rtol=1e-14)
            exchange.close()
        finally:
            context.shutdown()

    rank_pool(2).run(exchange, (readable,))
