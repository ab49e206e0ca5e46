"""The two ways to make micro-batches of documents, and what a micro-batch is.

DESIGN. `Windows` (mode "equal") and `Packs` (mode "packed") answer the same three questions for the loader:
how many items has an epoch, how many items make a micro-batch, and what is in the micro-batch of these
items. An item is named by (epoch, index) and its content is a function of that name, so a position is all
that a checkpoint has to hold.

In both modes the target of a token is the next token of the same document, also where a document is cut into
pieces and the next token is the input of another piece. The last token of a document has no target. So in
one epoch every token is an input once, and every token but the first of each document is a counted target
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .order import pack_bounds, permutation
from .source import Source

IGNORED = -100
"""Target of a token that is not counted."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch of one rank.

    Attributes:
        tokens: inputs, int32 (N,), N = micro_batch x seq_len; 0 in the padding.
        targets: the next token of the same document, int32 (N,); -100 where there is none, and in the
            padding.
        cu_seqlens: document d holds rows [cu_seqlens[d], cu_seqlens[d+1]), int32 (n_docs + 1,). Rows from
            cu_seqlens[-1] on are padding that belongs to no document.
        max_seqlen: no document is longer (always seq_len).
        n_docs: documents in this micro-batch, at most the loader's `max_docs`; may be 0.
        n_counted: targets that are not -100.
    """

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int
    n_docs: int
    n_counted: int


class Item(NamedTuple):
    """The name of an item: number `index` in the order of `epoch`."""

    epoch: int
    index: int


def _batch(tokens: NDArray[Any], targets: NDArray[Any], cu_seqlens: NDArray[Any], seq_len: int) -> Batch:
    return Batch(
        tokens=tokens,
        targets=targets,
        cu_seqlens=cu_seqlens.astype(np.int32),
        max_seqlen=seq_len,
        n_docs=len(cu_seqlens) - 1,
        n_counted=int(np.count_nonzero(targets != IGNORED)),
    )


class Windows:
    """Mode "equal": the concatenation of all documents in windows of seq_len; an epoch permutes the windows.

    Attention sees the whole window, so across documents; targets do not. The last window may be short and is
    filled up with padding inside its row.

    Attributes:
        items_per_batch: windows in a micro-batch.
        tokens_per_item: capacity of a window.
        max_docs: documents in a micro-batch: its rows.
    """

    def __init__(self, source: Source, *, seq_len: int, micro_batch: int, seed: int, shuffle: bool) -> None:
        self.items_per_batch = self.max_docs = micro_batch
        self.tokens_per_item = self._seq_len = seq_len
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._n_windows = -(-source.n_tokens // seq_len)
        self._order = lru_cache(maxsize=2)(self._draw)  # a micro-batch can lie across two epochs

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._n_windows)
        return permutation(self._n_windows, seed=self._seed, epoch=epoch)

    def n_items(self, epoch: int) -> int:
        """Windows in an epoch, the short one included."""
        return self._n_windows

    def batch(self, items: Sequence[Item | None]) -> Batch:
        """The micro-batch of these windows, one a row; None is a row of padding."""
        source, seq_len = self._source, self._seq_len
        rows = np.zeros((len(items), seq_len + 1), source.dtype)  # one more: the target of the last token
        targets = np.full((len(items), seq_len), IGNORED, np.int32)
        for item, row, target in zip(items, rows, targets, strict=True):
            if item is None:
                continue
            begin = int(self._order(item.epoch)[item.index]) * seq_len
            end = min(begin + seq_len, source.n_tokens)
            at = 0
            for doc, first, size in source.spans(begin, end):
                # All of them have a next token in the document, or all but its last one.
                n_targets = min(size, int(source.sizes[doc]) - first - 1)
                source.read(doc, first, row[at : at + n_targets + 1])
                target[at : at + n_targets] = row[at + 1 : at + 1 + n_targets]
                at += size
        tokens = rows[:, :seq_len].astype(np.int32)
        cu_seqlens = np.arange(len(items) + 1) * seq_len
        return _batch(tokens.reshape(-1), targets.reshape(-1), cu_seqlens, seq_len)


class _PackedEpoch(NamedTuple):
    order: NDArray[np.int64]  # pieces in the order of the epoch
    offsets: NDArray[np.int64]  # where each begins in the stream, and the end
    cuts: NDArray[np.int64]  # where each pack begins in the stream, and the end


class Packs:
    """Mode "packed": documents in pieces of at most seq_len; an epoch permutes these and cuts packs.

    Each document is cut into pieces of seq_len tokens and a shorter rest. The pieces, in the order of the
    epoch, form one stream, which `pack_bounds` cuts into packs of micro_batch x seq_len tokens and at most
    `max_docs` pieces. A piece is a document of the batch: attention and targets stay inside its document. The
    last pack of an epoch, and one that closed early, end in padding.

    Attributes:
        items_per_batch: 1: a pack is a whole micro-batch.
        tokens_per_item: capacity of a pack.
        max_docs: the most pieces in a pack.
    """

    items_per_batch = 1

    def __init__(
        self, source: Source, *, seq_len: int, micro_batch: int, max_docs: int, seed: int, shuffle: bool
    ) -> None:
        self.tokens_per_item = seq_len * micro_batch
        self.max_docs = max_docs
        self._source = source
        self._seq_len = seq_len
        self._seed = seed
        self._shuffle = shuffle
        self._first_piece = np.concatenate([[0], np.cumsum(-(-source.sizes // seq_len))])
        self._epoch = lru_cache(maxsize=2)(self._draw)

    def _draw(self, epoch: int) -> _PackedEpoch:
        n_pieces = int(self._first_piece[-1])
        sizes = np.full(n_pieces, self._seq_len)
        sizes[self._first_piece[1:] - 1] = (self._source.sizes - 1) % self._seq_len + 1
        order = np.arange(n_pieces)
        if self._shuffle:
            order = permutation(n_pieces, seed=self._seed, epoch=epoch)
        offsets = np.concatenate([[0], np.cumsum(sizes[order])])
        cuts = pack_bounds(offsets, capacity=self.tokens_per_item, max_docs=self.max_docs)
        return _PackedEpoch(order, offsets, cuts)

    def n_items(self, epoch: int) -> int:
        """Packs in this epoch; it may differ between epochs where `max_docs` closes packs early."""
        return len(self._epoch(epoch).cuts) - 1

    def batch(self, items: Sequence[Item | None]) -> Batch:
        """The micro-batch of the one pack named; None is padding only."""
        (item,) = items
        tokens = np.zeros(self.tokens_per_item, np.int32)
        targets = np.full(self.tokens_per_item, IGNORED, np.int32)
        if item is None:
            return _batch(tokens, targets, np.zeros(1), self._seq_len)
        source = self._source
        order, offsets, cuts = self._epoch(item.epoch)
        begin, end = cuts[item.index], cuts[item.index + 1]
        first = int(np.searchsorted(offsets, begin, "right")) - 1
        last = int(np.searchsorted(offsets, end, "left"))
        bounds = np.clip(offsets[first : last + 1], begin, end) - begin
        pieces = order[first:last]
        docs = np.searchsorted(self._first_piece, pieces, "right") - 1
        begins = (pieces - self._first_piece[docs]) * self._seq_len
        begins[0] += begin - offsets[first]  # the rest of a piece that the pack before has cut
        sizes = np.diff(bounds)
        followed = begins + sizes < source.sizes[docs]
        # Each piece is read with the token that follows it, if its document has one, so with a gap of one.
        gaps = np.arange(len(pieces))
        stream = np.zeros(int(end - begin) + len(pieces), source.dtype)
        places = bounds[:-1] + gaps
        for doc, at, place, size in zip(
            docs.tolist(), begins.tolist(), places.tolist(), (sizes + followed).tolist(), strict=True
        ):
            source.read(doc, at, stream[place : place + size])
        where = np.arange(int(end - begin)) + np.repeat(gaps, sizes)
        tokens[: len(where)] = stream[where]
        targets[: len(where)] = stream[where + 1]
        targets[bounds[1:][~followed] - 1] = IGNORED
        return _batch(tokens, targets, bounds, self._seq_len)
