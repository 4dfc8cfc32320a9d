"""Fine-tune a HuggingFace model with its attention rewritten: the usual loop, one more line.

    python examples/02_finetune.py [steps]

Output:
    2 sites fused, 0 left alone
    step 0  loss …
    step 5  loss …
    step 10 loss …
    step 15 loss …
    loss fell from … to …
"""
from __future__ import annotations

import shutil
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import flashfx


def batches(vocabulary: int, length: int, device: str):
    """Sequences that count upwards from a random number: easy to learn."""
    generator = torch.Generator().manual_seed(0)
    while True:
        start = torch.randint(0, vocabulary, (8, 1), generator=generator)
        yield ((start + torch.arange(length)) % vocabulary).to(device)


def main(steps: int = 20) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
                        attn_implementation="eager")
    model = GPT2LMHeadModel(config).to(device).train()
    model.loss_type = "ForCausalLM"
    data = batches(config.vocab_size, 64, device)

    report = flashfx.explain(model, input_ids=next(data))
    print(f"{report.fused} sites fused, {len(report) - report.fused} left alone")

    # Inductor needs a C++ compiler on a CPU; without one the rewritten graph still runs
    inner = "inductor" if device == "cuda" or shutil.which("g++") else "aot_eager"
    fast = torch.compile(model, backend="flashfx", options={"inner": inner})  # the one line

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(steps):
        ids = next(data)
        loss = fast(input_ids=ids, labels=ids).loss  # dropout 0.1 runs inside the kernels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 5 == 0:
            print(f"step {step:<2} loss {losses[-1]:.2f}")
    assert losses[-1] < losses[0]
    print(f"loss fell from {losses[0]:.2f} to {losses[-1]:.2f}")


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
