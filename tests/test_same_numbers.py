"""Promise 1: stages, prefetch, slots, recomputation, save and resume, threads and delayed streams change no bit."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zerox as zx
from helpers import on_ranks, random_batch, tiny_gpt, train_some
from test_failure import start, wait_for
from zerox.launcher import end_ranks

STEPS, RESUME = 50, 25
CHOICES: dict[str, Sequence[Any]] = {
    "zero": (0, 1, 2, 3),
    "prefetch": (True, False),
    "recompute": (False, True),
    "resume": (False, True),
    "slots": (1, 2, 3),
    "threads": (1, 2),
    "delay_seed": (0, 1, 2),
}


def train(
    world: int,
    *,
    reduce_at: str,
    precision: str,
    folder: Path | None = None,
    steps: int = STEPS,
    micro: int = 2,
    zero: int = 0,
    prefetch: bool = False,
    recompute: bool = False,
    resume: bool = False,
    slots: int = 2,
    threads: int = 1,
    delay_seed: int = 0,
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final weights (as float32) of rank 0; all ranks must agree."""
    options = {
        "zero": zero, "reduce_at": reduce_at, "precision": precision, "prefetch": prefetch, "recompute": recompute,
        "slots": slots, "clip": 0.5, "poison": True,
    }  # fmt: skip

    def rank(comm: zx.Comm) -> tuple[list[float], dict[str, np.ndarray]]:
        def engine(**more: Any) -> zx.Engine:
            schedule = zx.Schedule(kind="cosine", warmup=5, total=steps)
            return zx.Engine(tiny_gpt(), zx.AdamW(lr=1e-2), schedule=schedule, comm=comm, **options, **more)

        def run(e: zx.Engine, first: int, last: int) -> list[float]:
            ids = [[(s * micro + k) * world + comm.rank for k in range(micro)] for s in range(first, last)]
            return [float(e.train_step([random_batch(i) for i in step])) for step in ids]

        with engine() as e:
            losses = run(e, 0, RESUME if resume else steps)
            if not resume:
                return losses, e.parameters()
            assert folder is not None
            e.save(folder / "half")
        with engine(init=False) as e:
            e.load(folder / "half")
            losses += run(e, RESUME, steps)
            return losses, e.parameters()

    results = on_ranks(world, rank, threads=threads, delay_seed=delay_seed)
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert_same(weights, results[0][1])
    return results[0]


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), f"{name}: {np.abs(a[name] - b[name]).max()}"


@cache
def reference(world: int, reduce_at: str, precision: str) -> tuple[list[float], dict[str, np.ndarray]]:
    return train(world, reduce_at=reduce_at, precision=precision)


@cache
def pairwise() -> list[dict[str, Any]]:
    """Few combinations in which every two values of two options meet (greedy, deterministic)."""
    names = list(CHOICES)
    missing = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x, y in itertools.product(CHOICES[a], CHOICES[b])
    }
    rows = []
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    while missing:
        row = max(every, key=lambda r: sum(r[a] == x and r[b] == y for a, x, b, y in missing))
        missing = {m for m in missing if not (row[m[0]] == m[1] and row[m[2]] == m[3])}
        rows.append(row)
    return rows


def everything() -> list[dict[str, Any]]:
    return [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]


def name_of(row: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in row.items())


GROUPS = list(itertools.product((1, 2, 3, 4), ("micro", "step"), ("fp32", "bf16")))


@pytest.mark.parametrize("world, reduce_at, precision", GROUPS)
def test_pairwise(world: int, reduce_at: str, precision: str, tmp_path: Path) -> None:
    """Every two values of two options meet, at each world size, reduce_at and precision."""
    losses, weights = reference(world, reduce_at, precision)
    assert losses[-1] < losses[0] and np.isfinite(losses).all()
    for i, row in enumerate(pairwise()):
        folder = tmp_path / str(i)
        other_losses, other_weights = train(world, reduce_at=reduce_at, precision=precision, folder=folder, **row)
        assert other_losses == losses, name_of(row)
        assert_same(other_weights, weights)


@pytest.mark.proof
@pytest.mark.parametrize("world, reduce_at, precision", GROUPS)
@pytest.mark.parametrize("row", everything(), ids=name_of)
def test_everything(world: int, reduce_at: str, precision: str, row: dict[str, Any], tmp_path: Path) -> None:
    losses, weights = reference(world, reduce_at, precision)
    other_losses, other_weights = train(world, reduce_at=reduce_at, precision=precision, folder=tmp_path, **row)
    assert other_losses == losses
    assert_same(other_weights, weights)


@pytest.mark.parametrize("reduce_at", ["micro", "step"])
def test_worlds_agree_within_rounding(reduce_at: str) -> None:
    """The same global batch of 12 documents, cut over 1, 2, 3 and 4 ranks."""

    def losses(world: int) -> list[float]:
        def rank(comm: zx.Comm) -> list[float]:
            options = {"zero": 3, "reduce_at": reduce_at, "clip": 0.5}
            with zx.Engine(tiny_gpt(), zx.AdamW(lr=1e-2), comm=comm, **options) as e:
                share = 12 // world
                out = []
                for s in range(10):
                    mine = range(comm.rank * share, (comm.rank + 1) * share)
                    out.append(float(e.train_step([random_batch(s * 12 + i) for i in mine])))
                return out

        return on_ranks(world, rank)[0]

    alone = losses(1)
    for world in (2, 3, 4):
        assert np.allclose(losses(world), alone, rtol=2e-5), world


@pytest.mark.parametrize("world", [2, 3])
def test_threads_equal_processes(world: int, tmp_path: Path) -> None:
    losses, weights = on_ranks(world, train_some)[0]
    digest = hashlib.sha256(b"".join(w.tobytes() for _, w in sorted(weights.items()))).hexdigest()
    processes = start("losses.py", world, str(tmp_path))
    try:
        said = [wait_for(tmp_path / f"{r}.json", processes) for r in range(world)]
    finally:
        end_ranks(processes)
    for one in said:
        assert one == {"losses": losses, "weights": digest}
