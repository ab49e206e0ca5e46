"""Ranks as threads of this process, for notebooks and tests: `zx.launch(fn, ranks=2)`.

Each rank has a Comm of its own over one Meeting, so what runs here runs unchanged on processes. Nobody is left behind:
an error on one rank ends the others' waits at once, and so do Ctrl-C and the deadline, which also interrupt Python code
that is not inside a wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from zerox import _C
from zerox.blas import find_blas
from zerox.distributed import default_threads

GRACE_S = 5.0  # after the first error or an interrupt: until ranks that do not end are interrupted, or left alone


class _Rank:
    """One rank: opens its Comm, runs the function, keeps the result or the error.

    `done` says whether it ended. Thread.is_alive() may not: a Ctrl-C during Thread.join() makes Python 3.11 take the
    thread for ended while it runs.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.rank: int = options["rank"]
        self.result: Any = None
        self.error: BaseException | None = None
        self.failed_at = float("inf")
        self.thread = threading.Thread(target=self._run, name=f"zerox rank {self.rank}", daemon=True)
        self._fn, self._args, self._options = fn, args, options
        self.done = threading.Event()
        self._comm: _C.Comm | None = None
        self._ended = False

    def _run(self) -> None:
        try:
            try:
                self._work()
            except BaseException as error:
                self.failed_at, self.error = time.monotonic(), error
            finally:
                self.done.set()
        except KeyboardInterrupt as late:  # it was interrupted while it ended
            if self.error is None and self.failed_at < float("inf"):
                self.error = late
            self.done.set()

    def _work(self) -> None:
        with _C.Comm(**self._options) as self._comm:
            try:
                if self._ended:
                    raise KeyboardInterrupt
                self.result = self._fn(self._comm, *self._args)
            except BaseException as error:
                self._abort(f"{type(error).__name__}: {error}")
                raise

    def interrupt(self, why: str) -> None:
        """Ends its waits for other ranks, and raises KeyboardInterrupt in its Python code."""
        self._ended = True
        if self.done.is_set() or self.thread.ident is None:
            return
        self._abort(why)
        thread_id = ctypes.c_ulong(self.thread.ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(KeyboardInterrupt))

    def _abort(self, why: str) -> None:
        if self._comm is not None:
            with contextlib.suppress(_C.StateError):  # it is closed: nobody waits for it
                self._comm.abort(why)

    def where(self) -> str:
        """Its stack, while it runs."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame else []
        own = next((i for i, f in enumerate(stack) if f.filename == __file__ and f.name == "_work"), -1)
        return "".join(traceback.format_list(stack[own + 1 :]))

    def trace(self) -> str:
        """How it failed, from the user's function on."""
        assert self.error is not None
        tb = self.error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
            tb = tb.tb_next
        return "".join(traceback.format_exception(type(self.error), self.error, tb))


def launch(
    fn: Callable[..., Any],
    ranks: int = 2,
    *args: Any,
    threads: int | None = None,
    timeout: float | None = None,
    deadline: float | None = None,
    **comm: Any,
) -> list[Any]:
    """Runs fn(comm, *args) on ranks that are threads of this process; their results, in rank order.

    Pass comm on to what shall run on all ranks together: `zx.Engine(model, comm=comm)`.
    threads: that each rank computes with; None: its share of the cores. timeout: seconds that a wait for another rank
    may take; None: ZEROX_TIMEOUT (300). deadline: seconds that the whole may take; None: no limit. Other options go to
    each rank's Comm (device="ref", ...).

    If a rank raises, the others are ended and the first error that is not merely the news of another rank's end is
    raised here, with the tracebacks of all failed ranks as notes. Ctrl-C ends all ranks. TimeoutError, saying where
    each rank was, when the deadline passes.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"launch(fn, ranks={ranks!r}): ranks is a number of threads, at least 1")
    meeting = _C.Meeting(ranks)
    options = {
        "world": ranks,
        "meeting": meeting,
        "timeout": timeout or 0.0,
        "threads": threads or default_threads(ranks),
        "blas": find_blas(),
        **comm,
    }
    workers = [_Rank(fn, args, {**options, "rank": rank}) for rank in range(ranks)]
    ends = time.monotonic() + deadline if deadline is not None else float("inf")
    try:
        for worker in workers:
            worker.thread.start()
        late = _wait(workers, ends)
        places = [f"--- rank {w.rank} was here:\n{w.where()}" for w in late]
    except BaseException as error:  # Ctrl-C
        _end(workers, f"launch was ended by {type(error).__name__}")
        raise
    if late and time.monotonic() >= ends:
        notes = [*places, *_notes([w for w in workers if w not in late])]
        _end(workers, f"the deadline of {deadline:g} s passed")
        names = ", ".join(str(w.rank) for w in late)
        text = f"rank{'s' if len(late) > 1 else ''} {names} of {ranks} did not end within {deadline:g} s"
        raise _with_notes(TimeoutError(text), notes)
    if late:
        _end(late, "another rank failed")
    failed = sorted((w for w in workers if w.error is not None), key=_importance)
    if failed:
        error = failed[0].error
        assert error is not None
        raise _with_notes(error, _notes(workers))
    meeting.close()
    return [w.result for w in workers]


def _wait(workers: list[_Rank], ends: float) -> list[_Rank]:
    """Until all ended, time is up, or one failed and the grace passed; -> those still running.

    Comes back often, so that Ctrl-C is seen.
    """
    failed_at = float("inf")
    while running := [w for w in workers if not w.done.is_set()]:
        now = time.monotonic()
        failed_at = min([failed_at, *(w.failed_at for w in workers if w.error is not None)])
        left = min(ends, failed_at + GRACE_S) - now
        if left <= 0:
            break
        running[0].done.wait(min(0.1, left))
    return running


def _end(workers: list[_Rank], why: str) -> None:
    for worker in workers:
        worker.interrupt(why)
    ends = time.monotonic() + GRACE_S
    for worker in workers:
        if worker.thread.ident is not None and worker.done.wait(max(ends - time.monotonic(), 0)):
            worker.thread.join(GRACE_S)


def _importance(worker: _Rank) -> tuple[bool, float]:
    """The news that another rank ended comes after errors of a rank's own."""
    return isinstance(worker.error, _C.PeerError), worker.failed_at


def _notes(workers: list[_Rank]) -> list[str]:
    return [f"--- rank {w.rank} failed:\n{w.trace()}" for w in workers if w.error is not None]


def _with_notes(error: BaseException, notes: list[str]) -> BaseException:
    error.__notes__ = [*getattr(error, "__notes__", []), *notes]  # add_note needs Python 3.11
    return error
