"""Gradients of every operation and of a whole GPT against central differences, in double on the reference device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zerox as zx
from helpers import Scalars, alone, random_batch, tiny_gpt
from zerox import _C, nn

RTOL = 1e-6


def gradients(engine: zx.Engine, *inputs: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Loss (sum over counted labels, or the scalar) and the full gradients of one pass."""
    loss = engine(*inputs)
    value = float(loss.numpy().reshape(-1)[0])
    engine.backward(loss)
    grads = {r[0]: engine.core.read_grad(i) for i, r in enumerate(engine.records.records) if r[4]}
    engine.zero_grad()
    return value, grads


def check(model: nn.Module, *inputs: Any, h: float = 1e-5, picks: int = 6) -> None:
    """Directional derivatives and single elements of each parameter's gradient."""
    rng = np.random.default_rng(0)
    comm = alone(device="ref")
    with comm, zx.Engine(model, zx.SGD(), comm=comm, zero=0, reduce_at="step", precision="fp64") as engine:
        values = {
            n: rng.standard_normal(v.shape) * 0.5 + (1.0 if v.ndim == 1 else 0.0)
            for n, v in engine.parameters().items()
        }
        engine.load_parameters(values)
        _, grads = gradients(engine, *inputs)

        def loss_at(name: str, delta: np.ndarray) -> float:
            engine.load_parameters({**values, name: values[name] + delta})
            return gradients(engine, *inputs)[0]

        for name, grad in grads.items():
            assert grad.shape == values[name].shape and grad.dtype == np.float64
            directions = [rng.standard_normal(grad.shape) for _ in range(2)]
            for _ in range(min(picks, grad.size)):
                one = np.zeros(grad.size)
                one[rng.integers(grad.size)] = 1.0
                directions.append(one.reshape(grad.shape))
            for d in directions:
                numeric = (loss_at(name, h * d) - loss_at(name, -h * d)) / (2 * h)
                analytic = float((grad * d).sum())
                scale = np.linalg.norm(grad) * np.linalg.norm(d)
                assert abs(numeric - analytic) <= RTOL * max(scale, abs(analytic)) + 1e-9, (name, numeric, analytic)


def rand(*shape: int) -> nn.Parameter:
    return nn.Parameter(*shape, init=nn.normal(1.0))


def weighted(t: Any, w: np.ndarray) -> Any:
    """A scalar that depends on every element differently."""
    return (t * w_input(w)).sum()


def w_input(w: np.ndarray) -> Any:
    return nn.active_runner().core.input("weights", w)


def W(shape: tuple[int, ...]) -> np.ndarray:
    """The same weights in every forward."""
    return np.random.default_rng(7).standard_normal(shape)


def handed_on(m: Any) -> Any:
    """u + v hands its gradient to both; u's other use adds to its share and must leave v's alone."""
    u, v = nn.gelu(m.a), nn.gelu(m.b)
    other = weighted(u, W((3, 4)) + 1.0)
    return other + weighted(u + v, W((3, 4)))


OPERATIONS: dict[str, Callable[[], nn.Module]] = {
    "add": lambda: Scalars(lambda m: weighted(m.a + m.b, W((3, 4))), a=rand(3, 4), b=rand(3, 4)),
    "add, row": lambda: Scalars(lambda m: weighted(m.a + m.b, W((3, 4))), a=rand(3, 4), b=rand(4)),
    "add, one": lambda: Scalars(lambda m: weighted(m.a + m.b, W((3, 4))), a=rand(3, 4), b=rand(1)),
    "mul": lambda: Scalars(lambda m: weighted(m.a * m.b, W((3, 4))), a=rand(3, 4), b=rand(3, 4)),
    "mul, row": lambda: Scalars(lambda m: weighted(m.a * m.b, W((3, 4))), a=rand(3, 4), b=rand(4)),
    "mul, one": lambda: Scalars(lambda m: weighted(m.a * m.b, W((3, 4))), a=rand(3, 4), b=rand(1)),
    "square": lambda: Scalars(lambda m: weighted(m.a * m.a, W((5,))), a=rand(5)),
    "scale": lambda: Scalars(lambda m: weighted(m.a * -2.5, W((5,))), a=rand(5)),
    "mean": lambda: Scalars(lambda m: (m.a * m.a).mean(), a=rand(3, 5)),
    "reuse": lambda: Scalars(lambda m: weighted((m.a * m.b) * m.b + m.a, W((2, 3))), a=rand(2, 3), b=rand(2, 3)),
    "a gradient handed on to two": lambda: Scalars(handed_on, a=rand(3, 4), b=rand(3, 4)),
    "matmul": lambda: Scalars(lambda m: weighted(nn.matmul(m.a, m.b), W((3, 2))), a=rand(3, 4), b=rand(4, 2)),
    "linear": lambda: Scalars(
        lambda m: weighted(nn.linear(nn.linear(m.x, m.v), m.w, m.b), W((5, 3))),
        x=rand(5, 4), v=rand(2, 4), w=rand(3, 2), b=rand(3),
    ),
    "linear of an activation weight": lambda: Scalars(
        lambda m: weighted(nn.linear(m.x, m.w * m.w), W((5, 3))), x=rand(5, 4), w=rand(3, 4)
    ),
    "gelu": lambda: Scalars(lambda m: weighted(nn.gelu(m.a), W((4, 3))), a=rand(4, 3)),
    "layernorm": lambda: Scalars(
        lambda m: weighted(nn.layer_norm(m.x, m.g, m.b), W((5, 6))), x=rand(5, 6), g=rand(6), b=rand(6)
    ),
    "layernorm without bias": lambda: Scalars(
        lambda m: weighted(nn.layer_norm(m.x * 1.0, m.g), W((5, 6))), x=rand(5, 6), g=rand(6)
    ),
    "embedding": lambda: Scalars(
        lambda m: weighted(nn.embedding(index([2, 0, 2, 2, 4]), m.t), W((5, 3))), t=rand(5, 3)
    ),
    "rows of an activation": lambda: Scalars(
        lambda m: weighted(nn.embedding(index([1, 1, 3]), nn.gelu(m.t)), W((3, 3))), t=rand(5, 3)
    ),
    "cross_entropy": lambda: Scalars(
        lambda m: nn.cross_entropy(m.x * 1.0, index([1, -100, 0, 4, 4])), x=rand(5, 5)
    ),
    "linear_cross_entropy": lambda: Scalars(
        lambda m: nn.linear_cross_entropy(m.x, m.w, index([1, -100, 0, 6, 6])), x=rand(5, 4), w=rand(7, 4)
    ),
    "linear_cross_entropy in chunks": lambda: Scalars(
        lambda m: nn.linear_cross_entropy(m.x * 1.0, m.w, index([1, -100, 0, 6, 6]), chunk=2),
        x=rand(5, 4), w=rand(7, 4),
    ),
}  # fmt: skip


def index(ids: list[int]) -> Any:
    return nn.active_runner().core.input("index", np.array(ids, np.int32))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name: str) -> None:
    check(OPERATIONS[name]())


def attention_model(rows: int, heads: int, kv_heads: int, dim: int, cu: list[int], causal: bool) -> nn.Module:
    def loss(m: Any) -> Any:
        batch = nn.Inputs(tokens=None, positions=None, cu_seqlens=index(cu), max_seqlen=rows)
        out = nn.attention(m.qkv * 1.0, batch, heads=heads, kv_heads=kv_heads, causal=causal)
        return weighted(out, W((rows, heads * dim)))

    return Scalars(loss, qkv=rand(rows, (heads + 2 * kv_heads) * dim))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (4, 2), (3, 1)])
def test_attention(causal: bool, heads: int, kv_heads: int) -> None:
    """Several documents, one of length 1, an empty one, and rows past the last one."""
    check(attention_model(11, heads, kv_heads, 3, [0, 4, 5, 5, 9], causal), picks=10)


@pytest.mark.parametrize("recompute", [False, True])
def test_gpt(recompute: bool) -> None:
    model = tiny_gpt(layers=2, vocab=13, context=6, channels=8)
    batch = random_batch(3, rows=2, length=6, vocab=13)
    comm = alone(device="ref")
    with (
        comm,
        zx.Engine(
            model, zx.SGD(), comm=comm, zero=0, reduce_at="step", precision="fp64", recompute=recompute
        ) as engine,
    ):
        rng = np.random.default_rng(5)
        values = {n: v + 0.3 * rng.standard_normal(v.shape) for n, v in engine.parameters().items()}
        engine.load_parameters(values)
        _, grads = gradients(engine, batch)
        assert grads["wte.weight"].any() and grads["blocks.1.qkv.bias"].any()
        for name, grad in grads.items():
            d = rng.standard_normal(grad.shape)
            up, down = ({**values, name: values[name] + s * 1e-5 * d} for s in (1, -1))
            engine.load_parameters(up)
            high = gradients(engine, batch)[0]
            engine.load_parameters(down)
            numeric = (high - gradients(engine, batch)[0]) / 2e-5
            scale = np.linalg.norm(grad) * np.linalg.norm(d)
            assert abs(numeric - float((grad * d).sum())) <= RTOL * scale + 1e-9, name


def test_every_builtin_operation_has_a_case() -> None:
    covered = {"add", "mul", "scale", "sum", "matmul", "linear", "gelu", "layernorm", "embedding", "cross_entropy"}
    covered |= {"linear_cross_entropy", "attention"}
    assert set(_C.ops()) == covered
