"""Models that ship with zerox."""

from zerox.models.gpt import GPT, GPTConfig, gpt2

__all__ = ["GPT", "GPTConfig", "gpt2"]
