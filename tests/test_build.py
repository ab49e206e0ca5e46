"""Promises of the build: it compiles what changed and nothing else, and ZEROX_CUDA means what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FILES = {
    "csrc/base/a.h": "int zx_a(void);\n",
    "csrc/base/a.c": '#include "base/a.h"\nint zx_a(void) { return 7; }\n',
    "csrc/base/b.c": "int zx_b(void);\nint zx_b(void) { return 1; }\n",
    "csrc/py/module.c": """#include <Python.h>
#include "base/a.h"
static int exec(PyObject *module) { return PyModule_AddIntConstant(module, "a", zx_a()); }
static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec}, {0, NULL}};
static PyModuleDef def = {PyModuleDef_HEAD_INIT, .m_name = "zerox._C", .m_slots = slots};
PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&def); }
""",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project of three small sources with this project's build files."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "python" / "zerox").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "tools/flags.mk"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "python" / "zerox" / "__init__.py").write_text('__version__ = "0"\n')
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def build(tree: Path, **env: str) -> tuple[int, str]:
    """Exit status and output of an in-place build."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        env={**os.environ, "ZEROX_CUDA": "0", "ZEROX_WERROR": "0", "ZEROX_JOBS": "2", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout


def constant(tree: Path) -> int:
    """What the built module exports."""
    command = [sys.executable, "-c", "import zerox._C; print(zerox._C.a)"]
    done = subprocess.run(command, cwd=tree / "python", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_only_what_changed_is_compiled(tree: Path) -> None:
    assert build(tree) == (
        0,
        "zerox: csrc/base/a.c\nzerox: csrc/base/b.c\nzerox: csrc/py/module.c\n"
        "zerox: 3 of 3 objects compiled, without CUDA\n",
    )
    assert constant(tree) == 7
    assert build(tree) == (0, "zerox: 0 of 3 objects compiled, without CUDA\n")
    (tree / "csrc/base/a.c").write_text(FILES["csrc/base/a.c"].replace("7", "8"))
    assert build(tree)[1].startswith("zerox: csrc/base/a.c\nzerox: 1 of 3 objects")
    assert constant(tree) == 8


def test_header_flags_and_deleted_files_count_as_changes(tree: Path) -> None:
    assert build(tree)[0] == 0
    (tree / "csrc/base/a.h").write_text("int zx_a(void); \n")
    assert "zerox: 2 of 3 objects" in build(tree)[1]
    assert "zerox: 3 of 3 objects" in build(tree, CFLAGS="-DZX_OTHER=1")[1]
    (tree / "csrc/base/b.c").unlink()
    assert "zerox: 0 of 2 objects" in build(tree, CFLAGS="-DZX_OTHER=1")[1]
    library = next((tree / "python/zerox").glob("_C*.so"))
    assert b"zx_b" not in library.read_bytes()


def test_failure_keeps_the_old_module_and_names_the_source(tree: Path) -> None:
    assert build(tree)[0] == 0
    (tree / "csrc/base/a.c").write_text("int zx_a(void) { return undeclared; }\n")
    status, text = build(tree)
    assert status == 1
    assert "csrc/base/a.c:1:" in text
    assert constant(tree) == 7
    (tree / "csrc/base/a.c").write_text(FILES["csrc/base/a.c"])
    assert build(tree)[0] == 0


def test_warnings_are_errors_where_asked(tree: Path) -> None:
    (tree / "csrc/base/b.c").write_text("int zx_b(void);\nint zx_b(void) { int unused; return 1; }\n")
    status, text = build(tree)
    assert status == 0
    assert "unused" in text
    status, text = build(tree, ZEROX_WERROR="1")
    assert status == 1
    assert "Werror" in text


@pytest.mark.parametrize("home", ["", ":", ":/nonexistent", "/tmp:"])
def test_wrong_cuda_home_does_not_break_auto(tree: Path, home: str) -> None:
    (tree / "csrc/base/a_cuda.c").write_text("int zx_cuda(void);\nint zx_cuda(void) { return ZX_WITH_CUDA; }\n")
    status, text = build(tree, ZEROX_CUDA="auto", CUDA_HOME=home)
    assert status == 0, text
    assert "4 of 4 objects compiled, with CUDA" in text or "3 of 3 objects compiled, without CUDA" in text
    assert constant(tree) == 7


def test_cuda_is_a_wish_a_ban_or_a_demand(tree: Path) -> None:
    (tree / "csrc/base/a_cuda.c").write_text("#error compiled for CUDA\n")
    assert build(tree, ZEROX_CUDA="0")[0] == 0
    status, text = build(tree, ZEROX_CUDA="yes")
    assert status == 1
    assert "ZEROX_CUDA='yes' is not one of 0, 1, auto" in text
    status, text = build(tree, ZEROX_CUDA="1")
    assert status == 1
    assert "nvcc was not found" in text or "compiled for CUDA" in text
