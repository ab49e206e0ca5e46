"""zerox train --plot: the loss curve as an image where matplotlib is there, a clear word where it is not."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
from zerox.plotting import plot_losses, read_log, require_matplotlib, smoothed
from zerox.training import COLUMNS

TINY = ["--layers", "1", "--heads", "2", "--channels", "16", "--context", "16", "--seq", "16", "--batch", "2",
        "--eval-tokens", "64", "--eval-every", "4", "--steps", "8", "--threads", "1"]  # fmt: skip


def log_file(folder: Path, rows: list[dict[str, object]]) -> Path:
    lines = [",".join(COLUMNS), *(",".join(str(row.get(c, "")) for c in COLUMNS) for row in rows)]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    return folder / "log.csv"


def test_log_is_read_as_it_was_measured(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 5 - s, "valid_loss": 4.5 if s < 3 else 3.5} for s in range(1, 5)]
    rows.append({"step": 5, "loss": math.nan, "valid_loss": math.nan})
    steps, losses, measured = read_log(log_file(tmp_path, rows))
    assert steps == [1, 2, 3, 4, 5] and losses[:4] == [4, 3, 2, 1] and math.isnan(losses[4])
    assert measured == [(1, 4.5), (3, 3.5)]


def test_smoothing() -> None:
    assert smoothed([], 0.9) == []
    assert smoothed([1.0, 2.0, 3.0], 0.0) == [1.0, 2.0, 3.0]
    assert smoothed([2.0] * 5, 0.9) == pytest.approx([2.0] * 5)
    assert smoothed([1.0, 3.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 3) / 0.75])
    first, second, third = smoothed([math.nan, 4.0, math.inf], 0.5)
    assert math.isnan(first) and second == third == 4.0


def train(out: Path, *, path: str = "") -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path.insert(0, {path!r}); from zerox.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "train", "--plot", "--out", str(out), "--data", __file__, *TINY]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_without_matplotlib_it_says_what_to_install_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    with pytest.raises(RuntimeError, match=r"pip install zerox\[plot\]"):
        require_matplotlib()
    if found("matplotlib") is None:
        done = train(tmp_path / "run")
        assert done.returncode == 1 and "pip install zerox[plot]" in done.stderr
        assert not (tmp_path / "run").exists()


def test_an_image_of_a_training(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = train(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("n", [0, 1, 2, 300])
def test_short_and_long_logs_are_drawn(n: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = log_file(tmp_path, [{"step": s, "loss": 3.0, "valid_loss": "nan"} for s in range(n)])
    assert plot_losses(log, tmp_path / "loss.png").stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.csv", "loss.png"]
