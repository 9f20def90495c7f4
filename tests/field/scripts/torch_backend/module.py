"""A LightningModule and Lightning's Trainer with DDPStrategy."""

import argparse

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="unidist")
parser.add_argument("--out", required=True)
args = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.GELU(), torch.nn.Linear(32, 10)
        )

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.net(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


torch.manual_seed(0)
digits = load_digits()
samples = TensorDataset(torch.Tensor(digits.data) / 16, torch.tensor(digits.target))
model = Classifier()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=args.backend),
    max_steps=6,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    sync_batchnorm=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(samples, 8, shuffle=True))
assert dist.get_backend() == args.backend
torch.save(model.state_dict(), f"{args.out}/{trainer.global_rank}.pt")
