"""Promise 2: plan, then allocate. Bytes and traffic equal the formulas; a steady step allocates nothing."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zerox as zx
from helpers import alone, on_ranks, random_batch, tiny_gpt
from test_failure import LIMIT_S, SCRIPTS, wait_for
from zerox import _C
from zerox.launcher import end_ranks, start_ranks

GRID = list(itertools.product((0, 1, 2, 3), ("micro", "step"), ("fp32", "bf16")))


def formula(zero: int, reduce_at: str, precision: str, p: float, n: int) -> dict[str, float]:
    """persistent bytes a rank, P padded parameters, N ranks; slots apart."""
    params = (4 if precision == "fp32" else 2) * p / (n if zero == 3 else 1)
    state = (8 if precision == "fp32" else 12) * p / (n if zero >= 1 else 1)
    if reduce_at == "step":
        grads = 4 * p
    else:
        grads = 4 * p / (n if zero >= 1 else 1)
    return {"params": params, "state": state, "grads": grads}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bytes_equal_the_formulas(world: int) -> None:
    def rank(comm: zx.Comm) -> None:
        for zero, reduce_at, precision in GRID:
            options = {"zero": zero, "reduce_at": reduce_at, "precision": precision}
            with zx.Engine(tiny_gpt(channels=64), comm=comm, **options) as e:
                p = e.core.layout()["n_padded"]
                want = formula(zero, reduce_at, precision, p, world)
                planned, held = e.core.bytes(), e.core.bytes_held()
                assert planned == held, options
                page = 4096 * len(e.core.layout()["units"])  # each unit's range is rounded up to pages
                for got, exact in (
                    (held["params"], want["params"]),
                    (held["master"] + held["moments"], want["state"]),
                    (held["grads"], want["grads"]),
                ):
                    assert exact <= got <= exact + page + 4096, (options, got, exact)

    on_ranks(world, rank)


def traffic(zero: int, reduce_at: str, m: int, p: int, blocks: list[int], root: int, n: int, k: int) -> float:
    """elements sent a rank in a step of m micro-steps."""
    reductions = m if reduce_at == "micro" else 1
    share = (n - 1) / n
    if zero < 3:
        return (reductions + 1) * p * share
    k = min(k, len(blocks))
    forward, backward = sum(blocks), sum(blocks[: len(blocks) - k])
    later = sum(blocks[k:]) + sum(blocks[: len(blocks) - k])
    return (root + forward + backward + (m - 1) * later + reductions * p) * share


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_elements_sent_equal_the_formulas(world: int) -> None:
    def rank(comm: zx.Comm) -> None:
        for zero, reduce_at, m, slots in itertools.product((0, 1, 2, 3), ("micro", "step"), (1, 3), (1, 2, 3, 5)):
            if zero < 3 and slots != 2:
                continue
            options = {"zero": zero, "reduce_at": reduce_at, "slots": slots}
            with zx.Engine(tiny_gpt(), comm=comm, **options) as e:
                layout = e.core.layout()
                sizes = [0] * len(layout["units"])
                for r in layout["ranges"]:
                    sizes[r["unit"]] += r["n_padded"]
                for _ in range(2):  # the second step is the same as the first
                    e.stats(reset=True)
                    e.train_step([random_batch(comm.rank) for _ in range(m)])
                    want = traffic(zero, reduce_at, m, layout["n_padded"], sizes[1:], sizes[0], world, slots)
                    assert e.stats()["sent_elems"] == want, (options, m)

    on_ranks(world, rank)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_steady_step_allocates_nothing(zero: int) -> None:
    with alone(threads=2) as comm, zx.Engine(tiny_gpt(), comm=comm, zero=zero, recompute=True) as e:
        for s in range(3):
            e.train_step([random_batch(s, rows=3)])
        ids = random_batch(0).tokens.reshape(2, 24) % 60
        e.train_step(ids, ids)
        before = _C.memory_stats()
        for s in range(17):
            e.train_step(ids + s % 2, ids)
        after = _C.memory_stats()
        assert {k: v["n_allocs"] for k, v in before.items()} == {k: v["n_allocs"] for k, v in after.items()}
        assert e.core.memory()["n_deviations"] == 0


def test_refusal_names_numbers_and_a_way_out() -> None:
    with alone() as comm:
        with pytest.raises(zx.OutOfMemoryError, match=r"zero stage or more ranks"):
            zx.Engine(tiny_gpt(channels=64), comm=comm, memory_limit=100_000)
        with zx.Engine(tiny_gpt(), comm=comm) as e:
            needed = e.memory().total
            e.train_step(random_batch(0))

        def attempt() -> None:
            with (
                zx.Engine(tiny_gpt(), comm=comm, memory_limit=needed + (2 << 20)) as e,
                pytest.raises(zx.OutOfMemoryError, match=r"recompute=True or a smaller micro-batch"),
            ):
                e.train_step(random_batch(0, rows=400))

        live = []
        for _ in range(3):
            attempt()
            gc.collect()
            live.append({k: (v["n_live"], v["live_bytes"]) for k, v in _C.memory_stats().items()})
        assert live[0] == live[1] == live[2]


def test_plan_of_a_trillion_parameters() -> None:
    """10^12 parameters on 1,024 ranks, in under 10 s, with no memory."""
    config = zx.models.GPTConfig(vocab=50304, context=2048, layers=128, heads=200, channels=25600)
    began = time.monotonic()
    model = zx.models.GPT(config)
    memory = zx.plan(model, tokens=(1, 2048), world=1024, zero=3, precision="bf16", recompute=True)
    assert time.monotonic() - began < 10
    assert model.n_parameters() > 10**12
    p = memory.n_params
    assert memory.params == pytest.approx(2 * p / 1024, rel=1e-3)
    assert memory.master + memory.moments + memory.grads == pytest.approx(16 * p / 1024, rel=1e-3)
    assert "slots" in str(memory) and "activations" in str(memory)


def test_plan_matches_the_engine() -> None:
    for options in ({"zero": 0}, {"zero": 3, "precision": "bf16"}, {"zero": 2, "recompute": True}):
        planned = zx.plan(tiny_gpt(), tokens=(4, 24), world=1, **options)
        with alone() as comm, zx.Engine(tiny_gpt(), comm=comm, **options) as e:
            import numpy as np

            ids = np.zeros((4, 24), np.int32)
            e.train_step(ids, ids)
            real = e.memory()
        for part in ("params", "master", "moments", "grads", "param_slots", "grad_slots", "activations"):
            assert getattr(planned, part) == getattr(real, part), (options, part)


@pytest.mark.parametrize("ranks, zero", [(1, 0), (2, 3)])
def test_plan_equals_resident_memory(ranks: int, zero: int, tmp_path: Path) -> None:
    """Within 3% of the summed Pss of all ranks after steps 3 and 20; a model of at least 200 MB."""
    command = [sys.executable, str(SCRIPTS / "resident.py"), str(tmp_path), str(zero)]
    processes = start_ranks(command, ranks)
    try:
        said: list[dict[str, Any]] = [wait_for(tmp_path / f"{r}.json", processes, 4 * LIMIT_S) for r in range(ranks)]
    finally:
        end_ranks(processes, grace=LIMIT_S)
    for step in ("3", "20"):
        grown, planned = sum(s["grown"][step] for s in said), sum(s["planned"] for s in said)
        assert planned > 200e6
        assert abs(grown - planned) <= 0.03 * planned, (step, grown, planned, json.dumps(said))
