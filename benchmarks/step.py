"""The training step of a GPT of about 10 M parameters, fp32, 2 threads, 1 rank, against PyTorch eager, interleaved.

Both sides: forward, backward, clipping, AdamW (torch: fused) on the same shapes. Floor: the same products alone, by the
BLAS that zerox uses, 2 threads. Peer: pip install torch (CPU build). Usage: python benchmarks/step.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np
import zerox as zx
from _common import race, ratio, record
from zerox.blas import find_blas

THREADS = 2


def torch_gpt(config: Any, tokens: np.ndarray, targets: np.ndarray) -> Any:
    """One training step of the same model, written the way PyTorch users do."""
    import torch
    from torch import nn
    from torch.nn import functional as f

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            c = config.channels
            self.ln_1, self.ln_2 = nn.LayerNorm(c), nn.LayerNorm(c)
            self.qkv, self.proj = nn.Linear(c, 3 * c), nn.Linear(c, c)
            self.fc, self.out = nn.Linear(c, config.hidden), nn.Linear(config.hidden, c)

        def forward(self, x: Any) -> Any:
            b, t, c = x.shape
            q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, config.heads, c // config.heads).permute(2, 0, 3, 1, 4)
            y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
            return x + self.out(f.gelu(self.fc(self.ln_2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(config.vocab, config.channels)
            self.wpe = nn.Embedding(config.context, config.channels)
            self.blocks = nn.ModuleList(Block() for _ in range(config.layers))
            self.ln_f = nn.LayerNorm(config.channels)

        def forward(self, ids: Any, labels: Any) -> Any:
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            logits = f.linear(self.ln_f(x), self.wte.weight)
            return f.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    ids, labels = torch.tensor(tokens), torch.tensor(targets)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return step


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--batch", type=int, default=8)
    args = p.parse_args()
    config = zx.models.GPTConfig(vocab=256, context=256, layers=6, heads=6, channels=384)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (args.batch, 256))
    targets = np.roll(tokens, -1, axis=1)
    model = zx.models.GPT(config)
    with zx.Comm(threads=THREADS, blas=find_blas()) as comm:
        for zero in (0, 3):
            with zx.Engine(model, zx.AdamW(lr=1e-4), comm=comm, zero=zero) as engine:
                sides = {
                    "ours": lambda e=engine: e.train_step(tokens, targets),
                    "torch": torch_gpt(config, tokens, targets),
                }
                seconds = race(sides, rounds=args.rounds)
                flops = engine.memory().flops
            middle, low, high = ratio(seconds["torch"], seconds["ours"])
            ours = statistics.median(seconds["ours"])
            record(
                "step",
                case=f"gpt-10M-fp32-zero{zero}-world1-B{args.batch}-T256",
                unit="s",
                ours=round(ours, 4),
                peer=round(statistics.median(seconds["torch"]), 4),
                peer_name="torch eager, fused AdamW, 2 threads",
                ratio=round(middle, 3),
                spread=[round(low, 3), round(high, 3)],
                n=args.rounds,
                tokens_per_s=round(tokens.size / ours),
                gflop_per_s=round(flops / ours / 1e9, 1),
                n_parameters=model.n_parameters(),
            )


if __name__ == "__main__":
    main()
