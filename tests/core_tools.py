"""What the tests of zerox._C share: a small table of parameters, an engine on one rank, and a planned pass over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from helpers import alone
from zerox import _C

RECORDS = [("w", 0, "float32", (4, 3), True, 0, -1), ("b", 1, "float32", (3,), True, 0, -1)]
UNITS = ["root", "block"]
HYPER = (0.1, 0.9, 0.999, 1e-8, 0.0, 0.0, 0.1, 0.001)


@contextmanager
def one_engine(**options: Any) -> Iterator[_C.Engine]:
    with alone() as comm, _C.Engine(RECORDS, UNITS, comm=comm, **options) as engine:
        yield engine


def run_pass(engine: _C.Engine, forward: Callable[[_C.Engine], Any], *, train: bool = False, key: int = 1) -> Any:
    """Dry if it is the first of its key, then real; leaves the real pass open."""
    if not engine.planned(key):
        engine.begin(key, train=train, dry=True)
        try:
            out = forward(engine)
            if train:
                engine.backward(out)
            del out
            engine.end()
        except BaseException:
            engine.abandon()
            raise
    engine.begin(key, train=train, dry=False)
    return forward(engine)


def set_parameter(engine: _C.Engine, name: str, values: np.ndarray) -> None:
    param = next(p for p in engine.layout()["params"] if p["name"] == name)
    engine.load_begin()
    engine.write_slice(param["range"], "param", param["offset"], np.ascontiguousarray(values, np.float32))
    engine.load_end()
