"""What the Python tests share: ranks as threads, small models, batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import zerox as zx
from zerox import _C, nn
from zerox.blas import find_blas

DEADLINE_S = 60.0


def on_ranks(world: int, fn: Callable[..., Any], *, timeout: float = 20.0, threads: int = 1, **comm: Any) -> list[Any]:
    """fn(comm) on `world` threads as ranks; results in rank order. The first rank's error is raised with all traces."""
    return zx.launch(fn, world, timeout=timeout, threads=threads, deadline=DEADLINE_S, **comm)


def alone(**options: Any) -> _C.Comm:
    """A single rank's Comm."""
    return _C.Comm(**{"blas": find_blas(), "timeout": 20.0, "threads": 1, **options})


def tiny_gpt(**changes: Any) -> zx.models.GPT:
    shape = {"vocab": 61, "context": 24, "layers": 3, "heads": 2, "channels": 16}
    return zx.models.GPT(zx.models.GPTConfig(**{**shape, **changes}))


def random_batch(seed: int, *, rows: int = 2, length: int = 24, vocab: int = 61) -> zx.Batch:
    """Packed documents of uneven lengths, some labels ignored."""
    rng = np.random.default_rng(seed)
    n = rows * length
    cuts = np.unique(np.concatenate([np.arange(0, n + 1, length), rng.integers(1, n, 2)]))
    targets = rng.integers(0, vocab, n)
    targets[rng.random(n) < 0.2] = -100
    return zx.Batch(
        tokens=rng.integers(0, vocab, n).astype(np.int32),
        targets=targets.astype(np.int32),
        cu_seqlens=cuts.astype(np.int32),
        max_seqlen=length,
        n_docs=len(cuts) - 1,
        n_counted=int((targets >= 0).sum()),
    )


class Scalars(nn.Module):
    """A model of named parameters and a loss function over them, for cases with right values."""

    def __init__(self, loss: Callable[..., Any], **parameters: nn.Parameter) -> None:
        for name, value in parameters.items():
            setattr(self, name, value)
        self.loss = loss

    def forward(self, *inputs: Any) -> Any:
        return self.loss(self, *inputs)


def train_some(comm: zx.Comm) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final weights of 10 steps at stage 3: the same on threads and processes."""
    with zx.Engine(tiny_gpt(), zx.AdamW(lr=1e-2), comm=comm, zero=3, recompute=True, clip=0.5) as e:
        losses = [float(e.train_step(random_batch(s * comm.world + comm.rank))) for s in range(10)]
        return losses, e.parameters()
