"""Promise: an include that points up and a line against the rules of the sources are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def check(script: str, root: Path, *args: str) -> tuple[int, str]:
    """Exit status and output of a script of tools/ on another tree."""
    command = [sys.executable, str(ROOT / "tools" / script), "--root", str(root), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


TREE = {
    "csrc/base/zx.h": "#include <stdint.h>\n",
    "csrc/store/store.h": '#include "base/zx.h"\n',
    "csrc/model/tape.h": '#include "store/store.h"\n',
    "csrc/serve/blocks.h": '#include "store/store.h"\n',
    "csrc/py/module.c": '#include <Python.h>\n#include "model/tape.h"\n',
    "tests/c/check.h": '#include "base/zx.h"\n',
    "tests/c/test_a.c": '#include "check.h"\n#include "model/tape.h"\n',
}


def test_includes_that_point_down_pass(tmp_path: Path) -> None:
    write(tmp_path, TREE)
    status, text = check("check_includes.py", tmp_path)
    assert (status, text) == (0, "includes: 9 in 7 files, 0 wrong\n")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("csrc/base/a.c", '#include "store/store.h"', "may use only base"),
        ("csrc/store/a.cu", '#  include "model/tape.h"', "may use only base, kernels, device, comm, store"),
        ("csrc/serve/a.c", '#include "model/tape.h"', "may use only base"),
        ("csrc/model/a.c", "#include <Python.h>", "only csrc/py may use the interpreter"),
        ("csrc/model/a.c", "#include <numpy/arrayobject.h>", "only csrc/py may use the interpreter"),
        ("csrc/model/a.c", "#include <cuda_runtime.h>", "belongs in a .cu"),
        ("csrc/model/a.c", '#include "tape.h"', "is not written from csrc"),
        ("csrc/model/a.c", '#include "base/none.h"', "does not exist"),
        ("csrc/other/a.c", '#include "base/zx.h"', "other is not a layer"),
        ("tests/c/test_b.c", '#include "py/module.c"', "needs the interpreter"),
    ],
)
def test_wrong_include_is_named(tmp_path: Path, name: str, line: str, message: str) -> None:
    write(tmp_path, {**TREE, name: f"/* first line */\n{line}\n"})
    status, text = check("check_includes.py", tmp_path)
    faults = text.splitlines()[:-1]
    assert status == 1
    assert len(faults) == 1
    assert faults[0].startswith(f"{name}:1:" if "layer" in message else f"{name}:2:")
    assert message in faults[0]


NOTE = "TO" + "DO"
GOOD = """/* exit(1) and printf("x") in a comment are no calls */
static const char *text = "abort()";
void zx_a(void) { comm->abort(comm); snprintf(b, n, "%d", 1); static_assert(1); }
"""


def test_clean_source_passes(tmp_path: Path) -> None:
    write(tmp_path, {"csrc/base/a.c": GOOD, "a.py": "x = 1\n" * 600, "Makefile": "a:\n\ttrue\n"})
    assert check("check_style.py", tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.md", "x\n\u00d7\n", "a.md:2: ascii: "),
        ("csrc/base/a.c", "/*\n" + "x" * 121 + "\n*/\n", "csrc/base/a.c:2: length: 121 "),
        ("csrc/base/a.c", "\tint x;\n", "csrc/base/a.c:1: white: a tab"),
        ("a.py", "x = 1 \n", "a.py:1: white: white space"),
        ("a.py", "x = 1\n" * 601, "a.py:1: lines: 601"),
        ("csrc/base/a.c", f"/* {NOTE}: later */\n", "csrc/base/a.c:1: todo: "),
        ("csrc/base/a.c", "void f(void) {\n    exit(1);\n}\n", "csrc/base/a.c:2: calls: exit()"),
        ("csrc/base/a.c", "\n/* a */ abort();\n", "csrc/base/a.c:2: calls: abort()"),
        ("csrc/base/a.c", 'printf("%d", 1);\n', "csrc/base/a.c:1: calls: printf()"),
        ("csrc/base/a.c", 'fprintf(\n    stderr, "x");\n', "csrc/base/a.c:1: calls: fprintf()"),
        ("csrc/base/a.h", "assert (x);\n", "csrc/base/a.h:1: calls: assert()"),
    ],
)
def test_fault_of_style_is_named(tmp_path: Path, name: str, text: str, fault: str) -> None:
    write(tmp_path, {name: text})
    status, out = check("check_style.py", tmp_path)
    lines = out.splitlines()
    assert status == 1
    assert len(lines) == 2, out
    assert lines[0].startswith(fault)


def test_names_with_linkage(tmp_path: Path) -> None:
    write(tmp_path, {"a.c": "int zx_a; int zx_f(void) { return 0; } static int own; int *zx_p = &own;\n"})
    write(tmp_path, {"b.c": "int stray(void) { return 0; }\n"})
    for source in ("a", "b"):
        subprocess.run(["cc", "-c", f"{source}.c", "-o", f"{source}.o"], cwd=tmp_path, timeout=60, check=True)
    subprocess.run(["ar", "rcs", "good.a", "a.o"], cwd=tmp_path, timeout=60, check=True)
    subprocess.run(["ar", "rcs", "bad.a", "a.o", "b.o"], cwd=tmp_path, timeout=60, check=True)
    assert check("check_style.py", tmp_path, "--archive", str(tmp_path / "good.a"))[0] == 0
    status, text = check("check_style.py", tmp_path, "--archive", str(tmp_path / "bad.a"))
    assert status == 1
    assert "bad.a(b.o): symbols: stray has no zx_" in text
    status, text = check("check_style.py", tmp_path, "--archive", str(tmp_path / "none.a"))
    assert status == 1
    assert "nm failed" in text
