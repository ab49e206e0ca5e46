"""What an engine and a planner share: a model's records, and its forward run once per signature to plan memory."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerox import _C, nn
from zerox.config import EngineConfig
from zerox.data import Batch
from zerox.optim import SGD, AdamW

IGNORED = -100  # the label of tokens that are not counted


class ModelRecords:
    """Units and parameter records of a model: what the core lays out.

    Every Block is a unit; all else, and every parameter that two units use, belongs to unit 0, the root. A parameter
    that has several names (tied weights) is stored once, under the first.
    """

    def __init__(self, model: nn.Module, optimizer: AdamW | SGD, dtype: str) -> None:
        self.units = ["root"]
        self.block_units: dict[int, int] = {}
        self._check_blocks(model)
        owner: dict[int, int] = {}
        names: list[tuple[str, nn.Parameter, int]] = []
        for name, parameter in model.named_parameters():
            names.append((name, parameter, self._unit_of(name)))
        shared = {}
        for _, parameter, unit in names:
            shared.setdefault(id(parameter), set()).add(unit)
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self.records: list[_C._Record] = []
        for name, p, unit in names:
            home = unit if len(shared[id(p)]) == 1 else 0
            tied = owner.setdefault(id(p), len(self.records))
            tied_to = -1 if tied == len(self.records) else tied
            self.parameters.append((name, p))
            self.records.append((name, home, dtype, p.shape, p.trainable, optimizer.group(p.shape), tied_to))
        self.index = {k: v for k, v in owner.items()}
        if not self.records:
            raise ValueError(f"{type(model).__name__} has no parameters: assign nn.Parameter or modules to attributes")

    def _check_blocks(self, model: nn.Module) -> None:
        self._prefixes: list[tuple[str, int]] = []
        for name, module in model.named_modules():
            if not isinstance(module, nn.Block) or id(module) in self.block_units:
                continue
            for outer, _ in self._prefixes:
                if name.startswith(outer + "."):
                    raise ValueError(f"block {name!r} lies inside block {outer!r}: blocks cannot contain blocks")
            unit = len(self.units)
            self.units.append(name or "model")
            self.block_units[id(module)] = unit
            self._prefixes.append((name, unit))

    def _unit_of(self, parameter: str) -> int:
        for prefix, unit in self._prefixes:
            if prefix == "" or parameter.startswith(prefix + "."):
                return unit
        return 0


def initial_value(name: str, parameter: nn.Parameter, seed: int) -> NDArray[Any]:
    """Depends on the seed and the parameter's name only, not on ranks, stages or other parameters."""
    rng = np.random.Generator(np.random.Philox(key=(seed << 32) | zlib.crc32(name.encode())))
    value = np.asarray(parameter.init(rng, parameter.shape))
    if value.shape != parameter.shape:
        raise ValueError(f"initial value of {name!r} has shape {value.shape}, the parameter {parameter.shape}")
    return value


def positions_of(cu_seqlens: NDArray[np.int32], n: int) -> NDArray[np.int32]:
    """(n) int32: each token's index within its document; 0 past the last document."""
    positions = np.zeros(n, np.int32)
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    used = int(cu_seqlens[-1])
    positions[:used] = np.arange(used, dtype=np.int32) - np.repeat(starts, ends - starts)
    return positions


def as_batch(tokens: Any, targets: Any = None) -> Batch:
    """(B, T) or (T) arrays of token ids (and labels) -> a Batch of B documents of T tokens."""
    ids = np.asarray(tokens)
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
        raise ValueError(f"tokens must be whole numbers of shape (B, T) or (T); got {ids.dtype} {ids.shape}")
    rows, length = ids.shape if ids.ndim == 2 else (1, ids.shape[0])
    labels = np.full(ids.size, IGNORED, np.int64) if targets is None else np.asarray(targets)
    if targets is not None and (labels.shape != ids.shape or labels.dtype.kind not in "iu"):
        raise ValueError(
            f"targets must be whole numbers of the tokens' shape {ids.shape}; got {labels.dtype} {labels.shape}"
        )
    flat = labels.reshape(-1)
    return Batch(
        tokens=_as_int32("tokens", ids.reshape(-1)),
        targets=_as_int32("targets", flat),
        cu_seqlens=np.arange(rows + 1, dtype=np.int32) * length,
        max_seqlen=length,
        n_docs=rows,
        n_counted=int((flat >= 0).sum()),
    )


def _as_int32(name: str, ids: Any) -> NDArray[np.int32]:
    """(N) whole numbers, none of which may change its value."""
    ids = np.asarray(ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{name} of a Batch must be whole numbers of shape (N); got {ids.dtype} {ids.shape}")
    if ids.size and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise ValueError(f"{name} lie in {ids.min()} .. {ids.max()}, more than 32 bits hold")
    return np.ascontiguousarray(ids, np.int32)


def _check_documents(batch: Batch) -> None:
    cu, n = batch.cu_seqlens, batch.tokens.size
    if cu.ndim != 1 or cu.size < 1 or cu[0] != 0 or cu[-1] > n or (np.diff(cu) < 0).any():
        raise ValueError(
            f"cu_seqlens of a Batch must begin with 0, not fall, and end within its {n} tokens; got {cu.tolist()!s:.80}"
        )


@contextmanager
def _random_state_kept() -> Iterator[None]:
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)


class Runner:
    """Runs a model's forward on a core engine: inputs in, blocks entered and left, signatures planned dry first."""

    def __init__(self, model: nn.Module, optimizer: AdamW | SGD, config: EngineConfig) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.records = ModelRecords(model, optimizer, config.dtype)
        self.core: _C.Engine
        self._signatures: dict[tuple[Any, ...], int] = {}
        self._tensors: dict[int, _C.Tensor] = {}

    # what nn calls while a forward runs
    def parameter_tensor(self, parameter: nn.Parameter) -> _C.Tensor:
        index = self.records.index.get(id(parameter))
        if index is None:
            raise ValueError(
                f"{parameter!r} is not part of this engine's model: parameters must be assigned to attributes before "
                "the engine is made"
            )
        if index not in self._tensors:
            self._tensors[index] = self.core.param(index)
        return self._tensors[index]

    def enter_block(self, block: nn.Block) -> int:
        unit = self.records.block_units.get(id(block))
        if unit is None:
            raise ValueError(f"{type(block).__name__} is not part of this engine's model")
        self.core.enter(unit, self.config.recompute)
        return unit

    def exit_block(self, unit: int, *, failed: bool = False) -> None:
        """failed: an error is under way, which another one here must not replace."""
        with suppress(_C.ZeroxError) if failed else nullcontext():
            self.core.exit(unit)

    # passes
    def inputs_of(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of the model's forward as tensors of the pass that has begun."""
        return tuple(self._input(f"input {i}", a) for i, a in enumerate(args))

    def _input(self, name: str, value: Any) -> Any:
        if isinstance(value, nn.Inputs):
            fields = ("tokens", "positions", "cu_seqlens", "targets", "rows")
            tensors = {f: getattr(value, f) for f in fields if getattr(value, f) is not None}
            return nn.Inputs(max_seqlen=value.max_seqlen, **{f: self.core.input(f, a) for f, a in tensors.items()})
        return self.core.input(name, value) if isinstance(value, np.ndarray) else value

    def signature(self, train: bool, args: tuple[Any, ...]) -> int:
        key: list[Any] = [train]
        for a in args:
            if isinstance(a, nn.Inputs):
                shapes = [None if x is None else np.shape(x) for x in (a.tokens, a.cu_seqlens, a.targets, a.rows)]
                key.append((*shapes, a.max_seqlen))
            else:
                key.append((a.shape, a.dtype.str) if isinstance(a, np.ndarray) else repr(a))
        return self._signatures.setdefault(tuple(key), len(self._signatures))

    def plan_pass(self, train: bool, args: tuple[Any, ...]) -> int:
        """Runs the forward (and backward) dry if this signature is new; returns the signature."""
        signature = self.signature(train, args)
        if self.core.planned(signature):
            return signature
        with _random_state_kept():
            self.core.begin(signature, train=train, dry=True)
            try:
                with nn.running(self):
                    out = self.model(*self.inputs_of(args))
                if train:
                    self.core.backward(_check_loss(out))
                del out
                self.core.end()
            except BaseException:
                self.core.abandon()
                raise
        return signature

    def begin_pass(self, train: bool, args: tuple[Any, ...]) -> Any:
        """Plans if needed, begins a pass and runs the forward; the pass stays open. An error leaves no trace."""
        signature = self.plan_pass(train, args)
        self.core.begin(signature, train=train, dry=False)
        try:
            with nn.running(self):
                return self.model(*self.inputs_of(args))
        except BaseException:
            self.core.abandon()
            raise


def _check_loss(out: Any) -> _C.Tensor:
    if not isinstance(out, _C.Tensor):
        raise TypeError(f"the model's forward must return the loss, a Tensor; it returned {type(out).__name__}")
    return out


def language_inputs(batch: Batch, vocab: int | None, *, n_docs: int, rows: Any = None, train: bool = True) -> nn.Inputs:
    """A Batch as the arrays of nn.Inputs, checked: cu_seqlens is padded to n_docs documents."""
    tokens, targets = _as_int32("tokens", batch.tokens), _as_int32("targets", batch.targets)
    _check_documents(batch)
    for name, ids, low in (("token", tokens, 0), ("label", targets, None)):
        if vocab is None or ids.size == 0:
            continue
        if int(ids.max()) >= vocab or (low is not None and int(ids.min()) < low):
            bad = int(ids.max()) if int(ids.max()) >= vocab else int(ids.min())
            raise ValueError(f"{name} {bad} lies outside the vocabulary of {vocab}")
    if batch.cu_seqlens.size - 1 > n_docs:
        raise ValueError(f"the batch holds {batch.cu_seqlens.size - 1} documents and its capacity is {n_docs}")
    cu = np.full(n_docs + 1, batch.cu_seqlens[-1], np.int32)
    cu[: batch.cu_seqlens.size] = batch.cu_seqlens
    return nn.Inputs(
        tokens=tokens,
        positions=positions_of(cu, tokens.size),
        cu_seqlens=cu,
        max_seqlen=batch.max_seqlen,
        targets=targets if train else None,
        rows=rows,
    )
