"""Rank 0 waits in a barrier that rank 1 does not reach; the test sends Ctrl-C to rank 0. argv: folder."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import zerox as zx

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
with zx.connect(threads=1, timeout=60.0) as comm:
    try:
        if rank == 0:
            (folder / "waiting.json").write_text(json.dumps({"pid": os.getpid()}))
            comm.barrier()
        else:
            time.sleep(2.0)
            comm.barrier()
        said = "nothing"
    except KeyboardInterrupt:
        said = "KeyboardInterrupt"
    except zx.ZeroxError as error:
        said = str(error)
    (folder / f"{rank}.json").write_text(json.dumps({"said": said, "at": time.time()}))
