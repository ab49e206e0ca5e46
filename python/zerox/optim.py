"""Optimizers and learning-rate schedules: numbers for the core, which does the arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Hyper = tuple[float, float, float, float, float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Factor on the learning rate: linear warm-up over `warmup` steps, then a cosine down to `floor` at `total` steps.

    kind: "constant" (after warm-up) or "cosine". Step n (from 0) of a warm-up of w gets (n + 1) / w.
    """

    kind: str = "constant"
    warmup: int = 0
    total: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "cosine"):
            raise ValueError(f"Schedule.kind is {self.kind!r}; use 'constant' or 'cosine'")
        if self.warmup < 0 or self.total < 0:
            raise ValueError(f"Schedule: warmup={self.warmup} and total={self.total} cannot be negative")
        if self.kind == "cosine" and self.total <= self.warmup:
            raise ValueError(f"Schedule: a cosine needs total ({self.total}) above warmup ({self.warmup})")

    def factor(self, step: int) -> float:
        """For the step after `step` applied ones."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        done = min((step - self.warmup) / (self.total - self.warmup), 1.0)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


def _check(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not low <= value < high:
        raise ValueError(f"{name} is {value}; it must lie in [{low}, {high})")


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    decay: which parameters the weight decay applies to: "matrices" (two dimensions or more; what GPT training does) or
    "all" (what torch.optim.AdamW does by default).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: str = "matrices"

    name = "adamw"
    moments = 2

    def __post_init__(self) -> None:
        _check("AdamW.lr", self.lr, 0)
        _check("AdamW.betas[0]", self.betas[0], 0, 1)
        _check("AdamW.betas[1]", self.betas[1], 0, 1)
        _check("AdamW.eps", self.eps, 0)
        _check("AdamW.weight_decay", self.weight_decay, 0)
        _check_decay(self.decay)

    def group(self, shape: tuple[int, ...]) -> int:
        """Option group of a parameter: 0 with weight decay, 1 without."""
        return 0 if self.decay == "all" or len(shape) >= 2 else 1

    def hyper(self, factor: float, t: int) -> list[Hyper]:
        """For each group; t: this step's number, from 1."""
        b1, b2 = self.betas
        base = (self.lr * factor, b1, b2, self.eps)
        correct = (0.0, 1 - b1**t, 1 - b2**t)
        return [(*base, self.weight_decay, *correct), (*base, 0.0, *correct)]


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent: g += weight_decay * p; m = momentum * m + g; p -= lr * m."""

    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: str = "all"

    name = "sgd"

    def __post_init__(self) -> None:
        _check("SGD.lr", self.lr, 0)
        _check("SGD.momentum", self.momentum, 0, 1)
        _check("SGD.weight_decay", self.weight_decay, 0)
        _check_decay(self.decay)

    @property
    def moments(self) -> int:
        return 1 if self.momentum else 0

    def group(self, shape: tuple[int, ...]) -> int:
        return 0 if self.decay == "all" or len(shape) >= 2 else 1

    def hyper(self, factor: float, t: int) -> list[Hyper]:
        lr = self.lr * factor
        return [(lr, 0.0, 0.0, 0.0, wd, self.momentum, 1.0, 1.0) for wd in (self.weight_decay, 0.0)]


def _check_decay(decay: Any) -> None:
    if decay not in ("matrices", "all"):
        raise ValueError(f"decay is {decay!r}; use 'matrices' (two dimensions or more) or 'all'")
