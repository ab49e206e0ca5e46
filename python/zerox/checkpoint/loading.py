"""Loading: each rank finds the runs that its slices share with the saved ones, checks them all, and then writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zerox import _C, dtypes
from zerox.checkpoint.files import read_piece
from zerox.checkpoint.manifest import CheckpointError, Manifest, Piece, agree, find, read_manifest

if TYPE_CHECKING:
    from zerox.engine import Engine


def load(engine: Engine, path: Path, *, optimizer: bool = True) -> dict[str, Any] | None:
    """Loads the checkpoint at path, or the newest complete one in that folder. Collective; -> the saved data position.

    All or nothing: everything is read and its checksums are compared on every rank before the first value is changed.
    optimizer=False takes the weights only (moments become zero, counters stay).
    """
    comm = engine.comm
    where = Path(agree(comm, f"load {path}", lambda: str(find(path)) if comm.rank == 0 else None)[0])
    manifest: Manifest | None = None

    def check() -> None:
        nonlocal manifest
        manifest = read_manifest(where)
        _check_model(engine, manifest, where)
        if optimizer:
            _check_optimizer(engine, manifest, where)
        for _ in _values(engine, manifest, where, optimizer):
            pass

    agree(comm, f"load {where}", check)
    assert manifest is not None

    def write() -> None:
        engine.core.load_begin()
        for index, kind, begin, values in _values(engine, manifest, where, optimizer):
            engine.core.write_slice(index, kind, begin, values)

    agree(comm, f"load {where}", write)  # a file that vanished since: every rank raises, and can load another
    engine.core.load_end()
    engine.frozen_file = engine.last_save = None
    if optimizer:
        engine.steps, engine.skipped = manifest.step, manifest.skipped
    engine.extra = manifest.extra
    return manifest.data


def _check_model(engine: Engine, manifest: Manifest, where: Path) -> None:
    records = {r[0]: r for r in engine.records.records}
    saved = manifest.parameters
    missing, surplus = sorted(set(records) - set(saved)), sorted(set(saved) - set(records))
    if missing or surplus:
        what = f"has no {missing[0]!r}" if missing else f"has {surplus[0]!r}, which this model lacks"
        raise CheckpointError(
            f"{where} is of another model: it {what} ({len(missing)} missing, {len(surplus)} too many): "
            "build the model as it was saved"
        )
    for name, record in records.items():
        if saved[name].shape != tuple(record[3]):
            raise CheckpointError(
                f"{where} is of another model: {name!r} has shape {saved[name].shape} there and {tuple(record[3])} here"
            )


def _check_optimizer(engine: Engine, manifest: Manifest, where: Path) -> None:
    saved, mine = manifest.optimizer, engine.optimizer
    if saved["name"] != mine.name or saved["moments"] != mine.moments:
        raise CheckpointError(
            f"{where} was trained with {saved['name']} ({saved['moments']} moments), this engine uses {mine.name} "
            f"({mine.moments}): use the same optimizer, or take the weights only with optimizer=False"
        )


def _values(
    engine: Engine, manifest: Manifest, where: Path, optimizer: bool
) -> Iterator[tuple[int, str, int, NDArray[Any]]]:
    """(range, kind, begin, values) of everything that this rank's slices hold, read and checked."""
    core = engine.core
    records = engine.records.records
    saved: dict[tuple[str, str], list[Piece]] = {}
    for piece in manifest.pieces:
        saved.setdefault((piece.parameter, piece.kind), []).append(piece)
    cache: dict[Piece, NDArray[Any]] = {}
    for param, index, range_begin, begin, n in core.pieces(engine.comm.rank, engine.config.zero == 0):
        name = records[param][0]
        for kind in ("master", "moment1", "moment2"):
            dtype = core.has_slice(index, kind)
            if kind == "master" and not dtype:
                kind, dtype = "param", core.has_slice(index, "param")
            if not dtype:
                continue
            if kind.startswith("moment") and not optimizer:
                yield index, kind, range_begin, np.zeros(n, dtypes.NUMPY[dtype])
                continue
            sources = saved.get((name, kind)) or (saved.get((name, "param")) if kind in ("master", "param") else None)
            out = np.empty(n, np.float64 if dtype == "float64" else np.float32)
            fill(out, (name, kind, manifest.parameters[name].shape), begin, sources or [], where, cache)
            yield index, kind, range_begin, dtypes.cast(out, dtype)


def fill(
    out: NDArray[Any],
    what: tuple[str, str, tuple[int, ...]],
    begin: int,
    sources: list[Piece],
    where: Path,
    cache: dict[Piece, Any],
) -> None:
    """Elements [begin, begin + out.size) of a parameter (name, kind, shape), from the saved runs that hold them."""
    name, kind, shape = what
    whole = (shape, (0,) * len(shape), shape)  # boxes are whole tensors here until tensor parallelism splits them
    filled = 0
    for piece in sources:
        box = (shape, piece.box_begin, piece.box_shape)
        runs = _C.checkpoint_overlap(box, piece.begin, piece.n, whole, begin, out.size)
        if not runs:
            continue
        if piece not in cache:
            cache.clear()  # neighbours share a piece; more than one at a time is never needed
            values = read_piece(where, piece)
            cache[piece] = dtypes.from_bfloat16(values) if piece.dtype == "bfloat16" else values
        for source, target, count in runs:
            out[target : target + count] = cache[piece][source : source + count]
            filled += count
    if filled != out.size:
        raise CheckpointError(f"{where} holds {filled} of the {out.size} wanted elements of {name!r} ({kind})")
