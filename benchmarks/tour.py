"""The main job as one result line: speed, loss after so much text, losses after reloading.

Usage: python benchmarks/tour.py [--minutes 4], or --result runs/tour/tour.json for a tour that was run before.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path

from _common import record
from zerox.tour import tour


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--minutes", type=float, default=4.0)
    p.add_argument("--result", type=Path)
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.result
        if path is None:
            tour(Path(folder), minutes=args.minutes)
            path = Path(folder) / "tour.json"
        result = json.loads(path.read_text())
        with (path.parent / "log.csv").open() as log:
            rows = [r for r in csv.DictReader(log) if int(r["tokens"]) >= 1_000_000]
    record(
        "tour",
        case="gpt-2M-fp32-zero3-w2",
        unit="nats a byte",
        ours=round(result["valid_loss"], 4),
        bytes_of_text=result["tokens"],
        valid_loss_at_1MB=round(float(rows[0]["valid_loss"]), 4) if rows else None,
        tokens_per_s=round(result["tokens"] / result["seconds"]),
        same_world_bitwise=result["same_world_bitwise"],
        other_worlds_close=result["other_worlds_close"],
        n=1,
    )


if __name__ == "__main__":
    main()
