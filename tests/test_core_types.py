"""Promise: the types of zerox._C say what went wrong with the values and the place, belong to one thread at a time,
never touch memory that is gone, and leak nothing."""

from __future__ import annotations

import errno
import gc
import inspect
import pickle
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zerox
from core_tools import HYPER, RECORDS, UNITS, one_engine, run_pass
from helpers import alone, on_ranks
from zerox import _C

DEADLINE_S = 30.0
BASES = {
    "ArgumentError": ValueError,
    "StateError": RuntimeError,
    "OutOfMemoryError": MemoryError,
    "SystemCallError": OSError,
    "DeadlineError": TimeoutError,
    "PeerError": ConnectionError,
    "UnsupportedError": NotImplementedError,
    "CudaError": RuntimeError,
    "NcclError": RuntimeError,
    "BugError": AssertionError,
}
TYPES = [_C.Meeting, _C.Comm, _C.Partitioner, _C.Engine, _C.Tensor]


# ---- errors


@pytest.mark.parametrize("name", BASES)
def test_error_classes(name: str) -> None:
    cls = getattr(_C, name)
    assert issubclass(cls, _C.ZeroxError)
    assert issubclass(cls, BASES[name])
    assert (cls.status, cls.native, cls.where, cls.trace) == ("", 0, "", ())


def test_a_system_error_has_everything() -> None:
    _C.fault_arm(1)
    with pytest.raises(OSError, match="injected") as caught:
        _C.fault_point("here")
    error = caught.value
    assert isinstance(error, _C.SystemCallError)
    assert (error.status, error.native, error.errno) == ("SYSTEM", errno.EIO, errno.EIO)
    assert error.where.startswith("zx_fault_point (csrc/base/fault.c:")
    assert error.trace[0].endswith(error.where)
    assert str(error).endswith(f"{error.trace[0]}]")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.status, again.trace) == (str(error), error.status, error.trace)


def test_frames_lead_from_the_origin_to_the_entry() -> None:
    with alone() as comm, _C.Partitioner(RECORDS, UNITS, comm=comm) as store:
        with pytest.raises(_C.StateError) as caught:
            store.release(1)
        trace = caught.value.trace
        assert len(trace) >= 2
        assert "zx_store_release" in trace[-1]
        assert str(caught.value).count(" <- ") == len(trace) - 1


def test_every_callable_has_a_signature_and_a_docstring() -> None:
    for cls in TYPES:
        assert cls.__doc__
        for name, member in vars(cls).items():
            if name.startswith("__"):
                continue
            assert member.__doc__, f"{cls.__name__}.{name}"
            if callable(member):
                assert next(iter(inspect.signature(member).parameters)) == "self"
    assert inspect.signature(_C.Comm).parameters["timeout"].default == 0.0
    assert inspect.signature(_C.Engine).parameters["moments"].default == -1
    assert zerox.__version__ == _C.__version__


def test_types_cannot_be_changed_or_made_by_hand() -> None:
    for cls in TYPES:
        with pytest.raises(TypeError):
            cls.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        _C.Tensor()
    with pytest.raises(TypeError, match="'comm'"):
        _C.Engine(RECORDS, UNITS)


# ---- life


def test_closed_objects_say_so() -> None:
    comm = alone()
    store = _C.Partitioner(RECORDS, UNITS, comm=comm)
    engine = _C.Engine(RECORDS, UNITS, comm=comm)
    tensor = engine.param(0)
    for thing in (store, engine, comm):
        thing.close()
        thing.close()
        assert thing.closed
    calls: list[tuple[Any, str, tuple[Any, ...]]] = [
        (comm, "barrier", ()),
        (comm, "abort", ("why",)),
        (store, "acquire", (0,)),
        (store, "layout", ()),
        (store, "bytes", ()),
        (store, "step", ([HYPER] * 1,)),
        (engine, "planned", (1,)),
        (engine, "memory", ()),
        (engine, "param", (0,)),
        (engine, "apply", ("sum", [tensor])),
        (tensor, "numpy", ()),
        (tensor, "keep", ()),
    ]
    for thing, name, args in calls:
        with pytest.raises(_C.StateError, match="closed"):
            getattr(thing, name)(*args)
    with pytest.raises(_C.StateError, match="closed"):
        _ = store.version
    with pytest.raises(_C.StateError, match="closed"):
        _C.Partitioner(RECORDS, UNITS, comm=comm)
    assert (engine.in_pass, engine.dry, tensor.shape) == (False, False, (4, 3))


def test_python_classes_may_derive_from_partitioner() -> None:
    class Named(_C.Partitioner):
        """With an attribute of its own."""

    with alone() as comm:
        with Named(RECORDS, UNITS, comm=comm) as store:
            store.name = "mine"
            assert store.acquire(1)["b"].shape == (3,)
        with pytest.raises(_C.StateError, match="Named is closed"):
            store.release(1)


# ---- threads


def test_tensors_may_die_while_their_engine_is_in_use() -> None:
    """They are dropped in another thread during a wait, and given back when it ends."""
    arrived, go = threading.Event(), threading.Event()

    def rank(comm: _C.Comm) -> None:
        with _C.Engine(RECORDS, UNITS, comm=comm) as engine:
            made = run_pass(engine, lambda e: 2 * e.input("a", np.ones(4, np.float32)))
            if comm.rank == 1:
                del made
                engine.end()
                assert go.wait(DEADLINE_S)
                comm.barrier()
                comm.barrier()  # what follows counts memory of the whole process
                return
            kept = [made.keep() for _ in range(20)]
            del made
            engine.end()
            live = _C.memory_stats()["device"]["n_live"]
            holder = [kept, engine.param(0)]
            del kept

            def dropper() -> None:
                end = time.monotonic() + DEADLINE_S
                while time.monotonic() < end:
                    try:
                        engine.planned(1)
                        time.sleep(0.01)
                    except _C.StateError as error:
                        assert "Engine is in use by another thread, inside Comm.barrier" in str(error)
                        holder.clear()
                        assert _C.memory_stats()["device"]["n_live"] == live  # not while the other is inside
                        arrived.set()
                        break
                go.set()

            thread = threading.Thread(target=dropper, daemon=True)
            thread.start()
            comm.barrier()
            thread.join(DEADLINE_S)
            assert arrived.is_set()
            assert _C.memory_stats()["device"]["n_live"] == live - 20
            comm.barrier()
            run_pass(engine, lambda e: 2 * e.input("a", np.ones(4, np.float32)))
            engine.end()

    on_ranks(2, rank)


def test_engines_of_different_threads_run_side_by_side() -> None:
    """Each rank's product takes the GIL only between calls, so both are inside at once."""
    x = np.ones((64, 64), np.float32)

    def rank(comm: _C.Comm) -> float:
        with _C.Engine([("w", 0, "float32", (64, 64), True, 0, -1)], ["root"], comm=comm) as engine:
            total = 0.0
            for _ in range(30):
                out = run_pass(engine, lambda e: (e.input("x", x) @ e.param(0)).sum())
                total += out.item()
                del out
                engine.end()
            return total

    assert on_ranks(4, rank) == [0.0] * 4


# ---- leaks


def live_blocks() -> dict[str, tuple[int, int]]:
    return {name: (s["n_live"], s["live_bytes"]) for name, s in _C.memory_stats().items()}


def make_meeting(_: _C.Comm) -> None:
    _C.Meeting(2).close()


def make_comm(_: _C.Comm) -> None:
    with _C.Comm() as comm:
        comm.all_reduce(np.ones(3))


def make_partitioner(comm: _C.Comm) -> None:
    with _C.Partitioner(RECORDS, UNITS, comm=comm) as store:
        store.acquire(1)
        store.release(1)


def make_engine(comm: _C.Comm) -> None:
    with _C.Engine(RECORDS, UNITS, comm=comm) as engine:
        engine.param(0)


def make_planner(_: _C.Comm) -> None:
    _C.Engine(RECORDS, UNITS, comm=None, world=3).close()


def make_error(comm: _C.Comm) -> None:
    with pytest.raises(_C.ArgumentError):
        _C.Partitioner(RECORDS, ["root"], comm=comm)


@pytest.mark.parametrize("make", [make_meeting, make_comm, make_partitioner, make_engine, make_planner, make_error])
@pytest.mark.parametrize("n", [1000])
def test_a_thousand_of_each_leave_nothing(make: Callable[[_C.Comm], None], n: int) -> None:
    with alone() as comm:
        for _ in range(20):
            make(comm)
        gc.collect()
        blocks, types = live_blocks(), [sys.getrefcount(t) for t in TYPES]
        tracemalloc.start()
        try:
            make(comm)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(n):
                make(comm)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert live_blocks() == blocks
        assert [sys.getrefcount(t) for t in TYPES] == types
        assert grown < 16 * n, f"{grown} bytes more after {n} rounds"


def test_a_thousand_tensors_leave_nothing() -> None:
    def forward(e: _C.Engine) -> _C.Tensor:
        a = e.input("a", np.arange(8.0))
        for _ in range(9):
            a = a * 0.5
        return a.keep() if not e.dry else a

    with one_engine() as engine:
        for _ in range(20):
            run_pass(engine, forward)
            engine.end()
        gc.collect()
        blocks, types = live_blocks(), [sys.getrefcount(t) for t in TYPES]
        for _ in range(100):
            run_pass(engine, forward)
            engine.end()
        gc.collect()
        assert live_blocks() == blocks
        assert [sys.getrefcount(t) for t in TYPES] == types


def test_any_failing_primitive_is_an_error_and_leaves_nothing() -> None:
    """The n-th allocation, mapping or thread fails, for every n that opening, a step and closing pass."""

    def everything() -> None:
        with _C.Comm() as comm, _C.Engine(RECORDS, UNITS, comm=comm) as engine:
            loss = run_pass(engine, lambda e: (e.input("x", np.ones((2, 4))) @ e.param(0)).sum(), train=True)
            engine.backward(loss)
            del loss
            engine.end()
            engine.step([HYPER])
            assert engine.gather(0).shape == (4, 3)
            comm.empty(3)

    everything()
    gc.collect()
    blocks = live_blocks()
    _C.fault_arm(1 << 40)
    everything()
    n_points = _C.fault_passed()
    assert n_points > 20
    for n in range(1, n_points + 1):
        _C.fault_arm(n)
        try:
            with pytest.raises((_C.SystemCallError, _C.OutOfMemoryError), match="injected"):
                everything()
        finally:
            _C.fault_arm(0)
        gc.collect()
        assert live_blocks() == blocks, f"the {n}-th of {n_points} fault points"


# ---- functions


def test_overlap_of_runs() -> None:
    """Against a copy through the whole tensor."""
    rng = np.random.default_rng(6)
    for _ in range(200):
        shape = tuple(int(v) for v in rng.integers(1, 6, 3))
        boxes = []
        for _ in range(2):
            begin = tuple(int(rng.integers(0, s)) for s in shape)
            size = tuple(int(rng.integers(1, s - b + 1)) for s, b in zip(shape, begin, strict=True))
            n = int(np.prod(size))
            first = int(rng.integers(0, n + 1))
            boxes.append(((shape, begin, size), first, int(rng.integers(0, n - first + 1))))
        ids = []
        for (_, begin, size), first, n in boxes:
            cut = tuple(slice(b, b + s) for b, s in zip(begin, size, strict=True))
            ids.append(np.arange(np.prod(shape)).reshape(shape)[cut].reshape(-1)[first : first + n])
        wanted = {(s, d) for s, i in enumerate(ids[0]) for d, j in enumerate(ids[1]) if i == j}
        runs = _C.checkpoint_overlap(*boxes[0], *boxes[1])
        assert {(s + k, d + k) for s, d, n in runs for k in range(n)} == wanted
        assert sum(n for _, _, n in runs) == len(wanted)


@pytest.mark.parametrize(
    ("box", "begin", "n", "text"),
    [
        (((4,), (2,), (3,)), 0, 1, "does not lie in its tensor"),
        (((4,), (-1,), (3,)), 0, 1, "does not lie in its tensor"),
        (((4, 4), (0,), (3,)), 0, 1, "does not lie in its tensor"),
        (((4,), (0,), (3,)), 1, 3, r"\[1, \+3\)"),
        (((5,), (0,), (3,)), 0, 1, "different shapes"),
    ],
)
def test_impossible_runs(box: Any, begin: int, n: int, text: str) -> None:
    with pytest.raises(_C.ArgumentError, match=text):
        _C.checkpoint_overlap(box, begin, n, ((4,), (0,), (4,)), 0, 4)


def test_tables_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _C.ops()["add"] == (2, 2, 1)
    monkeypatch.setenv("ZEROX_JOB", "night")
    rows = {name: (value, default) for name, value, default, _ in _C.env_table()}
    assert rows["ZEROX_JOB"] == ("night", "")
    assert rows["ZEROX_TIMEOUT"][1] == "300"
    assert _C.isa() in ("plain", "avx2", "avx512")
    assert set(_C.memory_stats()) == {"misc", "comm", "store", "model", "device"}
    with pytest.raises(_C.ArgumentError, match="-1"):
        _C.fault_arm(-1)


def test_timeline_of_a_collective() -> None:
    _C.timeline_enable(64)
    try:
        with alone() as comm, _C.Partitioner(RECORDS, UNITS, comm=comm) as store:
            store.acquire(0)
            store.grad(0)
            store.release(0)
        events = _C.timeline_read()
    finally:
        _C.timeline_enable(0)
    assert events
    for name, lane, _, begin, end, n_bytes in events:
        assert name
        assert 0 <= lane <= 3
        assert begin <= end
        assert n_bytes >= 0
    assert _C.timeline_read() == []
