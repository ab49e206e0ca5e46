"""Where the BLAS library is: found by path, without importing its package; the core opens it with the first engine."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, files


def find_blas() -> str:
    """Path of the library for matrix products: ZEROX_BLAS, else the one inside the scipy-openblas32 package.

    Raises RuntimeError saying what to do when neither is there.
    """
    chosen = os.environ.get("ZEROX_BLAS", "")
    if chosen:
        if not os.path.exists(chosen):
            raise RuntimeError(f"ZEROX_BLAS names {chosen!r}, which does not exist")
        return chosen
    try:
        names = files("scipy-openblas32") or []
    except PackageNotFoundError:
        names = []
    for name in names:
        if "libscipy_openblas" in name.name and (".so" in name.name or name.name.endswith((".dylib", ".dll"))):
            return str(name.locate())
    raise RuntimeError(
        "no BLAS library: install the package scipy-openblas32 (pip install scipy-openblas32), or name a library that "
        "has cblas_sgemm with the environment variable ZEROX_BLAS"
    )
