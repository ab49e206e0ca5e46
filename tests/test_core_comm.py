"""Promise: zerox._C.Comm moves NumPy arrays between ranks as NumPy itself would, refuses what is impossible with the
values in the message, and gives up within its deadline, on Ctrl-C, and when another rank gives up."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from helpers import alone, on_ranks
from zerox import _C

DTYPES = ["float32", "float64", "int32", "int64"]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (257, 3)]
DEADLINE_S = 30.0


def values(shape: tuple[int, ...], dtype: str, rank: int) -> np.ndarray:
    """Small whole numbers: their sums are exact in every dtype and order."""
    rng = np.random.default_rng(1000 + rank)
    return rng.integers(-50, 50, shape).astype(dtype)


def exchange(comm: _C.Comm, shape: tuple[int, ...], dtype: str) -> None:
    world, rank = comm.world, comm.rank
    everybody = [values(shape, dtype, r) for r in range(world)]
    rows = [values((world, *shape), dtype, 100 + r) for r in range(world)]
    total = np.sum(everybody, axis=0, dtype=dtype)

    np.testing.assert_array_equal(comm.all_gather(everybody[rank]), np.stack(everybody), strict=True)
    np.testing.assert_array_equal(comm.all_reduce(everybody[rank]), np.asarray(total), strict=True)
    scattered = comm.reduce_scatter(rows[rank])
    np.testing.assert_array_equal(scattered, np.asarray(sum(r[rank] for r in rows), dtype=dtype), strict=True)
    swapped = comm.all_to_all(rows[rank])
    np.testing.assert_array_equal(swapped, np.stack([r[rank] for r in rows]), strict=True)
    for root in range(world):
        array = everybody[rank].copy()
        assert comm.broadcast(array, root=root) is array
        np.testing.assert_array_equal(array, everybody[root])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives_equal_numpy(world: int) -> None:
    def rank(comm: _C.Comm) -> int:
        assert (comm.world, comm.device, comm.closed) == (world, "cpu", False)
        for dtype in DTYPES:
            for shape in SHAPES:
                exchange(comm, shape, dtype)
        return comm.rank

    assert on_ranks(world, rank) == list(range(world))


@pytest.mark.parametrize("world", [1, 3])
def test_collectives_on_queued_streams(world: int) -> None:
    def rank(comm: _C.Comm) -> None:
        for shape in SHAPES:
            exchange(comm, shape, "float32")

    on_ranks(world, rank, delay_seed=11)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_out_in_place_and_bytes(world: int) -> None:
    def rank(comm: _C.Comm) -> None:
        mine = values((6,), "float32", comm.rank)
        out = np.full((world, 6), np.nan, np.float32)
        assert comm.all_gather(mine, out=out) is out
        whole = out.copy()
        row = whole[comm.rank]
        np.testing.assert_array_equal(comm.all_gather(row, out=whole), out)
        expected = comm.all_reduce(mine)
        assert comm.all_reduce(mine, out=mine) is mine
        np.testing.assert_array_equal(mine, expected)
        kept = values((world, 5), "float64", comm.rank)
        expected = comm.reduce_scatter(kept)
        np.testing.assert_array_equal(comm.reduce_scatter(kept, out=kept[comm.rank]), expected)
        bytes_ = np.arange(5, dtype=np.uint8) + comm.rank
        np.testing.assert_array_equal(comm.all_gather(bytes_)[world - 1], np.arange(5) + world - 1)
        comm.barrier()

    on_ranks(world, rank)


def test_bfloat16_travels_as_uint16() -> None:
    def rank(comm: _C.Comm) -> np.ndarray:
        one = (np.array([1.0, 2.5, -3.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
        with pytest.raises(_C.ArgumentError, match="uint16 with dtype"):
            comm.all_reduce(one)
        total = comm.all_reduce(one, dtype="bfloat16")
        assert total.dtype == np.uint16
        return (total.astype(np.uint32) << 16).view(np.float32)

    for total in on_ranks(3, rank):
        np.testing.assert_array_equal(total, [3.0, 7.5, -9.0])


def test_send_and_recv() -> None:
    def rank(comm: _C.Comm) -> None:
        message = np.arange(100_000, dtype=np.float32)
        if comm.rank == 0:
            comm.send(message, 2)
        elif comm.rank == 2:
            buffer = np.zeros_like(message)
            assert comm.recv(buffer, 0) is buffer
            np.testing.assert_array_equal(buffer, message)
        comm.barrier()

    on_ranks(3, rank)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_split_and_control_bytes(world: int) -> None:
    def rank(comm: _C.Comm) -> None:
        assert comm.all_gather_bytes("names", b"r" * comm.rank) == [b"r" * r for r in range(world)]
        assert comm.all_gather_bytes("nothing", b"") == [b""] * world
        child = comm.split(comm.rank % 2, key=-comm.rank)  # in reverse order
        assert child is not None
        with pytest.raises(_C.StateError, match="1 open"):
            comm.close()
        with child:
            members = [r for r in range(world) if r % 2 == comm.rank % 2][::-1]
            assert (child.world, child.rank) == (len(members), members.index(comm.rank))
            gathered = child.all_gather(np.array([comm.rank]))
            assert gathered.ravel().tolist() == members
            assert child.all_gather_bytes("ranks", b"x" * comm.rank) == [b"x" * r for r in members]
        assert child.closed
        with pytest.raises(_C.StateError, match="closed"):
            child.barrier()
        with pytest.raises(_C.StateError, match="closed"):
            child.abort("too late")
        assert comm.split(-1) is None
        comm.barrier()

    on_ranks(world, rank)


def test_registered_memory_outlives_close() -> None:
    def rank(comm: _C.Comm) -> np.ndarray:
        array = comm.empty((3, 4), "float64")
        assert (array.shape, array.dtype) == ((3, 4), np.float64)
        assert not array.any()
        array[:] = comm.rank + 1
        np.testing.assert_array_equal(comm.all_gather(array)[1], np.full((3, 4), 2.0))
        assert comm.empty(0).shape == (0,)
        return array[1:]

    before = _C.memory_stats()["device"]["live_bytes"]
    arrays = on_ranks(2, rank)
    for r, array in enumerate(arrays):
        assert (array == r + 1).all()
        array[:] = 9.0
        assert array.sum() == 72.0
    assert _C.memory_stats()["device"]["live_bytes"] > before
    del array, arrays
    assert _C.memory_stats()["device"]["live_bytes"] == before


BAD_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], type, str]] = [
    ("all_gather", ([1.0],), {}, TypeError, "NumPy array, not list"),
    ("all_gather", (np.zeros(3, np.float16),), {}, _C.ArgumentError, "NumPy type f2"),
    ("all_gather", (np.zeros(3, np.complex64),), {}, _C.ArgumentError, "NumPy type c8"),
    ("all_gather", (np.zeros((4, 4), np.float32)[:, ::2],), {}, _C.ArgumentError, "not C-contiguous"),
    ("all_gather", (np.zeros(3, ">f4"),), {}, _C.ArgumentError, "byte order"),
    ("all_gather", (np.zeros(3, np.float32),), {"dtype": "float64"}, _C.ArgumentError, "dtype says float64"),
    ("all_gather", (np.zeros(3, np.float32),), {"dtype": "half"}, _C.ArgumentError, "'half': use float32"),
    (
        "all_gather",
        (np.zeros(3),),
        {"out": np.zeros((3, 3))},
        _C.ArgumentError,
        r"\(3, 3\) and needs \(1, 3\)",
    ),
    ("all_gather", (np.zeros(3),), {"out": np.zeros((1, 3), np.float32)}, _C.ArgumentError, "out is float32"),
    ("reduce_scatter", (np.zeros((2, 3)),), {}, _C.ArgumentError, "2 rows .* 1 ranks"),
    ("reduce_scatter", (np.zeros(()),), {}, _C.ArgumentError, "0 rows"),
    ("broadcast", (np.zeros(3),), {"root": 1}, _C.ArgumentError, "root 1: ranks count from 0 to 0"),
    ("send", (np.zeros(3), 5), {}, _C.ArgumentError, "peer 5"),
    ("empty", (-1,), {}, _C.ArgumentError, "-1 in dimension 0"),
    ("empty", ((1 << 40, 1 << 40),), {}, _C.ArgumentError, "bytes"),
    ("empty", ("many",), {}, TypeError, "integer"),
    ("split", ("red",), {}, TypeError, ""),
]


@pytest.mark.parametrize(("name", "args", "options", "error", "text"), BAD_CALLS)
def test_impossible_arguments(
    name: str, args: tuple[Any, ...], options: dict[str, Any], error: type, text: str
) -> None:
    with alone() as comm:
        with pytest.raises(error, match=text):
            getattr(comm, name)(*args, **options)
        np.testing.assert_array_equal(comm.all_reduce(np.ones(2)), [1.0, 1.0])  # it is as usable as before


def test_read_only_and_shared_memory_are_refused() -> None:
    with alone() as comm:
        frozen = np.zeros((1, 3))
        frozen.setflags(write=False)
        with pytest.raises(_C.ArgumentError, match="read-only"):
            comm.all_gather(np.zeros(3), out=frozen)
        with pytest.raises(_C.ArgumentError, match="read-only"):
            comm.recv(frozen, 0)
        whole, rows = np.zeros(7), np.zeros((1, 3))
        with pytest.raises(_C.ArgumentError, match="shares memory"):
            comm.all_reduce(whole[:5], out=whole[2:])
        with pytest.raises(_C.ArgumentError, match="shares memory"):
            comm.all_to_all(rows, out=rows)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 2, "world": 2}, "rank 2 of a world of 2"),
        ({"world": 0}, "world of 0"),
        ({"local_rank": 3, "local_world": 2}, "local_rank 3 of local_world 2"),
        ({"device": "tpu"}, "'tpu': use cpu"),
        ({"threads": -1}, "threads -1"),
        ({"timeout": -1.0}, "timeout -1"),
        ({"transport": "pigeon"}, "pigeon"),
    ],
)
def test_impossible_comms(options: dict[str, Any], text: str) -> None:
    with pytest.raises(_C.ArgumentError, match=text):
        _C.Comm(**options)


def test_nobody_comes_to_the_meeting() -> None:
    meeting = _C.Meeting(2)
    began = time.monotonic()
    with pytest.raises(_C.DeadlineError, match="rank"):
        _C.Comm(rank=0, world=2, meeting=meeting, timeout=0.3)
    assert time.monotonic() - began < 5.0
    meeting.close()
    with pytest.raises(_C.StateError, match="Meeting is closed"):
        _C.Comm(rank=0, world=2, meeting=meeting)


def test_meeting_waits_for_its_comms() -> None:
    meeting = _C.Meeting(1)
    comm = _C.Comm(meeting=meeting)
    with pytest.raises(_C.StateError, match="1 open Comm"):
        meeting.close()
    comm.close()
    meeting.close()
    with pytest.raises(TypeError, match="meeting must be a Meeting"):
        _C.Comm(meeting=3)


def test_ranks_that_disagree_both_see_both_calls() -> None:
    def rank(comm: _C.Comm) -> str:
        with pytest.raises(_C.PeerError) as caught:
            if comm.rank == 0:
                comm.all_reduce(np.zeros(3, np.float32))
            else:
                comm.all_gather(np.zeros(4, np.float64))
        with pytest.raises(_C.PeerError):
            comm.check()
        return str(caught.value)

    for text in on_ranks(2, rank):
        assert "all_reduce" in text
        assert "all_gather" in text


def blocked_ranks(
    timeout: float = 20.0,
) -> tuple[list[_C.Comm], threading.Thread, list[BaseException], _C.Meeting]:
    """Two ranks; rank 0 waits in a barrier on a thread of its own."""
    meeting = _C.Meeting(2)
    comms: list[Any] = [None, None]

    def open_one(rank: int) -> None:
        comms[rank] = _C.Comm(rank=rank, world=2, meeting=meeting, timeout=timeout)

    opener = threading.Thread(target=open_one, args=(1,), daemon=True)
    opener.start()
    open_one(0)
    opener.join(DEADLINE_S)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            comms[0].barrier()
        except BaseException as error:
            errors.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        try:
            comms[0].check()
        except _C.StateError:
            return comms, waiter, errors, meeting
        time.sleep(0.01)
    raise AssertionError("the barrier did not begin")


def test_second_thread_is_an_error_and_abort_is_not() -> None:
    comms, waiter, errors, meeting = blocked_ranks()
    with pytest.raises(_C.StateError, match=r"Comm is in use by another thread, inside Comm\.barrier"):
        comms[0].all_reduce(np.zeros(1))
    with pytest.raises(_C.StateError, match="in use"):
        comms[0].close()
    comms[0].abort("had enough")
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive()
    assert len(errors) == 1
    assert isinstance(errors[0], _C.ZeroxError)
    with pytest.raises(_C.PeerError, match="had enough"):
        comms[1].barrier()
    for comm in comms:
        comm.close()
    meeting.close()


def test_late_rank_is_named() -> None:
    comms, waiter, errors, meeting = blocked_ranks(timeout=0.5)
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive()
    assert isinstance(errors[0], (_C.DeadlineError, _C.PeerError))
    assert "rank 1" in str(errors[0])
    assert "barrier" in str(errors[0])
    for comm in comms:
        comm.close()
    meeting.close()


def test_leaving_by_an_exception_tells_the_others_why() -> None:
    meeting = _C.Meeting(2)
    told: list[str] = []

    def waits() -> None:
        with (
            pytest.raises(_C.PeerError) as caught,
            _C.Comm(rank=0, world=2, meeting=meeting, timeout=DEADLINE_S) as comm,
        ):
            comm.barrier()
        told.append(str(caught.value))

    waiter = threading.Thread(target=waits, daemon=True)
    waiter.start()
    began = time.monotonic()
    with (
        pytest.raises(LookupError, match="no such file"),
        _C.Comm(rank=1, world=2, meeting=meeting, timeout=DEADLINE_S),
    ):
        raise LookupError("no such file")
    waiter.join(DEADLINE_S)
    assert time.monotonic() - began < 5.0
    assert "rank 1" in told[0]
    assert "LookupError: no such file" in told[0]
    meeting.close()


INTERRUPT = """
import sys, threading, time
from zerox import _C

meeting = _C.Meeting(2)
if sys.argv[1] == "barrier":
    def other():
        comm = _C.Comm(rank=1, world=2, meeting=meeting, timeout=60)
        time.sleep(60)
    threading.Thread(target=other, daemon=True).start()
    comm = _C.Comm(rank=0, world=2, meeting=meeting, timeout=60)
print("waiting", flush=True)
try:
    if sys.argv[1] == "barrier":
        comm.barrier()
    else:
        _C.Comm(rank=0, world=2, meeting=meeting, timeout=60)
except KeyboardInterrupt as error:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("where", ["barrier", "open"])
def test_ctrl_c_ends_a_wait_within_a_second(where: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPT, where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"
        assert time.monotonic() - began < 1.0
        child.wait(DEADLINE_S)
    finally:
        child.kill()
        child.communicate(timeout=DEADLINE_S)


FORK = """
import os, numpy as np
from zerox import _C

comm = _C.Comm()
store = _C.Partitioner([("w", 0, "float32", (3,), True, 0, -1)], ["root"], comm=comm)
child = os.fork()
if child == 0:
    status = 1
    try:
        comm.all_reduce(np.zeros(3))
    except _C.StateError as error:
        status = 0 if "fork of process" in str(error) else 2
    try:
        store.acquire(0)
        status = 3
    except _C.StateError:
        pass
    del store, comm
    os._exit(status)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert comm.all_reduce(np.ones(2)).tolist() == [1.0, 1.0]
assert store.acquire(0)["w"].shape == (3,)
"""


def test_forked_child_may_not_use_it() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
