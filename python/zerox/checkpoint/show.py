"""What `zerox checkpoint show` prints."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

from zerox import dtypes
from zerox.checkpoint.files import read_piece
from zerox.checkpoint.manifest import NAME, Manifest, complete_below, find, read_manifest
from zerox.memory import human


def describe(path: Path, *, verify: bool = False) -> str:
    """A checkpoint (or the newest of a folder) as text. verify: reads all values and compares their checksums."""
    where = find(path)
    lines = []
    others = complete_below(path) if where.parent == path else []
    if len(others) > 1:
        lines += [f"{len(others)} complete checkpoints in {path}; this is the newest", ""]
    lines += _describe(read_manifest(where), where)
    if verify:
        lines += ["", _verify(where)]
    return "\n".join(lines)


def _describe(manifest: Manifest, where: Path) -> Iterator[str]:
    own = {name: info for name, info in manifest.parameters.items() if info.tied_to is None}
    count = sum(math.prod(info.shape) for info in own.values())
    frozen = sum(math.prod(info.shape) for info in own.values() if not info.trainable)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((where / NAME).stat().st_mtime))
    shape = dict(manifest.model)
    kind = shape.pop("type", "")
    rows = [
        ("checkpoint", str(where)),
        ("written", f"{written}, {human(sum(manifest.files.values()))} in {len(manifest.files)} files"),
        ("step", f"{manifest.step:,}" + (f" ({manifest.skipped:,} skipped)" if manifest.skipped else "")),
        ("model", " ".join([kind.upper() or "not recorded", *(f"{k}={v}" for k, v in shape.items())])),
        ("parameters", f"{count:,}" + (f", of which {frozen:,} frozen" if frozen else "")),
        ("saved by", f"{_count(manifest.world, 'rank')}, zero={manifest.zero}, {manifest.precision}; loads on any"),
        ("optimizer", _options(manifest.optimizer)),
        ("schedule", _options(manifest.schedule)),
        ("seed", str(manifest.seed)),
        ("data position", "recorded" if manifest.data is not None else "none"),
    ]
    if manifest.extra:
        rows.append(("extra", ", ".join(manifest.extra)))
    yield from (f"{title:<14} {text}" for title, text in rows)
    yield ""
    table = [
        (name, " x ".join(map(str, info.shape)) or "one", info.dtype, _remark(info.tied_to, info.trainable))
        for name, info in sorted(manifest.parameters.items(), key=lambda item: _natural(item[0]))
    ]
    widths = [max(len(row[i]) for row in table) for i in range(3)] if table else [0, 0, 0]
    for name, size, dtype, remark in table:
        yield f"{name:<{widths[0]}}  {size:>{widths[1]}}  {dtype:<{widths[2]}}  {remark}".rstrip()


def _natural(name: str) -> list[tuple[int, str]]:
    """blocks.2 comes before blocks.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("s" if n != 1 else "")


def _options(options: dict[str, object]) -> str:
    rest = [f"{k}={v}" for k, v in options.items() if k not in ("name", "kind", "moments")]
    return " ".join([str(options.get("name") or options.get("kind") or ""), *rest]).strip()


def _remark(tied_to: str | None, trainable: bool) -> str:
    if tied_to is not None:
        return f"tied to {tied_to}"
    return "" if trainable else "frozen"


def _verify(where: Path) -> str:
    manifest = read_manifest(where)
    read = 0
    for piece in manifest.pieces:
        read_piece(where, piece)
        read += piece.n * dtypes.NUMPY[piece.dtype].itemsize
    return f"verified: the checksums of all {human(read)} fit"
