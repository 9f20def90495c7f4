"""PyTorch's wrappers around a distributed model, or within one, are refused before anything is trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from part_pools import PartOfPool

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("strategy", ["data", "tensor=2", "zero=2", "zero=3"])
def test_ddp_and_distribute_exclude_each_other(pool: Callable[..., PartOfPool], strategy: str) -> None:
    def on_rank() -> list[str]:
        import copy
        import io

        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DataParallel, DistributedDataParallel

        import unidist.torch as ud
        from unidist.errors import UsageError

        def network() -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))

        ud.init()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = network()
            model, _ = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
            messages = []
            module = torch.nn.Module()  # as a LightningModule has its network
            module.net = model
            for wrapper, each in (
                (DistributedDataParallel, model),
                (DistributedDataParallel, module),
                (DataParallel, module),
            ):
                with pytest.raises(UsageError) as caught:
                    wrapper(each)
                messages.append(str(caught.value))
            wrapped = DistributedDataParallel(network())
            holder = torch.nn.Module()
            holder.net = wrapped
            for each in (wrapped, holder):
                with pytest.raises(UsageError) as caught:
                    ud.distribute(each, torch.optim.SGD(each.parameters(), lr=0.1), strategy)
                messages.append(str(caught.value))
            if strategy == "data":  # what is copied or loaded is a plain model
                file = io.BytesIO()
                torch.save(model, file)
                file.seek(0)
                for plain in (copy.deepcopy(model), torch.load(file, weights_only=False)):
                    DistributedDataParallel(plain)
            return messages
        finally:
            dist.destroy_process_group()
            ud.shutdown()

    for messages in pool(2).run(on_rank):
        after, around, parallel, itself, within = messages
        assert after.startswith("the model is distributed by unidist, and now DistributedDataParallel wraps it as well")
        assert "take RANK, LOCAL_RANK and WORLD_SIZE out of os.environ" in after
        assert around.startswith("'net' of what DistributedDataParallel wraps is distributed by unidist. ")
        assert parallel.startswith("'net' of what DataParallel wraps is distributed by unidist. ")
        assert itself.startswith("the model is wrapped in DistributedDataParallel. ")
        assert within.startswith("'net' of the model is wrapped in DistributedDataParallel. ")
        assert not any("\n" in message for message in messages)


def test_a_model_may_be_collected_while_another_is_made() -> None:
    torch = pytest.importorskip("torch")
    from torch.nn.modules.module import register_module_module_registration_hook

    from unidist_torch.training.other_wrappers import refuse_wrapping

    distributed = [torch.nn.Linear(1, 1)]
    refuse_wrapping(distributed[0])
    # The collector may run in any hook, and PyTorch then goes on to the next one.
    handles = [register_module_module_registration_hook(lambda *_: distributed.clear()) for _ in range(2)]
    try:
        torch.nn.Sequential(torch.nn.Linear(1, 1))
    finally:
        for handle in handles:
            handle.remove()
    assert not distributed
