"""Reads handwritten digits with Lightning's Trainer: scikit-learn's bundled 8x8 images, offline.

    unidist launch -np 2 examples/lightning/digits.py
    unidist launch -np 2 --strategy zero=2,clip_norm=1 examples/lightning/digits.py
    python examples/lightning/digits.py              # the same script alone

The one line that makes it distributed is marked with (1); it needs no import.
"""

import argparse

import lightning
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_TEST = 360


class DigitReader(lightning.LightningModule):
    """A net of 69 thousand parameters."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 4 * 4, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10),
        )  # fmt: skip
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 images for training and 360 for testing; the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW (default: 0.002)")
    parser.add_argument("--checkpoints", help="folder of Lightning's checkpoints (default: none are written)")
    parser.add_argument("--resume", help="a file in such a folder, of a run on any number of ranks")
    args = parser.parse_args()

    lightning.seed_everything(0)
    train, test = load()
    trainer = lightning.Trainer(
        strategy="unidist",  # (1)
        accelerator="cpu",
        max_epochs=args.epochs,
        default_root_dir=args.checkpoints,
        enable_checkpointing=args.checkpoints is not None,
        enable_progress_bar=False,
        logger=False,
    )
    model = DigitReader(args.lr)
    trainer.fit(model, DataLoader(train, args.batch_size, shuffle=True), DataLoader(test, 60), ckpt_path=args.resume)
    accuracy = trainer.callback_metrics["accuracy"].item()
    if trainer.is_global_zero:
        print(f"after {trainer.current_epoch} epochs on {trainer.world_size} process(es): {accuracy:.2%}")


if __name__ == "__main__":
    main()
