"""Bytes on disk: safetensors files written in one pass, folders renamed into place, everything flushed."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerox import _C, dtypes
from zerox.checkpoint.manifest import CheckpointError, Piece

TAGS = {"float32": "F32", "float64": "F64", "bfloat16": "BF16"}


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of writing says of which file; Python's own says it only of opening."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_safetensors(
    path: Path,
    tensors: Iterable[tuple[str, str, Sequence[int], Callable[[], NDArray[Any]]]],
    metadata: dict[str, str] | None = None,
) -> list[tuple[int, int]]:
    """Writes (name, dtype, shape, read) tensors, one after the other, and flushes to the disk.

    -> (offset in the file, crc32) of each. `read` is called once, when its turn comes.
    """
    items = list(tensors)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape, _ in items:
        size = math.prod(shape) * dtypes.NUMPY[dtype].itemsize
        header[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    places = []
    _C.fault_point("open checkpoint file")
    with _named(path), open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, dtype, shape, read in items:
            values = read()
            if values.size != math.prod(shape) or values.dtype != dtypes.NUMPY[dtype]:
                raise AssertionError(f"{name}: {values.dtype} {values.shape} for {tuple(shape)} {dtype}")
            data = memoryview(np.ascontiguousarray(values)).cast("B") if values.size else b""
            places.append((start + header[name]["data_offsets"][0], zlib.crc32(data)))
            _C.fault_point("write checkpoint file")
            file.write(data)
        file.flush()
        _C.fault_point("flush checkpoint file")
        os.fsync(file.fileno())
    return places


def write_file(path: Path, content: bytes) -> None:
    _C.fault_point("open manifest")
    with _named(path), open(path, "xb") as file:
        _C.fault_point("write manifest")
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    _C.fault_point("flush folder")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def lock_folder(path: Path) -> Iterator[bool | None]:
    """Holds a lock on a folder while the context lasts, which the kernel frees when the process dies.

    Gives True; False if somebody else holds it; None if the folder is gone or its file system has no such locks.
    """
    fd, got = -1, None
    try:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            got = True
        except BlockingIOError:
            got = False
        except OSError:
            got = None
        yield got
    finally:
        if fd >= 0:
            os.close(fd)


def put_in_place(partial: Path, path: Path, replaced: Path) -> None:
    """partial becomes path. An older one at path is set aside first and removed last: one of them is always whole."""
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        _C.fault_point("rename old checkpoint")
        path.rename(replaced)
    _C.fault_point("rename checkpoint")
    try:
        partial.rename(path)
    except OSError:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        raise
    flush_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def read_piece(folder: Path, piece: Piece) -> NDArray[Any]:
    """The piece's elements; CheckpointError when the checksum does not fit or the file is too short."""
    kind = dtypes.NUMPY[piece.dtype]
    _C.fault_point("read checkpoint file")
    with open(folder / piece.file, "rb") as file:
        file.seek(piece.offset)
        data = file.read(piece.n * kind.itemsize)
    if len(data) != piece.n * kind.itemsize or zlib.crc32(data) != piece.crc32:
        raise CheckpointError(
            f"{folder / piece.file} is damaged: the checksum of {piece.parameter!r} ({piece.kind}, elements "
            f"{piece.begin} to {piece.begin + piece.n}) does not fit; use another checkpoint"
        )
    return np.frombuffer(data, kind)
