"""Sampling from a language model: the plain way, recomputing the context for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zerox import nn
from zerox.runner import positions_of

if TYPE_CHECKING:
    from zerox.engine import Engine


def choose(logits: NDArray[Any], temperature: float, top_k: int, seed: int, position: int) -> int:
    """One token from logits (V). Randomness is a function of (seed, position), so neighbours do not change it."""
    if temperature <= 0 or top_k == 1:
        return int(np.argmax(logits))
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # minus infinity is what an almost zero temperature means
        scores = (wide - wide.max()) / temperature
    order = np.argsort(-scores, kind="stable")
    if top_k:
        order = order[:top_k]
    p = np.exp(scores[order] - scores[order[0]])
    u = np.random.Generator(np.random.Philox(key=seed, counter=position)).random() * p.sum()
    return int(order[min(int(np.searchsorted(np.cumsum(p), u, side="right")), len(order) - 1)])


def generate(
    engine: Engine, prompt: str | bytes | Sequence[int], n: int, *, temperature: float, top_k: int, seed: int
) -> Any:
    config = getattr(engine.model, "config", None)
    if not hasattr(config, "vocab") or not hasattr(config, "context"):
        name = type(engine.model).__name__
        raise TypeError(f"generate needs a language model: {name}.config has no vocab and context")
    ids = [int(t) for t in (prompt.encode(errors="surrogateescape") if isinstance(prompt, str) else prompt)]
    if not ids:
        raise ValueError("the prompt is empty: give at least one token to continue from")
    if n < 0 or not temperature >= 0 or top_k < 0 or not 0 <= seed < 1 << 128:
        raise ValueError(
            f"generate: n={n}, temperature={temperature}, top_k={top_k} must be 0 or more, seed={seed} below 2**128"
        )
    wrong = [t for t in ids if not 0 <= t < config.vocab]
    if wrong:
        raise ValueError(f"token {wrong[0]} lies outside the vocabulary of {config.vocab}")
    for position in range(n):
        ids.append(choose(_next_logits(engine, ids[-config.context :]), temperature, top_k, seed, position))
    if not isinstance(prompt, (str, bytes)):
        return ids
    text = bytes(t if t < 256 else ord("?") for t in ids)
    return text.decode("utf-8", errors="replace") if isinstance(prompt, str) else text


def _next_logits(engine: Engine, window: list[int]) -> NDArray[Any]:
    """Logits (V) after the window, which is padded to the model's context: one signature for all lengths."""
    capacity = engine.model.config.context
    tokens = np.zeros(capacity, np.int32)
    tokens[: len(window)] = window
    cu = np.array([0, len(window)], np.int32)
    batch = nn.Inputs(
        tokens=tokens,
        positions=positions_of(cu, capacity),
        cu_seqlens=cu,
        max_seqlen=capacity,
        rows=np.array([len(window) - 1], np.int32),
    )
    return engine.logits(batch)[0]
