"""The public names of zerox, one a line with its parameters; and how zerox._C differs from _C.pyi.

    python tools/api_surface.py              print the surface
    python tools/api_surface.py --write      the same into tests/golden/api.txt, which a test compares
    python tools/api_surface.py --stubs      print what _C.pyi says and the module does not, or the reverse

A name is public if a module's __all__ has it (without __all__: if the module defines it and it has no leading
underscore), or if it is an attribute without a leading underscore of a public class. Annotations are left out: type
checkers read them, and how they are spelt depends on the Python.
"""

from __future__ import annotations

import argparse
import ast
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "api.txt"
STUBS = ROOT / "python" / "zerox" / "_C.pyi"


def parameters(signature: inspect.Signature) -> str:
    """A signature without annotations, as in "(self, x, *, lr=0.1)"."""
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(inspect.Signature(bare))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def signature_of(thing: object) -> str:
    try:
        return parameters(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(?)"


def class_lines(name: str, cls: type) -> Iterator[str]:
    if issubclass(cls, enum.Enum):
        yield f"{name} = enum({', '.join(member.name for member in cls)})"
        return
    bases = [base.__name__ for base in cls.__bases__ if base is not object]
    heading = f"{name}{'' if issubclass(cls, BaseException) else signature_of(cls)}"
    yield heading + (f" <- {', '.join(bases)}" if bases else "")
    inherited = {attribute for base in cls.__mro__[1:] if base is not object for attribute in vars(base)}
    for attribute, raw in sorted(vars(cls).items()):
        if attribute.startswith("_") or (attribute in inherited and not callable(raw)):
            continue
        value = inspect.getattr_static(cls, attribute)
        if isinstance(value, (classmethod, staticmethod)):
            yield f"{name}.{attribute}{signature_of(getattr(cls, attribute))} {type(value).__name__}"
        elif inspect.isroutine(value) or inspect.isfunction(value):
            yield f"{name}.{attribute}{signature_of(value)}"
        else:
            yield f"{name}.{attribute}"


def public_names(module: ModuleType) -> list[str]:
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return sorted(getattr(module, "__all__", own))


def module_lines(module: ModuleType, seen: set[str]) -> Iterator[str]:
    """Lines of the module's public names; one that a second module offers too is only named."""
    for name in public_names(module):
        value = getattr(module, name)
        full = f"{module.__name__}.{name}"
        if isinstance(value, ModuleType):
            if value.__name__ not in seen:
                seen.add(value.__name__)
                yield f"{full} module"
                yield from module_lines(value, seen)
        elif inspect.isclass(value) or inspect.isroutine(value):
            home = f"{value.__module__}.{value.__qualname__}"
            if home in seen:
                yield f"{full} = {home}"
                continue
            seen.add(home)
            if inspect.isclass(value):
                yield from class_lines(full, value)
            else:
                yield f"{full}{signature_of(value)}"
        else:
            yield f"{full}: {type(value).__name__}"


def surface() -> str:
    """The public names of zerox, as text."""
    return "".join(f"{line}\n" for line in module_lines(importlib.import_module("zerox"), {"zerox"}))


# ---- _C.pyi against the module


def stub_parameters(function: ast.FunctionDef) -> list[tuple[str, str, bool]]:
    """(name, kind, has a default) of each parameter of a stub."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    n_required = len(positional) - len(args.defaults)
    found = []
    for index, arg in enumerate(positional):
        kind = "POSITIONAL_ONLY" if index < len(args.posonlyargs) else "POSITIONAL_OR_KEYWORD"
        found.append((arg.arg, kind, index >= n_required))
    if args.vararg:
        found.append((args.vararg.arg, "VAR_POSITIONAL", False))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append((arg.arg, "KEYWORD_ONLY", default is not None))
    if args.kwarg:
        found.append((args.kwarg.arg, "VAR_KEYWORD", False))
    return found


def live_parameters(thing: object) -> list[tuple[str, str, bool]] | None:
    try:
        signature = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return [
        (parameter.name, parameter.kind.name, parameter.default is not inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]


def without_receiver(found: list[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
    return found[1:] if found and found[0][0] in ("self", "cls", "type") else found


def compare_callable(name: str, thing: object, stub: ast.FunctionDef) -> Iterator[str]:
    live = live_parameters(thing)
    wanted = without_receiver(stub_parameters(stub))
    if live is None:
        yield f"{name}: its docstring does not begin with a signature"
    elif without_receiver(live) != wanted:
        yield f"{name}: docstring {without_receiver(live)}, _C.pyi {wanted}"


def stub_members(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    members: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            members[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            members[node.target.id] = node
        elif isinstance(node, ast.Assign):
            members.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
    return members


def is_property(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list
    )


def compare_members(prefix: str, live: dict[str, object], stubs: dict[str, ast.stmt]) -> Iterator[str]:
    for name in sorted({name for name in live if not name.startswith("_")} - set(stubs)):
        yield f"{prefix}{name}: not in _C.pyi"
    for name, node in sorted(stubs.items()):
        if name in ("__init__", "__new__", "__slots__") or (name.startswith("_") and not name.endswith("__")):
            continue
        if name not in live:
            yield f"{prefix}{name}: in _C.pyi, not in the module"
            continue
        thing = live[name]
        if isinstance(node, ast.ClassDef):
            if not inspect.isclass(thing):
                yield f"{prefix}{name}: a class in _C.pyi only"
                continue
            members = stub_members(node.body)
            yield from compare_members(f"{prefix}{name}.", dict(vars(thing)), members)
            constructor = members.get("__init__", members.get("__new__"))
            if isinstance(constructor, ast.FunctionDef) and not issubclass(thing, BaseException):
                yield from compare_callable(f"{prefix}{name}", thing, constructor)
            if not thing.__doc__:
                yield f"{prefix}{name}: no docstring"
        elif isinstance(node, ast.FunctionDef) and not is_property(node):
            thing = thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing
            if not callable(thing):
                yield f"{prefix}{name}: a function in _C.pyi only"
            elif not name.startswith("__"):
                yield from compare_callable(f"{prefix}{name}", thing, node)
        elif callable(thing) and not inspect.isclass(thing):
            yield f"{prefix}{name}: an attribute in _C.pyi, a function in the module"


def stub_differences(module: ModuleType, stubs: str) -> list[str]:
    """How a module differs from the text of its stub file; empty if they agree."""
    return list(compare_members("", dict(vars(module)), stub_members(ast.parse(stubs).body)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.relative_to(ROOT)}")
    parser.add_argument("--stubs", action="store_true", help="compare zerox._C with _C.pyi")
    options = parser.parse_args()
    if options.stubs:
        differences = stub_differences(importlib.import_module("zerox._C"), STUBS.read_text(encoding="utf-8"))
        print("\n".join(differences) or "zerox._C and _C.pyi agree")
        return 1 if differences else 0
    text = surface()
    if options.write:
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
