"""Scaled reductions give the numbers that Horovod itself gives, in the same processes."""

from __future__ import annotations

import pytest
from part_pools import PartPools

from unidist.settings.environment import set_variables

pytestmark = pytest.mark.parallel


def test_scaled_reductions_are_those_of_horovod(rank_pools: PartPools) -> None:
    def on_rank() -> None:
        import horovod.torch as real
        import torch

        import unidist.torch as ud

        tops = {torch.float16: 60000.0, torch.float32: 3e38, torch.float64: 1.7e308}
        expected = {}
        for engine in ("horovod", "shm"):  # Horovod's numbers first, while it runs
            with set_variables({"UNIDIST_ENGINE": engine}):
                ud.init()
            for dtype in (torch.int32, torch.int64, *tops):
                values = torch.tensor([3, 5, 7, 100, 0, 1, -3, -5, -100]).to(dtype)
                values = values + ud.rank() * (values.abs() < 50).to(dtype)
                if dtype.is_floating_point:
                    values = torch.cat([values, torch.tensor([-3.1, tops[dtype], 1e-3], dtype=dtype)])
                for op, theirs in ((ud.Sum, real.Sum), (ud.Average, real.Average), (ud.Max, real.Max)):
                    for prescale, postscale in ((0.5, 1.0), (0.3, 1.0), (0.25, 2.0)):
                        for function in ("allreduce", "reducescatter")[: 1 if op is ud.Max else 2]:
                            name = f"{function} {dtype} {op.name} {prescale} {postscale}"
                            scaling = {"prescale_factor": prescale, "postscale_factor": postscale}
                            if engine == "horovod":
                                expected[name] = getattr(real, function)(values, name=name, op=theirs, **scaling)
                            result = getattr(ud, function)(values, name=f"our {name}", op=op, **scaling)
                            # shm rounds once where Horovod rounds after the sum, too.
                            rounding = 2**-10 if dtype is torch.float16 and engine == "shm" else 0
                            torch.testing.assert_close(
                                result, expected[name], rtol=rounding, atol=rounding / 100, msg=f"{engine} {name}"
                            )
            ud.shutdown()

    rank_pools.get(2).run(on_rank)
