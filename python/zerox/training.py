"""The training loop behind `zerox train`: one progress line, a CSV log, evaluation, checkpoints, an orderly stop."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import numpy as np

from zerox.checkpoint import find
from zerox.data import Corpus, Loader, Source, default_corpus
from zerox.engine import Engine, StepResult
from zerox.memory import human

COLUMNS = ("step", "tokens", "seconds", "loss", "valid_loss", "lr", "norm", "tokens_per_s", "applied")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What the loop does. steps or minutes ends it, whichever comes first; eval_tokens: of the validation part."""

    out: Path
    steps: int
    minutes: float | None
    micro_batch: int
    seq_len: int
    accumulate: int
    mode: str
    seed: int
    eval_every: int
    eval_tokens: int
    save_every: int
    keep: int


def open_corpus(path: str | None) -> Source:
    """A file or folder of text, or the default corpus: the Python standard library's sources."""
    return Corpus(path) if path else default_corpus()


class Progress:
    """One line that is rewritten on a terminal, and one line every `every` seconds in a file or pipe."""

    def __init__(self, stream: TextIO, *, enabled: bool, every: float = 15.0) -> None:
        self._stream, self._enabled, self._every = stream, enabled, every
        self._terminal = stream.isatty()
        self._last = -every
        self._width = 0

    def show(self, text: str, *, final: bool = False) -> None:
        now = time.monotonic()
        if not self._enabled or (not final and now - self._last < (0.2 if self._terminal else self._every)):
            return
        self._last = now
        if self._terminal:
            end = "\n" if final else ""
            self._stream.write("\r" + text.ljust(self._width) + end)
            self._width = 0 if final else len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._enabled:
            self._stream.write(("\r" + " " * self._width + "\r" if self._width else "") + text + "\n")
            self._width = 0
            self._stream.flush()


class StopRequest:
    """SIGTERM or Ctrl-C on any rank ends the loop of every rank after the same step."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait for the end of the step
        self.asked = True


def process_bytes() -> int:
    """Proportional resident memory of this process (Pss: pages shared by n processes count 1/n), in bytes."""
    with open("/proc/self/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def train(engine: Engine, corpus: Source, options: TrainOptions, *, resume: bool) -> dict[str, Any]:
    """Runs the loop; -> a summary {step, tokens, loss, valid_loss, seconds, checkpoint}. Collective."""
    rank, world = engine.comm.rank, engine.comm.world
    training, validation = corpus.split()
    shape = {"seq_len": options.seq_len, "micro_batch": options.micro_batch, "mode": options.mode}
    place = {"rank": rank, "world": world}
    loader = Loader(training, seed=options.seed, **shape, **place)
    checker = Loader(validation, seed=options.seed, **shape, **place)
    if resume:
        position = engine.load(options.out)
        if position is not None:
            loader.load_state(position)
    log = _Log(options.out / "log.csv", enabled=rank == 0, keep_to=engine.steps if resume else 0)
    progress = Progress(sys.stderr, enabled=rank == 0)
    loop = _Loop(engine, loader, checker, options, log, progress)
    try:
        with StopRequest() as stop:
            return loop.run(stop)
    finally:
        log.close()


class _Log:
    """CSV with one row a step. A resumed run keeps the rows up to its checkpoint; later ones are computed again."""

    def __init__(self, path: Path, *, enabled: bool, keep_to: int) -> None:
        self._file: TextIO | None = None
        self.valid_loss = float("nan")  # of the last row, as are the tokens
        self.tokens: int | None = None
        if not enabled:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._rows(path, keep_to) if keep_to else []
        if rows:
            self.valid_loss = float(rows[-1][COLUMNS.index("valid_loss")])
            self.tokens = int(rows[-1][COLUMNS.index("tokens")])
        partial = path.with_name(path.name + ".partial")
        self._file = partial.open("w", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerows([COLUMNS, *rows])
        self._file.flush()
        os.replace(partial, path)

    @staticmethod
    def _rows(path: Path, keep_to: int) -> list[list[str]]:
        """Those of steps up to keep_to; a row that a kill cut short is none."""
        if not path.exists():
            return []
        with path.open(newline="") as file:
            rows = [row for row in csv.reader(file) if len(row) == len(COLUMNS) and row[0].isdigit()]
        return [row for row in rows if int(row[0]) <= keep_to]

    def row(self, values: dict[str, Any]) -> None:
        if self._file:
            self._writer.writerow([values.get(c, "") for c in COLUMNS])
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()


class _Loop:
    def __init__(
        self, engine: Engine, loader: Loader, checker: Loader, options: TrainOptions, log: _Log, progress: Progress
    ) -> None:
        self.engine, self.loader, self.checker, self.options = engine, loader, checker, options
        self.log, self.progress = log, progress
        self.valid_loss = log.valid_loss
        self.checkpoint: Path | None = None
        self.memory = ""
        self.tokens_a_step = loader.n_tokens * options.accumulate * engine.comm.world
        self.first = engine.steps
        # other ranks or sizes may have trained the steps before
        self.tokens_before = self.first * self.tokens_a_step if log.tokens is None else log.tokens

    def tokens(self, step: int) -> int:
        """Of all ranks, until after this step."""
        return self.tokens_before + (step - self.first) * self.tokens_a_step

    def run(self, stop: StopRequest) -> dict[str, Any]:
        engine, options = self.engine, self.options
        started, first = time.monotonic(), engine.steps
        result: StepResult | None = None
        if first == 0:
            self.evaluate()
        while not self._done(stop, started):
            began = time.monotonic()
            result = engine.train_step([next(self.loader) for _ in range(options.accumulate)])
            now = time.monotonic()
            if result.applied and options.eval_every and result.step % options.eval_every == 0:
                self.evaluate()
            self._report(result, now - began, now - started, first)
            if result.applied and options.save_every and result.step % options.save_every == 0:
                self.save()
        seconds = time.monotonic() - started
        if engine.steps < options.steps and result is not None:
            self.progress.say(f"step {engine.steps:,}: stopping; evaluating and saving")
        if result is None and first:
            self.evaluate()
            self.checkpoint = find(options.out)
        if result is not None:
            self.evaluate()
            self._report(result, seconds / max(engine.steps - first, 1), seconds, first, final=True)
            self.save()
        return {
            "step": engine.steps,
            "tokens": self.tokens(engine.steps),
            "loss": float(result) if result is not None else None,
            "valid_loss": self.valid_loss if math.isfinite(self.valid_loss) else None,
            "seconds": round(seconds, 3),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "skipped": engine.skipped,
        }

    def _done(self, stop: StopRequest, started: float) -> bool:
        """The same answer on every rank: any rank's wish to stop counts, and rank 0's clock."""
        options = self.options
        late = options.minutes is not None and time.monotonic() - started > 60 * options.minutes
        wish = np.array([int(stop.asked or (late and self.engine.comm.rank == 0))], np.int32)
        return self.engine.steps >= options.steps or bool(self.engine.comm.all_gather(wish).any())

    def evaluate(self) -> None:
        self.valid_loss = self.engine.evaluate(self.checker.once(max_tokens=self.options.eval_tokens))
        self.progress.say(f"step {self.engine.steps:,}: validation loss {self.valid_loss:.4f} nats a token")

    def save(self) -> None:
        path = self.options.out / f"step-{self.engine.steps:08d}"
        if self.checkpoint == path:
            return
        self.engine.save(path, data=self.loader.state(), keep=self.options.keep)
        self.checkpoint = path

    def _report(self, result: StepResult, step_s: float, total_s: float, first: int, *, final: bool = False) -> None:
        options, rate = self.options, self.tokens_a_step / step_s if step_s else 0.0
        if not self.memory or final:
            self.memory = f"{human(process_bytes())} (plan {human(self.engine.memory().total)})"
        done = result.step - first
        left = total_s / max(done, 1) * (options.steps - result.step)
        if options.minutes is not None:
            left = min(left, 60 * options.minutes - total_s)
        self.progress.show(
            f"step {result.step:,}/{options.steps:,}  loss {float(result):.4f}  valid {self.valid_loss:.4f}  "
            f"{rate:,.0f} tokens/s  left {_duration(left)}  memory {self.memory}"
            + (f"  skipped {result.skipped}" if result.skipped else ""),
            final=final,
        )
        if not final:
            self.log.row(
                {
                    "step": result.step,
                    "tokens": self.tokens(result.step),
                    "seconds": round(total_s, 3),
                    "loss": result.loss,
                    "valid_loss": self.valid_loss,
                    "lr": result.lr,
                    "norm": result.norm,
                    "tokens_per_s": round(rate, 1),
                    "applied": int(result.applied),
                }
            )


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Atomically, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(summary, indent=1) + "\n")
    os.replace(partial, path)
