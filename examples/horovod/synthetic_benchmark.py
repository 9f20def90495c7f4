"""Images per second of a small convolutional model on random data, after Horovod's pytorch_synthetic_benchmark.

    unidist launch -np 2 python examples/horovod/synthetic_benchmark.py

With `import horovod.torch as hvd` in place of the line marked (1) the same file runs under Horovod:

    horovodrun -np 2 python examples/horovod/synthetic_benchmark.py
"""

import argparse
import statistics
import timeit

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

import unidist.torch as hvd  # (1)

IMAGE_SIZE, NUM_CLASSES = 64, 1000


class Block(nn.Module):
    """Two convolutions beside a shortcut; halves height and width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first_norm(self.first(images)))
        return F.relu(self.second_norm(self.second(x)) + self.shortcut(images))


def build(width: int) -> nn.Module:
    """Return a residual net; of 1.5 million parameters with a width of 32."""
    return nn.Sequential(
        Block(3, width), Block(width, 2 * width), Block(2 * width, 4 * width), Block(4 * width, 8 * width),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, NUM_CLASSES),
    )  # fmt: skip


def log(text: str) -> None:
    """Print on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=16, help="images per rank and step (default: 16)")
    parser.add_argument("--width", type=int, default=32, help="channels of the first block (default: 32)")
    parser.add_argument("--num-warmup-batches", type=int, default=5)
    parser.add_argument("--num-batches-per-iter", type=int, default=5, help="steps that are timed together")
    parser.add_argument("--num-iters", type=int, default=10, help="number of timings")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    args = parser.parse_args()
    if args.num_iters < 2:
        parser.error("--num-iters: an interval needs at least 2 timings")

    hvd.init()
    torch.manual_seed(0)
    model = build(args.width)
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scale)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
    labels = torch.randint(NUM_CLASSES, (args.batch_size,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    num_parameters = sum(each.numel() for each in model.parameters())
    log(f"Model: residual net of {num_parameters / 1e6:.1f} M parameters, batch size {args.batch_size} per rank")
    log(f"Number of ranks: {hvd.size()}")
    timeit.timeit(step, number=args.num_warmup_batches)
    rates = []
    for index in range(args.num_iters):
        seconds = timeit.timeit(step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{index}: {rates[-1]:.1f} img/sec per rank")

    # The ranks' mean rate is the rate of one; the interval is of single timings, as in Horovod's benchmark.
    mean = hvd.allreduce(torch.tensor(statistics.fmean(rates)), name="mean").item()
    interval = hvd.allreduce(torch.tensor(1.96 * statistics.pstdev(rates)), name="interval").item()
    log(f"Img/sec per rank: {mean:.1f} +-{interval:.1f}")
    log(f"Total img/sec on {hvd.size()} rank(s): {hvd.size() * mean:.1f} +-{hvd.size() * interval:.1f}")


if __name__ == "__main__":
    main()
