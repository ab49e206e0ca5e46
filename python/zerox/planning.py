"""zerox.plan: what a model would need, for any size and number of ranks, without a byte of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerox import _C, nn
from zerox.config import EngineConfig
from zerox.memory import Memory
from zerox.optim import SGD, AdamW
from zerox.runner import Runner, as_batch, language_inputs


def plan(
    model: nn.Module,
    *,
    tokens: tuple[int, int] | None = None,
    inputs: tuple[Any, ...] = (),
    world: int = 1,
    optimizer: AdamW | SGD | None = None,
    device_bytes: int = 1 << 62,
    **options: Any,
) -> Memory:
    """Memory of one of `world` ranks that train this model.

    tokens: (B, T), the micro-batch of a language model; or inputs: arrays for the model's forward (values unused).
    device_bytes: what a rank may use; more is refused (OutOfMemoryError) with the numbers. Other options as for Engine.
    """
    if world < 1:
        raise ValueError(f"world is {world}; it must be at least 1")
    optimizer = optimizer or AdamW()
    config = EngineConfig.from_options(options)
    runner = Runner(model, optimizer, config)
    if tokens is not None:
        batch = as_batch(np.zeros(tokens, np.int32), np.zeros(tokens, np.int32))
        inputs = (language_inputs(batch, None, n_docs=max(tokens[0], 1)), *inputs)
    runner.core = _C.Engine(
        runner.records.records,
        runner.records.units,
        comm=None,
        world=world,
        total_bytes=device_bytes,
        **config.core_options(optimizer.moments, optimizer.name),
    )
    try:
        if inputs:
            runner.plan_pass(True, tuple(inputs))
        return Memory.from_core(runner.core.memory(), runner.records, config, world)
    finally:
        runner._tensors.clear()
        runner.core.close()
