"""zerox trains transformer models whose parameters, gradients and optimizer state are sharded over processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zerox import data, models, nn
    from zerox._C import (
        ArgumentError,
        Comm,
        DeadlineError,
        Meeting,
        OutOfMemoryError,
        Partitioner,
        PeerError,
        StateError,
        Tensor,
        UnsupportedError,
        ZeroxError,
    )
    from zerox.data import Batch, Corpus, Loader
    from zerox.distributed import connect
    from zerox.engine import Engine, StepResult
    from zerox.memory import Memory
    from zerox.optim import SGD, AdamW, Schedule
    from zerox.partitioning import Partition, partition
    from zerox.planning import plan
    from zerox.rank_threads import launch

# Public name -> module; loaded at first use, so that `import zerox` costs little.
_HOME = {
    "Engine": "engine",
    "StepResult": "engine",
    "AdamW": "optim",
    "SGD": "optim",
    "Schedule": "optim",
    "Memory": "memory",
    "plan": "planning",
    "Partition": "partitioning",
    "partition": "partitioning",
    "connect": "distributed",
    "launch": "rank_threads",
    "Batch": "data",
    "Corpus": "data",
    "Loader": "data",
    **{
        name: "_C"
        for name in (
            "Comm",
            "Meeting",
            "Partitioner",
            "Tensor",
            "ZeroxError",
            "ArgumentError",
            "StateError",
            "OutOfMemoryError",
            "DeadlineError",
            "PeerError",
            "UnsupportedError",
        )
    },
}
_MODULES = ("nn", "models", "data", "optim", "checkpoint")

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"zerox.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"zerox.{name}")
    raise AttributeError(f"module 'zerox' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
