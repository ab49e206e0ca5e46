"""Which item stands where in an epoch. Pure functions of sizes, seed and epoch: nothing here has a state."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def permutation(n: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of 0 .. n-1 that depends on (n, seed, epoch) alone, int64 (n,).

    The raw words of the counter-based generator Philox with key (seed, epoch), sorted. NumPy promises the
    raw words to stay what they are in later versions, which it does not for `Generator.permutation`.
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(n)
    return np.argsort(words, kind="stable")


def pack_bounds(offsets: NDArray[Any], *, capacity: int, max_docs: int) -> NDArray[np.int64]:
    """Cuts a stream of pieces into packs, in order; returns the cuts from 0 to the end, int64 (n_packs + 1,).

    A pack ends after `capacity` tokens, or earlier at the end of its `max_docs`-th piece. So a piece that
    does not fit is cut, and its rest opens the next pack.

    Args:
        offsets: where each piece begins in the stream, int64 (n_pieces + 1,), strictly rising from 0.
    """
    total = int(offsets[-1])
    last = len(offsets) - 1
    cuts = [np.zeros(1, np.int64)]
    begin = 0
    n_tried = total
    while begin < total:
        # Guess that the next packs are all full and keep what is right, up to the first that closed early.
        n_tried = min(n_tried, -(-(total - begin) // capacity))
        begins = begin + capacity * np.arange(n_tried, dtype=np.int64)
        full = np.minimum(begins + capacity, total)
        first = np.searchsorted(offsets, begins, "right") - 1
        ends = np.minimum(full, offsets[np.minimum(first + max_docs, last)])
        early = np.flatnonzero(ends < full)
        n_right = int(early[0]) + 1 if len(early) else n_tried
        cuts.append(ends[:n_right])
        begin = int(ends[n_right - 1])
        n_tried = n_right if len(early) else 2 * n_tried
    return np.concatenate(cuts)
