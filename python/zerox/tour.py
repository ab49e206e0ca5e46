"""The main job: train on two processes at stage 3, save, load on two, one and three processes, sample."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from zerox.training import write_summary

RANKS = 2
TRAIN = ["--preset", "2M", "--batch", "8", "--zero", "3", "--lr", "2e-3", "--warmup", "50"]
EVAL = ["--batch", "8"]


def _zerox(*arguments: str, capture: bool = False, quiet: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "zerox", *arguments],
        check=False,
        text=True,
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.PIPE if quiet else None,
    )
    if done.returncode:
        sys.stderr.write(done.stderr or "")
        raise RuntimeError(f"zerox {' '.join(arguments)} ended with exit code {done.returncode}")
    return done.stdout or ""


def _steps_in(minutes: float, out: Path) -> int:
    """Steps that this machine takes in that time, from a short try: the learning-rate curve should end with it."""
    quick = ["--steps", "16", "--eval-every", "0", "--eval-tokens", "1024"]
    _zerox("train", "--out", str(out), "--ranks", str(RANKS), *quick, *TRAIN, quiet=True)
    with (out / "log.csv").open() as log:
        rows = list(csv.DictReader(log))
    rate = statistics.median(float(row["tokens_per_s"]) for row in rows[4:])
    tokens_a_step = int(rows[0]["tokens"]) / int(rows[0]["step"])
    return max(int(0.93 * 60 * minutes * rate / tokens_a_step), 20)  # the rest is for evaluations


def tour(out: Path, *, minutes: float) -> int:
    """Runs all parts, says what each showed, writes OUT/tour.json; -> exit code, 1 when a promise does not hold."""
    began = time.monotonic()
    if out.exists():
        shutil.rmtree(out)
    print(f"1. A GPT learns Python's own sources: {RANKS} processes, stage 3, {minutes:g} minutes", flush=True)
    steps = _steps_in(minutes, out / "speed")
    shutil.rmtree(out / "speed")
    limits = ["--steps", str(steps), "--minutes", str(1.2 * minutes), "--eval-every", str(-(-steps // 4))]
    _zerox("train", "--out", str(out), "--ranks", str(RANKS), *limits, *TRAIN)
    trained = json.loads((out / "summary.json").read_text())
    print(f"   {trained['tokens']:,} bytes of text, {trained['tokens'] / trained['seconds']:,.0f} a second; "
          f"validation loss {trained['valid_loss']:.4f} nats a byte", flush=True)  # fmt: skip

    print("2. The checkpoint is loaded on two, one and three processes", flush=True)
    losses = {}
    for ranks in (2, 1, 3):
        said = _zerox("evaluate", trained["checkpoint"], "--ranks", str(ranks), *EVAL, capture=True)
        losses[ranks] = json.loads(said.splitlines()[-1])["valid_loss"]
        off = abs(losses[ranks] - trained["valid_loss"]) / trained["valid_loss"]
        how = "the same bits" if losses[ranks] == trained["valid_loss"] else f"off by {off:.1e}"
        print(
            f"   {ranks} process{'es' if ranks > 1 else ''}: validation loss {losses[ranks]:.10f} ({how})", flush=True
        )

    print("3. A sample", flush=True)
    sample = _zerox("generate", trained["checkpoint"], "--prompt", "def ", "--tokens", "240", capture=True)
    print("\n".join("   | " + line for line in sample.splitlines()), flush=True)

    same = losses[2] == trained["valid_loss"]
    close = all(abs(loss - trained["valid_loss"]) <= 1e-6 * trained["valid_loss"] for loss in losses.values())
    seconds = time.monotonic() - began
    result = {**trained, "losses": losses, "same_world_bitwise": same, "other_worlds_close": close, "all_s": seconds}
    write_summary(out / "tour.json", result)
    print(f"Done in {seconds:.0f} s: {out / 'tour.json'}, {out / 'log.csv'}", flush=True)
    if not (same and close):
        print("The reloaded losses differ: this is a defect of zerox, please report it", file=sys.stderr)
    return 0 if same and close else 1
