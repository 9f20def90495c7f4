"""A script for Lightning that imports nothing of unidist: fits a module, and prints what rank 0 has at the end.

python _lightning_script.py BATCH_SIZE [STEP TO KILL RANK 1 IN]
"""

import os
import signal
import sys
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from lightning_runs import Regression, samples

batch_size, fatal = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1


class Mortal(Regression):
    """Dies on rank 1, in a process that has not been started in its place."""

    def training_step(self, batch, index):
        mark = Path("died")
        if self.trainer.global_step == fatal and self.trainer.global_rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
trainer = lightning.Trainer(
    strategy="unidist", accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
model = Mortal()
trainer.fit(model, DataLoader(samples(), batch_size))
total = sum(float(value.abs().sum()) for value in model.state_dict().values())
if trainer.is_global_zero:
    print(f"{trainer.world_size} rank(s), step {trainer.global_step}: {total.hex()}", flush=True)
