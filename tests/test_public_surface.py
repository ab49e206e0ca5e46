"""Promise: the public names, the stub file and the docstrings of the extension say the same."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import subprocess
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_surface", ROOT / "tools" / "api_surface.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def test_public_names_are_those_on_record() -> None:
    recorded = tool.GOLDEN.read_text(encoding="utf-8").splitlines()
    hint = "if the change is meant, record it: python tools/api_surface.py --write"
    assert tool.surface().splitlines() == recorded, hint


def test_stub_file_agrees_with_the_extension() -> None:
    extension = importlib.import_module("zerox._C")
    assert tool.stub_differences(extension, tool.STUBS.read_text(encoding="utf-8")) == []


def test_public_names_have_docstrings() -> None:
    zerox = importlib.import_module("zerox")
    things = {name: getattr(zerox, name) for name in zerox.__all__}
    bare = [
        name
        for name, thing in things.items()
        if (inspect.isclass(thing) or inspect.isroutine(thing)) and not inspect.getdoc(thing)
    ]
    assert bare == []


def test_library_exports_only_its_init_function() -> None:
    library = importlib.import_module("zerox._C").__file__
    assert library is not None
    done = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=posix", library],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["PyInit__C"]


STUB = """
LIMIT: int
def f(x: int, /, y: int = ..., *, z: str) -> int: ...
class Box:
    size: int
    def __init__(self, size: int) -> None: ...
    @property
    def full(self) -> bool: ...
    def put(self, item: object, *, at: int = ...) -> None: ...
"""


def make_module() -> ModuleType:
    """A module that agrees with STUB."""
    module = ModuleType("sample")

    def f(x, /, y=1, *, z): ...

    class Box:
        """A box."""

        size = 3

        def __init__(self, size): ...

        @property
        def full(self):
            return False

        def put(self, item, *, at=0): ...

    module.LIMIT, module.f, module.Box = 1, f, Box  # type: ignore[attr-defined]
    return module


def test_comparison_finds_what_differs() -> None:
    module = make_module()
    assert tool.stub_differences(module, STUB) == []
    for old, new, expected in [
        ("LIMIT: int\n", "", "LIMIT: not in _C.pyi"),
        ("    size: int\n", "    size: int\n    depth: int\n", "Box.depth: in _C.pyi, not in the module"),
        ("y: int = ...", "y: int", "f: docstring "),
        ("*, at", "at", "Box.put: docstring "),
        ("self, size: int", "self, width: int", "Box: docstring "),
        ("    @property\n    def full(self)", "    def full(self)", "Box.full: a function in _C.pyi only"),
        ("    def put(self, item: object, *, at: int = ...) -> None: ...\n", "", "Box.put: not in _C.pyi"),
        ("    def put(self, item: object, *, at: int = ...) -> None", "    put: int", None),
    ]:
        stub = STUB.replace(old, new)
        assert stub != STUB
        if expected is None:
            stub = STUB.replace(STUB[STUB.index("    def put") :], "    put: int\n")
            expected = "Box.put: an attribute in _C.pyi, a function in the module"
        ast.parse(stub)
        differences = tool.stub_differences(module, stub)
        assert len(differences) == 1, differences
        assert differences[0].startswith(expected)


def test_surface_reads_as_it_should() -> None:
    """The tool names a class once and functions with their parameters."""
    module = make_module()
    module.__all__ = ["LIMIT", "Box", "f"]  # type: ignore[attr-defined]
    lines = list(tool.module_lines(module, set()))
    assert lines == [
        "sample.Box(size)",
        "sample.Box.full",
        "sample.Box.put(self, item, *, at=0)",
        "sample.Box.size",
        "sample.LIMIT: int",
        "sample.f(x, /, y=1, *, z)",
    ]
