"""Check the host reference on any machine: against NumPy, and its gradients against central differences."""

import ctypes as ct
import sys

import binding as b
import numpy as np

HEADS, HEADS_KV, D, N_Q, N_K, SCALE = 4, 2, 64, 7, 9, 0.125


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Return x cut to bf16, as raw bits."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.int16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Return the doubles that raw bf16 bits stand for."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def pointer(x: np.ndarray) -> object:
    """Return a double * to a contiguous array."""
    return x.ctypes.data_as(ct.POINTER(ct.c_double))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: int) -> tuple[np.ndarray, np.ndarray]:
    """Return o (N_Q, HEADS, D) and lse (HEADS, N_Q) by NumPy."""
    score = np.einsum("ihd,jhd->hij", q, k.repeat(HEADS // HEADS_KV, 1)) * SCALE
    if causal:
        seen = np.arange(N_K)[None] <= np.arange(N_Q)[:, None] + N_K - N_Q
        score = np.where(seen[None], score, -np.inf)
    top = score.max(-1, keepdims=True)
    e = np.exp(score - top)
    total = e.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", e / total, v.repeat(HEADS // HEADS_KV, 1)), (top + np.log(total))[..., 0]


def main() -> int:
    """Run both masks; return 1 if an error is above its bound."""
    lib, rng, bad = b.Library(), np.random.default_rng(0), 0
    for causal in (0, 1):
        shapes = ((N_Q, HEADS), (N_K, HEADS_KV), (N_K, HEADS_KV), (N_Q, HEADS))
        bits = [to_bf16(rng.standard_normal((n, h, D))) for n, h in shapes]
        q, k, v, do = map(from_bf16, bits)
        p = b.Problem(b.BF16, b.PLAIN, HEADS, HEADS_KV, D, causal, 0, SCALE, 1, N_Q, N_K, N_Q, N_K)
        o, lse, grads = np.zeros_like(q), np.zeros((HEADS, N_Q)), [np.zeros_like(x) for x in (q, k, v)]
        views = [b.view(x) for x in bits]
        lib.call("forward_ref", b.ForwardArgs(p, *views[:3]), pointer(o), pointer(lse))
        lib.call("backward_ref", b.BackwardArgs(p, *views[:3], b.View(), views[3]), *map(pointer, grads))
        want, want_lse = attention(q, k, v, causal)
        error = max(np.abs(o - want).max(), np.abs(lse - want_lse).max())
        slope_error = 0.0
        for which, index in ((w, tuple(rng.integers(0, n) for n in grads[w].shape)) for w in (0, 1, 2) * 20):
            loss = []
            for step in (1e-5, -1e-5):
                x = [q.copy(), k.copy(), v.copy()]
                x[which][index] += step
                loss.append((attention(*x, causal)[0] * do).sum())
            slope_error = max(slope_error, abs((loss[0] - loss[1]) / 2e-5 - grads[which][index]))
        print(f"causal {causal}: forward error {error:.1e}, gradient error {slope_error:.1e}")
        bad += not (error < 1e-13 and slope_error < 1e-7)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
