"""Promise: the types of zerox._C say what went wrong with the values and the place, belong to one thread at a time,
never touch memory that is gone, convert what they are given without losing a value silently, and leak nothing."""

from __future__ import annotations

import errno
import gc
import inspect
import math
import pickle
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zerox
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
RECORDS = [("w", 0, "float32", (4, 3), True, 0, -1), ("b", 1, "float32", (3,), True, 0, -1)]
UNITS = ["root", "block"]
HYPER = (0.1, 0.9, 0.999, 1e-8, 0.0, 0.0, 0.1, 0.001)


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


# ---- passes


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


def test_operators_equal_numpy() -> None:
    rng = np.random.default_rng(3)
    x, y, row = (rng.normal(size=s).astype(np.float32) for s in ((2, 4), (2, 4), (4,)))
    w = rng.normal(size=(4, 3)).astype(np.float32)
    cases: list[tuple[Callable[..., Any], np.ndarray]] = [
        (lambda a, b, r, m: a + b, x + y),
        (lambda a, b, r, m: a - b, x - y),
        (lambda a, b, r, m: a * b, x * y),
        (lambda a, b, r, m: r * a + r, row * x + row),
        (lambda a, b, r, m: -a, -x),
        (lambda a, b, r, m: 3 * a, 3 * x),
        (lambda a, b, r, m: a * np.float32(0.5), np.float32(0.5) * x),
        (lambda a, b, r, m: np.float64(0.5) * a, np.float32(0.5) * x),
        (lambda a, b, r, m: a / 4, x / 4),
        (lambda a, b, r, m: sum([a, b, a]), x + y + x),
        (lambda a, b, r, m: a @ m, x @ w),
        (lambda a, b, r, m: a.sum(), x.sum()),
        (lambda a, b, r, m: a.mean(), x.mean()),
    ]
    with one_engine() as engine:
        set_parameter(engine, "w", w)
        for key, (fn, expected) in enumerate(cases):

            def forward(e: _C.Engine, fn: Callable[..., Any] = fn) -> _C.Tensor:
                return fn(e.input("a", x), e.input("b", y), e.input("r", row), e.param(0))

            out = run_pass(engine, forward, key=key)
            assert out.shape == np.shape(expected)
            assert out.dtype == "float32"
            np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6, atol=1e-6)
            if expected.ndim == 0:
                assert float(out) == out.item() == pytest.approx(float(expected), rel=1e-5)
            del out
            engine.end()


def test_operators_refuse_what_they_cannot_do() -> None:
    def forward(e: _C.Engine) -> _C.Tensor:
        t = e.input("a", np.ones((2, 2), np.float32))
        for call in (lambda: t + 1, lambda: 1.5 - t, lambda: t - np.float32(2), lambda: True + t):
            with pytest.raises(TypeError, match=r"engine\.input|unsupported"):
                call()
        for call in (lambda: 1 / t, lambda: t * "a", lambda: t @ 3, lambda: t * np.ones(2), lambda: np.ones(2) + t):
            with pytest.raises(TypeError):
                call()
        with pytest.raises(ZeroDivisionError):
            _ = t / 0
        return t

    with one_engine() as engine:
        tensor = run_pass(engine, forward)
        assert repr(tensor) == "<Tensor (2, 2) float32>"
        assert tensor.engine is engine
        with pytest.raises(_C.ArgumentError, match="4 elements"):
            tensor.item()
        del tensor
        engine.abandon()


def test_a_training_step_equals_numpy() -> None:
    rng = np.random.default_rng(8)
    x = rng.normal(size=(5, 4)).astype(np.float32)
    w = rng.normal(size=(4, 3)).astype(np.float32)

    def forward(e: _C.Engine) -> _C.Tensor:
        h = e.apply("matmul", [e.input("x", x), e.param(0)])
        e.enter(1, False)
        h = h + e.param(1)
        e.exit(1)
        return (h * h).sum()

    with one_engine(reduce_at="step", shard_params=False, shard_grads=False, optimizer="sgd", moments=0) as engine:
        set_parameter(engine, "w", w)
        loss = run_pass(engine, forward, train=True)
        generation = engine.generation
        assert loss.item() == pytest.approx(float(((x @ w) ** 2).sum()), rel=1e-5)
        engine.backward(loss)
        engine.end()
        dw, db = x.T @ (2 * x @ w), (2 * x @ w).sum(0)
        np.testing.assert_allclose(engine.read_grad(0), dw, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(engine.read_grad(1), db, rtol=1e-5, atol=1e-5)
        ctl = engine.step([HYPER])
        assert ctl["denominator"] == 1.0
        assert ctl["skip"] == 0
        assert ctl["norm"] == pytest.approx(float(np.sqrt((dw**2).sum() + (db**2).sum())), rel=1e-5)
        np.testing.assert_allclose(engine.gather(0), w - 0.1 * dw, rtol=1e-5, atol=1e-5)
        assert engine.version == 2
        with pytest.raises(_C.StateError, match="not held"):
            engine.read_grad(0)
        del loss
        loss = run_pass(engine, forward, train=True)
        assert engine.generation > generation
        memory = engine.memory()
        assert memory["store"] == engine.bytes()
        assert memory["activations"] > 0
        assert memory["flops"] > 0
        del loss
        engine.abandon()


def test_counted_loss_is_a_mean_and_nan_without_labels() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], np.float32))
    for key, (labels, expected) in enumerate([([0, 0], 1.5 * math.log(2)), ([1, -100], math.log(4)), ([-1, -1], None)]):

        def forward(e: _C.Engine, labels: list[int] = labels) -> _C.Tensor:
            return e.apply("cross_entropy", [e.input("logits", logits), e.input("labels", np.array(labels))])

        with one_engine() as engine:
            loss = run_pass(engine, forward, key=key)
            assert loss.is_total
            assert "counted" in repr(loss)
            if expected is None:
                assert math.isnan(loss.item())
            else:
                assert loss.item() == pytest.approx(expected, rel=1e-5)
            with pytest.raises(_C.ArgumentError, match="counted loss"):
                _ = loss * 2
            del loss
            engine.abandon()


def test_handles_go_stale_and_kept_ones_do_not() -> None:
    def forward(e: _C.Engine) -> _C.Tensor:
        return 2 * e.input("a", np.arange(3, dtype=np.float32))

    outside = _C.memory_stats()["device"]["n_live"]
    with one_engine(spare_bytes=4096) as engine:
        before = _C.memory_stats()["device"]["n_live"]
        old = run_pass(engine, forward)
        kept = old.keep()
        engine.end()
        np.testing.assert_array_equal(old.numpy(), [0, 2, 4])
        new = run_pass(engine, forward)
        with pytest.raises(_C.StateError, match="pass"):
            old.numpy()
        with pytest.raises(_C.StateError, match="earlier pass"):
            _ = old + new
        np.testing.assert_array_equal((kept + new).numpy(), [0, 4, 8])
        engine.end()
        assert _C.memory_stats()["device"]["n_live"] > before
        with pytest.raises(_C.StateError, match="dry run"):
            engine.begin(9, train=False, dry=True)
            forward(engine).numpy()
        engine.abandon()
    assert _C.memory_stats()["device"]["n_live"] == outside
    with pytest.raises(_C.StateError, match="closed"):
        kept.numpy()


# ---- inputs


def as_input(array: Any, dtype: str = "", engine_dtype: str = "float32") -> tuple[str, np.ndarray]:
    with one_engine(dtype=engine_dtype) as engine:
        tensor = run_pass(engine, lambda e: e.input("x", array, dtype=dtype))
        found = tensor.dtype, tensor.numpy()
        del tensor
        engine.end()
        return found


def nearest_even(values: np.ndarray) -> np.ndarray:
    """The bfloat16 next to each float64, ties to the even one; by search, not by arithmetic on bits."""
    bits = np.arange(0, 0x7F80, dtype=np.uint32)
    grid = (bits << 16).view(np.float32).astype(np.float64)
    right = np.clip(np.searchsorted(grid, np.abs(values)), 1, len(grid) - 1)
    left = right - 1
    low, high = np.abs(values) - grid[left], grid[right] - np.abs(values)
    chosen = np.where((low < high) | ((low == high) & (left % 2 == 0)), left, right)
    return np.copysign(grid[chosen], values)


@pytest.mark.parametrize("source", ["float16", "float32", "float64"])
def test_floats_become_bfloat16_rounded_to_nearest_even(source: str) -> None:
    rng = np.random.default_rng(2)
    ties = (np.arange(0x3F80, 0x3FC0, dtype=np.uint32) << 16 | 0x8000).view(np.float32).astype(np.float64)
    special = [0.0, -0.0, 1.0, 1e-3, 1 + 2**-8, 1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40, 65504.0]
    wide = [] if source == "float16" else [3.0e38, 1e-38, 1e-40]
    values = np.concatenate([rng.normal(size=500), ties, -ties, special, wide]).astype(source)
    dtype, got = as_input(values, engine_dtype="bfloat16")
    assert dtype == "bfloat16"
    np.testing.assert_array_equal(got, nearest_even(values.astype(np.float64)).astype(np.float32))
    assert np.signbit(got[628 + 1])  # minus zero
    edge = as_input(np.array([np.inf, -np.inf, np.nan], source), engine_dtype="bfloat16")[1]
    np.testing.assert_array_equal(edge, [np.inf, -np.inf, np.nan])


@pytest.mark.parametrize(
    ("array", "dtype", "engine_dtype", "wanted"),
    [
        (np.array([1.5, 2.5]), "", "float32", "float32"),
        (np.array([1.5, 2.5], np.float32), "", "float64", "float64"),
        (np.array([1.5, 2.5], np.float32), "float32", "bfloat16", "float32"),
        (np.array([[3, -4], [5, 6]], np.int64), "", "bfloat16", "int32"),
        (np.array([3, 4], np.uint8), "", "float32", "int32"),
        (np.array([3, 4], np.uint8), "uint8", "float32", "uint8"),
        (np.array([3, 1 << 40], np.int64), "int64", "float32", "int64"),
        (np.array([3, 4], np.int32), "float64", "float32", "float64"),
        (np.arange(12.0).reshape(3, 4).T, "", "float32", "float32"),
        (np.arange(4, dtype=">i4"), "", "float32", "int32"),
        ([1, 2, 3], "", "float32", "int32"),
        (np.float64(2.5), "", "float32", "float32"),
        (np.zeros((0, 3)), "", "float32", "float32"),
    ],
)
def test_inputs_keep_their_values(array: Any, dtype: str, engine_dtype: str, wanted: str) -> None:
    found, values = as_input(array, dtype, engine_dtype)
    assert found == wanted
    np.testing.assert_array_equal(values, np.asarray(array))
    assert values.shape == np.shape(array)


@pytest.mark.parametrize(
    ("array", "dtype", "text"),
    [
        (np.array([0, 1 << 31]), "", "2147483648 at element 1"),
        (np.array([-(1 << 40)]), "", "-1099511627776 at element 0"),
        (np.array([1], np.uint64), "", "NumPy type u8"),
        (np.array([1.5]), "int32", "dtype says int32"),
        (np.array([300]), "uint8", "dtype says uint8"),
        (np.array([True]), "", "NumPy type b1"),
        (np.array(["a"]), "", "NumPy type U4"),
        (np.array([None]), "", "NumPy type O8"),
        (np.zeros((1, 1, 1, 1, 1)), "", "5 dimensions"),
        (np.zeros(1), "float8", "'float8'"),
    ],
)
def test_inputs_that_would_lose_a_value_are_refused(array: Any, dtype: str, text: str) -> None:
    with one_engine() as engine:
        with pytest.raises(_C.ArgumentError, match=text):
            run_pass(engine, lambda e: e.input("ids", array, dtype=dtype))
        engine.abandon()


def test_apply_checks_its_arguments() -> None:
    with one_engine() as engine, one_engine() as other:
        foreign = other.param(0)
        cases: list[tuple[tuple[Any, ...], dict[str, Any], type, str]] = [
            (("softmax", [foreign]), {}, _C.ArgumentError, "'softmax'"),
            (("sum", [foreign]), {}, _C.ArgumentError, "another engine"),
            (("sum", [3]), {}, TypeError, "input 0 must be a Tensor or None, not int"),
            (("sum", 3), {}, TypeError, "iterable"),
            (("sum", [None] * 7), {}, _C.ArgumentError, "7 inputs, at most 6"),
            (("sum", []), {"ints": [1] * 5}, _C.ArgumentError, "5 entries, at most 4"),
            (("sum", []), {"ints": [1.5]}, TypeError, "integer, not float"),
            (("sum", []), {"floats": ["a"]}, TypeError, "real number"),
            (("sum", []), {"docs": 3}, TypeError, "tuple"),
            (("sum", []), {"docs": (foreign, 3)}, _C.ArgumentError, "cu_seqlens"),
            (("sum", []), {}, _C.StateError, "outside a pass"),
        ]
        for args, options, error, text in cases:
            with pytest.raises(error, match=text):
                engine.apply(*args, **options)
        with pytest.raises(_C.ArgumentError, match="another engine"):
            engine.backward(foreign)
        with pytest.raises(TypeError, match="'train' and 'dry'"):
            engine.begin(1)


def test_planning_without_a_comm() -> None:
    records = [("w", 0, "bfloat16", (1 << 20, 1 << 20), True, 0, -1)]
    with _C.Engine(records, ["root"], comm=None, world=1024, total_bytes=1 << 40, dtype="bfloat16") as engine:
        assert engine.comm is None
        assert engine.layout()["world"] == 1024
        assert engine.bytes()["params"] == 2 * (1 << 40) // 1024
        assert engine.memory()["limit"] == 1 << 40
        with pytest.raises(_C.StateError, match="only plans"):
            engine.acquire(0)
        with pytest.raises(_C.StateError, match="planning"):
            engine.begin(1, train=False, dry=False)
    with pytest.raises(_C.ArgumentError, match="how many ranks"):
        _C.Engine(records, ["root"], comm=None)


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
    assert _C.isa() in ("plain", "avx2")
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
