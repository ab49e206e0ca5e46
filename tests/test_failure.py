"""Promise 3: every wait ends. A rank that dies or stops is named by every other rank within seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zerox as zx
from helpers import alone, on_ranks, tiny_gpt
from zerox.checkpoint import find
from zerox.launcher import end_ranks, rank_environment, start_ranks

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 40.0


def start(script: str, ranks: int, *arguments: str) -> list[subprocess.Popen[bytes]]:
    return start_ranks([sys.executable, str(SCRIPTS / script), *arguments], ranks)


def wait_for(path: Path, processes: list[subprocess.Popen[bytes]], limit: float = LIMIT_S) -> dict[str, Any]:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        try:
            return json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(0.02)
    raise AssertionError(f"{path.name} was not written within {limit} s; exit codes {[p.poll() for p in processes]}")


@pytest.mark.parametrize("harm", ["kill", "stop"])
@pytest.mark.parametrize("phase", ["forward", "gather", "save", "step"])
def test_a_lost_rank_is_named(phase: str, harm: str, tmp_path: Path) -> None:
    """L1: with a deadline of 3 s every survivor raises within 5 s and names rank 1; the checkpoint stays loadable."""
    processes = start("victim.py", 3, str(tmp_path), phase, harm)
    try:
        harmed = wait_for(tmp_path / "harm.json", processes)["at"]
        for rank in (0, 2):
            said = wait_for(tmp_path / f"{rank}.json", processes)
            assert "rank 1" in said["text"], said
            assert said["at"] - harmed < 5.0, said
    finally:
        end_ranks(processes, grace=1.0)
    assert not [p for p in tmp_path.iterdir() if ".partial-" in p.name and phase != "save"]
    newest = find(tmp_path)
    with alone() as comm, zx.Engine(tiny_gpt(), comm=comm, init=False) as e:
        e.load(newest)
        assert e.steps >= 1


def test_ctrl_c_inside_a_collective(tmp_path: Path) -> None:
    """KeyboardInterrupt within a second; the other rank is told."""
    processes = start("waiter.py", 2, str(tmp_path))
    try:
        pid = wait_for(tmp_path / "waiting.json", processes)["pid"]
        time.sleep(0.3)
        sent = time.time()
        os.kill(pid, signal.SIGINT)
        said = wait_for(tmp_path / "0.json", processes)
        assert said["said"] == "KeyboardInterrupt" and said["at"] - sent < 1.0
        assert "rank 0" in wait_for(tmp_path / "1.json", processes)["said"]
    finally:
        end_ranks(processes, grace=1.0)


def test_ranks_that_disagree_are_both_told() -> None:
    """Both calls stand in both errors."""

    def rank(comm: zx.Comm) -> str:
        import numpy as np

        with pytest.raises(zx.PeerError) as caught:
            if comm.rank == 0:
                comm.all_reduce(np.zeros(7, np.float32))
            else:
                comm.all_gather(np.zeros(5, np.float32))
        return str(caught.value)

    for text in on_ranks(2, rank, timeout=3.0):
        assert "all_reduce" in text and "all_gather" in text, text


def test_launcher_ends_the_others_and_leaves_nothing(tmp_path: Path) -> None:
    """A rank that fails: its exit code is the job's, the others are ended, no process stays."""
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys, time, pathlib\n"
        "rank = int(os.environ['RANK'])\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{rank}}.pid').write_text(str(os.getpid()))\n"
        "time.sleep(1)\n"
        "sys.exit(7) if rank == 1 else time.sleep(100)\n"
    )
    command = [sys.executable, "-c", "import sys; from zerox import launcher; launcher.GRACE_S = 0.5; "
               f"sys.exit(launcher.run([sys.executable, {str(script)!r}], 3))"]  # fmt: skip
    done = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True)
    assert "rank 1 failed with exit code 7" in done.stderr
    assert done.returncode == 7
    for rank in range(3):
        pid = int((tmp_path / f"{rank}.pid").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_two_jobs_at_once_do_not_meet(tmp_path: Path) -> None:
    """L3: each job finds its own ranks; a busy port that was asked for is an error that names it."""
    code = (
        "import zerox as zx, numpy as np, sys\n"
        "with zx.connect(threads=1, timeout=20.0) as c:\n"
        "    sys.stdout.write(f'{c.all_reduce(np.array([int(sys.argv[1])], np.int64))[0]}\\n')\n"
    )
    script = tmp_path / "sum.py"
    script.write_text(code)
    jobs = [
        subprocess.Popen([sys.executable, "-m", "zerox", "run", "-n", "2", str(script), value], stdout=subprocess.PIPE)
        for value in ("10", "1000")
    ]
    outputs = [job.communicate(timeout=LIMIT_S)[0].split() for job in jobs]
    assert outputs == [[b"20", b"20"], [b"2000", b"2000"]]

    import socket

    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(RuntimeError, match=str(port)):
            start_ranks([sys.executable, "-c", ""], 2, port=port)
        env = {**os.environ, **rank_environment(0, 2, port, "job", "secret")}
        began = time.monotonic()
        run = subprocess.run(
            [sys.executable, "-c", "import zerox; zerox.connect(timeout=10)"],
            env=env, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert run.returncode != 0 and str(port) in run.stderr and time.monotonic() - began < 8
