"""Promise: zx.launch runs ranks as threads, gives their results in order, and leaves nobody behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import zerox as zx
from helpers import random_batch, tiny_gpt

LIMITS = {"threads": 1, "timeout": 20.0, "deadline": 60.0}


@pytest.fixture(autouse=True)
def no_rank_stays() -> Any:
    yield
    ends = time.monotonic() + 5
    while time.monotonic() < ends and (left := [t for t in threading.enumerate() if t.name.startswith("zerox rank")]):
        time.sleep(0.02)
    assert not left


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_results_in_rank_order(ranks: int) -> None:
    def fn(comm: zx.Comm, base: int, text: str) -> tuple[int, str, int]:
        return comm.rank + base, text, int(comm.all_reduce(np.array([1], np.int64))[0])

    assert zx.launch(fn, ranks, 10, "x", **LIMITS) == [(10 + r, "x", ranks) for r in range(ranks)]


def test_engines_train_together() -> None:
    def train(comm: zx.Comm) -> float:
        with zx.Engine(tiny_gpt(), comm=comm, zero=3) as engine:
            return float(engine.train_step(random_batch(comm.rank)))

    losses = zx.launch(train, **LIMITS)
    assert losses[0] == losses[1] > 0


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_the_real_error_is_raised_with_every_trace(guilty: int) -> None:
    """Not the PeerErrors that follow from it, whoever reports first."""

    def fn(comm: zx.Comm) -> None:
        if comm.rank == guilty:
            time.sleep(0.1)
            raise ZeroDivisionError("my own mistake")
        comm.barrier()

    with pytest.raises(ZeroDivisionError, match="my own mistake") as caught:
        zx.launch(fn, 3, **LIMITS)
    notes = caught.value.__notes__
    assert [note.split(" failed")[0] for note in notes] == ["--- rank 0", "--- rank 1", "--- rank 2"]
    assert "ZeroDivisionError: my own mistake" in notes[guilty]
    assert all("PeerError" in note and "barrier" in note for r, note in enumerate(notes) if r != guilty)
    assert all("rank_threads.py" not in note for note in notes), "the user's own frames only"


def test_the_error_of_a_rank_that_closed_its_comm() -> None:
    def fn(comm: zx.Comm) -> None:
        comm.close()
        raise RuntimeError("after the end")

    with pytest.raises(RuntimeError, match="after the end"):
        zx.launch(fn, 2, **LIMITS)


def test_first_of_several_errors() -> None:
    def fn(comm: zx.Comm) -> None:
        time.sleep(0.2 * (2 - comm.rank))
        raise (KeyError if comm.rank else IndexError)(f"rank {comm.rank}")

    with pytest.raises(KeyError, match="rank 1"):
        zx.launch(fn, 2, **LIMITS)


def test_wrong_options_reach_the_caller() -> None:
    for ranks in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match="at least 1"):
            zx.launch(lambda comm: None, ranks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'tpu'"):
        zx.launch(lambda comm: None, 2, device="tpu", **LIMITS)


def test_deadline_ends_waits_and_loops_and_says_where_ranks_were() -> None:
    def wait_for_nobody(comm: zx.Comm) -> None:
        comm.barrier()

    def loop_forever(comm: zx.Comm) -> None:
        while True:
            time.sleep(0.001)

    def fn(comm: zx.Comm) -> None:
        if comm.rank < 2:
            (loop_forever if comm.rank else wait_for_nobody)(comm)
        comm.barrier()

    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks 0, 1, 2 of 3 did not end within 0\.5 s") as caught:
        zx.launch(fn, 3, threads=1, timeout=30.0, deadline=0.5)
    assert time.monotonic() - began < 10
    notes = caught.value.__notes__
    assert "wait_for_nobody" in notes[0] and "loop_forever" in notes[1]


def test_a_rank_that_does_not_notice_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 never waits for anybody, so it cannot learn that rank 0 failed."""
    monkeypatch.setattr("zerox.rank_threads.GRACE_S", 0.5)

    def fn(comm: zx.Comm) -> None:
        if comm.rank == 0:
            raise RuntimeError("early")
        while True:
            time.sleep(0.001)

    with pytest.raises(RuntimeError, match="early"):
        zx.launch(fn, 2, threads=1, timeout=30.0)


def test_a_wait_for_a_rank_that_does_not_come_has_a_deadline() -> None:
    def fn(comm: zx.Comm) -> None:
        if comm.rank == 0:
            comm.barrier()
        time.sleep(2.5 if comm.rank else 0)

    with pytest.raises(TimeoutError, match="barrier"):
        zx.launch(fn, 2, threads=1, timeout=1.0, deadline=30.0)


SCRIPT = """
import threading, time
import zerox as zx

def fn(comm):
    if comm.rank == 0:
        print("running", flush=True)
    if comm.rank == 1:
        while True:
            time.sleep(0.001)
    comm.barrier()

try:
    zx.launch(fn, 3, threads=1, timeout=60.0)
except KeyboardInterrupt:
    print("interrupted", [t.name for t in threading.enumerate()], flush=True)
"""


def test_ctrl_c_ends_all_ranks() -> None:
    """Ranks inside a wait and inside Python code; the process goes on with none of them left."""
    job = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "running\n"
        time.sleep(0.2)
        job.send_signal(signal.SIGINT)
        said, _ = job.communicate(timeout=30)
    finally:
        job.kill()
        job.wait()
    assert said == "interrupted ['MainThread']\n"
    assert job.returncode == 0
