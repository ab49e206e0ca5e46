"""The engine: one model, trained and sampled, with its state sharded over the ranks of a communicator.

engine = zx.Engine(model, zx.AdamW(lr=6e-4), zero=3, precision="bf16")
for batch in loader:
    loss = engine.train_step(batch)
engine.save("run/step-1000")
"""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerox import _C, dtypes, nn
from zerox.config import EngineConfig
from zerox.data import Batch
from zerox.memory import Memory
from zerox.optim import SGD, AdamW, Schedule
from zerox.runner import ModelRecords, Runner, as_batch, initial_value, language_inputs


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank. float() gives the loss.

    loss: mean over the counted labels (or ranks x micro-steps) of all ranks. norm: global gradient norm before
    clipping. applied: False when a gradient was not finite; then nothing was changed. denominator: what
    the loss was divided by. step, skipped: numbers of steps so far, applied and not.
    """

    loss: float
    norm: float
    lr: float
    applied: bool
    denominator: float
    step: int
    skipped: int = field(repr=False)

    def __float__(self) -> float:
        return self.loss

    def __format__(self, spec: str) -> str:
        return format(self.loss, spec) if spec else str(self)


class Engine:
    """Trains a model on this rank, together with the other ranks of `comm`.

    model: a zerox.nn.Module. optimizer: AdamW or SGD. comm: this rank's connection; None: made from the launcher's
    environment (zerox run, torchrun, Slurm, Open MPI), or a single rank. schedule: factor on the learning rate.
    init: fill parameters from their initial values; False leaves zeros for a checkpoint to overwrite.
    Other options: see EngineConfig; they are keywords.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: AdamW | SGD | None = None,
        *,
        schedule: Schedule | None = None,
        comm: _C.Comm | None = None,
        threads: int | None = None,
        init: bool = True,
        **options: Any,
    ) -> None:
        for what, value, kinds in (
            ("model", model, (nn.Module,)),
            ("optimizer", optimizer, (AdamW, SGD, type(None))),
            ("schedule", schedule, (Schedule, type(None))),
        ):
            if not isinstance(value, kinds):
                names = " or ".join(k.__name__ for k in kinds if k is not type(None))
                raise TypeError(f"Engine: {what} must be a zerox {names}, not {value!r:.60}")
        self.config = EngineConfig.from_options(options)
        self.optimizer = optimizer or AdamW()
        self.schedule = schedule or Schedule()
        self.model = model
        self._owns_comm = comm is None
        if comm is None:
            from zerox.distributed import connect

            comm = connect(threads=threads)
        elif threads is not None:
            raise ValueError("threads belongs to the communicator: pass it to zerox.connect(threads=...)")
        self.comm = comm
        self.steps = 0  # applied
        self.skipped = 0  # not applied, because of a gradient that was not finite
        self._skipped_in_a_row = 0
        self._loss: _C.Tensor | None = None
        self._most_docs: dict[int, int] = {}  # tokens of a batch -> capacity for documents
        self.extra: dict[str, Any] | None = None  # of the checkpoint that was loaded
        self.last_save: Path | None = None
        # of the last save: name, identity, places
        self.frozen_file: tuple[str, tuple[int, int, int], list[tuple[int, int]]] | None = None
        try:
            self._runner = Runner(model, self.optimizer, self.config)
            self._check_ranks_agree()
            self._core = self._runner.core = _C.Engine(
                self._runner.records.records,
                self._runner.records.units,
                comm=comm,
                **self.config.core_options(self.optimizer.moments, self.optimizer.name),
            )
            if init:
                self._load_initial_values()
        except BaseException:
            if hasattr(self, "_core"):
                self._core.close()  # else it would keep the communicator open for as long as the traceback lives
            if self._owns_comm:
                comm.close()
            raise
        self._count_parameters(+1)

    def _check_ranks_agree(self) -> None:
        """Ranks with other settings or another model would compute wrong numbers without an error. Collective."""
        if self.comm.world == 1:
            return
        records = self._runner.records
        own = {"memory_limit", "spare_bytes", "poison"}  # may differ
        said = {f"option {k}": repr(v) for k, v in asdict(self.config).items() if k not in own}
        said.update(optimizer=repr(self.optimizer), schedule=repr(self.schedule))
        shapes = zlib.crc32(repr((records.records, records.units)).encode())
        said["model"] = f"{type(self.model).__name__} of {self.model.n_parameters():,} parameters ({shapes:08x})"
        replies = [json.loads(b) for b in self.comm.all_gather_bytes("engine open", json.dumps(said).encode())]
        for rank, theirs in enumerate(replies):
            for what, value in theirs.items():
                if value != replies[0][what]:
                    raise ValueError(
                        f"the ranks make different engines: {what} is {replies[0][what]} on rank 0 and {value} on rank "
                        f"{rank}: give all ranks the same"
                    )

    # ---- training ----

    def train_step(self, *inputs: Any) -> StepResult:
        """Forward, backward and optimizer step on this rank's data.

        inputs: one Batch; a list of Batches (micro-batches, accumulated); tokens and targets (B, T) whole numbers; or
        whatever arrays the model's forward takes. Raises what the forward raises; gradients gathered since the last
        step are then gone, all else is as before.
        """
        micro = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)) else [inputs]
        if not micro:
            raise ValueError("train_step got an empty list of micro-batches")
        try:
            for one in micro:
                self.backward(self(*(one if isinstance(one, tuple) else (one,))))
        except BaseException:
            with suppress(_C.ZeroxError):  # after the loss of a rank nothing can be tidied; the first error counts
                self.zero_grad()
            raise
        return self.step()

    def __call__(self, *inputs: Any) -> _C.Tensor:
        """Forward in training mode: the loss, for `backward` (readable with float() until the next forward)."""
        self._close_pass()
        loss = self._runner.begin_pass(True, self._arguments(inputs))
        self._loss = loss
        return loss

    def backward(self, loss: _C.Tensor) -> None:
        """Adds the loss's gradients to this step's; call once for each forward, any number of times before `step`."""
        try:
            self._core.backward(loss)
            self._core.end()
        except BaseException:
            self._core.abandon()
            raise

    def step(self) -> StepResult:
        """One optimizer step from all gradients since the last: summed over ranks, divided once, clipped, applied."""
        self._close_pass()
        factor = self.schedule.factor(self.steps)
        hyper = self.optimizer.hyper(factor, self.steps + 1)
        ctl = self._core.step(hyper, max_norm=self.config.clip or 0.0)
        applied = not ctl["skip"]
        if applied:
            self.steps += 1
            self._skipped_in_a_row = 0
        else:
            self._note_skip(ctl)
        denominator = ctl["denominator"]
        return StepResult(
            loss=ctl["loss_sum"] / denominator if denominator else math.nan,
            norm=ctl["norm"],
            lr=self.optimizer.lr * factor,
            applied=applied,
            denominator=denominator,
            step=self.steps,
            skipped=self.skipped,
        )

    def _note_skip(self, ctl: dict[str, float]) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == 1 and self.comm.rank == 0:
            why = f"the gradient norm is {ctl['norm']}"
            if not ctl["denominator"]:
                why = "no label was counted, or engine.backward was not called"
            warnings.warn(
                f"step {self.steps + 1} was skipped: {why}; weights are unchanged (skipped so far: {self.skipped})",
                RuntimeWarning,
                stacklevel=3,
            )

    def zero_grad(self) -> None:
        """Throws away gradients and losses gathered since the last step."""
        self._close_pass()
        self._core.zero_grad()

    def _close_pass(self) -> None:
        self._loss = None
        if self._core.in_pass:
            self._core.abandon()

    # ---- evaluation and sampling ----

    def evaluate(self, batches: Iterable[Any]) -> float:
        """Mean loss over the counted labels of all batches of all ranks; nan when there is none. Collective."""
        total = np.zeros(2)
        for one, mine in self._in_step(batches):
            with self._pass(False, self._arguments(one if isinstance(one, tuple) else (one,))) as loss:
                counted = self._count_of(loss) if mine else 0.0
                total += (loss.item() * counted if counted else 0.0, counted)
        shares = self.comm.all_gather(total).sum(axis=0)
        return float(shares[0] / shares[1]) if shares[1] else math.nan

    @staticmethod
    def _count_of(loss: _C.Tensor) -> float:
        return float(loss.numpy()[1]) if loss.is_total else 1.0

    def _in_step(self, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """(batch, whether it is this rank's own). Gathers are collective: a rank that ran out repeats its last one."""
        rounds, last = iter(batches), None
        sharded = self.config.zero == 3 and self.comm.world > 1
        while True:
            one = next(rounds, None)
            if not sharded:
                if one is None:
                    return
                yield one, True
                continue
            last = one if one is not None else last
            has = self.comm.all_gather(np.array([one is not None, last is not None], np.int32)).reshape(-1, 2)
            if not has[:, 0].any():
                return
            if not has[:, 1].all():
                without = np.flatnonzero(has[:, 1] == 0).tolist()
                raise ValueError(
                    f"evaluate got no batch on ranks {without}, but others have some: at zero=3 all compute together, "
                    "so give each rank one at least"
                )
            yield last, one is not None

    def logits(self, *inputs: Any) -> NDArray[Any]:
        """The model's forward without targets, as an array (float32; float64 in fp64). Collective at zero=3.

        inputs: of a language model a Batch, or tokens (B, T) -> (N, vocab); else what the forward takes.
        """
        with self._pass(False, self._arguments(inputs, targets=False)) as out:
            return out.numpy()

    @contextmanager
    def _pass(self, train: bool, args: tuple[Any, ...]) -> Iterator[_C.Tensor]:
        self._close_pass()
        out = self._runner.begin_pass(train, args)
        try:
            yield out
        except BaseException:
            self._core.abandon()
            raise
        self._core.end()

    def generate(
        self,
        prompt: str | bytes | Sequence[int],
        n: int = 200,
        *,
        temperature: float = 0.8,
        top_k: int = 0,
        seed: int = 0,
    ) -> Any:
        """Continues a prompt by n tokens; returns what was given (text, bytes or a list of ids) with its continuation.

        temperature 0 takes the likeliest token (the first of equals). Collective: every rank passes the same
        arguments and gets the same answer. Text is read and written as UTF-8 bytes. This is the plain sampler: the
        whole context is computed for each token.
        """
        from zerox.sampling import generate

        return generate(self, prompt, n, temperature=temperature, top_k=top_k, seed=seed)

    def _arguments(self, inputs: tuple[Any, ...], *, targets: bool = True) -> tuple[Any, ...]:
        """(Batch) or (tokens, targets) for language models; arrays as they are for others."""
        vocab = getattr(getattr(self.model, "config", None), "vocab", None)
        if vocab is not None and not (inputs and isinstance(inputs[0], (Batch, nn.Inputs))):
            if len(inputs) != 1 + targets:
                if not targets:
                    raise TypeError(f"logits of a language model take a Batch, or tokens; got {len(inputs)} inputs")
                raise TypeError(
                    f"a language model is trained on a Batch, or on tokens and targets; got {len(inputs)} inputs "
                    "(several micro-batches: a list of Batches or of (tokens, targets))"
                )
            inputs = (as_batch(*inputs),)
        if inputs and isinstance(inputs[0], Batch):
            n_docs = self._docs_capacity(inputs[0])
            inputs = (language_inputs(inputs[0], vocab, n_docs=n_docs, train=targets), *inputs[1:])
        return tuple(a if isinstance(a, nn.Inputs) or not hasattr(a, "__array__") else np.asarray(a) for a in inputs)

    def _docs_capacity(self, batch: Batch) -> int:
        """Documents a batch of this size is padded to: powers of two that only grow, so that few signatures arise."""
        most = max(self._most_docs.get(batch.tokens.size, 1), batch.n_docs)
        self._most_docs[batch.tokens.size] = 1 << (most - 1).bit_length()
        return self._most_docs[batch.tokens.size]

    # ---- values ----

    def parameter(self, name: str) -> NDArray[Any]:
        """The whole parameter as it is computed with, in float32 (float64 in fp64; no bf16 master). Collective."""
        for index, (known, _) in enumerate(self._runner.records.parameters):
            if known == name:
                self._close_pass()
                value = self._core.gather(index)
                return dtypes.from_bfloat16(value) if self.config.precision == "bf16" else value
        raise KeyError(f"no parameter {name!r}; there are {', '.join(n for n, _ in self._runner.records.parameters)}")

    def parameters(self) -> dict[str, NDArray[Any]]:
        """All parameters by name. Collective."""
        return {name: self.parameter(name) for name, _ in self._runner.records.parameters}

    def load_parameters(self, values: dict[str, NDArray[Any]]) -> None:
        """Sets every parameter from whole arrays of its shape (uint16: bfloat16 bits); moments stay. Collective."""
        records = self._runner.records.records
        missing = [r[0] for r in records if r[0] not in values and r[6] < 0]
        if missing:
            raise KeyError(f"no value for parameter {missing[0]!r} ({len(missing)} are missing)")
        for name, _, _, shape, *_ in records:
            if name in values and np.shape(values[name]) != shape:
                raise ValueError(f"{name!r} has shape {np.shape(values[name])}, the parameter {shape}")

        def value_of(i: int) -> NDArray[Any]:
            value = np.asarray(values[records[i][0]])
            return dtypes.from_bfloat16(value) if value.dtype == np.uint16 else value

        self._load(value_of)

    def _load_initial_values(self) -> None:
        parameters = self._runner.records.parameters
        self._load(lambda i: initial_value(*parameters[i], self.config.seed))

    def _load(self, value_of: Any) -> None:
        self.frozen_file = None  # the last save's no longer holds these values
        whole = self.config.zero == 0
        current, flat = -1, np.empty(0)
        self._core.load_begin()
        for param, index, range_begin, begin, n in self._core.pieces(self.comm.rank, whole):
            if param != current:
                current, flat = param, value_of(param).reshape(-1)
            kind = "master" if self._core.has_slice(index, "master") else "param"
            values = dtypes.cast(flat[begin : begin + n], self._core.has_slice(index, kind))
            self._core.write_slice(index, kind, range_begin, values)
        self._core.load_end()

    # ---- the rest ----

    def memory(self) -> Memory:
        """Bytes of this rank, by purpose; activations are known after the first forward."""
        return Memory.from_core(self._core.memory(), self._runner.records, self.config, self.comm.world)

    def plan(self, *inputs: Any, train: bool = True) -> Memory:
        """Runs the model dry on inputs of these shapes: sizes the arena, refuses what does not fit."""
        self._close_pass()
        self._runner.plan_pass(train, self._arguments(inputs))
        return self.memory()

    def stats(self, *, reset: bool = False) -> dict[str, int]:
        """Gathers, reductions and elements sent since the last reset."""
        return self._core.stats(reset)

    def save(
        self,
        path: str | Path,
        *,
        data: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        keep: int | None = None,
    ) -> Path:
        """Writes a checkpoint that any number of ranks and any stage can load. Collective.

        data: a loader's state(); extra: anything JSON; keep: only the newest so many complete ones stay in its folder.
        """
        from zerox.checkpoint import save

        self._close_pass()
        self.last_save = save(self, Path(path), data=data, extra=extra, keep=keep)
        return self.last_save

    def load(self, path: str | Path, *, optimizer: bool = True) -> dict[str, Any] | None:
        """Loads the checkpoint at path, or the newest complete one below it; all or nothing. -> the data state.

        optimizer=False takes the weights only. What was saved as `extra` is in `engine.extra` afterwards.
        """
        from zerox.checkpoint import load

        self._close_pass()
        data = load(self, Path(path), optimizer=optimizer)
        self.zero_grad()  # gradients gathered so far are of other weights
        return data

    @property
    def core(self) -> _C.Engine:
        """The compiled engine, for those who build on the store's verbs."""
        return self._core

    @property
    def records(self) -> ModelRecords:
        """Units and parameters as the core knows them."""
        return self._runner.records

    def _count_parameters(self, change: int) -> None:
        for _, parameter in self._runner.records.parameters:
            parameter.engines += change

    def adopt_comm(self) -> None:
        """From now on close() also closes the communicator."""
        self._owns_comm = True

    def close(self) -> None:
        """Gives back all memory; also the communicator if this engine made it. Can be called twice."""
        if self._core.closed:
            return
        self._loss = None
        self._core.close()
        self._count_parameters(-1)
        if self._owns_comm:
            self.comm.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and self._owns_comm and not self.comm.closed:
            self.comm.abort(f"{kind.__name__}: {value}")
        self.close()

    def __repr__(self) -> str:
        n = self.model.n_parameters()
        return (
            f"Engine({type(self.model).__name__}, {n:,} parameters, zero={self.config.zero}, "
            f"{self.config.precision}, rank {self.comm.rank} of {self.comm.world}, step {self.steps})"
        )
