"""Prints where the scipy-openblas32 package lies, without importing it.

python tools/openblas.py include   the folder of cblas.h
python tools/openblas.py lib       the shared library
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def main(argv: list[str]) -> int:
    spec = find_spec("scipy_openblas32")
    if argv not in (["include"], ["lib"]):
        print(__doc__, file=sys.stderr)
        return 2
    if spec is None or not spec.submodule_search_locations:
        print(f"{sys.executable} has no scipy-openblas32: pip install scipy-openblas32", file=sys.stderr)
        return 1
    home = Path(spec.submodule_search_locations[0])
    print(home / "include" if argv == ["include"] else next(home.glob("lib/libscipy_openblas*.so")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
