"""Text for training: documents on disk or in memory, packed into micro-batches, resumed exactly.

Reading order: `source` (what a document is, split, fingerprint), `corpus` (files), `order` (which item is
where in an epoch: pure functions), `batch` (the two ways of packing), `loader` (ranks, position, resume).

The vocabulary of a `Corpus` is the 256 byte values. There is no separator token: documents are kept apart by
`cu_seqlens`. Needs NumPy only.
"""

from .batch import IGNORED, Batch
from .corpus import Corpus, default_corpus
from .loader import Loader
from .source import Arrays, Source

__all__ = ["IGNORED", "Arrays", "Batch", "Corpus", "Loader", "Source", "default_corpus"]
