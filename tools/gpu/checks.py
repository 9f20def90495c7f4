"""One rank of a check: python -m tools.gpu.checks RESULT CHECK [ARGUMENT]..., started by the launcher.

Rank 0 writes what was found as JSON: a dict by what was looked at, each with "ok" where something can be wrong. Without
a GPU it runs on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl

import unidist.torch as ud
from tools.gpu.models import Network, batch, network, train

Found = dict[str, Any]

_DELAY_CYCLES = 3_000_000  # about 2 ms
_LIMITS = {torch.float64: 1e-9, torch.float32: 0.2}  # of errors; with precision=... parameters are rounded
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_PACKAGES = (
    "torch",
    "numpy",
    "jax",
    "jaxlib",
    "tensorflow",
    "keras",
    "triton",
    "pytest",
    "setuptools",
    "pluggy",
    "click",
)


def environment(device: torch.device) -> Found:
    """What is installed here."""
    found: Found = {"python": platform.python_version(), "libc": " ".join(platform.libc_ver())}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def equality(device: torch.device, *strategies: str, delay_cycles: int = 0) -> Found:
    """Every strategy gives the numbers of one process."""
    found: Found = {}
    for strategy in strategies:
        dtype = torch.float32 if "precision" in strategy else torch.float64
        try:
            expected = train(None, device, dtype, steps=6)
            trained = train(strategy, device, dtype, steps=6, delay_cycles=delay_cycles)
        except Exception as exc:
            traceback.print_exc()
            found[strategy] = {"ok": False, "raised": _text(exc)}
            if ud.size() > 1:
                break  # the ranks may be apart now
            continue
        error = max(float((one - other).abs().max()) for one, other in zip(trained, expected, strict=True))
        found[strategy] = {"ok": error < _LIMITS[dtype], "error": error}
    return found


def delayed(device: torch.device, *strategies: str) -> Found:
    """The same where gradients come late: a wait that is missing shows."""
    return equality(device, *strategies, delay_cycles=_DELAY_CYCLES if device.type == "cuda" else 0)


def context_ring(device: torch.device) -> Found:
    """Gradients of attention whose tokens are divided over the ranks."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            found: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
            return found

    torch.manual_seed(0)
    dtype, limit = (torch.bfloat16, 3e-2) if device.type == "cuda" else (torch.float64, 1e-9)
    model: Any = Attention().to(dtype).to(device)
    x = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    expected = torch.autograd.grad(model(x).float().square().mean(), list(model.parameters()))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = ud.distribute(model, optimizer, f"context={ud.size()}")
    model(x).float().square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    errors = [
        float((own.float() - whole.float()).norm() / whole.float().norm())
        for own, whole in zip(gradients, expected, strict=True)
    ]
    return {"gradients": {"ok": max(errors) < limit, "relative_errors": errors}}


def pipelines(device: torch.device, *schedules: str) -> Found:
    """Every schedule gives the losses of one process."""
    found: Found = {}
    for schedule in schedules:
        losses: list[list[float]] = []
        for strategy in (None, f"pipeline={ud.size()}:schedule={schedule}"):
            model = network(device, torch.float64, depth=8)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            step: Any = None
            if strategy is not None:
                step = ud.TrainStep(model, optimizer, torch.nn.functional.mse_loss, strategy)
            losses.append([])
            for number in range(6):
                x, y = batch(number, 8 * ud.size(), device, torch.float64)
                if step is None:
                    optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    optimizer.step()
                else:
                    loss = step(x, y)
                losses[-1].append(float(loss.detach()))
        error = max(abs(one - other) for one, other in zip(*losses, strict=True))
        found[schedule] = {"ok": error < _LIMITS[torch.float64], "error": error}
    return found


def killed(device: torch.device, folder: str) -> Found:
    """A rank is killed while the other waits for it in an exchange of an elastic job: the other goes on, how soon."""
    told = Path(folder, "killed.txt")
    if ud.rank() == 0:
        told.unlink(missing_ok=True)
    ud.barrier()
    model: Any = network(device, torch.float64)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = ud.distribute(model, optimizer)
    state: Any = ud.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    seconds: list[float] = []

    def loop(state: Any) -> None:
        while state.step < 12:
            if state.step == 5 and ud.size() == 2 and ud.rank() == 1:
                time.sleep(0.5)  # the other waits by then
                told.write_text(str(time.monotonic_ns()))
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = batch(state.step, 8, device, torch.float64)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            float(next(model.parameters()).sum())  # the step is complete
            if told.exists() and not seconds:
                seconds.append((time.monotonic_ns() - int(told.read_text())) / 1e9)
            state.step += 1
            state.commit()

    ud.elastic.run(loop)(state)
    return {"survivor": {"ok": bool(seconds) and state.step == 12, "seconds_to_next_step": seconds}}


def wrong_index(device: torch.device) -> Found:
    """An index out of range in an embedding raises the CUDA error, not PeerLostError."""
    model: Any = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8)).to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ud.distribute(model, optimizer)
    try:
        model(torch.tensor([3, 99], device=device)).sum().backward()
        optimizer.step()
        _wait(device)
    except Exception as exc:
        return {"error": {"ok": "PeerLost" not in type(exc).__name__, "raised": _text(exc)}}
    return {"error": {"ok": False, "raised": "nothing"}}


def steps(device: torch.device, width: str, depth: str, *sides: str) -> Found:
    """Milliseconds of a step, alone and in a row, of the host until it is queued; launches, host waits, peak memory."""
    found: Found = {}
    for side in sides:
        try:
            found[side] = _measured(_step_of(side, device, int(width), int(depth)), device)
        except Exception as exc:
            traceback.print_exc()
            found[side] = {"ok": False, "raised": _text(exc)}
            if ud.size() > 1:
                break
    return found


def overlap(device: torch.device, width: str, depth: str, side: str) -> Found:
    """How much of NCCL's time lies beside kernels of the backward pass."""
    if device.type != "cuda":
        return {}
    step = _step_of(side, device, int(width), int(depth))
    spans = _profiled(step, device, lambda event: str(event.device_type).endswith("CUDA"))
    exchanges = [span for name, *span in spans if "nccl" in name.lower()]
    kernels = [span for name, *span in spans if "nccl" not in name.lower()]
    total = sum(end - begin for begin, end in exchanges)
    beside = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in exchanges for b in kernels)
    return {side: {"operations": len(exchanges), "nccl_us": total, "beside_kernels_us": beside}}


def compiled(device: torch.device) -> Found:
    """A compiled model gives the same numbers; a whole step as a CUDA graph is replayed, or refused with a reason."""
    rows = 8 * ud.size()
    expected = train(None, device, torch.float64, steps=4)
    model: Any = network(device, torch.float64)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ud.distribute(model, optimizer)
    run = torch.compile(model, backend="inductor" if device.type == "cuda" else "aot_eager")
    own = slice(8 * ud.rank(), 8 * ud.rank() + 8)
    for step in range(4):
        x, y = batch(step, rows, device, torch.float64)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(run(x[own]), y[own]).backward()
        optimizer.step()
    errors = [
        float((parameter.detach().cpu() - whole).abs().max())
        for parameter, whole in zip(model.parameters(), expected, strict=True)
    ]
    found: Found = {"compiled": {"ok": max(errors) < 1e-9, "error": max(errors)}}
    if device.type == "cuda":
        found["graph"] = _graphed(device)
    return found


CHECKS: dict[str, Callable[..., Found]] = {
    each.__name__: each
    for each in (environment, equality, delayed, context_ring, pipelines, killed, wrong_index, steps, overlap, compiled)
}


def _graphed(device: torch.device) -> Found:
    model: Any = network(device, torch.float64)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    model, optimizer = ud.distribute(model, optimizer)
    x, y = batch(0, 8, device, torch.float64)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        _wait(device)
    except Exception as exc:
        return {"refused": _text(exc)}
    return {"replayed": True}


def _step_of(side: str, device: torch.device, width: int, depth: int) -> Callable[[], None]:
    """Return a step that a GPU is busy with, without a wait at its end.

    Args:
        side: a strategy of unidist, "DDP", "FSDP2", or "plain" for PyTorch alone.
        device: to train on.
        width: of the network.
        depth: likewise.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model: Any = Network(width, depth).to(dtype).to(device)
    if side in ("DDP", "FSDP2"):
        _make_group(device)
    if side == "DDP":
        devices = [device] if device.type == "cuda" else None
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    elif side == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if side not in ("plain", "DDP", "FSDP2"):
        model, optimizer = ud.distribute(model, optimizer, side)
    x, y = batch(0, 4096 if device.type == "cuda" else 64, device, dtype)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def _measured(step: Callable[[], None], device: torch.device) -> Found:
    for _ in range(5):
        step()
    _wait(device)
    queued, alone = [], []
    for _ in range(15):
        begin = time.perf_counter()
        step()
        queued.append(time.perf_counter() - begin)
        _wait(device)
        alone.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(20):
        step()
    _wait(device)
    found: Found = {
        "alone_ms": 1e3 * statistics.median(alone),
        "in_a_row_ms": 1e3 * (time.perf_counter() - begin) / 20,
        "host_ms": 1e3 * statistics.median(queued),
    }
    if device.type == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        names = [name for name, *_ in _profiled(step, device, lambda event: event.name in (*_WAITS, *_LAUNCHES))]
        found |= {
            "host_waits": sum(name in _WAITS for name in names),
            "launches": sum(name in _LAUNCHES for name in names),
        }
    return found


def _profiled(
    step: Callable[[], None], device: torch.device, wanted: Callable[[Any], bool]
) -> list[tuple[str, float, float]]:
    """Return name, begin and end in microseconds of the events of one step."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        step()
    _wait(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        _wait(device)
    return [
        (event.name, event.time_range.start, event.time_range.end) for event in recorded.events() or () if wanted(event)
    ]


def _make_group(device: torch.device) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[:1500]


def main(output: str, check: str, *arguments: str) -> None:
    """Run one check."""
    ud.init()
    found = CHECKS[check](ud.device(), *arguments)
    if ud.rank() == 0:
        Path(output).write_text(json.dumps(found, indent=1))
    sys.stdout.flush()
    if any("raised" in each and not each["ok"] for each in found.values() if isinstance(each, dict)):
        os._exit(0)  # ranks may be apart, or the device unusable; the result is written
    ud.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
