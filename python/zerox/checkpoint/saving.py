"""Saving: every rank writes the slices that it owns, rank 0 writes the manifest and renames the folder into place."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerox import _C
from zerox.checkpoint.files import flush_folder, lock_folder, put_in_place, write_file, write_safetensors
from zerox.checkpoint.manifest import (
    NAME,
    PARTIAL,
    REPLACED,
    CheckpointError,
    Manifest,
    ParameterInfo,
    Piece,
    agree,
    complete_below,
)

if TYPE_CHECKING:
    from zerox.engine import Engine

_FILE_OF = {"param": "weights", "master": "state", "moment1": "state", "moment2": "state"}


def save(
    engine: Engine,
    path: Path,
    *,
    data: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Writes a checkpoint at path (a folder that is made, or replaced). Collective; returns path.

    data: position of the data loader; extra: anything JSON; keep: afterwards only so many complete checkpoints (the
    newest) stay in path's folder. Until it is complete the checkpoint has another name, and an older one at path stays
    loadable.
    """
    comm = engine.comm
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    with ExitStack() as held:
        partial = Path(agree(comm, f"save {path}", lambda: _prepare(path, held) if comm.rank == 0 else None)[0])
        _write(engine, path, partial, data, extra)
    if keep is not None and comm.rank == 0:
        for _, old in complete_below(path.parent)[:-keep]:
            if old != path:
                shutil.rmtree(old, ignore_errors=True)
    return path


def _write(
    engine: Engine, path: Path, partial: Path, data: dict[str, Any] | None, extra: dict[str, Any] | None
) -> None:
    comm = engine.comm
    try:
        written = agree(comm, f"save {path}", lambda: _write_rank(engine, partial))
        agree(
            comm,
            f"save {path}",
            lambda: _finish(engine, path, partial, written, data, extra) if comm.rank == 0 else None,
        )
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _prepare(path: Path, held: ExitStack) -> str:
    """Makes the folder to write into. It is locked until `held` closes: what nobody has locked is of a killed save."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not (path / NAME).exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is no checkpoint: choose another name")
    _clear_killed_saves(path)
    while True:
        partial = path.with_name(f"{path.name}{PARTIAL}{secrets.token_hex(4)}")
        _C.fault_point("make checkpoint folder")
        partial.mkdir()
        mine = held.enter_context(lock_folder(partial))
        if mine is not False and partial.is_dir():  # else another save took it for stale before it was locked
            return str(partial)


def _clear_killed_saves(path: Path) -> None:
    """Removes what they left in path's folder: only folders of our names that hold nothing but a checkpoint's files."""
    for stale in path.parent.glob(f"*{PARTIAL}{'[0-9a-f]' * 8}"):
        with lock_folder(stale) as free:
            if (free or (free is None and stale.name.startswith(path.name + PARTIAL))) and _is_ours(stale):
                shutil.rmtree(stale, ignore_errors=True)
    for old in path.parent.glob(f"*{REPLACED}"):
        if (path.parent / old.name.removesuffix(REPLACED) / NAME).exists() and _is_ours(old):
            shutil.rmtree(old, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and all(f.name == NAME or f.suffix == ".safetensors" for f in folder.iterdir())


def _write_rank(engine: Engine, partial: Path) -> dict[str, Any]:
    """This rank's files; -> {"files": {name: bytes}, "pieces": [...]}."""
    core, rank, world = engine.core, engine.comm.rank, engine.comm.world
    names = [r[0] for r in engine.records.records]
    shapes = [r[3] for r in engine.records.records]
    ranges = core.layout()["ranges"]
    by_file: dict[str, list[tuple[dict[str, Any], Any]]] = {}
    for param, index, range_begin, begin, n in core.pieces(rank):
        trainable = ranges[index]["trainable"]
        for kind in _FILE_OF:
            dtype = core.has_slice(index, kind)
            own_master = kind == "master" and dtype == core.has_slice(index, "param")
            if not dtype or own_master:
                continue
            label = _FILE_OF[kind] if trainable else "frozen"
            file = f"{label}-{rank:05d}-of-{world:05d}.safetensors"
            piece = {
                "parameter": names[param], "kind": kind, "dtype": dtype, "box_begin": [0] * len(shapes[param]),
                "box_shape": list(shapes[param]), "begin": begin, "n": n, "file": file,
            }  # fmt: skip
            read = lambda i=index, k=kind, b=range_begin, m=n: core.read_slice(i, k, b, m)  # noqa: E731
            by_file.setdefault(file, []).append((piece, read))
    sizes, pieces = {}, []
    for file, entries in by_file.items():
        target = partial / file
        linked = _link_frozen(engine, target) if file.startswith("frozen") else None
        if linked is None:
            tensors = (
                (f"{p['kind']}:{p['parameter']}[{p['begin']}:{p['begin'] + p['n']}]", p["dtype"], (p["n"],), read)
                for p, read in entries
            )
            places = write_safetensors(target, tensors)
            if file.startswith("frozen"):
                engine.frozen_file = (target.name, _identity(target), places)
        else:
            places = linked
        sizes[file] = target.stat().st_size
        pieces += [{**p, "offset": at, "crc32": crc} for (p, _), (at, crc) in zip(entries, places, strict=True)]
    flush_folder(partial)
    return {"files": sizes, "pieces": pieces}


def _link_frozen(engine: Engine, target: Path) -> list[tuple[int, int]] | None:
    """Frozen values do not change: the file of this engine's last save is linked instead of written again."""
    if engine.frozen_file is None or engine.last_save is None:
        return None
    name, written, places = engine.frozen_file
    try:
        os.link(engine.last_save / name, target)
    except OSError:
        return None  # moved, deleted, or another file system: write it
    if _identity(target) != written:
        target.unlink()  # another engine has saved there since
        return None
    return places


def _identity(file: Path) -> tuple[int, int, int]:
    """Tells whether a file is the one that was written, and unchanged."""
    about = file.stat()
    return about.st_dev, about.st_ino, about.st_mtime_ns


def _finish(
    engine: Engine,
    path: Path,
    partial: Path,
    written: list[dict[str, Any]],
    data: dict[str, Any] | None,
    extra: dict[str, Any] | None,
) -> None:
    records = engine.records.records
    config = getattr(engine.model, "config", None)
    manifest = Manifest(
        step=engine.steps,
        skipped=engine.skipped,
        seed=engine.config.seed,
        world=engine.comm.world,
        zero=engine.config.zero,
        precision=engine.config.precision,
        optimizer={"name": engine.optimizer.name, "moments": engine.optimizer.moments, **asdict(engine.optimizer)},
        schedule=asdict(engine.schedule),
        model=config.as_dict() if hasattr(config, "as_dict") else {},
        data=data,
        extra=extra,
        parameters={
            name: ParameterInfo(
                shape=shape, dtype=dtype, trainable=trainable, tied_to=records[tied][0] if tied >= 0 else None
            )
            for name, _, dtype, shape, trainable, _, tied in records
        },
        files={name: size for part in written for name, size in part["files"].items()},
        pieces=tuple(Piece(**p) for part in written for p in part["pieces"]),
    )
    write_file(partial / NAME, manifest.encode())
    flush_folder(partial)
    put_in_place(partial, path, path.with_name(path.name + REPLACED))
