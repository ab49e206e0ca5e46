"""Starting ranks as processes of this machine: `zerox run -n 4 script.py`.

The launcher binds the meeting port itself and hands the socket to rank 0, so ports never clash; it draws the job's
token and name; a rank that fails ends the others after a grace time in which they can report; children die with the
launcher. Each rank has a session of its own, so that Ctrl-C reaches the launcher alone, which passes it on: every rank
gets each signal once, whoever sent it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
GRACE_S = 10.0  # after the first failure: the others notice within a deadline and print what they know


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def rank_environment(rank: int, ranks: int, port: int, job: str, token: str) -> dict[str, str]:
    """What torchrun would set, and the job's name and secret."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ZEROX_JOB": job,
        "ZEROX_TOKEN": token,
    }


def _start(command: Sequence[str], env: dict[str, str], fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=env, pass_fds=fds, preexec_fn=_die_with_parent, start_new_session=True)


def start_ranks(command: Sequence[str], ranks: int, *, port: int = 0) -> list[subprocess.Popen[bytes]]:
    """One process for each rank, running command. port: for the meeting; 0 = any free one."""
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: at least one is needed")
    job, token = f"zerox-{os.getpid()}-{secrets.token_hex(4)}", secrets.token_hex(16)
    processes: list[subprocess.Popen[bytes]] = []
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise RuntimeError(f"port {port} on 127.0.0.1 is in use: choose another, or none ({error})") from error
        listener.listen(ranks)
        port = listener.getsockname()[1]
        try:
            for rank in range(ranks):
                env = {**os.environ, **rank_environment(rank, ranks, port, job, token)}
                fds: tuple[int, ...] = ()
                if rank == 0:
                    env["ZEROX_LISTEN_FD"] = str(listener.fileno())
                    fds = (listener.fileno(),)
                processes.append(_start(command, env, fds))
        except BaseException:
            end_ranks(processes, grace=0)
            raise
    return processes


def end_ranks(processes: Sequence[subprocess.Popen[bytes]], *, grace: float = 2.0) -> None:
    """Ends those that still run: asks, waits, then kills."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ranks(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all; -> 0, or the exit code of the rank that failed first (128 + signal if it was killed)."""
    first_failure: int | None = None
    deadline = float("inf")
    while True:
        codes = [p.poll() for p in processes]
        if first_failure is None:
            failed = [(rank, code) for rank, code in enumerate(codes) if code]
            if failed:
                rank, code = failed[0]
                first_failure = code if code > 0 else 128 - code
                deadline = time.monotonic() + GRACE_S
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
                print(f"zerox: rank {rank} {how}; ending the others", file=sys.stderr, flush=True)
        if all(code is not None for code in codes):
            return first_failure or 0
        if time.monotonic() > deadline:
            end_ranks(processes)
            return first_failure or 0
        time.sleep(0.02)


def run(command: Sequence[str], ranks: int, *, port: int = 0) -> int:
    """Starts ranks, passes SIGINT and SIGTERM on to them, waits; leaves no process behind. The third SIGINT kills."""
    processes = start_ranks(command, ranks, port=port)
    interrupts = 0

    def pass_on(number: int, _: object) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)
        if interrupts > 2:
            raise KeyboardInterrupt

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, pass_on)
        return wait_ranks(processes)
    except KeyboardInterrupt:
        return 130
    finally:
        end_ranks(processes, grace=0.0 if interrupts > 2 else 2.0)
        for number, handler in before.items():
            signal.signal(number, handler)
