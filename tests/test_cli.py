"""The command line as its user types it: train, resume, evaluate, generate; what it says when something is wrong."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from zerox.checkpoint import find

LIMIT_S = 60
SMALL = ["--layers", "2", "--heads", "2", "--channels", "32", "--context", "32", "--batch", "4", "--threads", "1",
         "--eval-tokens", "512", "--warmup", "5", "--timeout", "20"]  # fmt: skip


def zerox(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "zerox", *arguments], capture_output=True, text=True, timeout=LIMIT_S, env=env
    )
    assert done.returncode == expect, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * (i + 3))
    return folder


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "log.csv").open() as log:
        return list(csv.DictReader(log))


def test_resumed_run_equals_the_uninterrupted_one(text: Path, tmp_path: Path) -> None:
    """Two ranks at stage 3: 12 steps, resumed to 24, give the losses and the validation loss of 24 steps at once."""
    common = ["--data", str(text), "--ranks", "2", *SMALL]
    zerox("train", "--out", str(tmp_path / "whole"), "--steps", "24", *common)
    # the learning-rate curve is that of 24 steps in both runs
    first = zerox("train", "--out", str(tmp_path / "parts"), "--steps", "24", "--save-every", "12", *common)
    assert "validation loss" in first.stderr and "tokens/s" in first.stderr
    for step in ("step-00000024",):
        for file in (tmp_path / "parts" / step).iterdir():
            file.unlink()
        (tmp_path / "parts" / step).rmdir()
    zerox("train", "--out", str(tmp_path / "parts"), "--steps", "24", "--resume", *common)
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [r["step"] for r in whole] == [str(s) for s in range(1, 25)]
    assert [(r["step"], r["loss"]) for r in parts][-12:] == [(r["step"], r["loss"]) for r in whole][-12:]
    summaries = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("whole", "parts")]
    assert summaries[0]["valid_loss"] == summaries[1]["valid_loss"]
    assert float(whole[-1]["loss"]) < float(whole[0]["loss"]) - 0.5

    said = zerox("evaluate", str(tmp_path / "whole"), "--data", str(text), "--batch", "4", "--eval-tokens", "512")
    assert json.loads(said.stdout)["valid_loss"] == pytest.approx(summaries[0]["valid_loss"], rel=1e-6)
    continued = zerox("generate", str(tmp_path / "whole"), "--prompt", "the ", "--tokens", "5", "--temperature", "0")
    assert continued.stdout.startswith("the ") and len(continued.stdout) == len("the ") + 5 + 1


@pytest.mark.parametrize("arguments, words", [
    (["train", "--out", "{out}", "--data", "{out}/nowhere"], ["nowhere"]),
    (["train", "--out", "{out}", "--resume"], ["no checkpoint"]),
    (["train", "--out", "{out}", "--heads", "3"], ["3 heads", "208 channels"]),
    (["generate", "{out}/nowhere"], ["nowhere", "does not exist"]),
    (["run", "-n", "2", "{out}/no_such_script.py"], ["no_such_script.py"]),
])  # fmt: skip
def test_mistakes_are_named(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    code = 2 if arguments[0] == "run" else 1  # 2 is Python's own for a script that is not there
    done = zerox(*[a.format(out=tmp_path / "out") for a in arguments], expect=code)
    for word in words:
        assert word in done.stderr, done.stderr
    if arguments[0] != "run":
        assert "Traceback" not in done.stderr


def test_help_is_there() -> None:
    for command in ("train", "evaluate", "generate", "run", "tour"):
        assert "usage: zerox" in zerox(command, "--help").stdout


def test_sigterm_to_one_rank_stops_all_with_a_checkpoint(text: Path, tmp_path: Path) -> None:
    """D15: every rank stops after the same step, a complete checkpoint exists, all end within seconds."""
    out = tmp_path / "run"
    job = subprocess.Popen(
        [sys.executable, "-m", "zerox", "train", "--out", str(out), "--data", str(text), "--ranks", "3",
         "--steps", "100000", *SMALL],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (out / "log.csv").exists() or len(rows(out)) < 5:
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.05)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        assert len(children) == 3
        os.kill(int(children[1]), signal.SIGTERM)
        began = time.monotonic()
        assert job.wait(20) == 0
        assert time.monotonic() - began < 15
    finally:
        job.kill()
        job.wait()
    step = json.loads((out / "summary.json").read_text())["step"]
    assert find(out).name == f"step-{step:08d}" and step == int(rows(out)[-1]["step"])
