"""Micro-batches for each rank, in an order that does not depend on the number of ranks, resumed exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .batch import Batch, Item, Packs, Windows
from .source import Source, natural

_VERSION = 1
_MODES = ("packed", "equal")
_POSITION = ("epoch", "index", "items")


class Loader:
    """An endless stream of micro-batches of one rank; epochs follow each other without a gap.

    All ranks share one position in one global order of items (windows in mode "equal", packs in mode
    "packed"). Micro-step m of rank r takes the m x world + r th of the micro-batches that this order is cut
    into; with k micro-steps in an optimizer step, m = s x k + k'. So the same global batches are seen
    whenever world x k is the same. Nothing is dropped: where an epoch's items do not divide evenly, the
    micro-step goes on in the next epoch, and all ranks take the same number of steps.

    Args:
        source: the documents, such as one part of `Corpus(path).split()`.
        seq_len: T, the most tokens that attend to each other.
        micro_batch: B; a micro-batch holds N = B x T tokens.
        mode: "packed": pieces of documents that do not see each other; "equal": B rows of T consecutive
            tokens of the concatenated documents.
        seed: with the epoch, it decides the order; 0 <= seed < 2**64.
        rank, world: this rank, and the number of ranks that share the data.
        max_docs: mode "packed" only: the most pieces in a micro-batch, B .. N; a micro-batch with smaller
            ones is closed early and padded. Default: min(N, 4 B + 64).
        shuffle: False keeps the order of the source in every epoch.

    Errors: TypeError or ValueError that names the option; ValueError if the source holds less than seq_len
        tokens or no target at all.
    """

    def __init__(
        self,
        source: Source,
        *,
        seq_len: int,
        micro_batch: int,
        mode: str = "packed",
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        max_docs: int | None = None,
        shuffle: bool = True,
    ) -> None:
        if not isinstance(source, Source):
            raise TypeError(f"source must be a Corpus, one of its parts or Arrays, not {type(source).__name__}")
        self.source = source
        self.seq_len = natural("seq_len", seq_len, least=1)
        self.micro_batch = natural("micro_batch", micro_batch, least=1)
        self.n_tokens = self.seq_len * self.micro_batch
        if self.n_tokens >= 2**31:
            raise ValueError(
                f"micro_batch {micro_batch} x seq_len {seq_len} is {self.n_tokens:,} tokens, more than int32 "
                "offsets reach: take fewer, and accumulate"
            )
        if mode not in _MODES:
            raise ValueError(f"mode must be 'packed' or 'equal', not {mode!r}")
        self.mode = mode
        self.seed = natural("seed", seed, least=0, most=2**64 - 1)
        self.world = natural("world", world, least=1)
        self.rank = natural("rank", rank, least=0, most=self.world - 1)
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle must be True or False, not {shuffle!r}")
        self.shuffle = shuffle
        if source.n_tokens < self.seq_len:
            raise ValueError(
                f"{source.label} holds {source.n_tokens:,} tokens, less than one sequence of "
                f"{self.seq_len:,}: take seq_len <= {source.n_tokens:,}, or more data"
            )
        if source.n_tokens == source.n_docs:
            raise ValueError(
                f"{source.label} holds {source.n_docs:,} documents of one token each, so no token has a next "
                "one to learn: give documents of at least two tokens"
            )
        self._packing: Windows | Packs
        if mode == "equal":
            if max_docs is not None:
                raise ValueError("max_docs belongs to mode 'packed'; in mode 'equal' it is micro_batch")
            self._packing = Windows(
                source,
                seq_len=self.seq_len,
                micro_batch=self.micro_batch,
                seed=self.seed,
                shuffle=self.shuffle,
            )
        else:
            if max_docs is None:
                max_docs = min(self.n_tokens, 4 * self.micro_batch + 64)
            self._packing = Packs(
                source,
                seq_len=self.seq_len,
                micro_batch=self.micro_batch,
                max_docs=natural("max_docs", max_docs, least=self.micro_batch, most=self.n_tokens),
                seed=self.seed,
                shuffle=self.shuffle,
            )
        self._next = Item(0, 0)
        self._items = 0

    @property
    def max_docs(self) -> int:
        """The most documents that a micro-batch can hold."""
        return self._packing.max_docs

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next item belongs to, from 0."""
        return self._next.epoch

    @property
    def items(self) -> int:
        """Items that all ranks together have consumed."""
        return self._items

    def __repr__(self) -> str:
        epoch, index = self._next
        return (
            f"<Loader: {self.mode}, {self.micro_batch} x {self.seq_len} tokens, rank {self.rank} of "
            f"{self.world}, epoch {epoch}, item {index:,} of {self.n_items(epoch):,}, {self.source!r}>"
        )

    def n_items(self, epoch: int) -> int:
        """Items (windows or packs) in an epoch, all ranks together."""
        return self._packing.n_items(epoch)

    def micro_steps(self, epochs: int) -> int:
        """Micro-steps from here until `epochs` whole epochs, counted from the very start, are consumed."""
        epochs = natural("epochs", epochs, least=0)
        left = sum(self.n_items(epoch) for epoch in range(self._next.epoch, epochs)) - self._next.index
        return max(0, -(-left // (self.world * self._packing.items_per_batch)))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """This rank's next micro-batch. After an error the position is what it was."""
        per_batch = self._packing.items_per_batch
        at = self._advance(self._next, self.rank * per_batch)
        items: list[Item | None] = []
        for _ in range(per_batch):
            items.append(at)
            at = self._advance(at, 1)
        batch = self._packing.batch(items)
        self._next = self._advance(self._next, self.world * per_batch)
        self._items += self.world * per_batch
        return batch

    def _advance(self, item: Item, n: int) -> Item:
        """The item n further on. It always exists: the end of an epoch is the start of the next."""
        epoch, index = item.epoch, item.index + n
        while index >= self.n_items(epoch):
            index -= self.n_items(epoch)
            epoch += 1
        return Item(epoch, index)

    def once(self, *, max_tokens: int | None = None) -> Iterator[Batch]:
        """One pass for evaluation: each item of epoch 0 once over all ranks, in order; the position stays.

        All ranks get the same number of micro-batches; what is missing at the end is padding without
        targets. So the sum of losses over counted targets, divided by their sum, does not depend on the
        number of ranks.

        Args:
            max_tokens: ends after the items that hold this many tokens when full, one item at least.
        """
        n_items = self.n_items(0)
        if max_tokens is not None:
            max_tokens = natural("max_tokens", max_tokens, least=1)
            n_items = min(n_items, -(-max_tokens // self._packing.tokens_per_item))
        per_batch = self._packing.items_per_batch
        for begin in range(0, n_items, self.world * per_batch):
            mine = begin + self.rank * per_batch
            yield self._packing.batch(
                [Item(0, index) if index < n_items else None for index in range(mine, mine + per_batch)]
            )

    def state(self) -> dict[str, Any]:
        """The position, and what it is valid for, fit for JSON; after a micro-step the same on every rank."""
        return {
            "version": _VERSION,
            "epoch": self._next.epoch,
            "index": self._next.index,
            "items": self._items,
            **self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        """What makes a position mean the same; world and, in mode "equal", micro_batch do not matter."""
        packed = self.mode == "packed"
        return {
            "mode": self.mode,
            "seq_len": self.seq_len,
            "micro_batch": self.micro_batch if packed else None,
            "max_docs": self.max_docs if packed else None,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "data": self.source.fingerprint(),
        }

    def load_state(self, state: Mapping[str, Any], *, allow_other_data: bool = False) -> bool:
        """Goes on where `state` was taken, with any world size.

        Args:
            state: what `state()` gave.
            allow_other_data: with other data or another packing, start at the beginning instead of raising.

        Returns: True if it goes on from the saved position, False if it starts at the beginning.

        Errors: ValueError that shows both sides if data, packing or seed differ, and if `state` is not a
            state. The position is then what it was.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != _VERSION:
            raise ValueError(f"not a loader state of version {_VERSION}: {state!r}")
        identity = self._identity()
        other = [key for key in identity if state.get(key) != identity[key]]
        if other:
            if allow_other_data:
                self._next, self._items = Item(0, 0), 0
                return False
            raise ValueError(
                "the saved position belongs to other data or another packing: "
                + "; ".join(f"{key} was {state.get(key)!r} and is {identity[key]!r}" for key in other)
                + f" ({self.source.label}). Give the loader what it had, or load_state(..., "
                "allow_other_data=True) to start at the beginning"
            )
        epoch, index, items = (natural(f"state[{key!r}]", state.get(key), least=0, most=2**62) for key in _POSITION)
        if index >= self.n_items(epoch):
            raise ValueError(f"state: index {index} lies outside of epoch {epoch} with {self.n_items(epoch)} items")
        self._next, self._items = Item(epoch, index), items
        return True
