"""Reads handwritten digits, written as for Horovod: after its MNIST example, on scikit-learn's bundled images, offline.

    unidist launch -np 2 python examples/horovod/digits.py

With `import horovod.torch as hvd` in place of the line marked (1) the same file runs under Horovod, and prints the
same losses:

    horovodrun -np 2 python examples/horovod/digits.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unidist.torch as hvd  # (1)

NUM_TEST = 360


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 images for training and 360 for testing; the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Net(nn.Module):
    """A convolutional net of 18 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.fc1 = nn.Linear(20 * 4 * 4, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(images))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = self.drop(F.relu(self.fc1(x.flatten(1))))
        return self.fc2(x)


def metric_average(value: torch.Tensor, name: str) -> float:
    """Return the average of a number over the ranks."""
    return hvd.allreduce(value, name=name).item()


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> float:
    """Train on this rank's share once; return the mean loss over all ranks."""
    model.train()
    total = torch.zeros((), dtype=torch.float64)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return metric_average(total / len(loader), "train loss")


def evaluate(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return loss and accuracy on the test images, averaged over the ranks' shares."""
    model.eval()
    loss, correct, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            loss += F.cross_entropy(output, labels, reduction="sum")
            correct += (output.argmax(1) == labels).sum()
            count += len(labels)
    return metric_average(loss / count, "test loss"), metric_average(correct / count, "test accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one rank (default: 0.02)")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())  # each rank its own dropout; the weights come from rank 0
    train, test = load()
    train_sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    train_loader = DataLoader(train, args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test, 100, sampler=test_sampler)

    model = Net()
    # Averaged gradients are those of one large batch, which bears a larger rate; Adasum needs no scaling on CPUs.
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        train_loss = train_epoch(model, optimizer, train_loader)
        test_loss, accuracy = evaluate(model, test_loader)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch}: train loss {train_loss:.6f}, test loss {test_loss:.6f}, accuracy {accuracy:.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
