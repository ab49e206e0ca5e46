"""Collectives of 2 processes against Gloo (through torch.distributed), interleaved in the same two processes.

Both are called from Python on float32 arrays; "registered" sources come from comm.empty(). floor: a copy of the same
bytes within each process, both at once. Peer: pip install torch (CPU build).
Usage: python benchmarks/comm.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _common import ratio, record

SIZES = {"4KB": 1 << 10, "64KB": 1 << 14, "1MB": 1 << 18, "64MB": 1 << 24}  # float32 elements
OPS = ("all_reduce", "all_gather", "reduce_scatter")


def repeat(fn: Callable[[], Any], barrier: Callable[[], Any], n: int) -> float:
    """Seconds a call, of n calls after a barrier."""
    barrier()
    began = time.perf_counter()
    for _ in range(n):
        fn()
    return (time.perf_counter() - began) / n


def calls(comm: Any, op: str, n: int, registered: bool) -> Callable[[], Any]:
    """The call on n elements in total a rank: all_gather sends n / 2, the others n."""
    make = comm.empty if registered else lambda shape: np.empty(shape, np.float32)
    shape = {"all_reduce": (n,), "all_gather": (n // 2,), "reduce_scatter": (2, n // 2)}[op]
    out = np.empty({"all_reduce": (n,), "all_gather": (2, n // 2), "reduce_scatter": (n // 2,)}[op], np.float32)
    source = make(shape)
    source[...] = comm.rank + 1
    out[...] = 0
    call = getattr(comm, op)
    return lambda: call(source, out=out)


def gloo(op: str, n: int) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    if op == "all_reduce":
        values = torch.ones(n)
        return lambda: dist.all_reduce(values)
    if op == "all_gather":
        part, parts = torch.ones(n // 2), [torch.empty(n // 2) for _ in range(2)]
        return lambda: dist.all_gather(parts, part)
    whole, own = torch.ones(n), torch.empty(n // 2)
    return lambda: dist.reduce_scatter_tensor(own, whole)


def rank_main(rounds: int, store: str) -> None:
    import torch
    import torch.distributed as dist
    import zerox as zx

    torch.set_num_threads(1)
    with zx.connect(threads=1, timeout=60) as comm:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.world)
        for op in OPS:
            for name, n in SIZES.items():
                ours = {kind: calls(comm, op, n, kind == "registered") for kind in ("registered", "other")}
                sides = {**ours, "gloo": gloo(op, n)}
                counts = {kind: max(3, (1 << 21) // n) for kind in ours} | {"gloo": 3 if n >= 1 << 24 else 10}
                seconds: dict[str, list[float]] = {side: [] for side in sides}
                a, b = np.ones(n, np.float32), np.empty(n, np.float32)
                floors = []
                for fn in sides.values():
                    fn()
                for _ in range(rounds):
                    for side, fn in sides.items():
                        seconds[side].append(repeat(fn, comm.barrier, counts[side]))
                    floors.append(repeat(lambda a=a, b=b: np.copyto(b, a), comm.barrier, max(3, (1 << 20) // n)))
                if comm.rank == 0:
                    report(op, name, seconds, floors, rounds)
        dist.destroy_process_group()


def report(op: str, name: str, seconds: dict[str, list[float]], floors: list[float], rounds: int) -> None:
    floor = statistics.median(floors)
    for side in ("registered", "other"):
        ours = statistics.median(seconds[side])
        middle, low, high = ratio(seconds["gloo"], seconds[side])
        record(
            "comm",
            case=f"{op}-{name}-w2-{side}",
            unit="us",
            floor=round(1e6 * floor, 2),
            ours=round(1e6 * ours, 2),
            peer=round(1e6 * statistics.median(seconds["gloo"]), 1),
            peer_name="Gloo (torch.distributed)",
            ratio=round(middle, 2),
            of_floor=round(floor / ours, 3),
            spread=[round(low, 2), round(high, 2)],
            n=rounds,
        )


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--store", default="")
    args = p.parse_args()
    if "RANK" in os.environ:
        rank_main(args.rounds, args.store)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "zerox", "run", "-n", "2", __file__, "--rounds", str(args.rounds)]
        sys.exit(subprocess.run([*command, "--store", f"{folder}/store"], check=False).returncode)


if __name__ == "__main__":
    main()
