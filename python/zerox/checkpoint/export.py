"""One checkpoint as plain safetensors: whole tensors under their names, which other programs read.

Sharded checkpoints are for going on; this is for taking the weights elsewhere. A tied parameter is stored once: the
file's metadata maps each further name to the stored one, as the safetensors library does it. Several files come with an
index (`model.safetensors.index.json`), as Hugging Face writes it.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from zerox import __version__, dtypes
from zerox.checkpoint.files import TAGS, flush_folder, write_file, write_safetensors
from zerox.checkpoint.loading import fill
from zerox.checkpoint.manifest import CheckpointError, Manifest, Piece, find, read_manifest

INDEX = "model.safetensors.index.json"
_KINDS = {tag: np.dtype(dtypes.NUMPY[name]) for name, tag in TAGS.items()}
_MOST_HEADER_BYTES = 100_000_000  # the safetensors library's own limit


def consolidate(
    path: str | Path,
    out: str | Path,
    *,
    dtype: str = "master",
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes a checkpoint's weights as safetensors files with whole tensors; -> the files, the index last.

    path: a checkpoint, or a folder of them (the newest complete one is taken).
    out: a file (its name ends in .safetensors), or a folder, made if need be, that gets model.safetensors.
    dtype: "master" takes the fp32 master copies of bf16 parameters; "stored" what the model computes with.
    max_shard_bytes: no file holds more bytes of values, but that a larger tensor has a file of its own; several files
        are out/model-00001-of-00003.safetensors and so on, and an index.
    overwrite: replace what is there under these names; in a folder, also an earlier export.

    Reads one tensor at a time. Raises CheckpointError, and leaves nothing behind, when the checkpoint is not complete,
    a checksum does not fit, or a file is there already.
    """
    if dtype not in ("master", "stored"):
        raise ValueError(f"dtype is {dtype!r}; it must be 'master' (fp32 where there are masters) or 'stored'")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
    out = Path(out)
    single = out.suffix == ".safetensors"
    if single and max_shard_bytes is not None:
        raise ValueError(f"max_shard_bytes needs a folder, and {out} names one file: leave .safetensors away")
    if single and out.is_dir():
        raise CheckpointError(f"{out} is a folder: name a file, or a folder without .safetensors")
    where = find(Path(path))
    manifest = read_manifest(where)
    plan = _plan(manifest, where, dtype)
    groups = _cut(plan, max_shard_bytes)
    if single:
        targets = [out]
    elif len(groups) == 1:
        targets = [out / "model.safetensors"]
    else:
        targets = [out / f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    files = [*targets, out / INDEX] if len(groups) > 1 else targets
    older = [] if single else _exported(out)
    for file in [*files, *older]:
        if file.exists() and not overwrite:
            raise CheckpointError(f"{file} exists: choose another name, or say overwrite")
    _write_all(files, groups, manifest, where)
    for stale in older:
        if stale not in files:
            stale.unlink()
    flush_folder(files[0].parent)
    return files


class _Tensor:
    """One tensor to write: where its values are in the checkpoint."""

    def __init__(self, name: str, kind: str, shape: tuple[int, ...], dtype: str, pieces: list[Piece]) -> None:
        self.name, self.kind, self.shape, self.dtype, self.pieces = name, kind, shape, dtype, pieces
        self.n_bytes = math.prod(shape) * dtypes.NUMPY[dtype].itemsize

    def entry(self, where: Path) -> tuple[str, str, tuple[int, ...], Callable[[], NDArray[Any]]]:
        """As write_safetensors takes it."""
        return self.name, self.dtype, self.shape, lambda: self.read(where)

    def read(self, where: Path) -> NDArray[Any]:
        """All of it, every checksum compared; CheckpointError if an element is missing."""
        values = np.empty(math.prod(self.shape), np.float64 if self.dtype == "float64" else np.float32)
        fill(values, (self.name, self.kind, self.shape), 0, self.pieces, where, {})
        return dtypes.cast(values, self.dtype)


def _plan(manifest: Manifest, where: Path, dtype: str) -> list[_Tensor]:
    found: dict[tuple[str, str], list[Piece]] = {}
    for piece in manifest.pieces:
        found.setdefault((piece.parameter, piece.kind), []).append(piece)
    plan = []
    for name, info in manifest.parameters.items():
        if info.tied_to is not None:
            if info.tied_to not in manifest.parameters or manifest.parameters[info.tied_to].tied_to is not None:
                raise CheckpointError(f"{where}: {name!r} is tied to {info.tied_to!r}, which is not stored there")
            continue
        kind = "master" if dtype == "master" and (name, "master") in found else "param"
        pieces = found.get((name, kind), [])
        if not pieces and math.prod(info.shape):
            raise CheckpointError(f"{where} holds no values of {name!r}: it is not complete; use another checkpoint")
        plan.append(_Tensor(name, kind, info.shape, pieces[0].dtype if pieces else info.dtype, pieces))
    return plan


def _cut(plan: list[_Tensor], most: int | None) -> list[list[_Tensor]]:
    """In order, as many tensors in a file as it may hold."""
    groups: list[list[_Tensor]] = [[]]
    held = 0
    for tensor in plan:
        if most is not None and groups[-1] and held + tensor.n_bytes > most:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.n_bytes
    return groups


def _exported(folder: Path) -> list[Path]:
    """Files of an export in a folder: a reader would take older ones for a part of a new one."""
    names = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX))
    return [p for p in folder.iterdir() if names.fullmatch(p.name)] if folder.is_dir() else []


def _write_all(files: list[Path], groups: list[list[_Tensor]], manifest: Manifest, where: Path) -> None:
    """files: one for each group, then perhaps the index. All under other names first; an error leaves nothing."""
    folder = files[0].parent
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    mark = f".partial-{secrets.token_hex(4)}"
    partial = [file.with_name(file.name + mark) for file in files]
    ties = {name: info.tied_to for name, info in manifest.parameters.items() if info.tied_to is not None}
    try:
        for file, group in zip(partial, groups, strict=False):
            stored = {t.name for t in group}
            metadata = {"format": "pt", "producer": f"zerox {__version__}", "step": str(manifest.step)}
            metadata.update({name: to for name, to in ties.items() if to in stored})
            write_safetensors(file, [t.entry(where) for t in group], metadata)
        if len(files) > len(groups):
            home = {t.name: file.name for file, group in zip(files, groups, strict=False) for t in group}
            total = sum(t.n_bytes for group in groups for t in group)
            index = {"metadata": {"total_size": total}, "weight_map": home}
            write_file(partial[-1], (json.dumps(index, indent=2) + "\n").encode())
        for source, target in zip(partial, files, strict=True):
            os.replace(source, target)
    except BaseException:
        for file in partial:
            file.unlink(missing_ok=True)
        for empty in made:
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()
        raise


# ---- reading


def read_weights(path: str | Path) -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file, or of a folder with model.safetensors or an index, by name.

    Arrays are views of the mapped file and read it when they are used; writing to one changes this process's copy only.
    bfloat16 comes as uint16. A tied name is the same array as the one it is tied to. `engine.load_parameters` takes the
    result. CheckpointError when a file is missing or no whole safetensors file.
    """
    path = Path(path)
    if not path.is_dir():
        files = [path]
    elif (path / INDEX).exists():
        files = [path / name for name in _index_files(path / INDEX)]
    else:
        files = [path / "model.safetensors"]
    values: dict[str, NDArray[Any]] = {}
    ties: dict[str, str] = {}
    for file in files:
        found, metadata = _read_file(file)
        values.update(found)
        ties.update({name: to for name, to in metadata.items() if to in found and name not in found})
    values.update({name: values[to] for name, to in ties.items()})
    return values


def _index_files(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if not all(Path(name).name == name for name in names):
            raise ValueError("it names a file elsewhere")
        return names
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error}") from error


def _read_file(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    try:
        with open(path, "rb") as file:
            header, data = _open_header(file)
            metadata = header.pop("__metadata__", {})
            size = os.fstat(file.fileno()).st_size - data
        tensors = dict(_views(path, header, data, size))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error
    return tensors, {str(k): str(v) for k, v in metadata.items()}


def _open_header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """The header, and where the values begin."""
    first = file.read(8)
    size = int.from_bytes(first, "little")
    if len(first) < 8 or size > _MOST_HEADER_BYTES:
        raise ValueError("it does not begin with the length of a header")
    text = file.read(size)
    if len(text) < size:
        raise ValueError(f"its header of {size:,} bytes is cut")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, 8 + size


def _views(path: Path, header: dict[str, Any], data: int, size: int) -> Iterator[tuple[str, NDArray[Any]]]:
    whole = np.memmap(path, np.uint8, mode="c", offset=0) if size else np.empty(data, np.uint8)
    for name, tensor in header.items():
        kind = _KINDS.get(tensor["dtype"])
        if kind is None:
            raise ValueError(f"{name!r} has dtype {tensor['dtype']!r}; F32, F64 and BF16 are read")
        shape = tuple(int(n) for n in tensor["shape"])
        begin, end = (int(n) for n in tensor["data_offsets"])
        if min((0, *shape)) < 0 or not 0 <= begin <= end or end - begin != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{name!r} of shape {shape} has bytes {begin} to {end}")
        if end > size:
            raise ValueError(f"{name!r} ends at byte {end:,} of {size:,}: the file is cut")
        yield name, np.ndarray(shape, kind, whole, data + begin)
