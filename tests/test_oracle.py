"""The oracle: the same model, weights and batches in PyTorch give the same losses and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zerox as zx
from helpers import alone, on_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

CONFIG = zx.models.GPTConfig(vocab=96, context=64, layers=3, heads=4, channels=64)
LR, STEPS, WARMUP = 2e-3, 100, 10


class TorchGPT:
    """GPT-2's mathematics on torch tensors, parameters by zerox's names."""

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self.p = {n: torch.tensor(v, dtype=torch.float32, requires_grad=True) for n, v in values.items()}

    def loss(self, batch: zx.Batch) -> Any:
        f, p = torch.nn.functional, self.p
        cu = batch.cu_seqlens  # rows past the last document are padding
        tokens = torch.tensor(batch.tokens[: cu[-1]], dtype=torch.long)
        targets = torch.tensor(batch.targets[: cu[-1]], dtype=torch.long)
        document = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
        position = np.arange(cu[-1]) - cu[document]
        seen = torch.tensor((document[:, None] == document) & (position[:, None] >= position))
        x = p["wte.weight"][tokens] + p["wpe.weight"][torch.tensor(position)]
        for i in range(CONFIG.layers):
            w = {k.removeprefix(f"blocks.{i}."): v for k, v in p.items() if k.startswith(f"blocks.{i}.")}
            norm = lambda y, n, w=w: f.layer_norm(y, y.shape[-1:], w[f"{n}.weight"], w[f"{n}.bias"], 1e-5)  # noqa: E731
            linear = lambda y, n, w=w: f.linear(y, w[f"{n}.weight"], w[f"{n}.bias"])  # noqa: E731
            q, k, v = (
                linear(norm(x, "ln_1"), "qkv").view(-1, 3, CONFIG.heads, CONFIG.channels // CONFIG.heads).unbind(1)
            )
            scores = torch.einsum("nhd,mhd->hnm", q, k) / (CONFIG.channels // CONFIG.heads) ** 0.5
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            y = torch.einsum("hnm,mhd->nhd", weights, v).reshape(x.shape)
            x = x + linear(y, "proj")
            x = x + linear(f.gelu(linear(norm(x, "ln_2"), "fc"), approximate="tanh"), "out")
        x = f.layer_norm(x, x.shape[-1:], p["ln_f.weight"], p["ln_f.bias"], 1e-5)
        logits = x @ p["wte.weight"].T
        return f.cross_entropy(logits, targets, ignore_index=-100)


def text_batches() -> list[zx.Batch]:
    """Packed pieces of this file: real text, folded into 96 tokens."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8)
    documents = [(part % 96).astype(np.int32) for part in np.array_split(text, 37)]
    loader = zx.Loader(zx.data.Arrays(documents), seq_len=CONFIG.context, micro_batch=4, seed=3)
    return [next(loader) for _ in range(STEPS)]


def test_100_steps_equal_torch() -> None:
    """fp32 losses to 1e-4 relative, final weights per tensor to 1e-4 in relative L2 (key biases excepted)."""
    batches = text_batches()
    schedule = zx.Schedule(kind="cosine", warmup=WARMUP, total=STEPS)
    optimizer = zx.AdamW(lr=LR, eps=1e-5, weight_decay=0.1)
    with (
        alone(threads=2) as comm,
        zx.Engine(zx.models.GPT(CONFIG), optimizer, schedule=schedule, comm=comm, zero=3, clip=1.0) as engine,
    ):
        model = TorchGPT(engine.parameters())
        matrices = [v for v in model.p.values() if v.ndim >= 2]
        vectors = [v for v in model.p.values() if v.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-5)
        for step, batch in enumerate(batches):
            ours = engine.train_step(batch)
            for group in adam.param_groups:
                group["lr"] = LR * schedule.factor(step)
            adam.zero_grad()
            loss = model.loss(batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(list(model.p.values()), 1.0)
            adam.step()
            assert float(ours) == pytest.approx(loss.item(), rel=1e-4), step
            assert ours.norm == pytest.approx(float(norm), rel=1e-3), step
        c = CONFIG.channels
        for name, value in engine.parameters().items():
            expected = model.p[name].detach().numpy()
            if name.endswith("qkv.bias"):  # a key bias has no gradient in exact arithmetic: only noise moves it
                value, expected = (np.delete(x, np.s_[c : 2 * c]) for x in (value, expected))
            error = np.linalg.norm(value - expected) / max(np.linalg.norm(expected), 1e-12)
            assert error <= 1e-4, (name, error)


def test_two_ranks_equal_torch_on_the_joined_batch() -> None:
    """Ranks with unequal numbers of counted labels: one denominator for all (mean over labels, not of means)."""
    first, second = text_batches()[:2]
    masked = second.targets.copy()
    masked[10:] = -100
    second = zx.Batch(
        second.tokens, masked, second.cu_seqlens, second.max_seqlen, second.n_docs, int((masked >= 0).sum())
    )

    def rank(comm: zx.Comm) -> tuple[float, float, dict[str, np.ndarray]]:
        with zx.Engine(zx.models.GPT(CONFIG), zx.SGD(lr=0.1), comm=comm, zero=2, clip=None) as e:
            start = e.parameters()
            result = e.train_step((first, second)[comm.rank])
            after = e.parameters()
            return float(result), result.norm, {n: start[n] - after[n] for n in start}

    loss, norm, moved = on_ranks(2, rank)[0]
    with alone() as comm, zx.Engine(zx.models.GPT(CONFIG), comm=comm) as e:
        model = TorchGPT(e.parameters())
    total = model.loss(first) * first.n_counted + model.loss(second) * second.n_counted
    mean = total / (first.n_counted + second.n_counted)
    mean.backward()
    assert loss == pytest.approx(mean.item(), rel=1e-5)
    grads = {n: v.grad.numpy() for n, v in model.p.items()}
    assert norm == pytest.approx(np.sqrt(sum((g**2).sum() for g in grads.values())), rel=1e-5)
    for name, g in grads.items():
        assert np.allclose(moved[name], 0.1 * g, rtol=1e-3, atol=2e-7), name
