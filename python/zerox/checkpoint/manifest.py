"""What a checkpoint folder holds. The manifest is written last, so a folder with a whole manifest is complete."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerox import _C
from zerox.agreement import agree as run_on_all

NAME = "manifest.json"
FORMAT = "zerox-checkpoint"
VERSION = 1
PARTIAL, REPLACED = ".partial-", ".replaced"  # suffixes of folders that are not, or no longer, the checkpoint


class CheckpointError(Exception):
    """A checkpoint cannot be read or written; the text names the file and what to do."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of elements of one parameter: elements [begin, begin + n) of its box, flattened in row-major order."""

    parameter: str
    kind: str  # "param", "master", "moment1", "moment2"
    dtype: str
    box_begin: tuple[int, ...]
    box_shape: tuple[int, ...]
    begin: int
    n: int
    file: str
    offset: int  # bytes from the start of the file
    crc32: int


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    tied_to: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What affects the next step (counters, optimizer, schedule, seed, data position), and where values are."""

    step: int
    skipped: int
    seed: int
    world: int
    zero: int
    precision: str
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None
    parameters: dict[str, ParameterInfo] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # name -> bytes
    pieces: tuple[Piece, ...] = ()

    def encode(self) -> bytes:
        """JSON with a checksum of its own content, as it is read back: keys that are no strings become strings."""
        body = json.loads(json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}))
        text = json.dumps(body, sort_keys=True)
        return json.dumps({**body, "checksum": zlib.crc32(text.encode())}, sort_keys=True, indent=1).encode()

    @classmethod
    def decode(cls, content: bytes, name: str) -> Manifest:
        try:
            body = json.loads(content)
            if not isinstance(body, dict) or body.get("format") != FORMAT:
                raise CheckpointError(f"{name} is not a checkpoint manifest of zerox")
            if body.get("version") != VERSION:
                raise CheckpointError(
                    f"{name} has format version {body.get('version')}; this zerox reads version {VERSION}: update zerox"
                )
            checksum = body.pop("checksum")
            if zlib.crc32(json.dumps(body, sort_keys=True).encode()) != checksum:
                raise CheckpointError(f"{name} was changed after it was written: its checksum does not fit its content")
            del body["format"], body["version"]
            parameters = {k: ParameterInfo(**{**v, "shape": tuple(v["shape"])}) for k, v in body["parameters"].items()}
            pieces = tuple(
                Piece(**{**p, "box_begin": tuple(p["box_begin"]), "box_shape": tuple(p["box_shape"])})
                for p in body["pieces"]
            )
            return cls(**{**body, "parameters": parameters, "pieces": pieces})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{name} is damaged: {error}") from error


def read_manifest(folder: Path) -> Manifest:
    """The checked manifest of a folder; CheckpointError when it is missing, damaged, or a file is missing or cut."""
    path = folder / NAME
    try:
        _C.fault_point("read manifest")
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no complete checkpoint: there is no {NAME}") from None
    manifest = Manifest.decode(content, str(path))
    for name, size in manifest.files.items():
        file = folder / name
        if Path(name).name != name:
            raise CheckpointError(f"{path} names {name!r}, which is no plain file name")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is not complete; use another one")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes and should have {size}: it is damaged")
    return manifest


def _readable(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except (CheckpointError, OSError):
        return None


def find(path: Path) -> Path:
    """The checkpoint at path, or the newest complete one in that folder (most steps, then latest written)."""
    if (path / NAME).exists():
        return path
    replaced = path.with_name(path.name + REPLACED)
    if _readable(replaced):
        return replaced  # a save was interrupted between its two renames
    complete = complete_below(path)
    if not complete:
        what = "is no folder" if path.exists() else "does not exist"
        what = "holds no complete checkpoint" if path.is_dir() else what
        raise CheckpointError(f"{path} {what}; save one with engine.save(...)")
    return complete[-1][1]


def complete_below(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = []
    for child in folder.iterdir():
        if not child.is_dir() or PARTIAL in child.name:
            continue
        if child.name.endswith(REPLACED) and (folder / child.name.removesuffix(REPLACED) / NAME).exists():
            continue  # its successor is in place
        if manifest := _readable(child):
            found.append((manifest.step, (child / NAME).stat().st_mtime_ns, child))
    return [(step, child) for step, _, child in sorted(found)]


def agree(comm: _C.Comm, what: str, action: Callable[[], Any]) -> list[Any]:
    """Runs action on every rank; its (JSON) results in rank order. If it failed anywhere, every rank raises."""
    label = f"checkpoint {what.split()[0]}"  # names of set-up calls are short
    return run_on_all(comm, what, action, failure=CheckpointError, label=label)[1]
