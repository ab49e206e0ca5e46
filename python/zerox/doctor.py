"""`zerox doctor`: what this machine has and lacks, and what to do about it.

Every look is on its own: one that fails says so in its line and the others go on. Nothing here is needed to import
zerox, and the compiled core is imported only when its line is made, so the report comes even where the core is broken.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import zerox
from zerox.memory import human

OK, ABSENT, BAD = "ok", "absent", "bad"
_MARKS = {OK: "ok", ABSENT: "--", BAD: "!!"}
_SECRET = ("ZEROX_TOKEN",)
_PACKAGES = {
    "torch": "tests and races against PyTorch: pip install zerox[torch]",
    "matplotlib": "zerox train --plot: pip install zerox[plot]",
    "safetensors": "not needed: zerox writes and reads such files itself",
    "tqdm": "not needed: zerox has a progress line of its own",
}
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER_PREFIXES = ("OMPI_COMM_WORLD_", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class Finding:
    """One line of the report. status: "ok", "absent" (optional and not there), "bad" (training does not work)."""

    name: str
    status: str
    text: str
    advice: str = ""


def examine(env: Mapping[str, str] = os.environ) -> list[Finding]:
    """All findings, in the order of the report."""
    looks: list[tuple[str, Callable[[], Finding]]] = [
        ("Python", _python),
        ("core", _core),
        ("NumPy", _numpy),
        ("BLAS", _blas),
        ("cores", _cores),
        ("memory", _memory),
        ("launcher", lambda: _launcher(env)),
        ("settings", lambda: _settings(env)),
        ("CUDA", lambda: _cuda(env)),
        ("NCCL", _nccl),
        ("extras", _extras),
        ("training", _training),
    ]
    findings = []
    for name, look in looks:
        try:
            findings.append(look())
        except Exception as error:
            text = " ".join(str(error).split(" [zx_")[0].split())
            findings.append(Finding(name, BAD, f"{type(error).__name__}: {text}", _ADVICE.get(name, "")))
    return findings


_ADVICE = {
    "core": "build it: pip install . (needs a C compiler), or make install in a checkout",
    "NumPy": "pip install numpy",
    "BLAS": "pip install scipy-openblas32, or name a library that has cblas_sgemm with ZEROX_BLAS",
    "launcher": "start ranks with: zerox run -n 4 script.py",
    "settings": "unset what is wrong",
    "training": "the lines above that are marked !! come first; if there are none, please report this",
}


def report(*, as_json: bool = False) -> int:
    """Prints the report; -> exit code: 0 when training on CPUs works here, else 1."""
    findings = examine()
    works = all(f.status != BAD for f in findings)
    if as_json:
        print(json.dumps({"zerox": zerox.__version__, "works": works, "findings": [asdict(f) for f in findings]}))
        return 0 if works else 1
    print(f"zerox {zerox.__version__} on {platform.system()} {platform.release()} {platform.machine()}\n")
    width = max(len(f.name) for f in findings)
    for f in findings:
        first, *rest = f.text.splitlines() or [""]
        print(f"  {_MARKS[f.status]}  {f.name:<{width}}  {first}")
        for line in [*rest, *([f"-> {f.advice}"] if f.advice else [])]:
            print(f"      {'':<{width}}  {line}")
    print("\nTraining on CPUs works." if works else "\nTraining does not work yet: see the lines that are marked !!")
    return 0 if works else 1


# ---- what training needs


def _python() -> Finding:
    return Finding("Python", OK, f"{platform.python_version()} ({sys.executable})")


def _core() -> Finding:
    from zerox import _C

    return Finding("core", OK, f"{_C.__version__}, instruction set {_C.isa()} ({_C.__file__})")


def _numpy() -> Finding:
    import numpy

    return Finding("NumPy", OK, numpy.__version__)


def _blas() -> Finding:
    """Where it is, and the speed of a product through the core, on all threads."""
    import numpy as np

    from zerox import _C, nn
    from zerox.blas import find_blas
    from zerox.distributed import default_threads
    from zerox.engine import Engine

    class Product(nn.Module):
        def __init__(self) -> None:
            self.linear = nn.Linear(n, n, bias=False)

        def forward(self, x: _C.Tensor) -> _C.Tensor:
            return self.linear(x)

    n, path, threads = 768, find_blas(), default_threads(1)
    with _C.Comm(threads=threads, blas=path) as comm, Engine(Product(), comm=comm) as engine:
        rows = np.ones((n, n), np.float32)
        seconds = []
        for _ in range(6):
            began = time.perf_counter()
            engine.logits(rows)
            seconds.append(time.perf_counter() - began)
    speed = 2e-9 * n**3 / min(seconds)
    text = f"{speed:,.0f} GFLOP/s in products of {n} x {n} on {_count(threads, 'thread')}"
    return Finding("BLAS", OK, f"{text}\n{path}")


def _training() -> Finding:
    """Three steps of a small model at stage 3 on two ranks, which are threads here."""
    import numpy as np

    from zerox.engine import Engine
    from zerox.models import GPT, GPTConfig
    from zerox.optim import AdamW
    from zerox.rank_threads import launch

    def steps(comm: zerox.Comm) -> list[float]:
        ids = (np.arange(64).reshape(4, 16) * 7 + comm.rank) % 61
        shape = GPTConfig(vocab=61, context=16, layers=2, heads=2, channels=32)
        with Engine(GPT(shape), AdamW(lr=1e-2), comm=comm, zero=3) as engine:
            return [float(engine.train_step(ids, np.roll(ids, -1, axis=1))) for _ in range(3)]

    began = time.perf_counter()
    losses, other = launch(steps, 2, threads=1, timeout=20.0, deadline=60.0)
    seconds = time.perf_counter() - began
    if losses != other or not losses[-1] < losses[0]:
        return Finding("training", BAD, f"losses {losses} and {other}: they should fall and agree", _ADVICE["training"])
    text = f"3 steps on 2 ranks at stage 3: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {1000 * seconds:.0f} ms"
    return Finding("training", OK, text)


# ---- the machine


def _cores() -> Finding:
    usable = sorted(os.sched_getaffinity(0))
    text = f"{len(usable)} usable of {os.cpu_count()} (affinity {_ranges(usable)})"
    model = _after("model name", Path("/proc/cpuinfo"))
    if model:
        text = f"{text}, {model}"
    quota = cgroup_cores()
    if quota is not None and quota < len(usable):
        return Finding(
            "cores",
            OK,
            f"{text}; the control group allows the time of {quota:g}",
            f"set ZEROX_THREADS={max(int(quota), 1)}: more threads than that wait for each other",
        )
    return Finding("cores", OK, text)


def _memory() -> Finding:
    total, free = (_kib(name) for name in ("MemTotal", "MemAvailable"))
    text = f"{human(free)} free of {human(total)}"
    limit = cgroup_memory()
    if limit is not None and limit < total:
        text += f"; the control group allows {human(limit)}"
    shared = Path("/dev/shm")
    if shared.is_dir():
        text += f"; shared memory {human(shutil.disk_usage(shared).free)} free"
    return Finding("memory", OK, text)


def _kib(name: str) -> int:
    return int(_after(name, Path("/proc/meminfo")).split()[0]) * 1024


def _after(name: str, file: Path) -> str:
    """The value of the first line "name: value"."""
    found = re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", file.read_text(), re.MULTILINE)
    return found[1].strip() if found else ""


def _cgroup_files(name: str, controller: str, root: Path, proc: Path) -> Iterator[str]:
    """Contents of a file of this process's control groups, innermost first; version 2, then 1."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, inside = line.split(":", 2)
        if kinds and controller not in kinds.split(","):
            continue
        base = root / controller if kinds else root
        places = [base / inside.strip("/"), *(base / inside.strip("/")).parents]
        for place in places:
            with contextlib.suppress(OSError):
                yield (place / name).read_text().strip()
            if place == base:
                break


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the control groups allow; None = no limit."""
    limits = [
        int(text)
        for name in ("memory.max", "memory.limit_in_bytes")
        for text in _cgroup_files(name, "memory", root, proc)
        if text.isdigit() and int(text) < 1 << 60
    ]
    return min(limits, default=None)


def cgroup_cores(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of time that the control groups allow; None = no limit."""
    pairs = [text.split() for text in _cgroup_files("cpu.max", "cpu", root, proc)]
    quotas = list(_cgroup_files("cpu.cfs_quota_us", "cpu", root, proc))
    pairs += zip(quotas, _cgroup_files("cpu.cfs_period_us", "cpu", root, proc), strict=False)
    limits = [int(p[0]) / int(p[1]) for p in pairs if len(p) == 2 and p[0].isdigit() and int(p[1])]
    return min(limits, default=None)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("s" if n != 1 else "")


# ---- the environment


def _launcher(env: Mapping[str, str]) -> Finding:
    from zerox.distributed import place_from_environment

    variables = {k: v for k, v in env.items() if k in _LAUNCHERS or k.startswith(_LAUNCHER_PREFIXES)}
    place = place_from_environment(env)
    if not variables:
        return Finding("launcher", OK, "none: this process is the only rank")
    text = f"rank {place.rank} of {place.world}" if place.world > 1 else "a single rank"
    return Finding("launcher", OK, "\n".join([text, *_pairs(variables)]))


def _pairs(variables: Mapping[str, str]) -> list[str]:
    return [f"{k}={'(set)' if k in _SECRET else v}" for k, v in sorted(variables.items())]


def _settings(env: Mapping[str, str]) -> Finding:
    from zerox import _C

    known = {name: (default, text) for name, _, default, text in _C.env_table()}
    lines = [f"{pair}  ({known[pair.split('=')[0]][1]})" for pair in _pairs({k: env[k] for k in known if env.get(k)})]
    advice = []
    for name in sorted(env):
        if name.startswith("ZEROX_") and name not in known and name not in ("ZEROX_LISTEN_FD",):
            close = difflib.get_close_matches(name, known, n=1)
            advice.append(f"{name} is not read by zerox" + (f": did you mean {close[0]}?" if close else ""))
    return Finding("settings", OK, "\n".join(lines) or "all at their defaults", "; ".join(advice))


# ---- what is optional


def nvcc_path(env: Mapping[str, str] = os.environ) -> str | None:
    """The CUDA compiler: in CUDA_HOME or CUDA_PATH (lists, perhaps with empty entries), on PATH, in /usr/local/cuda."""
    homes = [h.strip() for v in ("CUDA_HOME", "CUDA_PATH") for h in env.get(v, "").split(os.pathsep) if h.strip()]
    places = [str(Path(home, "bin", "nvcc")) for home in homes]
    found = (shutil.which(place, path=env.get("PATH")) for place in (*places, "nvcc", "/usr/local/cuda/bin/nvcc"))
    return next(filter(None, found), None)


def _cuda(env: Mapping[str, str]) -> Finding:
    missing, there = [], []
    build = _cuda_build()
    missing.append(build) if build else there.append("this build has CUDA")
    driver = _cuda_driver()
    missing.append(driver) if driver else there.append("the driver works")
    nvcc = nvcc_path(env)
    if nvcc is None:
        home = env.get("CUDA_HOME")
        missing.append(
            "no nvcc (in CUDA_HOME, on PATH, in /usr/local/cuda)" + (f"; CUDA_HOME is {home!r}" if home else "")
        )
    else:
        there.append(f"nvcc {_nvcc_version(nvcc)} at {nvcc}".replace("  ", " "))
    if not build and not driver:
        return Finding("CUDA", OK, "; ".join(there))
    return Finding("CUDA", ABSENT, "absent: " + "; ".join(missing) + (f" (found: {'; '.join(there)})" if there else ""))


def _cuda_build() -> str:
    """Why the core cannot use a GPU; "" if it can."""
    from zerox import _C

    try:
        _C.Comm(device="cuda").close()
    except _C.UnsupportedError as error:
        return str(error).split(" [")[0].split(":")[0]
    except _C.ZeroxError:
        return ""  # it has a CUDA device, which could not be opened: the driver's line says why
    return ""


def _cuda_driver() -> str:
    """Why there is no GPU to use; "" if there is one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no driver library (libcuda.so.1)"
    code = cuda.cuInit(0)
    if code:
        return f"the driver finds no usable GPU (cuInit returned {code})"
    count = ctypes.c_int()
    code = cuda.cuDeviceGetCount(ctypes.byref(count))
    return "" if code == 0 and count.value > 0 else "the driver finds no GPU"


def _nvcc_version(path: str) -> str:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"release ([\d.]+)", said)
    return found[1] if found else ""


def _nccl() -> Finding:
    places = ["libnccl.so.2"]
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            places += [str(f.locate()) for f in metadata.files(package) or [] if f.name == "libnccl.so.2"]
        except metadata.PackageNotFoundError:
            continue
    for place in places:
        try:
            nccl, version = ctypes.CDLL(place), ctypes.c_int()
        except OSError:
            continue
        nccl.ncclGetVersion(ctypes.byref(version))
        major, rest = divmod(version.value, 10000)
        return Finding("NCCL", OK, f"{major}.{rest // 100}.{rest % 100} ({place})")
    return Finding("NCCL", ABSENT, "absent: no libnccl.so.2 on the loader's path or in a package nvidia-nccl-cu12/13")


def _extras() -> Finding:
    lines = []
    for name, use in _PACKAGES.items():
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} absent ({use})")
    return Finding("extras", OK if not any(" absent (" in line for line in lines) else ABSENT, "\n".join(lines))
