"""`zerox train --plot`: the loss curve of a training log as an image. Needs matplotlib, an optional extra."""

from __future__ import annotations

import csv
import importlib.util
import math
import os
import secrets
from pathlib import Path


def require_matplotlib() -> None:
    """RuntimeError that says what to install where matplotlib is absent."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib: pip install zerox[plot], or train without --plot (log.csv stays)")


def smoothed(values: list[float], keep: float) -> list[float]:
    """Exponential moving average, unbiased at its start; not-finite values are left out of it."""
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(mean / weight if weight else math.nan)
    return out


def read_log(path: Path) -> tuple[list[int], list[float], list[tuple[int, float]]]:
    """Steps, training losses, and (step, validation loss) where it was measured anew, of a log.csv."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps, losses = [int(r["step"]) for r in rows], [float(r["loss"]) for r in rows]
    measured: list[tuple[int, float]] = []
    for row in rows:
        value = float(row["valid_loss"] or "nan")
        if math.isfinite(value) and (not measured or value != measured[-1][1]):
            measured.append((int(row["step"]), value))
    return steps, losses, measured


def plot_losses(log: Path, image: Path) -> Path:
    """Draws training and validation loss of log.csv into a PNG; -> image."""
    require_matplotlib()
    from matplotlib.figure import Figure

    steps, losses, measured = read_log(log)
    keep = 1 - 1 / max(len(steps) / 100, 1)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smoothed(losses, keep), color="tab:blue", label="training")
    if measured:
        axes.plot(*zip(*measured, strict=True), "o-", color="tab:orange", markersize=4, label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    partial = image.with_name(f"{image.name}.partial-{secrets.token_hex(4)}")
    try:
        figure.savefig(partial, dpi=150, format="png")
        os.replace(partial, image)
    finally:
        partial.unlink(missing_ok=True)
    return image
