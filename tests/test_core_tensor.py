"""Promise: an Engine's tensors compute what NumPy computes, are read only while they are valid, and convert what they
are given without losing a value silently."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from core_tools import HYPER, one_engine, run_pass, set_parameter
from zerox import _C


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
