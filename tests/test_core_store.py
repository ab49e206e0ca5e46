"""Promise: zerox._C.Partitioner shards any arrays, and a driver in NumPy alone can train with its verbs: bitwise the
same at every stage, and equal to the same loop in one process without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import alone, on_ranks
from zerox import _C

Arrays = dict[str, np.ndarray]
STAGES = [{"shard_state": stage >= 1, "shard_grads": stage >= 2, "shard_params": stage >= 3} for stage in range(4)]
UNITS = ["root", "first", "second"]
SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {
    "scale": (0, (5,)),
    "w1": (1, (5, 7)),
    "b1": (1, (7,)),
    "empty": (1, (0, 3)),
    "w2": (2, (7, 3)),
    "b2": (2, (3,)),
}
STEPS, MICRO, ROWS = 3, 2, 4
MAX_NORM = 0.05  # below the norms of these gradients: every step clips


def records(dtype: str = "float32") -> list[tuple[str, int, str, tuple[int, ...], bool, int, int]]:
    return [(name, unit, dtype, shape, True, 0, -1) for name, (unit, shape) in SHAPES.items()]


def initial(dtype: str = "float32") -> Arrays:
    rng = np.random.default_rng(5)
    return {name: rng.normal(0, 0.5, shape).astype(dtype) for name, (_, shape) in SHAPES.items()}


def batch(step: int, micro: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, micro, rank])
    return rng.normal(size=(ROWS, 5)).astype(np.float32), rng.normal(size=(ROWS, 3)).astype(np.float32)


def hyper(step: int) -> tuple[float, ...]:
    return (0.05, 0.9, 0.95, 1e-8, 0.1, 0.0, 1 - 0.9 ** (step + 1), 1 - 0.95 ** (step + 1))


# ---- the model: half the squared error of (tanh((x * scale) @ w1 + b1) @ w2 + b2), summed


def forward_first(x: np.ndarray, p: Arrays, scale: np.ndarray) -> np.ndarray:
    return np.tanh((x * scale) @ p["w1"] + p["b1"])


def forward_second(h: np.ndarray, p: Arrays, y: np.ndarray) -> np.ndarray:
    return h @ p["w2"] + p["b2"] - y


def backward_second(error: np.ndarray, h: np.ndarray, p: Arrays, grad: Arrays) -> np.ndarray:
    grad["w2"] += h.T @ error
    grad["b2"] += error.sum(0)
    return error @ p["w2"].T


def backward_first(dh: np.ndarray, h: np.ndarray, x: np.ndarray, p: Arrays, scale: np.ndarray, grad: Arrays) -> Any:
    dz = dh * (1 - h * h)
    grad["w1"] += (x * scale).T @ dz
    grad["b1"] += dz.sum(0)
    return ((dz @ p["w1"].T) * x).sum(0)


# ---- the same training, with the store's verbs and without


def load(store: _C.Partitioner, values: Arrays, rank: int, whole: bool) -> None:
    params = store.layout()["params"]
    store.load_begin()
    for param, where, range_begin, begin, n in store.pieces(rank, whole):
        flat = values[params[param]["name"]].reshape(-1)
        store.write_slice(where, "master", range_begin, flat[begin : begin + n])
    store.load_end()


def micro_step(store: _C.Partitioner, x: np.ndarray, y: np.ndarray) -> None:
    store.begin_pass()
    scale = store.acquire(0)["scale"]
    h = forward_first(x, store.acquire(1), scale)
    store.release(1)
    error = forward_second(h, store.acquire(2), y)
    store.release(2)
    dh = backward_second(error, h, store.acquire(2), store.grad(2))
    store.release(2)
    store.reduce(2)
    dscale = backward_first(dh, h, x, store.acquire(1), scale, store.grad(1))
    store.release(1)
    store.reduce(1)
    root = store.grad(0)["scale"]
    root += dscale
    store.reduce(0)
    store.release(0)
    store.count(0.5 * float((error * error).sum()), ROWS)


def train_with(store: _C.Partitioner, rank: int, world: int, whole: bool) -> tuple[Arrays, list[dict[str, float]]]:
    load(store, initial(), rank, whole)
    results = []
    for step in range(STEPS):
        for micro in range(MICRO):
            micro_step(store, *batch(step, micro, rank))
        results.append(store.step([hyper(step)], max_norm=MAX_NORM))
    names = [p["name"] for p in store.layout()["params"]]
    return {name: store.gather(i) for i, name in enumerate(names)}, results


def train_alone(world: int) -> tuple[Arrays, list[dict[str, float]]]:
    """In float64, so that its own rounding does not matter."""
    p = {name: value.astype(np.float64) for name, value in initial().items()}
    m = {name: np.zeros_like(value) for name, value in p.items()}
    v = {name: np.zeros_like(value) for name, value in p.items()}
    results = []
    for step in range(STEPS):
        grad = {name: np.zeros_like(value) for name, value in p.items()}
        loss = 0.0
        for micro in range(MICRO):
            for rank in range(world):
                x, y = batch(step, micro, rank)
                h = forward_first(x, p, p["scale"])
                error = forward_second(h, p, y)
                dh = backward_second(error, h, p, grad)
                grad["scale"] += backward_first(dh, h, x, p, p["scale"], grad)
                loss += 0.5 * float((error * error).sum())
        count = MICRO * world * ROWS
        norm = float(np.sqrt(sum((g * g).sum() for g in grad.values()))) / count
        factor = min(1.0, MAX_NORM / (norm + 1e-6)) / count
        lr, beta1, beta2, eps, decay, _, correction1, correction2 = hyper(step)
        for name, g in grad.items():
            m[name] = beta1 * m[name] + (1 - beta1) * g * factor
            v[name] = beta2 * v[name] + (1 - beta2) * (g * factor) ** 2
            p[name] -= lr * (m[name] / correction1 / (np.sqrt(v[name] / correction2) + eps) + decay * p[name])
        results.append({"norm": norm, "denominator": float(count), "loss_sum": loss})
    return p, results


def on_store(world: int, fn: Callable[[_C.Partitioner, _C.Comm], Any], **options: Any) -> list[Any]:
    def rank(comm: _C.Comm) -> Any:
        with _C.Partitioner(records(), UNITS, comm=comm, **options) as store:
            return fn(store, comm)

    return on_ranks(world, rank)


@pytest.mark.parametrize("reduce_at", ["micro", "step"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_is_the_same_at_every_stage_and_without_the_store(world: int, reduce_at: str) -> None:
    expected, expected_steps = train_alone(world)
    first: Arrays | None = None
    for stage, policy in enumerate(STAGES):
        whole = stage == 0 or world == 1
        trained = on_store(
            world,
            lambda store, comm, whole=whole: train_with(store, comm.rank, world, whole),
            reduce_at=reduce_at,
            poison=True,
            **policy,
        )
        for values, steps in trained:
            first = first or values
            for name, value in values.items():
                np.testing.assert_array_equal(value, first[name], err_msg=f"{name} at stage {stage}", strict=True)
                np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-6)
            for step, wanted in zip(steps, expected_steps, strict=True):
                assert step["skip"] == 0
                for key, value in wanted.items():
                    assert step[key] == pytest.approx(value, rel=1e-5)


def test_norms_really_clip() -> None:
    _, steps = train_alone(2)
    assert all(step["norm"] > 2 * MAX_NORM for step in steps)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_bytes_held_are_those_of_the_formula(world: int, stage: int) -> None:
    def check(store: _C.Partitioner, comm: _C.Comm) -> None:
        assert store.bytes_held() == store.bytes()
        parts = store.bytes()
        assert parts.pop("total") == sum(parts.values())

    on_store(world, check, **STAGES[stage])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_slices_in_and_out(stage: int, dtype: str) -> None:
    """What is written is read back, on the rank that holds it and by gather on all; layout says where it lies."""
    rng = np.random.default_rng(9)
    whole = {name: rng.normal(size=shape) for name, (_, shape) in SHAPES.items()}
    raw = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)

    def to_raw(values: np.ndarray) -> np.ndarray:
        if dtype != "bfloat16":
            return values.astype(dtype)
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    def rank(comm: _C.Comm) -> None:
        with _C.Partitioner(records(dtype), UNITS, comm=comm, **STAGES[stage]) as store:
            layout = store.layout()
            params, version = layout["params"], store.version
            assert [p["name"] for p in params] == list(SHAPES)
            assert layout["world"] == 2
            assert layout["n_elems"] == sum(p["n"] for p in params)
            assert [u["name"] for u in layout["units"]] == UNITS
            pieces = store.pieces(comm.rank, stage == 0)
            store.load_begin()
            for param, where, range_begin, begin, n in pieces:
                values = to_raw(whole[params[param]["name"]]).reshape(-1)[begin : begin + n]
                store.write_slice(where, "param", range_begin, values)
            store.load_end()
            assert store.version == version + 1
            for param, where, range_begin, begin, n in pieces:
                values = to_raw(whole[params[param]["name"]]).reshape(-1)[begin : begin + n]
                read = store.read_slice(where, "param", range_begin, n)
                np.testing.assert_array_equal(read, values, strict=True)
                assert not store.read_slice(where, "moment2", range_begin, n).any()
                assert store.has_slice(where, "param") == dtype
                assert store.has_slice(where, "master") == ("float64" if dtype == "float64" else "float32")
            for index, values in enumerate(whole.values()):
                gathered = store.gather(index)
                assert gathered.dtype == raw
                np.testing.assert_array_equal(gathered, to_raw(values), strict=True)
            views = store.acquire(1)
            assert {n: v.shape for n, v in views.items()} == {"w1": (5, 7), "b1": (7,), "empty": (0, 3)}
            np.testing.assert_array_equal(views["w1"], to_raw(whole["w1"]), strict=True)
            assert not views["w1"].flags.writeable
            assert store.unit_state(1) == "LIVE"
            store.release(1)
            del views

    on_ranks(2, rank)


def test_every_element_belongs_to_one_rank() -> None:
    with alone() as comm, _C.Partitioner(records(), UNITS, comm=comm) as store:
        for whole in (False, True):
            owned = np.zeros(sum(int(np.prod(s)) for _, s in SHAPES.values()), int)
            starts = np.cumsum([0, *(p["n"] for p in store.layout()["params"])])
            for param, _, _, begin, n in store.pieces(0, whole):
                owned[starts[param] + begin : starts[param] + begin + n] += 1
            assert (owned == 1).all()


def test_views_keep_the_store_and_the_store_waits_for_them() -> None:
    with alone() as comm:
        store = _C.Partitioner(records(), UNITS, comm=comm)
        view = store.acquire(1)["w1"][2:]
        grads = store.grad(2)
        with pytest.raises(BufferError, match="2 calls"):
            store.close()
        assert not store.closed
        assert (view == 0).all()
        with pytest.raises(_C.StateError, match="1 open"):
            comm.close()
        del grads
        with pytest.raises(RuntimeError, match="the body's own"), store:
            raise RuntimeError("the body's own")
        assert not store.closed
        del store
        assert (view == 0).all()
        with pytest.raises(_C.StateError, match="1 open"):
            comm.close()
        del view


def test_ties_and_frozen_parameters() -> None:
    table = [
        ("table", 0, "float32", (4, 2), True, 0, -1),
        ("head", 0, "float32", (4, 2), True, 0, 0),
        ("fixed", 1, "float32", (3,), False, 0, -1),
    ]
    with alone() as comm, _C.Partitioner(table, ["root", "frozen"], comm=comm) as store:
        params = store.layout()["params"]
        assert params[1]["tied_to"] == 0
        assert (params[0]["range"], params[0]["offset"]) == (params[1]["range"], params[1]["offset"])
        grads = store.grad(0)
        grads["table"] += 1
        grads["head"] += 1
        assert (grads["table"] == 2).all()
        assert sorted(store.acquire(0)) == ["head", "table"]
        assert list(store.acquire(1)) == ["fixed"]
        with pytest.raises(_C.StateError, match="frozen"):
            store.grad(1)
        frozen = params[2]["range"]
        assert [store.has_slice(frozen, k) for k in ("param", "master", "moment1")] == ["float32", "", ""]
        with pytest.raises(_C.ArgumentError, match="has_slice"):
            store.read_slice(frozen, "moment1", 0, 1)
        del grads


WRONG: list[tuple[Callable[[_C.Partitioner], Any], type, str]] = [
    (lambda s: s.acquire(3), _C.ArgumentError, "no unit 3"),
    (lambda s: s.release(1), _C.StateError, "first"),
    (lambda s: s.reduce(1), _C.StateError, "grad"),
    (lambda s: s.unit_state(-1), _C.ArgumentError, "no unit -1"),
    (lambda s: s.gather(99), _C.ArgumentError, "no parameter 99"),
    (lambda s: s.pieces(1), _C.ArgumentError, "rank 1"),
    (lambda s: s.step([]), _C.ArgumentError, "0 entries .* 1 option groups"),
    (lambda s: s.step([(0.1, 0.9)]), _C.ArgumentError, "has 2 numbers and needs 8"),
    (lambda s: s.step([("a",) * 8]), TypeError, "real number"),
    (lambda s: s.read_slice(0, "weights", 0, 1), _C.ArgumentError, "'weights': use param"),
    (lambda s: s.read_slice(0, "param", 0, 1 << 40), _C.ArgumentError, "holds"),
    (lambda s: s.read_slice(0, "param", 0, -1), _C.ArgumentError, "holds"),
    (lambda s: s.write_slice(0, "param", 0, np.zeros(1, np.float32)), _C.StateError, "load_begin"),
    (lambda s: s.write_slice(0, "param", 0, np.zeros(1)), _C.ArgumentError, "dtype says float32"),
    (lambda s: s.load_end(), _C.StateError, "load_begin"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_calls_leave_the_store_usable(number: int) -> None:
    call, error, text = WRONG[number]
    with alone() as comm, _C.Partitioner(records(), UNITS, comm=comm) as store:
        with pytest.raises(error, match=text):
            call(store)
        values, _ = train_with(store, 0, 1, True)
        np.testing.assert_allclose(values["w1"], train_alone(1)[0]["w1"], rtol=1e-6, atol=1e-6)


def one(**changes: Any) -> list[tuple[Any, ...]]:
    record = {
        "name": "w",
        "unit": 0,
        "dtype": "float32",
        "shape": (3,),
        "trainable": True,
        "group": 0,
        "tied_to": -1,
    }
    return [tuple({**record, **changes}.values())]


@pytest.mark.parametrize(
    ("table", "options", "error", "text"),
    [
        (one(unit=1), {}, _C.ArgumentError, "w belongs to unit 1"),
        (one(dtype="int8"), {}, _C.ArgumentError, "'int8'"),
        (one(dtype="int32"), {}, _C.ArgumentError, "int32"),
        (one(shape=(1, 2, 3, 4, 5)), {}, _C.ArgumentError, "5 entries, at most 4"),
        (one(shape=(-1,)), {}, _C.ArgumentError, "-1 in dimension 0"),
        (one() * 2, {}, _C.ArgumentError, "two parameters are named w"),
        ([("w", 0)], {}, TypeError, "record 0 must be a tuple"),
        ([("w", "0", "float32", (3,), True, 0, -1)], {}, TypeError, ""),
        (one(), {"reduce_at": "sometimes"}, _C.ArgumentError, "'sometimes': use micro or step"),
        (one(), {"optimizer": "adam"}, _C.ArgumentError, "'adam': use adamw or sgd"),
        (one(), {"shard_grads": False}, _C.ArgumentError, "sharded parameters need sharded gradients"),
        (one(), {"slots": 0}, _C.ArgumentError, "n_slots 0"),
        (one(), {"moments": 1}, _C.ArgumentError, "moments"),
        (one(), {"comm": None}, TypeError, "comm must be a Comm, not NoneType"),
    ],
)
def test_impossible_partitioners(table: Any, options: dict[str, Any], error: type, text: str) -> None:
    with alone() as comm:
        with pytest.raises(error, match=text):
            _C.Partitioner(table, ["root"], **{"comm": comm, **options})
        comm.close()  # nothing of it is left


def test_null_device_has_no_arrays() -> None:
    with _C.Comm(device="null") as comm, _C.Partitioner(one(), ["root"], comm=comm) as store:
        with pytest.raises(_C.UnsupportedError, match="null"):
            store.acquire(0)
        with pytest.raises(NotImplementedError):
            comm.empty(3)
