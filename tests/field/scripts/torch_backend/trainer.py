"""transformers' GPT-2 with HF Trainer, whose DistributedDataParallel uses the group that the script has made."""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="unidist")
parser.add_argument("--out", required=True)
args = parser.parse_args()

dist.init_process_group(args.backend)  # before TrainingArguments, whose `ddp_backend` knows gloo and MPI for CPUs

text = torch.tensor(list(Path(argparse.__file__).read_bytes()[: 33 * 128])).view(-1, 33)
dataset = [{"input_ids": ids, "labels": ids} for ids in text]
torch.manual_seed(0)
config = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4, use_cache=False)
config.bos_token_id = config.eos_token_id = None
training = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=4,
    learning_rate=3e-3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(GPT2LMHeadModel(config), training, train_dataset=dataset)
trainer.train()
assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
assert dist.get_backend(trainer.model_wrapped.process_group) == args.backend
torch.save(trainer.model.state_dict(), f"{args.out}/{dist.get_rank()}.pt")
dist.destroy_process_group()
