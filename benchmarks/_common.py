"""Interleaved races and result lines."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def device_name() -> str:
    """Processor and number of cores that this process may use."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()} x{len(os.sched_getaffinity(0))}"
    return "cpu"


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def steal_ticks() -> int:
    """Time that others had the processors, from /proc/stat (jiffies)."""
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])


def timed(fn: Callable[[], Any]) -> float:
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


def race(sides: dict[str, Callable[[], Any]], *, rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of each side in each round; sides take turns, and the order is reversed every other round."""
    for fn in sides.values():
        for _ in range(warm):
            fn()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(rounds):
        order = list(sides.items())
        for name, fn in order if round_number % 2 == 0 else reversed(order):
            seconds[name].append(timed(fn))
    return seconds


def ratio(peer: list[float], ours: list[float]) -> tuple[float, float, float]:
    """Median, smallest and largest of the per-round ratios peer / ours (above 1 = we are faster)."""
    ratios = sorted(p / o for p, o in zip(peer, ours, strict=True))
    return statistics.median(ratios), ratios[0], ratios[-1]


def record(kind: str, **line: Any) -> dict[str, Any]:
    """Appends a line to benchmarks/results/cpu/<kind>.jsonl and prints it."""
    line = {
        "bench": kind,
        **line,
        "commit": commit(),
        "device": device_name(),
        "when": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    }
    path = RESULTS / "cpu" / f"{kind}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))
    return line
