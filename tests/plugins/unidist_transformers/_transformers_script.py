"""A script of the transformers library with UnidistTrainer; prints what rank 0 has at the end.

python _transformers_script.py BATCH_SIZE [STEP TO KILL RANK 1 IN]
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from unidist_transformers import UnidistTrainer

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from transformers_runs import make_model, make_samples

batch_size, fatal = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1


class Mortal(transformers.TrainerCallback):
    """Kills rank 1."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == fatal and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


torch.set_default_dtype(torch.float64)
arguments = transformers.TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=batch_size, num_train_epochs=2, learning_rate=1e-2,
    save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
trainer = UnidistTrainer(make_model(), arguments, train_dataset=make_samples(), callbacks=[Mortal()])
trainer.train()
total = sum(float(value.abs().sum()) for value in trainer.model.state_dict().values())
if trainer.is_world_process_zero():
    print(f"{arguments.world_size} rank(s), step {trainer.state.global_step}: {total.hex()}", flush=True)
