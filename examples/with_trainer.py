"""Hugging Face's Trainer with a palsgd optimizer. Start it on every machine:

    torchrun --nproc-per-node 2 examples/with_trainer.py trainer-run

A small GPT-2 learns the characters of a file of torch's source. After a kill or SIGTERM the same
command goes on.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import palsgd
from palsgd import process_groups
from palsgd.integrations.huggingface import LocalTrainingCallback

TEXT = Path(torch.__file__).with_name("serialization.py")
LENGTH = 64  # characters of an example


def examples() -> list[dict[str, torch.Tensor]]:
    """Pieces of the text; every byte is a token."""
    tokens = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    pieces = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="trainer-run")
    parser.add_argument("--steps", type=int, default=192)
    given = parser.parse_args()

    args = TrainingArguments(
        str(given.folder),
        max_steps=given.steps,  # of the clock: steps without data count too
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=16,
        eval_strategy="steps",
        eval_steps=64,
        save_steps=64,
        save_total_limit=2,
        average_tokens_across_devices=False,  # a number per step over the link
        use_cpu=process_groups.device_and_backend()[1] == "gloo",  # not a GPU for each process
        report_to="none",
    )
    torch.manual_seed(0)  # every worker starts from the same weights
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(args.device)
    inner = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    opt = palsgd.PALSGD(model, inner, sync_every=16)
    palsgd.leave_on_sigterm(opt)
    data = examples()
    trainer = Trainer(
        model,
        args,
        train_dataset=data[:-32],
        eval_dataset=data[-32:],
        optimizers=(opt, None),
        callbacks=[LocalTrainingCallback(opt)],
    )
    last = get_last_checkpoint(str(given.folder)) if given.folder.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    if opt.leaving:
        sys.exit(143)  # so that whoever started it knows that there is more to do
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        sent = opt.ledger.bytes_sent / opt.clock
        print(f"loss {loss:.3f}, {opt.rounds} syncs, {sent:.0f} bytes sent per step")
    trainer.end()


if __name__ == "__main__":
    main()
