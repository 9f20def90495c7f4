"""What a Horovod script calls, on every engine: grouped operations, process sets, join, Adasum, gradients."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Collection

import pytest
import torch
from _training import runtime

import unidist.torch as hvd
from unidist.errors import ConfigurationError, MismatchError, UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.runtime import context

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel
has_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed; unidist build horovod"
)


def on_engines(*names: str, soak: Collection[str] = ()) -> list[object]:
    """Return the parameters "engine-ranks" with their marks; `soak` are those that the others make unlikely to fail."""

    def marks(name: str) -> list[pytest.MarkDecorator]:
        return [has_horovod] * name.startswith("horovod") + [pytest.mark.soak] * (name in soak)

    return [pytest.param(name, marks=marks(name)) for name in (*names, *soak)]


@pytest.fixture(params=on_engines("single-1", "shm-3", "gloo-2", "horovod-3", soak=("shm-2", "shm-4", "horovod-2")))
def ranks(request: pytest.FixtureRequest, pool: Pool) -> RankPool:
    engine, size = request.param.split("-")
    return pool(int(size), engine)


@pytest.fixture(params=on_engines("shm-4", "horovod-4", soak=("gloo-4",)))
def four_ranks(request: pytest.FixtureRequest, pool: Pool) -> RankPool:
    engine, size = request.param.split("-")
    return pool(int(size), engine)


@pytest.fixture(params=on_engines("shm-3", "horovod-3", soak=("gloo-3",)))
def three_ranks(request: pytest.FixtureRequest, pool: Pool) -> RankPool:
    engine, size = request.param.split("-")
    return pool(int(size), engine)


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a tensor that every rank can compute for every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def everyone(*shape: int) -> list[torch.Tensor]:
    return [values(rank, *shape) for rank in range(hvd.size())]


def test_grouped_reductions_are_those_of_the_single_ones(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank, size = hvd.rank(), hvd.size()
            mine = [values(rank, 3), values(rank, 2, 2), values(rank, 7)]
            sums = [sum(everyone(*tensor.shape)) for tensor in mine]
            for result, total in zip(hvd.grouped_allreduce(mine, name="a"), sums, strict=True):
                torch.testing.assert_close(result, total / size)
            for result, total in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), sums, strict=True):
                torch.testing.assert_close(result, total)
            handle = hvd.grouped_allreduce_async([tensor.clone() for tensor in mine], op=hvd.Sum)
            results = hvd.synchronize(handle)
            assert hvd.poll(handle)
            torch.testing.assert_close(results, sums)
            in_place = [tensor.clone() for tensor in mine]
            returned = hvd.grouped_allreduce_(in_place, op=hvd.Sum, prescale_factor=0.5)
            assert all(a is b for a, b in zip(returned, in_place, strict=True))
            torch.testing.assert_close(in_place, [total / 2 for total in sums])

    ranks.run(on_rank)


def test_grouped_gathers_and_reducescatters_with_uneven_rows(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank, size = hvd.rank(), hvd.size()
            gathered = hvd.grouped_allgather([values(rank, rank + 1, 2), values(rank, 0 if rank else 3)])
            torch.testing.assert_close(gathered[0], torch.cat([values(r, r + 1, 2) for r in range(size)]))
            torch.testing.assert_close(gathered[1], values(0, 3))
            for rows in (0, 1, size, 2 * size + 1):
                mine = [values(rank, rows, 2), values(rank, rows)]
                results = hvd.grouped_reducescatter(mine, op=hvd.Sum)
                for tensor, result in zip(mine, results, strict=True):
                    total = sum(everyone(*tensor.shape))
                    torch.testing.assert_close(result, torch.tensor_split(total, size)[rank])

    ranks.run(on_rank)


def test_alltoall_with_splits_says_how_many_rows_came_from_whom(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank, size = hvd.rank(), hvd.size()
            splits = [(rank + other) % 3 for other in range(size)]
            source = torch.full((sum(splits), 2), float(rank))
            wanted = torch.cat([torch.full(((other + rank) % 3, 2), float(other)) for other in range(size)])
            for result, received in (
                hvd.alltoall(source, torch.tensor(splits)),
                hvd.synchronize(hvd.alltoall_async(source, splits, name="x")),
            ):
                assert torch.equal(result, wanted)
                assert received.tolist() == [(other + rank) % 3 for other in range(size)]
                assert received.dtype is torch.int32

    ranks.run(on_rank)


def test_compression_reduces_in_sixteen_bits_and_returns_the_type_given(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            for compression, tolerance in ((hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2)):
                mine = values(hvd.rank(), 50, dtype=torch.float32)
                wanted = (sum(everyone(50)) / hvd.size()).float()
                for result in (
                    hvd.allreduce(mine, compression=compression),
                    hvd.grouped_allreduce([mine], compression=compression)[0],
                ):
                    assert result.dtype is torch.float32
                    torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)
                    assert not torch.equal(result, wanted)  # or it was not compressed
                whole = torch.arange(4)
                assert hvd.allreduce(whole, compression=compression, op=hvd.Sum).dtype is torch.int64

    ranks.run(on_rank)


def test_a_sparse_tensor_is_summed_or_averaged(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank, size = hvd.rank(), hvd.size()
            mine = torch.sparse_coo_tensor([[rank, 3]], values(rank, 2, 2), (size + 4, 2))
            total = sum(
                torch.sparse_coo_tensor([[r, 3]], values(r, 2, 2), (size + 4, 2)).to_dense() for r in range(size)
            )
            handle = hvd.sparse_allreduce_async(mine, name="s", op=hvd.Sum)
            torch.testing.assert_close(handle().to_dense(), total)
            handle = hvd.sparse_allreduce_async(mine, name="s", op=hvd.Average)
            torch.testing.assert_close(hvd.synchronize(handle).to_dense(), total / size)

    ranks.run(on_rank)


# Gradients: against autograd over the concatenated computation, times what Horovod's rules say.


def test_gradients_flow_through_reductions(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank, size = hvd.rank(), hvd.size()
            weight = values(100 + rank, 4)
            weights = [values(100 + r, 4) for r in range(size)]
            for op, factor in ((hvd.Sum, 1), (hvd.Average, 1 / size)):
                x = values(rank, 4).requires_grad_()
                (hvd.allreduce(x, op=op, prescale_factor=2.0) * weight).sum().backward()
                torch.testing.assert_close(x.grad, 2.0 * factor * sum(weights))
                many = [values(rank, 4).requires_grad_(), values(rank, 4).requires_grad_()]
                outputs = hvd.grouped_allreduce(many, op=op)
                (outputs[0] * weight + outputs[1] * 3 * weight).sum().backward()
                torch.testing.assert_close(many[0].grad, factor * sum(weights))
                torch.testing.assert_close(many[1].grad, 3 * factor * sum(weights))

    ranks.run(on_rank)


def test_gradients_flow_through_movements(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank, size = hvd.rank(), hvd.size()
            # all-gather: the mean over the ranks of the gradient of this rank's rows, as Horovod has it
            x = values(rank, rank + 1, 2).requires_grad_()
            scale = torch.arange(1.0, 1 + size * (size + 1) // 2, dtype=torch.float64)[:, None] * (rank + 1)
            (hvd.allgather(x) * scale).sum().backward()
            start = rank * (rank + 1) // 2
            mean = sum(r + 1 for r in range(size)) / size
            wanted = torch.arange(1.0 + start, 2.0 + start + rank, dtype=torch.float64)[:, None] * mean
            torch.testing.assert_close(x.grad, wanted.expand(-1, 2))
            # broadcast: the mean of the gradients goes to the root
            x = values(rank, 3).requires_grad_()
            root = size - 1
            (hvd.broadcast(x, root) * (rank + 1.0)).sum().backward()
            torch.testing.assert_close(x.grad, torch.full((3,), mean if rank == root else 0.0, dtype=torch.float64))
            # reduce-scatter: the gradients of all ranks' rows, gathered (times the ranks for Sum)
            for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
                x = values(rank, size + 1).requires_grad_()
                (hvd.reducescatter(x, op=op) * (rank + 1.0)).sum().backward()
                rows = [len(part) for part in torch.tensor_split(torch.empty(size + 1), size)]
                owner = torch.cat([torch.full((n,), r + 1.0) for r, n in enumerate(rows)])
                torch.testing.assert_close(x.grad, factor * owner.double())
            # all-to-all: what was sent to a rank comes back from it
            x = values(rank, size, 2).requires_grad_()
            output, _ = hvd.alltoall(x, [1] * size)
            (output * (rank + 1.0)).sum().backward()
            torch.testing.assert_close(x.grad, torch.arange(1.0, 1 + size).double()[:, None].expand(-1, 2))
            # grouped all-gather and reduce-scatter, once each
            x = values(rank, 2).requires_grad_()
            hvd.grouped_allgather([x])[0].sum().backward()
            torch.testing.assert_close(x.grad, torch.ones(2).double())
            x = values(rank, size).requires_grad_()
            hvd.grouped_reducescatter([x])[0].sum().backward()
            torch.testing.assert_close(x.grad, torch.ones(size).double())

    ranks.run(on_rank)


def test_no_gradient_is_kept_where_none_is_wanted(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            x = torch.ones(2, requires_grad=True)
            with torch.no_grad():
                assert not hvd.allreduce(x).requires_grad
            assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad
            assert hvd.allreduce(x).requires_grad

    ranks.run(on_rank)


# Process sets


def test_a_process_set_runs_every_operation_over_its_ranks(four_ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank = hvd.rank()
            odd = hvd.add_process_set([3, 1])
            even = hvd.add_process_set(hvd.ProcessSet([0, 2]))
            assert odd.ranks == [1, 3]
            assert odd.process_set_id != even.process_set_id
            mine = odd if rank % 2 else even
            assert mine.included()
            assert mine.size() == 2
            assert mine.rank() == rank // 2
            assert not (even if rank % 2 else odd).included()
            own = [values(r, 4) for r in mine.ranks]
            x = values(rank, 4)
            torch.testing.assert_close(hvd.allreduce(x, process_set=mine), sum(own) / 2)
            torch.testing.assert_close(hvd.allreduce(x, name="same", op=hvd.Sum, process_set=mine), sum(own))
            torch.testing.assert_close(hvd.grouped_allreduce([x], op=hvd.Sum, process_set=mine)[0], sum(own))
            torch.testing.assert_close(hvd.allgather(x, process_set=mine), torch.cat(own))
            torch.testing.assert_close(hvd.broadcast(x, mine.ranks[1], process_set=mine), own[1])
            half = torch.tensor_split(sum(own), 2)[mine.rank()]
            torch.testing.assert_close(hvd.reducescatter(x, op=hvd.Sum, process_set=mine), half)
            swapped = hvd.alltoall(x, process_set=mine)
            torch.testing.assert_close(swapped, torch.cat([each.chunk(2)[mine.rank()] for each in own]))
            assert hvd.broadcast_object(rank, mine.ranks[0], process_set=mine) == mine.ranks[0]
            assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
            hvd.barrier(process_set=mine)
            y = x.clone().requires_grad_()
            (hvd.allreduce(y, op=hvd.Sum, process_set=mine) * (rank + 1.0)).sum().backward()
            torch.testing.assert_close(y.grad, torch.full((4,), sum(r + 1.0 for r in mine.ranks)).double())
            # the global set goes on beside it
            torch.testing.assert_close(hvd.allreduce(x, name="same", op=hvd.Sum), sum(everyone(4)))

    four_ranks.run(on_rank)


def test_process_sets_are_registered_once_and_can_be_removed(three_ranks: RankPool) -> None:
    def on_rank() -> None:
        hvd.init(process_sets=[[0, 1], hvd.ProcessSet([2])])
        try:
            with pytest.raises(ValueError, match=r"\[0, 1\].*already"):
                hvd.add_process_set([1, 0])
            with pytest.raises(ValueError, match="already"):
                hvd.add_process_set([0, 1, 2])
            with pytest.raises(ValueError, match="ranks 0 to 2"):
                hvd.add_process_set([0, 7])
            with pytest.raises(MismatchError, match="different process sets"):
                hvd.add_process_set([0, hvd.rank()] if hvd.rank() else [0])
            pair = hvd.add_process_set([0, 2])
            if hvd.rank() == 1:
                with pytest.raises(UsageError, match="does not belong"):
                    hvd.allreduce(torch.ones(1), process_set=pair)
                with pytest.raises(ValueError, match="does not belong"):
                    pair.rank()
            assert hvd.remove_process_set(pair)
            assert pair.process_set_id is None
            assert pair.size() is None
            assert not hvd.remove_process_set(pair)
            assert not hvd.remove_process_set(hvd.global_process_set)
            with pytest.raises(UsageError, match="not registered"):
                hvd.allreduce(torch.ones(1), process_set=pair)
            again = hvd.add_process_set([0, 2])
            assert again.process_set_id is not None
            assert hvd.global_process_set.ranks == [0, 1, 2]
            assert hvd.global_process_set.size() == 3
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
            assert total.item() == 3
        finally:
            hvd.shutdown()
        assert again.process_set_id is None

    three_ranks.run(on_rank)


# Join


def test_ranks_that_have_run_out_of_data_join(three_ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank = hvd.rank()
            for step in range(2 * rank):
                active = sum(2 * other > step for other in range(3))
                x = torch.full((5,), 3.0)
                assert hvd.allreduce(x, name=f"loss.{step}").tolist() == [float(active)] * 5
                assert hvd.allreduce(x, name="total", op=hvd.Sum).tolist() == [3.0 * active] * 5
            assert hvd.join() == 2
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3

    three_ranks.run(on_rank)


# Adasum


def test_adasum_combines_pairs_of_pairs(four_ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            level = everyone(9)
            while len(level) > 1:
                level = [
                    (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
                    for a, b in zip(level[::2], level[1::2], strict=True)
                ]
            for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
                x = values(hvd.rank(), 9, dtype=dtype)
                result = hvd.allreduce(x, op=hvd.Adasum)
                assert result.dtype is dtype
                torch.testing.assert_close(result.double(), level[0], rtol=tolerance, atol=tolerance)
                hvd.allreduce_(x, op=hvd.Adasum)
                assert torch.equal(x, result)

    four_ranks.run(on_rank)


def test_adasum_of_three_ranks_is_refused(three_ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime(), pytest.raises(NotImplementedError, match="power of 2"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)

    three_ranks.run(on_rank)


# Lifecycle and queries


def test_init_takes_all_ranks_and_no_fewer(pool: Pool) -> None:
    def on_rank() -> None:
        with pytest.raises(ConfigurationError, match="1 of the 2 ranks"):
            hvd.init([0])
        hvd.init(comm=[0, 1])
        assert hvd.is_homogeneous()
        hvd.init()  # again: nothing happens
        hvd.shutdown()

    pool(2, "shm").run(on_rank)


def test_queries_answer_for_the_engines_there_are(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            assert hvd.gloo_built() is True
            assert hvd.gloo_enabled() is (context.current().engine.spec.name == "gloo")
            assert hvd.mpi_enabled() is False
            assert hvd.ddl_built() is False
            assert hvd.ccl_built() is False
            assert hvd.cuda_built() is (torch.version.cuda is not None)
            assert isinstance(hvd.nccl_built(), int)
            with pytest.raises(ValueError, match="not over MPI"):
                hvd.mpi_threads_supported()

    ranks.run(on_rank)


def test_a_timeline_is_recorded_between_start_and_stop(pool: Pool, tmp_path: object) -> None:
    def on_rank(folder: str) -> None:
        with runtime():
            hvd.allreduce(torch.ones(1), name="before")
            hvd.start_timeline(f"{folder}/trace-%r.json", mark_cycles=True)
            with pytest.raises(UsageError, match="already"):
                hvd.start_timeline(f"{folder}/other-%r.json")
            hvd.allreduce(torch.ones(1), name="between")
            hvd.stop_timeline()
            hvd.allreduce(torch.ones(1), name="after")
            hvd.stop_timeline()
            with open(f"{folder}/trace-{hvd.rank()}.json") as file:
                text = file.read()
            assert "between" in text
            assert "CYCLE_START" in text
            assert "before" not in text
            assert "after" not in text

    pool(2, "shm").run(on_rank, (str(tmp_path),))


@has_horovod
def test_a_timeline_has_a_row_for_each_phase_of_a_step(pool: Pool, tmp_path: object) -> None:
    def on_rank(folder: str) -> None:
        import json

        import unidist.torch as ud

        def train(with_step: bool) -> list[str]:
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            x, y = torch.ones(8, 4), torch.ones(8, 1)
            path = f"{folder}/{with_step}-%r.json"
            if with_step:
                step = ud.TrainStep(model, optimizer, torch.nn.functional.mse_loss)
                ud.start_timeline(path)
                for _ in range(3):
                    step(x, y)
            else:
                model, optimizer = ud.distribute(model, optimizer)
                ud.start_timeline(path)
                for _ in range(3):
                    torch.nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            ud.stop_timeline()
            with open(path.replace("%r", str(ud.rank()))) as file:
                events = json.load(file)
            rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
            found = sorted((event["ts"], rows[event["tid"]]) for event in events if event["ph"] == "X")
            return [row for _, row in found if not row.startswith("exchange ")]

        with runtime():
            of_step, of_loop = train(True), train(False)
            assert of_loop.count("backward") == of_loop.count("step") == 3, of_loop
            assert of_step.count("forward") == of_step.count("backward") == of_step.count("step") == 3, of_step
            assert set(of_step) == {"forward", "backward", "exchange", "step"}
            assert of_step[:3] == ["forward", "exchange", "backward"]  # of the loss, between the passes
            assert "exchange" in of_step[3 : of_step.index("step")]

    pool(2, "shm").run(on_rank, (str(tmp_path),))


def test_every_function_of_horovod_has_its_parameters_here() -> None:
    original = pytest.importorskip("horovod.torch", exc_type=ImportError)

    missing = []
    for name in dir(original):
        theirs = getattr(original, name)
        if name.startswith("_") or not inspect.isfunction(theirs) or name in ("check_extension", "init", "shutdown"):
            continue
        ours = getattr(hvd, name, None)
        if ours is None:
            missing.append(name)
            continue
        wanted = list(inspect.signature(theirs).parameters.values())
        found = list(inspect.signature(ours).parameters.values())
        assert [p.name for p in found][: len(wanted)] == [p.name for p in wanted], name
        for parameter, other in zip(found, wanted, strict=False):
            optional = parameter.default is not inspect.Parameter.empty
            assert optional or other.default is inspect.Parameter.empty, f"{name}({parameter.name})"
    assert not missing
