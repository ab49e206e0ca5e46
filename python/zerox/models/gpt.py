"""GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, tanh GELU, head tied to the embedding."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from zerox import nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a GPT. context: longest document, in tokens. hidden: width of the MLP, 4 x channels unless set."""

    vocab: int = 256
    context: int = 256
    layers: int = 4
    heads: int = 4
    channels: int = 256
    hidden: int = 0
    bias: bool = True
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab", "context", "heads", "channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig.{name} is {getattr(self, name)}; it must be at least 1")
        if self.layers < 0:
            raise ValueError(f"GPTConfig.layers is {self.layers}; it cannot be negative")
        if self.channels % self.heads:
            near = [h for h in range(1, self.channels + 1) if self.channels % h == 0]
            raise ValueError(
                f"GPTConfig: {self.channels} channels cannot be split over {self.heads} heads; "
                f"heads may be one of {near}"
            )
        if not self.hidden:
            object.__setattr__(self, "hidden", 4 * self.channels)

    def as_dict(self) -> dict[str, Any]:
        return {"type": "gpt", **asdict(self)}


_GPT2 = {
    "124M": {"layers": 12, "heads": 12, "channels": 768},
    "350M": {"layers": 24, "heads": 16, "channels": 1024},
    "774M": {"layers": 36, "heads": 20, "channels": 1280},
    "1.5B": {"layers": 48, "heads": 25, "channels": 1600},
}


def gpt2(size: str, **changes: Any) -> GPTConfig:
    """The published shapes: "124M", "350M", "774M", "1.5B"; vocabulary 50,257, context 1,024."""
    if size not in _GPT2:
        raise ValueError(f"no GPT-2 of size {size!r}; there are {', '.join(_GPT2)}")
    return replace(GPTConfig(vocab=50257, context=1024, **_GPT2[size]), **changes)


class GPTBlock(nn.Block):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        c, out_std = config.channels, config.init_std / math.sqrt(2 * max(config.layers, 1))
        self.heads = config.heads
        self.ln_1 = nn.LayerNorm(c, bias=config.bias)
        self.qkv = nn.Linear(c, 3 * c, bias=config.bias, init=nn.normal(config.init_std))
        self.proj = nn.Linear(c, c, bias=config.bias, init=nn.normal(out_std))
        self.ln_2 = nn.LayerNorm(c, bias=config.bias)
        self.fc = nn.Linear(c, config.hidden, bias=config.bias, init=nn.normal(config.init_std))
        self.out = nn.Linear(config.hidden, c, bias=config.bias, init=nn.normal(out_std))

    def forward(self, x: Any, batch: nn.Inputs) -> Any:
        x = x + self.proj(nn.attention(self.qkv(self.ln_1(x)), batch, heads=self.heads))
        return x + self.out(nn.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    """forward(batch): the counted loss where the batch has targets, else logits (rows, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        self.config = config
        self.wte = nn.Embedding(config.vocab, config.channels, init=nn.normal(config.init_std))
        self.wpe = nn.Embedding(config.context, config.channels, init=nn.normal(config.init_std))
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.channels, bias=config.bias)

    def forward(self, batch: nn.Inputs) -> Any:
        if batch.max_seqlen > self.config.context:
            raise ValueError(
                f"documents of up to {batch.max_seqlen} tokens do not fit this model's context of "
                f"{self.config.context}: cut them, or build the model with a larger context"
            )
        x = self.wte(batch.tokens) + self.wpe(batch.positions)
        for block in self.blocks:
            x = block(x, batch)
        x = self.ln_f(x)
        if batch.targets is not None:
            return nn.linear_cross_entropy(x, self.wte.weight, batch.targets)
        if batch.rows is not None:
            x = nn.embedding(batch.rows, x)
        return nn.linear(x, self.wte.weight)
