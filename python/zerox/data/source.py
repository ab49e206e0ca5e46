"""What the loader reads: an immutable list of documents over some storage, its split and fingerprint."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SAMPLE_BLOCKS = 256
_SAMPLE_TOKENS = 1024


class Store(Protocol):
    """Where the tokens of a source are. `entry` counts files or arrays."""

    dtype: np.dtype[Any]

    def read(self, entry: int, begin: int, out: NDArray[Any]) -> None:
        """Fills `out` with the tokens of `entry` from `begin` on; all of them exist or it raises."""
        ...


def natural(name: str, value: object, *, least: int, most: int | None = None) -> int:
    """`value` as an int in [least, most], or an error that names the option."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"in {least} .. {most}"
        raise ValueError(f"{name} must be {bounds}, not {number}")
    return number


class Source:
    """Documents in a fixed order. A document is `sizes[d]` > 0 consecutive tokens of one entry of a store.

    Attributes:
        label: where the data came from, for messages.
        names: names of the documents, (D,); relative paths with "/" for files.
        sizes: tokens of each document, int64 (D,), all > 0.
        offsets: where each document begins in the concatenation of all, int64 (D+1,).
        vocab: token ids lie in [0, vocab).
    """

    def __init__(
        self,
        store: Store,
        *,
        label: str,
        names: Sequence[str],
        entries: ArrayLike,
        begins: ArrayLike,
        sizes: ArrayLike,
        vocab: int,
    ) -> None:
        self.label = label
        self.names = tuple(names)
        self.vocab = vocab
        self.sizes = np.asarray(sizes, np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self._store = store
        self._entries = np.asarray(entries, np.int64)
        self._begins = np.asarray(begins, np.int64)
        self._fingerprint: dict[str, Any] | None = None

    @property
    def n_docs(self) -> int:
        """Number of documents, empty ones not counted."""
        return len(self.names)

    @property
    def n_tokens(self) -> int:
        """Tokens of all documents together."""
        return int(self.offsets[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type in which the store holds tokens."""
        return self._store.dtype

    def __repr__(self) -> str:
        return f"<{self.label}: {self.n_tokens:,} tokens in {self.n_docs:,} documents>"

    def read(self, doc: int, begin: int, out: NDArray[Any]) -> None:
        """Copies tokens [begin, begin + len(out)) of document `doc` into `out`, (n,) of `dtype`.

        Errors: IndexError if they are not all inside the document; RuntimeError if the file on disk has
        changed.
        """
        if not (0 <= doc < self.n_docs and 0 <= begin and begin + len(out) <= self.sizes[doc]):
            raise IndexError(f"tokens {begin} .. {begin + len(out)} of document {doc} lie outside of {self!r}")
        self._store.read(int(self._entries[doc]), int(self._begins[doc]) + begin, out)

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(document, first token in it, number of tokens) for tokens [begin, end) of the concatenation."""
        doc = int(np.searchsorted(self.offsets, begin, "right")) - 1
        while begin < end:
            size = min(end, int(self.offsets[doc + 1])) - begin
            yield doc, begin - int(self.offsets[doc]), size
            begin += size
            doc += 1

    def split(self, validation: float = 0.05) -> tuple[Source, Source]:
        """The training part and the validation part, which share this source's storage.

        Documents go to the validation part if a hash of their name falls below `validation`, so that a
        document keeps its side when others are added or removed. Each part gets one document at least. The
        tail of a source of one document is its validation part, one token at least.

        Args:
            validation: the fraction wanted, 0 < validation < 1. It is met on average over many documents.

        Errors: ValueError if the fraction is out of range or a single document has less than two tokens.
        """
        if not 0 < validation < 1:
            raise ValueError(
                f"validation must lie between 0 and 1, not {validation!r}: to train on everything, give the "
                "loader the source itself"
            )
        docs = np.arange(self.n_docs)
        begins, sizes = self._begins, self.sizes
        if self.n_docs == 1:
            size = self.n_tokens
            if size < 2:
                raise ValueError(f"{self.label} holds {size} token, which cannot be split in two: use more data")
            tail = min(max(round(size * validation), 1), size - 1)
            return (
                self._part("training part", docs, begins, [size - tail]),
                self._part("validation part", docs, begins + (size - tail), [tail]),
            )
        draws = np.array([_unit_hash(name) for name in self.names])
        chosen = draws < validation
        if not chosen.any():
            chosen[np.argmin(draws)] = True
        elif chosen.all():
            chosen[np.argmax(draws)] = False
        train, valid = docs[~chosen], docs[chosen]
        return (
            self._part("training part", train, begins[train], sizes[train]),
            self._part("validation part", valid, begins[valid], sizes[valid]),
        )

    def _part(self, which: str, docs: NDArray[Any], begins: ArrayLike, sizes: ArrayLike) -> Source:
        return Source(
            self._store,
            label=f"{self.label} ({which})",
            names=[self.names[d] for d in docs],
            entries=self._entries[docs],
            begins=begins,
            sizes=sizes,
            vocab=self.vocab,
        )

    def fingerprint(self) -> dict[str, Any]:
        """Tells this data from other data: {"n_docs", "n_tokens", "names", "content"}, fit for JSON.

        `names` hashes all names and sizes, in order. `content` hashes all tokens up to 256 Ki, and beyond
        that 256 evenly spread blocks of 1,024: a change that keeps every size and misses every block is not
        seen.
        """
        if self._fingerprint is None:
            names = hashlib.sha256()
            for name in self.names:
                names.update(_name_bytes(name) + b"\0")
            names.update(self.sizes.astype("<i8").tobytes())
            self._fingerprint = {
                "n_docs": self.n_docs,
                "n_tokens": self.n_tokens,
                "names": names.hexdigest()[:16],
                "content": self._content_hash(),
            }
        return dict(self._fingerprint)

    def _content_hash(self) -> str:
        content = hashlib.sha256()
        n_blocks = min(_SAMPLE_BLOCKS, -(-self.n_tokens // _SAMPLE_TOKENS))
        last = max(self.n_tokens - _SAMPLE_TOKENS, 0)
        for block in range(n_blocks):
            begin = block * last // max(n_blocks - 1, 1)
            end = min(begin + _SAMPLE_TOKENS, self.n_tokens)
            for doc, first, size in self.spans(begin, end):
                tokens = np.empty(size, self.dtype)
                self.read(doc, first, tokens)
                content.update(tokens.astype("<i4").tobytes())
        return content.hexdigest()[:16]


def _name_bytes(name: str) -> bytes:
    """The same bytes in every locale, for any string."""
    return name.encode("utf-8", "surrogatepass")


def _unit_hash(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(_name_bytes(name)).digest()[:6], "little") / 2**48


class _Memory:
    """Arrays kept in memory."""

    dtype = np.dtype(np.int32)

    def __init__(self, arrays: list[NDArray[np.int32]]) -> None:
        self._arrays = arrays

    def read(self, entry: int, begin: int, out: NDArray[Any]) -> None:
        out[:] = self._arrays[entry][begin : begin + len(out)]


class Arrays(Source):
    """Documents given as token ids in memory, each (n,) of integers; empty ones are skipped.

    Args:
        documents: the token ids of each document; they are copied to int32.
        names: a name for each, which decides its side of `split` (default: its number).
        vocab: token ids lie in [0, vocab); default: the largest id + 1.

    Errors: ValueError for ids that are negative, too large or not integers, and if no document has a token.

    >>> train = Arrays([[1, 2, 3], [4, 5]])
    """

    def __init__(
        self,
        documents: Sequence[ArrayLike],
        *,
        names: Sequence[str] | None = None,
        vocab: int | None = None,
    ) -> None:
        if names is None:
            names = [str(i) for i in range(len(documents))]
        if len(names) != len(documents):
            raise ValueError(f"{len(names)} names were given for {len(documents)} documents")
        limit = 2**31 - 1 if vocab is None else natural("vocab", vocab, least=1, most=2**31 - 1)
        arrays = [_as_tokens(i, document, limit) for i, document in enumerate(documents)]
        kept = [i for i, array in enumerate(arrays) if len(array)]
        if not kept:
            raise ValueError(f"no tokens in {len(documents)} documents: give at least one that is not empty")
        super().__init__(
            _Memory(arrays),
            label="arrays in memory",
            names=[names[i] for i in kept],
            entries=kept,
            begins=np.zeros(len(kept), np.int64),
            sizes=[len(arrays[i]) for i in kept],
            vocab=limit if vocab is not None else max(int(arrays[i].max()) for i in kept) + 1,
        )


def _as_tokens(i: int, document: ArrayLike, limit: int) -> NDArray[np.int32]:
    array = np.asarray(document)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"document {i} must be a list of integers, not {array.dtype} of shape {array.shape}")
    if array.size and not (0 <= int(array.min()) and int(array.max()) < limit):
        raise ValueError(
            f"document {i} holds token ids from {array.min()} to {array.max()}, they must lie in 0 .. {limit - 1}"
        )
    return array.astype(np.int32)
