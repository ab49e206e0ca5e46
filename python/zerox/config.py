"""What an engine is told: one frozen dataclass, strict about names, types and contradictions."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

import numpy as np

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of `zerox.Engine`.

    zero: 0 nothing is sharded; 1 optimizer state; 2 also gradients; 3 also parameters.
    precision: "fp32"; "bf16" (parameters and activations in bfloat16, fp32 master copies and gradients); "fp64".
    reduce_at: "micro" sums gradients over ranks after each micro-batch, "step" once; None: "step" at zero 0-1, else
        "micro". A numerical setting of its own: it changes the order of a sum.
    recompute: blocks' activations are computed again in backward instead of being kept.
    slots: physical memory slots behind the blocks' parameters at zero=3; prefetch works slots-1 blocks ahead.
    prefetch: gather the next block while this one computes.
    clip: largest global gradient norm; None = no clipping.
    memory_limit: bytes this rank may use; None = what the device has. More is refused before it is allocated.
    spare_bytes: arena room for forwards that deviate from their plan.
    reduce_dtype: of gradients on the wire: "fp32", or "bf16" at half the bytes.
    seed: of initial values.
    poison: fill released memory with NaN (debugging).
    """

    zero: int = 0
    precision: str = "fp32"
    reduce_at: str | None = None
    recompute: bool = False
    slots: int = 2
    grad_slots: int = 2
    prefetch: bool = True
    clip: float | None = 1.0
    memory_limit: int | None = None
    spare_bytes: int = 1 << 20
    reduce_dtype: str = "fp32"
    seed: int = 0
    poison: bool = False

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineConfig:
        """From keyword options; an unknown name is an error with the closest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
                raise TypeError(f"Engine has no option {name!r}{hint}")
        plain = {name: v.item() if isinstance(v, np.generic) else v for name, v in options.items()}
        return cls(**plain)

    def __post_init__(self) -> None:
        self._one_of("zero", (0, 1, 2, 3))
        self._one_of("precision", tuple(PRECISIONS))
        self._one_of("reduce_at", (None, "micro", "step"))
        self._one_of("reduce_dtype", ("fp32", "bf16"))
        for name in ("recompute", "prefetch", "poison"):
            self._one_of(name, (False, True))
        for name, low in (("slots", 1), ("grad_slots", 1), ("spare_bytes", 0), ("seed", 0)):
            value = getattr(self, name)
            if not _is_int(value) or value < low:
                raise ValueError(f"Engine option {name} is {value!r}; it must be a whole number from {low} up")
        if self.memory_limit is not None and (not _is_int(self.memory_limit) or self.memory_limit <= 0):
            raise ValueError(f"Engine option memory_limit is {self.memory_limit!r}; it must be a number of bytes")
        if self.clip is not None and (not isinstance(self.clip, (int, float)) or not self.clip > 0):
            raise ValueError(f"Engine option clip is {self.clip!r}; it must be above 0, or None for no clipping")

    def _one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if not any(value == a and type(value) is type(a) for a in allowed):
            options = ", ".join(repr(a) for a in allowed)
            raise ValueError(f"Engine option {name} is {value!r}; it must be one of {options}")

    @property
    def dtype(self) -> str:
        return PRECISIONS[self.precision]

    def core_options(self, moments: int, optimizer: str) -> dict[str, Any]:
        """Keyword arguments of the compiled Engine."""
        return {
            "dtype": self.dtype,
            "memory_limit": self.memory_limit or 0,
            "spare_bytes": self.spare_bytes,
            "shard_state": self.zero >= 1,
            "shard_grads": self.zero >= 2,
            "shard_params": self.zero >= 3,
            "reduce_at": self.reduce_at or ("step" if self.zero <= 1 else "micro"),
            "slots": self.slots,
            "grad_slots": self.grad_slots,
            "prefetch": self.prefetch,
            "reduce_dtype": PRECISIONS[self.reduce_dtype],
            "optimizer": optimizer,
            "moments": moments,
            "poison": self.poison,
        }
