"""One rank of a job in which rank 1 comes to harm. argv: folder, phase (forward, gather, save, step), kill or stop.

Each other rank writes folder/<rank>.json with its error; the victim writes folder/harm.json with the time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import zerox as zx
from helpers import random_batch, tiny_gpt

folder, phase, harm = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rank = int(os.environ["RANK"])


def suffer(*_: Any) -> None:
    (folder / "harm.json").write_text(json.dumps({"at": time.time(), "pid": os.getpid()}))
    os.kill(os.getpid(), signal.SIGKILL if harm == "kill" else signal.SIGSTOP)


with zx.connect(threads=1, timeout=3.0) as comm:
    model = tiny_gpt()
    engine = zx.Engine(model, comm=comm, zero=3)
    engine.train_step(random_batch(rank))
    engine.save(folder / "good")
    if rank == 1 and phase == "forward":
        model.blocks[1].fc.forward = suffer
    elif rank == 1 and phase == "gather":
        engine._runner.enter_block = suffer
    elif rank == 1 and phase == "save":
        import zerox.checkpoint.saving

        zerox.checkpoint.saving.write_safetensors = suffer
    try:
        for s in range(3):
            if rank == 1 and phase == "step" and s == 1:
                suffer()
            engine.train_step(random_batch(s))
            engine.save(folder / "next")
        said = {"error": "", "text": "no error at all"}
    except Exception as error:
        said = {"error": type(error).__name__, "text": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps({**said, "at": time.time()}))
    engine.close()
