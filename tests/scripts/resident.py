"""One rank that compares the memory plan with what the operating system counts. argv: folder, stage.

folder/<rank>.json: bytes grown since import, bootstrap and one product, after steps 3 and 20; bytes planned.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import zerox as zx
from zerox import nn
from zerox.training import process_bytes

folder, zero = Path(sys.argv[1]), int(sys.argv[2])


class Product(nn.Module):
    """Opens the BLAS library and its buffers."""

    def __init__(self) -> None:
        self.w = nn.Parameter(256, 256, init=nn.normal(0.1))

    def forward(self, x: np.ndarray) -> zx.Tensor:
        return nn.linear(x, self.w).sum()


with zx.connect(threads=1, timeout=60.0) as comm:
    with zx.Engine(Product(), comm=comm) as warm:
        warm.train_step(np.ones((256, 256), np.float32))
    comm.barrier()
    base = process_bytes()
    config = zx.models.GPTConfig(vocab=256, context=64, layers=7, heads=8, channels=512)
    grown = {}
    with zx.Engine(zx.models.GPT(config), comm=comm, zero=zero) as engine:
        ids = np.random.default_rng(0).integers(0, 256, (4, 64))
        for step in range(1, 21):
            engine.train_step(ids, ids)
            if step in (3, 20):
                comm.barrier()
                grown[step] = process_bytes() - base
                comm.barrier()
        planned = engine.memory().total - engine.memory().comm
    out = folder / f"{os.environ['RANK']}.json.partial"
    out.write_text(json.dumps({"grown": grown, "planned": planned}))
    out.rename(out.with_suffix(""))
