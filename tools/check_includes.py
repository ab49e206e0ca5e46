"""Includes point only down: fails and names every include that points up, sideways or nowhere.

The layers, lowest first, are LAYERS below; layers of one line do not know each other. Inside csrc a quoted
include is written from the include root ("base/zx.h"). Python's and NumPy's headers belong to csrc/py, those
of CUDA to CUDA sources. The C tests may use every layer but py.

    python tools/check_includes.py [--root FOLDER]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

LAYERS = (
    ("base",),
    ("kernels",),
    ("device",),
    ("comm",),
    ("store",),
    ("offload", "model", "serve", "tune"),
    ("py",),
)
RANK = {layer: rank for rank, line in enumerate(LAYERS) for layer in line}
SUFFIXES = {".c", ".h", ".def", ".cu", ".cuh"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
PYTHON_HEADER = re.compile(r"Python\.h|structmember\.h|numpy/|cpython/|pythread\.h")
CUDA_HEADER = re.compile(r"cuda|cublas|cub/|cutlass|nvrtc|nccl|curand|cooperative_groups|mma\.h")
CUDA_FILE = re.compile(r"\.cuh?$|_(cuda|nccl)\.[ch]$")


def may_include(layer: str, target: str) -> bool:
    return target == layer or RANK[target] < RANK[layer]


def check_quoted(csrc: Path, layer: str, name: str) -> str | None:
    """What is wrong with #include "name" in a file of the layer; layer "tests" stands above all but py."""
    target = name.split("/")[0]
    if "/" not in name or target not in RANK:
        return f'"{name}" is not written from csrc, as in "base/zx.h"'
    if not (csrc / name).is_file():
        return f'"{name}" does not exist in csrc'
    if layer == "tests":
        return f'a C test includes "{name}", but py needs the interpreter' if target == "py" else None
    if not may_include(layer, target):
        allowed = ", ".join(other for other in RANK if may_include(layer, other))
        return f'{layer} includes "{name}", but may use only {allowed}'
    return None


def check_angled(path: Path, layer: str, name: str) -> str | None:
    if PYTHON_HEADER.match(name) and layer != "py":
        return f"{layer} includes <{name}>: only csrc/py may use the interpreter"
    if CUDA_HEADER.match(name) and not CUDA_FILE.search(path.name):
        return f"<{name}> belongs in a .cu, .cuh, _cuda.c or _nccl.c file"
    return None


def check_file(root: Path, path: Path) -> tuple[int, list[str]]:
    """How many includes the file has, and the faults."""
    csrc = root / "csrc"
    layer = path.relative_to(csrc).parts[0] if path.is_relative_to(csrc) else "tests"
    place = path.relative_to(root)
    if layer != "tests" and layer not in RANK:
        return 0, [f"{place}:1: {layer} is not a layer: add it to LAYERS in tools/check_includes.py"]
    text = path.read_text(encoding="utf-8", errors="replace")
    faults, n_includes = [], 0
    for match in INCLUDE.finditer(text):
        n_includes += 1
        quoted, angled = match.groups()
        if quoted and layer == "tests" and (path.parent / quoted).is_file():
            continue
        fault = check_quoted(csrc, layer, quoted) if quoted else check_angled(path, layer, angled)
        if fault:
            faults.append(f"{place}:{text.count(chr(10), 0, match.start()) + 1}: {fault}")
    return n_includes, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root.resolve()
    files = sorted(path for top in ("csrc", "tests/c") for path in (root / top).rglob("*") if path.suffix in SUFFIXES)
    results = [check_file(root, path) for path in files]
    faults = [fault for _, found in results for fault in found]
    for fault in faults:
        print(fault)
    n_includes = sum(n for n, _ in results)
    print(f"includes: {n_includes} in {len(files)} files, {len(faults)} wrong")
    return 1 if faults or not files else 0


if __name__ == "__main__":
    sys.exit(main())
