"""Writes benchmarks/REPORT.md: the newest line of each case under benchmarks/results. python benchmarks/_report.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def newest(path: Path) -> list[dict[str, Any]]:
    """The last line of each case and peer, in order of first appearance."""
    lines: dict[tuple[str, str | None], dict[str, Any]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        lines[line["case"], line.get("peer_name")] = line
    return list(lines.values())


def cell(value: Any) -> str:
    return "-" if value is None else str(value)


def table(lines: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| case | unit | floor | ours | peer | ratio | spread | n | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        spread = line.get("spread")
        between = f"{spread[0]}-{spread[1]}" if isinstance(spread, list) else cell(spread)
        keys = ("case", "unit", "floor", "ours", "peer", "peer_name", "ratio")
        cells = [cell(line.get(k)) for k in keys] + [between, cell(line.get("n")), cell(line.get("commit"))]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    out = [
        "# Measured",
        "",
        "Ratios are peer / ours from one interleaved run (above 1: zerox is faster); spread: least and largest round.",
        "Made by `python benchmarks/_report.py` from the lines under `results/`.",
        "",
    ]
    for folder in sorted(p for p in (HERE / "results").iterdir() if p.is_dir()):
        for path in sorted(folder.glob("*.jsonl")):
            lines = newest(path)
            devices = sorted({str(line.get("device", "")) for line in lines})
            out += [
                f"## {folder.name}: {path.stem}",
                "",
                f"{'; '.join(devices)}.",
                "",
            ]
            out += [*table(lines), ""]
    (HERE / "REPORT.md").write_text("\n".join(out))


if __name__ == "__main__":
    main()
