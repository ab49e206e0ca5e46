"""`zx.partition`: NumPy arrays sharded over ranks, without a model; a front to the verbs of the store."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerox import _C, dtypes
from zerox.agreement import agree
from zerox.memory import human

_OPTIONS = ("reduce_at", "slots", "grad_slots", "prefetch", "reduce_dtype", "moments", "poison")
_MAX_DIMS = 4  # of the core's shapes; arrays of more are flat there
_WIDE = {"float32": "float32", "bfloat16": "float32", "float64": "float64"}  # what gradients are summed in


def partition(
    arrays: Mapping[str, Any],
    *,
    comm: _C.Comm | None = None,
    units: Mapping[str, Sequence[str]] | None = None,
    zero: int = 3,
    optimizer: str | None = None,
    bfloat16: Collection[str] = (),
    **options: Any,
) -> Partition:
    """Shards arrays over the ranks of comm: each rank keeps its part of every array. Collective.

    arrays: name -> array, float32 or float64, of any shape; every rank passes the same names, shapes and values, and
        reads from them only what it will hold (so a memory-mapped file is never read whole).
    comm: None joins the ranks that a launcher started (`zx.connect()`), and closes with the Partition.
    units: unit name -> names of arrays that are gathered together; arrays in no unit belong to the unit "root". None:
        all do.
    zero: 3 shards the arrays; 1 and 2 only what an optimizer adds (state; also gradients); 0 nothing.
    optimizer: "adamw" or "sgd" makes room for gradients and optimizer state, which the verbs grad, reduce, count and
        step of `.core` need; None: values only.
    bfloat16: names of uint16 arrays that hold bfloat16 values. Arrays whose dtype is called bfloat16 (of the package
        ml_dtypes) need no mention.
    options: of zerox.Partitioner: reduce_at, slots, grad_slots, prefetch, reduce_dtype, moments, poison.

    Raises ValueError, TypeError or KeyError on every rank if the arrays of any rank cannot be used.
    """
    for name in options:
        if name not in _OPTIONS:
            close = difflib.get_close_matches(name, ["comm", "units", "zero", "optimizer", "bfloat16", *_OPTIONS], n=1)
            raise TypeError(f"partition has no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise ValueError(f"zero is {zero!r}; it must be 0, 1, 2 or 3")
    if optimizer not in (None, "adamw", "sgd"):
        raise ValueError(f"optimizer is {optimizer!r}; it must be 'adamw', 'sgd', or None for values only")
    owns = comm is None
    if comm is None:
        from zerox.distributed import connect

        comm = connect()
    try:
        return Partition(arrays, comm, owns, units or {}, zero, optimizer, bfloat16, options)
    except BaseException as error:
        if owns:
            comm.abort(f"{type(error).__name__}: {error}")
            comm.close()
        raise


class Partition:
    """Arrays sharded over ranks; made by `zx.partition`. Names are kept in `names`, shapes in `shapes`."""

    def __init__(
        self,
        arrays: Mapping[str, Any],
        comm: _C.Comm,
        owns_comm: bool,
        units: Mapping[str, Sequence[str]],
        zero: int,
        optimizer: str | None,
        bfloat16: Collection[str],
        options: dict[str, Any],
    ) -> None:
        self.comm, self.zero = comm, zero
        self._owns_comm = owns_comm
        if isinstance(bfloat16, str):
            raise TypeError(f"bfloat16 is the text {bfloat16!r}: give a list of array names")
        self._bfloat16 = frozenset(bfloat16)

        def read() -> dict[str, Any]:
            unit_of, unit_names = _unit_table(arrays, units)
            unknown = sorted(self._bfloat16 - set(arrays))
            if unknown:
                raise KeyError(f"bfloat16 names {unknown[0]!r}, which is not among the arrays")
            kinds = {name: self._raw(name, a).dtype for name, a in arrays.items()}
            tagged = self._tagged(arrays)
            table = [(n, unit_of[n], _dtype_name(n, kinds[n], n in tagged), np.shape(a)) for n, a in arrays.items()]
            return {"units": unit_names, "arrays": table, "zero": zero, "optimizer": optimizer, "options": options}

        told = _agree(comm, "partition", read)
        table = told["arrays"]
        self.names: tuple[str, ...] = tuple(row[0] for row in table)
        self.shapes: dict[str, tuple[int, ...]] = {row[0]: tuple(row[3]) for row in table}
        self.dtypes: dict[str, str] = {row[0]: row[2] for row in table}
        self.units: tuple[str, ...] = tuple(told["units"])
        records = [
            (name, unit, dtype, _core_shape(shape), optimizer is not None, 0, -1) for name, unit, dtype, shape in table
        ]
        if optimizer is None:
            options = {"optimizer": "sgd", "moments": 0, **options}
        else:
            options = {"optimizer": optimizer, **options}
        self._core = _C.Partitioner(
            records,
            list(self.units),
            comm=comm,
            shard_state=zero >= 1,
            shard_grads=zero >= 2,
            shard_params=zero >= 3,
            **options,
        )
        layout = self._core.layout()
        self._params, self._ranges = layout["params"], layout["ranges"]
        self.load(arrays)

    # ---- values in and out ----

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Replaces the values, of all arrays, by others of the same shapes and dtypes. Collective."""
        flat = _agree(self.comm, "partition load", lambda: self._checked(arrays), same=False)
        self._core.load_begin()
        for param, index, range_begin, begin, n in self._core.pieces(self.comm.rank, self.zero == 0):
            values = np.ascontiguousarray(flat[self.names[param]][begin : begin + n])
            self._core.write_slice(index, "param", range_begin, values)
        self._core.load_end()

    def gather(self, name: str | None = None) -> Any:
        """The whole array of that name, or all as a dict; new arrays, bfloat16 as uint16. Collective."""
        if name is None:
            return {each: self.gather(each) for each in self.names}
        return self._core.gather(self._index(name)).reshape(self.shapes[name])

    def shard(self, name: str) -> list[tuple[int, NDArray[Any]]]:
        """What this rank owns of an array: (begin, values) runs of its elements in row-major order. Local.

        The runs of all ranks cover the array once; a rank may own none of a small one.
        """
        wanted = self._index(name)
        return [
            (begin, self._core.read_slice(index, "param", range_begin, n))
            for param, index, range_begin, begin, n in self._core.pieces(self.comm.rank)
            if param == wanted
        ]

    def reduce_scatter(self, arrays: Mapping[str, Any]) -> dict[str, list[tuple[int, NDArray[Any]]]]:
        """Sums arrays over ranks; -> name -> the (begin, values) runs that this rank owns, as `shard` cuts them.

        arrays: any of the names, of the partitioned shapes; one that a rank leaves out counts as zeros there. Sums are
        made in rank order in float32 (float64 for float64 arrays): the bits are those of the verbs grad and reduce.
        The partitioned values stay as they are. Collective.
        """
        flat = _agree(self.comm, "partition reduce_scatter", lambda: self._checked(arrays, some=True), same=False)
        world, rank = self.comm.world, self.comm.rank
        in_range: list[list[dict[str, Any]]] = [[] for _ in self._ranges]
        for p in self._params:
            in_range[p["range"]].append(p)
        sums = []
        for index, at in enumerate(self._ranges):
            whole = np.zeros(at["n_padded"], _WIDE[at["dtype"]])
            for p in in_range[index]:
                if p["name"] in flat:
                    values = flat[p["name"]]
                    whole[p["offset"] : p["offset"] + p["n"]] = (
                        dtypes.from_bfloat16(values) if p["dtype"] == "bfloat16" else values
                    )
            sums.append(self.comm.reduce_scatter(whole.reshape(world, -1)) if whole.size else whole)
        runs: dict[str, list[tuple[int, NDArray[Any]]]] = {name: [] for name in self.names}
        for param, index, range_begin, begin, n in self._core.pieces(rank):
            first = range_begin - rank * self._ranges[index]["slice"]
            runs[self.names[param]].append((begin, sums[index][first : first + n].copy()))
        return runs

    # ---- the rest ----

    @property
    def core(self) -> _C.Partitioner:
        """The store's verbs: acquire, release, grad, reduce, count, step, ... on units by number."""
        return self._core

    def unit(self, name: str) -> int:
        """The number of a unit, as the verbs of `core` take it; unit 0 is "root"."""
        if name not in self.units:
            raise KeyError(f"no unit {name!r}; there are {', '.join(self.units)}")
        return self.units.index(name)

    @property
    def nbytes(self) -> int:
        """What this rank holds, in bytes."""
        return self._core.bytes()["total"]

    def close(self) -> None:
        """Gives back the memory; also the communicator if this Partition made it. Can be called twice."""
        if self._core.closed:
            return
        self._core.close()
        if self._owns_comm:
            self.comm.close()

    def __enter__(self) -> Partition:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and self._owns_comm and not self.comm.closed:
            self.comm.abort(f"{kind.__name__}: {value}")
        try:
            self.close()
        except (BufferError, _C.ZeroxError):
            if kind is None:
                raise

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __repr__(self) -> str:
        n = sum(p["n"] for p in self._params)
        held = "closed" if self._core.closed else f"{human(self.nbytes)} here"
        return (
            f"Partition({len(self.names)} arrays, {n:,} elements, {len(self.units)} "
            f"unit{'s' if len(self.units) > 1 else ''}, zero={self.zero}, rank {self.comm.rank} of {self.comm.world}, "
            f"{held})"
        )

    # ---- checks ----

    def _index(self, name: str) -> int:
        if name not in self.shapes:
            close = difflib.get_close_matches(str(name), self.names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise KeyError(f"no array {name!r} in this Partition of {len(self.names)}{hint}")
        return self.names.index(name)

    def _raw(self, name: str, array: Any) -> NDArray[Any]:
        """The array as NumPy has it, ml_dtypes' bfloat16 as uint16."""
        a = np.asarray(array)
        return a.view(np.uint16) if a.dtype.name == "bfloat16" else a

    def _tagged(self, arrays: Mapping[str, Any]) -> frozenset[str]:
        own = {name for name, a in arrays.items() if getattr(getattr(a, "dtype", None), "name", "") == "bfloat16"}
        return self._bfloat16 | own

    def _checked(self, arrays: Mapping[str, Any], *, some: bool = False) -> dict[str, NDArray[Any]]:
        """Flat arrays of the right shapes and dtypes; errors name the array."""
        for name in arrays:
            self._index(name)
        missing = [name for name in self.names if name not in arrays]
        if missing and not some:
            raise KeyError(f"no value for array {missing[0]!r} ({len(missing)} are missing)")
        flat = {}
        for name, array in arrays.items():
            a = self._raw(name, array)
            wanted = dtypes.NUMPY[self.dtypes[name]]
            if a.shape != self.shapes[name] or a.dtype != wanted:
                raise ValueError(
                    f"array {name!r} is {a.dtype} {a.shape}; the partitioned one is {wanted} {self.shapes[name]}"
                )
            flat[name] = a.reshape(-1)
        return flat


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unit_table(arrays: Mapping[str, Any], units: Mapping[str, Sequence[str]]) -> tuple[dict[str, int], list[str]]:
    """Each array's unit, and the names of the units, the root first."""
    if not arrays:
        raise ValueError("partition got no arrays")
    for name in [*arrays, *units]:
        if not isinstance(name, str) or not name:
            raise TypeError(f"names of arrays and units are text that is not empty, not {name!r}")
        if "\0" in name or not _is_utf8(name):
            raise ValueError(f"the name {name!r} holds a NUL or half a character: names are UTF-8 text")
    names = ["root", *(unit for unit in units if unit != "root")]
    unit_of: dict[str, int] = {}
    for unit, members in units.items():
        if isinstance(members, str):
            raise TypeError(f"unit {unit!r} is given as the text {members!r}: give a list of array names")
        for name in members:
            if name not in arrays:
                raise KeyError(f"unit {unit!r} names {name!r}, which is not among the arrays")
            if name in unit_of:
                raise ValueError(f"array {name!r} is in the units {names[unit_of[name]]!r} and {unit!r}: choose one")
            unit_of[name] = names.index(unit)
    return {name: unit_of.get(name, 0) for name in arrays}, names


def _dtype_name(name: str, dtype: np.dtype[Any], tagged: bool) -> str:
    if tagged:
        if dtype != np.uint16:
            raise TypeError(f"array {name!r} is named in bfloat16 and is {dtype}: it must be uint16 (the raw bits)")
        return "bfloat16"
    if dtype == np.uint16:
        raise TypeError(f"array {name!r} is uint16: if it holds bfloat16 values, say so with bfloat16=[{name!r}]")
    if dtype not in (np.float32, np.float64):
        raise TypeError(f"array {name!r} is {dtype}: partition takes float32, float64, and bfloat16 as uint16")
    return dtype.name


def _core_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape) if len(shape) <= _MAX_DIMS else (int(np.prod(shape, dtype=np.int64)),)


def _agree(comm: _C.Comm, what: str, read: Any, *, same: bool = True) -> Any:
    """Runs read on every rank; if it failed on any, all raise. same: what it returned (JSON) must be equal on all."""
    value, told = agree(comm, what, read, failure=ValueError, share=same)
    if not same:
        return value
    for rank, other in enumerate(told):
        if other != told[0]:
            raise ValueError(f"{what}: rank {rank} passed {_difference(other, told[0])}: all must agree")
    return told[0]


def _difference(theirs: dict[str, Any], first: dict[str, Any]) -> str:
    for key in ("zero", "optimizer", "options", "units"):
        if theirs[key] != first[key]:
            return f"{key} {theirs[key]!r} and rank 0 {first[key]!r}"
    rows, expected = {r[0]: r for r in theirs["arrays"]}, {r[0]: r for r in first["arrays"]}
    for name in [*expected, *rows]:
        if rows.get(name) != expected.get(name):
            mine, right = (
                f"{r[2]} {tuple(r[3])} in unit {r[1]}" if r else "none" for r in (rows.get(name), expected.get(name))
            )
            return f"for array {name!r} {mine} and rank 0 {right}"
    return "the arrays in another order than rank 0"
