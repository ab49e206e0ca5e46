"""Every Python block in README.md and docs/ runs, as its reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)):
            found.append((f"{page.relative_to(ROOT)}:{i}", code))
    return found


def test_pages_have_code() -> None:
    assert len(blocks()) >= 8


@pytest.mark.parametrize("name, code", blocks(), ids=[name for name, _ in blocks()])
def test_block_runs(name: str, code: str, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, f"{name}:\n{done.stdout}\n{done.stderr}"
