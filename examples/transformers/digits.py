"""Reads handwritten digits with a small ViT and Hugging Face's Trainer: scikit-learn's 8x8 images, offline.

    unidist launch -np 2 examples/transformers/digits.py
    unidist launch -np 2 --strategy zero=2 examples/transformers/digits.py
    python examples/transformers/digits.py              # the same script alone

The two lines that make it distributed are marked with (1) and (2).
"""

import argparse
import tempfile

import numpy as np
import torch
from sklearn.datasets import load_digits
from transformers import EvalPrediction, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from unidist_transformers import UnidistTrainer  # (1) was: from transformers import Trainer

NUM_TEST = 360

Samples = list[dict[str, torch.Tensor]]


def load() -> tuple[Samples, Samples]:
    """Return 1437 images for training and 360 for testing; the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # (1797, 1, 8, 8)
    samples = [
        {"pixel_values": image, "labels": torch.tensor(label)}
        for image, label in zip(images, digits.target, strict=True)
    ]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    return [samples[number] for number in order[NUM_TEST:]], [samples[number] for number in order[:NUM_TEST]]


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """Return the share of digits that were read."""
    return {"accuracy": float((np.argmax(found.predictions, -1) == found.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="images per rank and step (default: 16)")
    parser.add_argument("--checkpoints", help="folder of the Trainer's checkpoints (default: none are kept)")
    parser.add_argument("--resume", help="a checkpoint in such a folder, of a run on any number of ranks")
    args = parser.parse_args()

    set_seed(0)
    train, test = load()
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, num_labels=10,
    )  # fmt: skip
    arguments = TrainingArguments(
        args.checkpoints or tempfile.mkdtemp(),
        per_device_train_batch_size=args.batch_size,
        num_train_epochs=args.epochs,
        learning_rate=2e-3,
        save_strategy="epoch" if args.checkpoints else "no",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = UnidistTrainer(  # (2) was: Trainer(
        ViTForImageClassification(config), arguments, train_dataset=train, eval_dataset=test, compute_metrics=accuracy
    )
    trainer.train(resume_from_checkpoint=args.resume)
    found = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        print(f"after {trainer.state.epoch:.0f} epochs on {arguments.world_size} process(es): {found:.2%}")


if __name__ == "__main__":
    main()
