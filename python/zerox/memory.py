"""The memory plan of an engine, for people: a table, fields, HTML in notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerox.config import EngineConfig
    from zerox.runner import ModelRecords


def human(n: float) -> str:
    """1536 -> "1.5 kB" (decimal units)."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(n) < 1000 or unit == "PB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes one rank holds. total = the sum of the parts; limit = what it may use."""

    params: int
    master: int
    moments: int
    grads: int
    wire: int
    param_slots: int
    grad_slots: int
    control: int
    activations: int
    spare: int
    scratch: int
    comm: int
    total: int
    limit: int
    flops: float
    n_params: int
    world: int
    zero: int

    @classmethod
    def from_core(cls, m: dict[str, Any], records: ModelRecords, config: EngineConfig, world: int) -> Memory:
        store = {k: v for k, v in m["store"].items() if k != "total"}
        rest = {k: m[k] for k in ("activations", "spare", "scratch", "comm", "total", "limit", "flops")}
        n_params = sum(p.size for (_, p), r in zip(records.parameters, records.records, strict=True) if r[6] < 0)
        return cls(**store, **rest, n_params=n_params, world=world, zero=config.zero)

    def rows(self) -> list[tuple[str, int]]:
        parts = (
            ("parameters", self.params),
            ("master copy", self.master),
            ("optimizer moments", self.moments),
            ("gradients", self.grads),
            ("parameter slots", self.param_slots),
            ("gradient slots", self.grad_slots),
            ("gradients on the wire", self.wire),
            ("activations", self.activations),
            ("spare room", self.spare),
            ("kernel scratch", self.scratch),
            ("communication", self.comm),
            ("control", self.control),
        )
        return [(name, n) for name, n in parts if n]

    def _title(self) -> str:
        return f"{self.n_params:,} parameters, zero={self.zero}, {self.world} rank{'s' if self.world > 1 else ''}"

    def __str__(self) -> str:
        lines = [f"Memory of one rank ({self._title()})"]
        lines += [f"  {name:<22} {human(n):>10}" for name, n in self.rows()]
        lines.append(f"  {'total':<22} {human(self.total):>10}  of {human(self.limit)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{n}</td><td style='text-align:right'>{human(b)}</td></tr>" for n, b in self.rows())
        total = f"<tr><th>total</th><th>{human(self.total)} of {human(self.limit)}</th></tr>"
        return f"<table><caption>{self._title()}</caption>{rows}{total}</table>"
