"""ctypes view of libattention.so: the structs of attention.h, made from torch or NumPy arrays."""

import ctypes as ct
import os
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = os.path.join(HERE, "..", "..", "..", "build", "attention", "libattention.so")
BF16, FP16 = 0, 1
PLAIN, HOPPER = 0, 1


class View(ct.Structure):
    """A (tokens, heads, d) view with element strides."""

    _fields_ = [("data", ct.c_void_p), ("token_stride", ct.c_int64), ("head_stride", ct.c_int64)]


class Problem(ct.Structure):
    """Shape and options of one attention call."""

    _fields_ = (
        [(n, ct.c_int32) for n in ("dtype", "path", "n_heads", "n_heads_kv", "head_dim", "causal", "deterministic")]
        + [("scale", ct.c_float)]
        + [(n, ct.c_int64) for n in ("n_docs", "n_tokens_q", "n_tokens_k", "max_len_q", "max_len_k")]
        + [("cu_q", ct.c_void_p), ("cu_k", ct.c_void_p)]
    )


class ForwardArgs(ct.Structure):
    """Arguments of zx_attn_forward."""

    _fields_ = [
        ("problem", Problem),
        *((n, View) for n in "qkvo"),
        ("lse", ct.c_void_p),
        ("workspace", ct.c_void_p),
    ]


class BackwardArgs(ct.Structure):
    """Arguments of zx_attn_backward."""

    _fields_ = [
        ("problem", Problem),
        *((n, View) for n in ("q", "k", "v", "o", "d_o")),
        ("lse", ct.c_void_p),
        *((n, View) for n in ("dq", "dk", "dv")),
        ("workspace", ct.c_void_p),
    ]


def view(array: Any) -> View:
    """Describe an array (tokens, heads, d) of 2-byte elements, the last axis contiguous."""
    if hasattr(array, "data_ptr"):
        assert array.dim() == 3 and array.stride(2) == 1 and array.element_size() == 2
        return View(array.data_ptr(), array.stride(0), array.stride(1))
    assert array.ndim == 3 and array.strides[2] == 2
    return View(array.ctypes.data, array.strides[0] // 2, array.strides[1] // 2)


class Library:
    """The shared library; every call raises RuntimeError with the library's sentence when it fails."""

    def __init__(self, path: str = LIBRARY) -> None:
        """Open the library at path."""
        self.c = ct.CDLL(path)
        self.c.zx_attn_message.restype = ct.c_char_p
        for name in ("zx_attn_forward_workspace", "zx_attn_backward_workspace"):
            getattr(self.c, name).restype = ct.c_size_t

    def call(self, name: str, args: ct.Structure, *rest: Any) -> None:
        """Call zx_attn_<name>(&args, *rest)."""
        if getattr(self.c, "zx_attn_" + name)(ct.byref(args), *rest):
            raise RuntimeError(f"{name}: {self.c.zx_attn_message().decode()}")

    def workspace_bytes(self, name: str, problem: Problem) -> int:
        """Return the bytes that zx_attn_<name> needs, name being forward or backward."""
        return getattr(self.c, f"zx_attn_{name}_workspace")(ct.byref(problem))
