"""The main job: train on two processes at stage 3, save, load on two, one and three processes, sample."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from zerox.training import write_summary

RANKS = 2
TRAIN = ["--preset", "2M", "--batch", "8", "--zero", "3", "--lr", "2e-3", "--warmup", "50", "--eval-every", "200"]
EVAL = ["--batch", "8"]


def _zerox(*arguments: str, capture: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "zerox", *arguments], check=False, text=True, stdout=subprocess.PIPE if capture else None
    )
    if done.returncode:
        raise RuntimeError(f"zerox {' '.join(arguments)} ended with exit code {done.returncode}")
    return done.stdout or ""


def tour(out: Path, *, minutes: float) -> int:
    """Runs all parts, says what each showed, writes OUT/tour.json; -> exit code, 1 when a promise does not hold."""
    began = time.monotonic()
    if out.exists():
        shutil.rmtree(out)
    print(f"1. A GPT learns Python's own sources: {RANKS} processes, stage 3, {minutes:g} minutes", flush=True)
    # the number of steps sets the learning-rate curve: about what this takes on two cores, at most
    steps = str(max(int(minutes * 250), 20))
    _zerox("train", "--out", str(out), "--ranks", str(RANKS), "--steps", steps, "--minutes", str(minutes), *TRAIN)
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
