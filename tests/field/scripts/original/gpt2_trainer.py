"""transformers' GPT-2 with HF Trainer: several passes for each update, clipped to a norm of 1, its default."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--passes", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()[: 33 * 256])).view(-1, 33)
dataset = [{"input_ids": ids, "labels": ids} for ids in text]


class InOrder(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=self.data_collator)


config = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4, use_cache=False)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
config.bos_token_id = config.eos_token_id = None
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
training = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=args.batch_size // args.passes,
    gradient_accumulation_steps=args.passes,
    max_steps=args.steps,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = InOrder(model, training, train_dataset=dataset, optimizers=(optimizer, None))
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
