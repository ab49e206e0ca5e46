"""Promise: zx.partition shards any arrays; gathers give them back bit for bit; sums over ranks are the store's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zerox as zx
from helpers import alone, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from zerox import dtypes

Arrays = dict[str, np.ndarray]
SHAPES: dict[str, tuple[int, ...]] = {
    "scale": (),
    "one": (1,),
    "w": (5, 7),
    "prime": (127,),
    "empty": (0, 3),
    "deep": (2, 1, 3, 1, 2, 1),
    "big": (9, 100),
}
UNITS = {"first": ["w", "prime"], "second": ["big", "empty"]}


def numbers(seed: int = 0, dtype: str = "float32") -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def mixed() -> Arrays:
    """Of all dtypes; "prime" holds bfloat16 bits."""
    arrays = numbers(1)
    arrays["w"] = arrays["w"].astype(np.float64)
    arrays["prime"] = dtypes.to_bfloat16(arrays["prime"])
    return arrays


def joined(runs: list[list[tuple[int, np.ndarray]]], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The runs of all ranks as one array; every element comes once."""
    flat, seen = np.zeros(int(np.prod(shape)), dtype), np.zeros(int(np.prod(shape)), int)
    for begin, values in (run for rank in runs for run in rank):
        assert values.dtype == dtype
        flat[begin : begin + values.size] = values
        seen[begin : begin + values.size] += 1
    assert (seen == 1).all()
    return flat.reshape(shape)


def same(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("units", [None, UNITS])
def test_gather_and_shards_give_back_what_went_in(world: int, zero: int, units: Any) -> None:
    arrays = mixed()

    def rank(comm: zx.Comm) -> dict[str, Any]:
        with zx.partition(arrays, comm=comm, units=units, zero=zero, bfloat16=["prime"]) as p:
            everything = p.gather()
            assert list(everything) == list(arrays) == list(p.names)
            for name, value in arrays.items():
                same(everything[name], value)
                same(p.gather(name), value)
            assert p.units == ("root", *(units or ()))
            assert "w" in p and len(p) == len(arrays) and f"rank {comm.rank} of {world}" in repr(p)
            return {name: p.shard(name) for name in p.names}

    shards = on_ranks(world, rank)
    for name, value in arrays.items():
        same(joined([s[name] for s in shards], value.shape, value.dtype), value)


def test_memory_shrinks_with_the_ranks() -> None:
    """Values only: no gradients, no state; a rank holds its share and the slots that gathers need."""
    arrays = {str(i): np.ones(1 << 18, np.float32) for i in range(8)}
    units = {f"unit {i}": [str(i)] for i in range(8)}

    def rank(comm: zx.Comm) -> dict[str, int]:
        with zx.partition(arrays, comm=comm, units=units) as p:
            return p.core.bytes()

    whole, half, quarter = (on_ranks(world, rank)[0] for world in (1, 2, 4))
    assert whole["params"] == 8 << 20
    assert half["params"] == 4 << 20 and quarter["params"] == 2 << 20
    assert all(b["grads"] == b["master"] == b["moments"] == 0 for b in (whole, half, quarter))


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_over_ranks(world: int, zero: int) -> None:
    arrays = mixed()
    given_by = [{n: a.astype(np.float64 if n == "w" else np.float32) for n, a in numbers(10 + r).items()}
                for r in range(world)]  # fmt: skip

    def rank(comm: zx.Comm) -> Any:
        mine = dict(given_by[comm.rank])
        mine["prime"] = dtypes.to_bfloat16(mine["prime"])
        if comm.rank == 1:
            del mine["big"]
        with zx.partition(arrays, comm=comm, units=UNITS, zero=zero, bfloat16=["prime"]) as p:
            sums = p.reduce_scatter(mine)
            assert {n: [(b, v.size) for b, v in runs] for n, runs in sums.items()} == {
                n: [(b, v.size) for b, v in p.shard(n)] for n in p.names
            }
            same(p.gather("big"), arrays["big"])  # the values are as they were
            return sums

    results = on_ranks(world, rank)
    for name, shape in SHAPES.items():
        wide = np.dtype(np.float64 if name == "w" else np.float32)
        right = np.zeros(shape, wide)
        for r in range(world):  # in rank order
            if name == "prime":
                right = right + dtypes.from_bfloat16(dtypes.to_bfloat16(given_by[r][name]))
            elif not (name == "big" and r == 1):
                right = right + given_by[r][name]
        same(joined([result[name] for result in results], shape, wide), right.astype(wide).reshape(shape))


def test_sums_have_the_bits_of_the_verbs() -> None:
    """reduce_scatter against grad, reduce and one step of SGD at rate 1 from zero: minus the same sums."""

    def rank(comm: zx.Comm) -> None:
        mine = numbers(20 + comm.rank)
        nothing = {name: np.zeros_like(value) for name, value in mine.items()}
        with zx.partition(nothing, comm=comm, units=UNITS, optimizer="sgd", moments=0) as p:
            sums = p.reduce_scatter(mine)
            core = p.core
            for unit in range(3):
                views = core.grad(unit)
                for name, view in views.items():
                    view += mine[name].reshape(view.shape)
                del view, views
                core.reduce(unit)
            core.count(0.0, 1.0 if comm.rank == 0 else 0.0)
            core.step([(1.0, 0, 0, 0, 0, 0, 1.0, 1.0)])
            for name in p.names:
                for (begin, total), (at, value) in zip(sums[name], p.shard(name), strict=True):
                    assert begin == at
                    same(-value, total)

    on_ranks(3, rank)


def test_verbs_underneath_on_named_units() -> None:
    arrays = numbers()
    with alone() as comm, zx.partition(arrays, comm=comm, units=UNITS) as p:
        views = p.core.acquire(p.unit("first"))
        same(views["w"], arrays["w"])
        with pytest.raises(KeyError, match="no unit 'third'; there are root, first, second"):
            p.unit("third")
        p.core.release(p.unit("first"))
        del views


def test_load_replaces_all_values() -> None:
    def rank(comm: zx.Comm) -> None:
        with zx.partition(numbers(), comm=comm) as p:
            later = numbers(7)
            later["w"] = np.asfortranarray(later["w"])
            p.load(later)
            for name, value in later.items():
                same(p.gather(name), value)
            with pytest.raises(KeyError, match="no value for array 'w'"):
                p.load({k: v for k, v in later.items() if k != "w"})
            same(p.gather("w"), later["w"])

    on_ranks(2, rank)


def test_not_contiguous_and_mapped_arrays(tmp_path: Any) -> None:
    values = np.arange(600, dtype=np.float32).reshape(20, 30)
    np.save(tmp_path / "a.npy", values)
    arrays = {"t": values.T, "step": values[::3, ::-2], "mapped": np.load(tmp_path / "a.npy", mmap_mode="r")}

    def rank(comm: zx.Comm) -> None:
        with zx.partition(arrays, comm=comm) as p:
            for name, value in arrays.items():
                same(p.gather(name), np.asarray(value))

    on_ranks(3, rank)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_sets(data: st.DataObject) -> None:
    letters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])  # what UTF-8 and C strings hold
    names = data.draw(st.lists(st.text(letters, min_size=1, max_size=8), min_size=1, max_size=6, unique=True))
    shapes = [tuple(data.draw(st.lists(st.integers(0, 7), max_size=5))) for _ in names]
    kinds = [data.draw(st.sampled_from(["float32", "float64", "uint16"])) for _ in names]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    arrays = {n: rng.integers(0, 1 << 14, s).astype(k) for n, s, k in zip(names, shapes, kinds, strict=True)}
    unit = {n: data.draw(st.sampled_from(["root", "a", "b"])) for n in names}
    units = {u: [n for n in names if unit[n] == u] for u in ("root", "a", "b")}
    world, zero = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    bits = [n for n, k in zip(names, kinds, strict=True) if k == "uint16"]

    def rank(comm: zx.Comm) -> dict[str, Any]:
        with zx.partition(arrays, comm=comm, units=units, zero=zero, bfloat16=bits) as p:
            for name, value in p.gather().items():
                same(value, arrays[name])
            return {name: p.shard(name) for name in names}

    shards = on_ranks(world, rank)
    for name, value in arrays.items():
        same(joined([s[name] for s in shards], value.shape, value.dtype), value)


def ones(**kinds: Any) -> Arrays:
    return {name: np.ones(3, kind) for name, kind in kinds.items()}


@pytest.mark.parametrize(
    "arrays, options, error, text",
    [
        ({}, {}, ValueError, "no arrays"),
        (ones(a="int32"), {}, TypeError, "'a' is int32"),
        (ones(a="uint16"), {}, TypeError, r"bfloat16=\['a'\]"),
        (ones(a="float32"), {"bfloat16": ["a"]}, TypeError, "must be uint16"),
        (ones(a="float32"), {"bfloat16": ["b"]}, KeyError, "'b'"),
        (ones(a="float32"), {"units": {"u": ["b"]}}, KeyError, "unit 'u' names 'b'"),
        (ones(a="float32"), {"units": {"u": ["a"], "v": ["a"]}}, ValueError, "'u' and 'v'"),
        (ones(a="float32"), {"units": {"u": "a"}}, TypeError, "give a list"),
        ({3: np.ones(3)}, {}, TypeError, "not 3"),
        (ones(a="float32"), {"zero": 4}, ValueError, "zero is 4"),
        (ones(a="float32"), {"optimizer": "adam"}, ValueError, "'adam'"),
        (ones(a="float32"), {"slot": 3}, TypeError, "did you mean 'slots'"),
        (ones(a="float32"), {"slots": 0}, ValueError, "n_slots 0"),
        (ones(a="float32"), {"reduce_at": object()}, TypeError, "object"),
    ],
)
def test_what_cannot_be_partitioned_is_named(arrays: Any, options: Any, error: Any, text: str) -> None:
    with alone() as comm:
        with pytest.raises(error, match=text):
            zx.partition(arrays, comm=comm, **options)
        comm.barrier()  # as good as before, and nothing is left open
        comm.close()


def test_an_error_on_one_rank_is_raised_on_all_at_once() -> None:
    def rank(comm: zx.Comm) -> None:
        wrong = {"a": np.ones(3, np.int32 if comm.rank == 1 else np.float32)}
        with pytest.raises((TypeError, ValueError), match="'a' is int32"):
            zx.partition(wrong, comm=comm)
        with zx.partition(ones(a="float32"), comm=comm) as p:
            with pytest.raises(ValueError, match="'a' is float32"):
                p.reduce_scatter({"a": np.ones(3 + (comm.rank == 0), np.float32)})
            with pytest.raises((KeyError, ValueError), match="no array 'b'"):
                p.reduce_scatter(ones(b="float32") if comm.rank else {})
            same(p.gather("a"), np.ones(3, np.float32))

    on_ranks(2, rank, timeout=10.0)


def test_ranks_that_differ_are_told_how() -> None:
    def rank(comm: zx.Comm) -> None:
        last = comm.rank == comm.world - 1
        for arrays, options, text in (
            ({"a": np.ones(4 if last else 3, np.float32)}, {}, r"rank 2 passed for array 'a' float32 \(4,\)"),
            (ones(a="float32", b="float64") if last else ones(a="float32"), {}, "for array 'b' float64"),
            (ones(a="float32"), {"zero": 2 if last else 3}, "zero 2 and rank 0 3"),
            (ones(a="float32"), {"units": {"u": ["a"]} if last else None}, "units"),
            (dict(reversed(ones(a="float32", b="float32").items())) if last else ones(a="float32", b="float32"), {},
             "another order"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=text):
                zx.partition(arrays, comm=comm, **options)

    on_ranks(3, rank, timeout=10.0)


def test_names_that_are_not_there_get_a_suggestion() -> None:
    with alone() as comm, zx.partition(ones(weight="float32"), comm=comm) as p:
        for call in (p.gather, p.shard):
            with pytest.raises(KeyError, match="did you mean 'weight'"):
                call("wieght")
        p.close()
        p.close()
        assert "closed" in repr(p)
        with pytest.raises(zx.StateError, match="closed"):
            p.gather("weight")


def test_arrays_of_ml_dtypes() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    arrays = {"w": np.arange(20).reshape(4, 5).astype(bfloat16), "one": np.asarray(3, bfloat16)}

    def rank(comm: zx.Comm) -> None:
        with zx.partition(arrays, comm=comm) as p:
            for name, value in arrays.items():
                same(p.gather(name), value.view(np.uint16))
            sums = p.reduce_scatter(arrays)
            assert all((2 * np.arange(20)[b : b + v.size] == v).all() for b, v in sums["w"])

    on_ranks(2, rank)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_are_utf8(name: str) -> None:
    with alone() as comm, pytest.raises(ValueError, match="UTF-8"):
        zx.partition({name: np.ones(3, np.float32)}, comm=comm)
