"""The rules of the sources that no compiler and no linter checks; fails and names every place.

ascii     every text file is ASCII
length    code lines have at most 120 characters
white     no tabs (but in makefiles) and no white space at the end of a line
lines     code files have at most 600 lines, unless LONG_FILES gives a reason
todo      a note on work left names its issue, as in the word with (#12) behind it
calls     nothing in csrc ends the process or prints, unless ALLOWED_CALLS gives a reason
symbols   every name with linkage in the archive of the core begins with zx_ (with --archive)

python tools/check_style.py [--root FOLDER] [--archive build/c/plain/libzx.a]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LENGTH = 120
MAX_LINES = 600
C_SUFFIXES = {".c", ".h", ".def", ".cu", ".cuh"}
CODE_SUFFIXES = C_SUFFIXES | {".py", ".pyi"}
TEXT_SUFFIXES = CODE_SUFFIXES | {".md", ".toml", ".mk", ".in", ".sh", ".txt"}
TEXT_NAMES = {"Makefile", ".ci/run", ".clang-format", ".gitignore"}

# file -> why it may be longer than MAX_LINES
LONG_FILES: dict[str, str] = {
    "tests/c/test_device.c": "one device, its memory and streams: the cases share their set-up",
    "tests/test_data.py": "one loader against naive models: the cases share their corpora",
}
# file -> the calls that it may make, and why
ALLOWED_CALLS: dict[str, tuple[set[str], str]] = {}

TASK_NOTE = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b(?!\(#\d+\))")
CALL = re.compile(
    r"(?<![\w.>])(?:(printf|vprintf|puts|putchar|perror|exit|_exit|_Exit|quick_exit|abort|assert)\s*\("
    r"|(v?fprintf|fputs|fputc|fwrite)\s*\([^;]*?\b(?:stderr|stdout)\b)"
)
C_NOISE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)


def list_files(root: Path) -> list[str]:
    """Paths of the project's files, relative to the root: what git would track, or everything without git."""
    git = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=60, check=True)
        names = done.stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        names = [str(path.relative_to(root)) for path in root.rglob("*")]
    return sorted(
        name
        for name in set(names)
        if (Path(name).suffix in TEXT_SUFFIXES or name in TEXT_NAMES) and (root / name).is_file()
    )


def blank(match: re.Match[str]) -> str:
    """White space with the same line ends, in place of a comment or literal."""
    return re.sub(r"[^\n]", " ", match[0])


def check_lines(name: str, text: str) -> Iterator[str]:
    sketch = name.startswith("dev/")
    code = Path(name).suffix in CODE_SUFFIXES and not sketch
    makefile = name.endswith((".mk", "Makefile"))
    long_lines = code or makefile or name in TEXT_NAMES
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{name}:{number}"
        if not line.isascii():
            odd = next(char for char in line if not char.isascii())
            yield f"{where}: ascii: {odd!r} (U+{ord(odd):04X}) in column {line.index(odd) + 1}"
        if long_lines and len(line) > MAX_LENGTH:
            yield f"{where}: length: {len(line)} characters, at most {MAX_LENGTH}"
        if "\t" in line and not makefile:
            yield f"{where}: white: a tab"
        if line != line.rstrip():
            yield f"{where}: white: white space at the end of the line"
        note = None if name.endswith(".md") else TASK_NOTE.search(line)
        if note:
            yield f"{where}: todo: {note[0]} without an issue, write {note[0]}(#12)"
    n_lines = text.count("\n")
    if code and n_lines > MAX_LINES and name not in LONG_FILES:
        yield (
            f"{name}:1: lines: {n_lines}, at most {MAX_LINES}: split the file, "
            "or give the reason in LONG_FILES of tools/check_style.py"
        )


def check_calls(name: str, text: str) -> Iterator[str]:
    allowed, _ = ALLOWED_CALLS.get(name, (set(), ""))
    code = C_NOISE.sub(blank, text)
    for match in CALL.finditer(code):
        call = match[1] or match[2]
        if call not in allowed:
            line = code.count("\n", 0, match.start()) + 1
            yield f"{name}:{line}: calls: {call}() in the library: return a status, or log with zx_log"


def check_lists(root: Path) -> Iterator[str]:
    for name in [*LONG_FILES, *ALLOWED_CALLS]:
        if not (root / name).is_file():
            yield f"tools/check_style.py: {name} is listed as an exception and does not exist"


def check_symbols(archive: Path) -> Iterator[str]:
    """Defined external names, by archive member."""
    done = subprocess.run(
        ["nm", "-g", "--defined-only", "--format=posix", str(archive)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        yield f"{archive}: symbols: nm failed: {done.stderr.strip()}"
    member, n_names = "?", 0
    for line in done.stdout.splitlines():
        words = line.split()
        if line.endswith("]:"):
            member = line[line.index("[") + 1 : -2]
        elif len(words) >= 2:
            n_names += 1
            if not words[0].startswith("zx_"):
                yield f"{archive}({member}): symbols: {words[0]} has no zx_: make it static or rename it"
    if done.returncode == 0 and n_names == 0:
        yield f"{archive}: symbols: the archive defines no names"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--archive", type=Path, help="check the names in this static library too")
    options = parser.parse_args()
    root = options.root.resolve()
    names = list_files(root)
    faults: list[str] = []
    for name in names:
        text = (root / name).read_text(encoding="utf-8", errors="surrogateescape")
        faults += check_lines(name, text)
        if name.startswith("csrc/") and Path(name).suffix in C_SUFFIXES:
            faults += check_calls(name, text)
    if root == Path(__file__).resolve().parent.parent:
        faults += check_lists(root)
    if options.archive:
        faults += check_symbols(options.archive)
    for fault in faults:
        print(fault)
    checked = "names" if options.archive else "names not checked: no --archive"
    print(f"style: {len(names)} files ({checked}), {len(faults)} wrong")
    return 1 if faults or not names else 0


if __name__ == "__main__":
    sys.exit(main())
