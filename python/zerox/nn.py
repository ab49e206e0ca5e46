"""Modules, parameters and operations: how a model is written.

A model is ordinary Python: subclass `Module`, make `Parameter`s in `__init__`, compute in `forward`. Activations are
(tokens, channels). A `Block` is a module whose parameters are gathered together, released after its forward, and whose
activations can be recomputed; everything outside blocks belongs to the root and stays gathered during a pass.

    class Net(nn.Module):
        def __init__(self):
            self.embed = nn.Embedding(256, 64)
            self.blocks = nn.ModuleList(MyBlock(64) for _ in range(4))

        def forward(self, batch):
            x = self.embed(batch.tokens)
            for block in self.blocks:
                x = block(x, batch)
            return nn.linear_cross_entropy(x, self.embed.weight, batch.targets)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from zerox._C import Tensor
    from zerox.runner import Runner

Init = Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]

_active = threading.local()


def active_runner() -> Runner:
    """The engine (or planner) whose forward is running in this thread; RuntimeError outside of one."""
    runner = getattr(_active, "runner", None)
    if runner is None:
        raise RuntimeError(
            "a model was called outside an engine: tensors exist only inside engine(...), engine.train_step(...), "
            "engine.evaluate(...) or zerox.plan(...)"
        )
    return runner


class running:
    """Context: this thread runs the forward of `runner`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __enter__(self) -> None:
        self._before = getattr(_active, "runner", None)
        _active.runner = self._runner

    def __exit__(self, *_: object) -> None:
        _active.runner = self._before


# ---- initial values ----


@dataclass(frozen=True)
class normal:
    """Independent normal values with mean 0 and standard deviation `std`."""

    std: float

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(self.std)


@dataclass(frozen=True)
class constant:
    """One value everywhere."""

    value: float

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        return np.full(shape, self.value, np.float32)


@dataclass(frozen=True, eq=False)
class values:
    """Exactly this array."""

    array: NDArray[Any]

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        return np.array(self.array)


zeros, ones = constant(0.0), constant(1.0)


class Parameter:
    """A trainable (or frozen) array of a model. It holds no numbers: these live, sharded, in an engine's store.

    shape: at most four dimensions; 0 is a legal size. init: how an engine fills it. trainable: whether it is stepped.
    Inside a forward it stands for its value and can be used in arithmetic like a Tensor.
    """

    def __init__(self, *shape: int, init: Init = zeros, trainable: bool = True) -> None:
        if len(shape) > 4 or any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError(f"a parameter's shape has at most 4 whole sizes from 0 up; got {shape}")
        self.shape = shape
        self.init = init
        self._trainable = trainable
        self.engines = 0  # open engines that laid this parameter out

    @property
    def trainable(self) -> bool:
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        if self.engines and bool(value) != self._trainable:
            raise RuntimeError(
                "a parameter cannot be frozen or unfrozen while an engine holds it, because its memory was planned: "
                "save, close the engine, change it, make a new engine and load"
            )
        self._trainable = bool(value)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def tensor(self) -> Tensor:
        """Its value in the forward that is running."""
        return active_runner().parameter_tensor(self)

    def __repr__(self) -> str:
        return f"Parameter{self.shape}{'' if self.trainable else ', frozen'}"

    def __add__(self, other: Any) -> Tensor:
        return add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return add(self, other)

    def __mul__(self, other: Any) -> Tensor:
        return mul(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return mul(self, other)

    def __sub__(self, other: Any) -> Tensor:
        return self.tensor() - _tensor(other)

    def __rsub__(self, other: Any) -> Tensor:
        return _tensor(other) - self.tensor()

    def __neg__(self) -> Tensor:
        return -self.tensor()

    def __truediv__(self, other: Any) -> Tensor:
        return self.tensor() / _tensor(other)

    def __matmul__(self, other: Any) -> Tensor:
        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return matmul(other, self)

    def sum(self) -> Tensor:
        return self.tensor().sum()

    def mean(self) -> Tensor:
        return self.tensor().mean()


class Module:
    """A part of a model. Parameters and modules that are assigned to attributes belong to it, under that name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Itself (named prefix) and all modules below, each name once; a shared module appears under each name."""
        yield from self._walk(prefix, ())

    def _walk(self, prefix: str, above: tuple[Module, ...]) -> Iterator[tuple[str, Module]]:
        if any(self is outer for outer in above):
            raise ValueError(
                f"{prefix!r} is a module that contains it: a module cannot hold its parent as an attribute (hold it in "
                "a list, or pass what is needed to forward)"
            )
        yield prefix, self
        for name, child in self.children():
            yield from child._walk(f"{prefix}.{name}" if prefix else name, (*above, self))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every parameter under every name it has, in order of definition; a tied one comes more than once."""
        for prefix, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Parameter):
                    yield f"{prefix}.{name}" if prefix else name, value

    def n_parameters(self) -> int:
        """Elements, tied parameters counted once."""
        unique = {id(p): p.size for _, p in self.named_parameters()}
        return sum(unique.values())


class ModuleList(Module):
    """Modules in a row, named by their index."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._modules = list(modules)
        for i, module in enumerate(self._modules):
            if not isinstance(module, Module):
                raise TypeError(f"ModuleList holds modules; number {i} is {type(module).__name__}: assign a Parameter "
                                "to an attribute")  # fmt: skip

    def children(self) -> Iterator[tuple[str, Module]]:
        return ((str(i), m) for i, m in enumerate(self._modules))

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> Module:
        return self._modules[index]


class Block(Module):
    """A module that is gathered, released and recomputed as one unit. Blocks cannot contain blocks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner = active_runner()
        unit = runner.enter_block(self)
        try:
            out = self.forward(*args, **kwargs)
        except BaseException:
            runner.exit_block(unit, failed=True)  # so that a forward which handles the error can go on
            raise
        runner.exit_block(unit)
        return out


# ---- operations ----


def _tensor(x: Any) -> Tensor:
    return x.tensor() if isinstance(x, Parameter) else x


def _apply(op: str, inputs: Iterable[Any], ints: tuple[int, ...] = (), floats: tuple[float, ...] = ()) -> Tensor:
    tensors = [None if x is None else _tensor(x) for x in inputs]
    return active_runner().core.apply(op, tensors, ints, floats)


def add(a: Any, b: Any) -> Tensor:
    """a + b; b may be smaller: its shape ends a's, or it has one element."""
    return _apply("add", _larger_first(a, b))


def mul(a: Any, b: Any) -> Tensor:
    """a * b elementwise, broadcast like `add`; a number scales."""
    for x, y in ((a, b), (b, a)):
        if isinstance(y, (int, float)):
            return _apply("scale", (x,), (), (float(y),))
    return _apply("mul", _larger_first(a, b))


def _larger_first(a: Any, b: Any) -> tuple[Any, Any]:
    for x in (a, b):
        if not hasattr(x, "shape"):
            raise TypeError(f"add and mul take Tensors and Parameters, mul also a number; got {type(x).__name__}")
    return (a, b) if math.prod(a.shape) >= math.prod(b.shape) else (b, a)


def linear(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """x (N, in), weight (out, in), bias (out) -> (N, out)."""
    return _apply("linear", (x, weight, bias) if bias is not None else (x, weight))


def matmul(a: Any, b: Any) -> Tensor:
    """a (N, K) times b (K, M) -> (N, M)."""
    return _apply("matmul", (a, b))


def embedding(index: Any, table: Any) -> Tensor:
    """index (N) int32, table (V, C) -> (N, C)."""
    return _apply("embedding", (index, table))


def layer_norm(x: Any, weight: Any, bias: Any = None, *, eps: float = 1e-5) -> Tensor:
    """Over the last dimension (Ba, Kiros and Hinton 2016)."""
    return _apply("layernorm", (x, weight, bias) if bias is not None else (x, weight), (), (eps,))


def gelu(x: Any) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016, the tanh form of GPT-2)."""
    return _apply("gelu", (x,))


def attention(
    qkv: Any,
    batch: Any,
    *,
    heads: int,
    kv_heads: int | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention inside each document of the batch.

    qkv (N, (heads + 2 kv_heads) D): query heads, then key heads, then value heads. batch: what the model's forward got
    (its cu_seqlens and max_seqlen say where documents begin). -> (N, heads D). scale: 1/sqrt(D) unless given.
    """
    groups = heads if kv_heads is None else kv_heads
    if heads < 1 or groups < 1:
        raise ValueError(f"attention needs at least one head; got heads={heads}, kv_heads={kv_heads}")
    dim = max(qkv.shape[1] // (heads + 2 * groups), 1)
    factor = 1.0 / math.sqrt(dim) if scale is None else scale
    ints = (heads, groups, int(causal), batch.max_seqlen)
    return _apply("attention", (qkv, batch.cu_seqlens), ints, (factor,))


def cross_entropy(logits: Any, target: Any) -> Tensor:
    """logits (N, V), target (N) int32, negative = not counted -> a counted loss {sum, labels} for engine.backward."""
    return _apply("cross_entropy", (logits, target))


def linear_cross_entropy(x: Any, weight: Any, target: Any, *, chunk: int = 0) -> Tensor:
    """cross_entropy(linear(x, weight), target) without ever holding all logits; chunk: rows at a time, 0 = chosen."""
    return _apply("linear_cross_entropy", (x, weight, target), (chunk,))


# ---- layers ----


class Linear(Module):
    """y = x W^T + b with W (out, in)."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool = True, init: Init | None = None) -> None:
        self.weight = Parameter(n_out, n_in, init=init or normal(0.02))
        self.bias = Parameter(n_out) if bias else None

    def forward(self, x: Any) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(Module):
    def __init__(self, n: int, channels: int, *, init: Init | None = None) -> None:
        self.weight = Parameter(n, channels, init=init or normal(0.02))

    def forward(self, index: Any) -> Tensor:
        return embedding(index, self.weight)


class LayerNorm(Module):
    def __init__(self, channels: int, *, bias: bool = True, eps: float = 1e-5) -> None:
        self.weight = Parameter(channels, init=ones)
        self.bias = Parameter(channels) if bias else None
        self.eps = eps

    def forward(self, x: Any) -> Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)


@dataclass(frozen=True)
class Inputs:
    """What a language model's forward gets: a batch of documents, as tensors.

    tokens (N) int32; positions (N) int32, counted from each document's start; targets (N) int32 or None; cu_seqlens
    (documents + 1) int32; max_seqlen bounds the longest document; rows (R) int32 or None: which rows need logits.
    """

    tokens: Any
    positions: Any
    cu_seqlens: Any
    max_seqlen: int
    targets: Any = None
    rows: Any = None
