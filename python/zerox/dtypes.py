"""bfloat16 in NumPy, which has no such type: raw values travel as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMPY = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}


def to_bfloat16(array: NDArray[Any]) -> NDArray[np.uint16]:
    """float32 -> bfloat16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    nan = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(array), nan, rounded).reshape(np.shape(array))


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact."""
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(np.shape(bits))


def cast(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """A float array in a named dtype, as the core takes it."""
    if dtype == "bfloat16":
        return to_bfloat16(array)
    return np.ascontiguousarray(array, NUMPY[dtype])
