"""Case L6: zerox doctor works anywhere, lists what is absent with its reason, and tells broken from merely absent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zerox
from zerox.doctor import cgroup_cores, cgroup_memory, nvcc_path

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def doctor(*arguments: str, without: tuple[str, ...] = (), **env: str) -> tuple[int, str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in (*LAUNCHER, *without) and not k.startswith("ZEROX_")}
    done = subprocess.run(
        [sys.executable, "-m", "zerox", "doctor", *arguments],
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout, done.stderr


def findings(*, without: tuple[str, ...] = (), **env: str) -> tuple[int, dict[str, Any]]:
    code, said, error = doctor("--json", without=without, **env)
    report = json.loads(said)
    assert report["works"] == (code == 0) and report["zerox"] == zerox.__version__, error
    return code, {f["name"]: f for f in report["findings"]}


def test_every_part_is_listed_and_training_works() -> None:
    code, found = findings(without=("CUDA_HOME", "CUDA_PATH"))
    assert code == 0
    names = ["Python", "core", "NumPy", "BLAS", "cores", "memory", "launcher", "settings", "CUDA", "NCCL", "extras",
             "training"]  # fmt: skip
    assert list(found) == names
    assert all(f["status"] in ("ok", "absent") for f in found.values())
    assert "instruction set" in found["core"]["text"]
    assert "GFLOP/s" in found["BLAS"]["text"] and "blas" in found["BLAS"]["text"].lower()
    assert f"{len(os.sched_getaffinity(0))} usable" in found["cores"]["text"]
    assert "only rank" in found["launcher"]["text"]
    assert "loss" in found["training"]["text"]
    for package in ("torch", "matplotlib", "safetensors", "tqdm"):
        assert package in found["extras"]["text"]


def test_as_a_table() -> None:
    code, said, error = doctor()
    assert code == 0 and error == ""
    assert said.startswith(f"zerox {zerox.__version__} on ")
    assert said.endswith("\nTraining on CPUs works.\n")
    assert "  ok  Python " in said


@pytest.mark.parametrize("home", [None, "", ":/usr/local/cuda", "no nvcc here", "not there", "a folder called nvcc"])
def test_l6_no_cuda_home_breaks_anything(home: str | None, tmp_path: Path) -> None:
    """Case L6: CUDA_HOME unset, empty, ":/usr/local/cuda", or a directory without nvcc."""
    if home == "no nvcc here":
        (tmp_path / "bin").mkdir()
        home = str(tmp_path)
    elif home == "a folder called nvcc":
        (tmp_path / "bin" / "nvcc").mkdir(parents=True)
        home = str(tmp_path)
    elif home == "not there":
        home = str(tmp_path / "nowhere")
    code, found = findings(without=("CUDA_HOME", "CUDA_PATH"), **({} if home is None else {"CUDA_HOME": home}))
    assert code == 0
    for name in ("CUDA", "NCCL"):
        assert found[name]["status"] == "ok" or found[name]["text"].startswith("absent: ")
        assert len(found[name]["text"]) > len("absent: ") + 5, "the reason"


def test_where_nvcc_is_looked_for(tmp_path: Path) -> None:
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    toolkit = str(tmp_path / "toolkit")
    for env in (
        {"CUDA_HOME": toolkit},
        {"CUDA_HOME": f":{toolkit}"},
        {"CUDA_HOME": f"/nowhere:{toolkit}:"},
        {"CUDA_PATH": toolkit},
        {"PATH": str(nvcc.parent)},
    ):
        assert nvcc_path({"PATH": "", **env}) == str(nvcc), env
    nvcc.chmod(0o644)
    assert nvcc_path({"PATH": "", "CUDA_HOME": toolkit}) != str(nvcc)


def test_settings_and_launcher_are_listed() -> None:
    token = "a-secret-of-the-job"
    code, found = findings(ZEROX_TOKEN=token, ZEROX_THREADS="1", ZEROX_TIMEOT="3", RANK="0", WORLD_SIZE="1")
    assert code == 0
    assert "ZEROX_THREADS=1" in found["settings"]["text"]
    assert "ZEROX_TOKEN=(set)" in found["settings"]["text"] and token not in json.dumps(found)
    assert "ZEROX_TIMEOT" in found["settings"]["advice"] and "ZEROX_TIMEOUT" in found["settings"]["advice"]
    assert "RANK=0" in found["launcher"]["text"] and "WORLD_SIZE=1" in found["launcher"]["text"]


@pytest.mark.parametrize(
    "env, name, text",
    [
        ({"ZEROX_BLAS": "/nowhere/libblas.so"}, "BLAS", "/nowhere/libblas.so"),
        ({"ZEROX_BLAS": __file__}, "BLAS", "test_doctor.py"),
        ({"RANK": "1"}, "launcher", "WORLD_SIZE"),
        ({"RANK": "7", "WORLD_SIZE": "2"}, "launcher", "'7'"),
        ({"ZEROX_THREADS": "many"}, "BLAS", "'many'"),
    ],
)
def test_what_is_broken_is_marked_with_advice(env: dict[str, str], name: str, text: str) -> None:
    code, found = findings(**env)
    assert code == 1
    assert found[name]["status"] == "bad" and text in found[name]["text"] and found[name]["advice"]
    assert found["Python"]["status"] == found["core"]["status"] == "ok", "the others go on"


def test_a_missing_core_is_reported_not_raised(tmp_path: Path) -> None:
    """An installation whose extension is gone: the report comes, says so, and what to do."""
    package = Path(zerox.__file__).parent
    shutil.copytree(package, tmp_path / "zerox", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code, said, error = doctor(PYTHONPATH=str(tmp_path))
    assert code == 1 and "Traceback" not in error
    assert "!!  core " in said and "-> build it: pip install ." in said
    assert "Training does not work yet" in said


OLD = "5:memory:/x\n4:cpu,cpuacct:/x"  # control groups of version 1


def test_limits_of_control_groups(tmp_path: Path) -> None:
    proc = tmp_path / "self"
    for version, line, files, memory, cores in (
        (2, "0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "5000", "a/cpu.max": "150000 100000",
                        "a/b/cpu.max": "max 100000"}, 5000, 1.5),
        (2, "0::/", {"memory.max": "7000", "cpu.max": "400000 100000"}, 7000, 4.0),
        (2, "0::/not/seen/from/here", {"memory.max": "7000"}, 7000, None),
        (2, "0::/", {"memory.max": "max", "cpu.max": "max 100000"}, None, None),
        (1, OLD, {"memory/x/memory.limit_in_bytes": "900", "cpu/x/cpu.cfs_quota_us": "50000",
                  "cpu/x/cpu.cfs_period_us": "100000"}, 900, 0.5),
        (1, OLD, {"memory/x/memory.limit_in_bytes": str((1 << 63) - 4096), "cpu/x/cpu.cfs_quota_us": "-1",
                  "cpu/x/cpu.cfs_period_us": "100000"}, None, None),
    ):  # fmt: skip
        root = tmp_path / f"cgroup-{len(list(tmp_path.iterdir()))}"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text + "\n")
        proc.write_text(line + "\n")
        assert (cgroup_memory(root, proc), cgroup_cores(root, proc)) == (memory, cores), (version, line, files)
    assert cgroup_memory(tmp_path, tmp_path / "nowhere") is None
