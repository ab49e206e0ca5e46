"""`import zerox` beside `import numpy` and `import torch` (pip install torch): whole interpreters, interleaved, in ms.

Usage: python benchmarks/imports.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from _common import race, record

CODE = {
    "numpy": "import numpy",
    "zerox": "import numpy, zerox",  # the package alone: its modules come with the first use of a name
    "engine": "import zerox; zerox.Engine",
    "torch": "import torch",
}


def start(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=15)
    args = p.parse_args()
    seconds = race({name: lambda c=code: start(c) for name, code in CODE.items()}, rounds=args.rounds)
    ms = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    for case, side in (("import-zerox", "zerox"), ("import-zerox-Engine", "engine")):
        extra = [1e3 * (ours - numpy) for ours, numpy in zip(seconds[side], seconds["numpy"], strict=True)]
        record(
            "import",
            case=case,
            unit="ms",
            floor=round(ms["numpy"], 1),
            ours=round(ms[side], 1),
            peer=round(ms["torch"], 1),
            peer_name="import torch",
            ratio=round(ms["torch"] / ms[side], 2),
            above_numpy=round(statistics.median(extra), 1),
            spread=[round(min(extra), 1), round(max(extra), 1)],
            n=args.rounds,
        )


if __name__ == "__main__":
    main()
