"""Builds zerox._C from csrc/*/*.c (and the CUDA sources where nvcc is found); metadata is in pyproject.toml.

DESIGN. setuptools recompiles an extension whole, on one core, and puts the objects of an editable build into
a temporary folder. This file replaces only that step: every source is its own object under build/obj/,
compiled in parallel, and compiled again only when its command line or one of the files in its dependency
file changed. So a second `pip install` compiles nothing. The flags are in tools/flags.mk, which the Makefile
reads too.

Environment:
    ZEROX_CUDA    auto (default: CUDA if there are CUDA sources and nvcc is found), 0 (never), 1 (or fail)
    ZEROX_WERROR  1: warnings are errors
    ZEROX_JOBS    compilers at a time (default: all cores)
    CC, CFLAGS, LDFLAGS, CUDA_HOME, NVCC as usual
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

ROOT = Path(__file__).resolve().parent


def read_flags() -> dict[str, list[str]]:
    """NAME = words of tools/flags.mk."""
    flags = {}
    for line in (ROOT / "tools" / "flags.mk").read_text().splitlines():
        match = re.fullmatch(r"([A-Z0-9_]+) = (.*)", line)
        if match:
            flags[match[1]] = match[2].split()
    return flags


FLAGS = read_flags()


# ---------------------------------------------------------------------------------------- tools and headers


def c_compiler() -> list[str]:
    """The C compiler: $CC, what Python was built with, cc, gcc, clang; the first that exists."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in (sysconfig.get_config_var("CC") or "", "cc", "gcc", "clang"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    raise SetupError("no C compiler found: install gcc (Debian: apt-get install gcc libc6-dev) or set CC")


def package_include(package: str, *parts: str) -> str:
    """An include folder inside an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place, *parts)
        if folder.is_dir():
            return str(folder)
    raise SetupError(f"the headers of {package} are missing: pip install {package.replace('_', '-')}")


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit: the nvcc to call, and the folders that hold its headers and its libraries."""

    nvcc: str
    include: str
    lib: str


def nvcc_candidates() -> list[str]:
    """Where nvcc may be, best first. CUDA_HOME may be unset, empty, a list with empty entries, or wrong."""
    homes = [
        entry
        for name in ("CUDA_HOME", "CUDA_PATH")
        for entry in os.environ.get(name, "").split(os.pathsep)
        if entry.strip()
    ]
    found = [os.environ.get("NVCC", "")]
    found += [os.path.join(home.strip(), "bin", "nvcc") for home in homes]
    found += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return [path for path in found if path and os.path.isfile(path) and os.access(path, os.X_OK)]


def find_cuda() -> tuple[Cuda | None, str]:
    """The first working toolkit and "", or None and the reason."""
    why = "nvcc was not found in CUDA_HOME, on PATH or in /usr/local/cuda"
    for nvcc in nvcc_candidates():
        homes = [Path(nvcc).resolve().parent.parent]
        # nvcc on PATH is often a wrapper script: the real one says where its toolkit is.
        dry = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        top = re.search(r"^#\$ TOP=(.+)$", dry.stdout + dry.stderr, re.MULTILINE)
        if top:
            homes.insert(0, Path(top[1].strip()))
        for home in homes:
            for target in (home, home / "targets" / f"{platform.machine()}-linux"):
                for lib in (target / "lib64", target / "lib"):
                    header = target / "include" / "cuda_runtime.h"
                    if header.is_file() and (lib / "libcudart_static.a").is_file():
                        return Cuda(nvcc, str(header.parent.resolve()), str(lib.resolve())), ""
        why = f"{nvcc} has no toolkit beside it (include/cuda_runtime.h and lib64/libcudart_static.a)"
    return None, why


def is_cuda_source(path: str) -> bool:
    return path.endswith((".cu", "_cuda.c"))


def choose_cuda(sources: list[str]) -> Cuda | None:
    """Applies ZEROX_CUDA: the toolkit to build with, or None for a CPU build."""
    wish = os.environ.get("ZEROX_CUDA", "auto").strip().lower() or "auto"
    if wish not in ("0", "1", "auto"):
        raise SetupError(f"ZEROX_CUDA={wish!r} is not one of 0, 1, auto")
    if wish == "0":
        return None
    if wish == "auto" and not any(map(is_cuda_source, sources)):
        return None
    cuda, why = find_cuda()
    if cuda is None and wish == "1":
        raise SetupError(f"ZEROX_CUDA=1, but {why}: install the CUDA toolkit, set CUDA_HOME, or use ZEROX_CUDA=0")
    if cuda is None:
        print(f"zerox: building without CUDA: {why}", flush=True)
    return cuda


# ---------------------------------------------------------------------------------------- one object


@dataclass(frozen=True)
class Job:
    """One output file: the command that makes it, and what stands for that command in the signature.

    Header folders of build requirements lie in a fresh temporary folder at every isolated build; the
    signature holds their versions in place of their paths.
    """

    source: str
    output: Path
    command: tuple[str, ...]
    signature: str

    def is_fresh(self) -> bool:
        return is_fresh(self.output, self.signature, read_depfile(self.output.with_suffix(".d")))


def read_depfile(path: Path) -> list[str] | None:
    """The prerequisites that the compiler wrote, or None without a dependency file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    _, _, rest = text.replace("\\\n", " ").partition(": ")
    return [word.replace("\\ ", " ") for word in re.split(r"(?<!\\)\s+", rest.strip()) if word]


def is_fresh(output: Path, signature: str, inputs: list[str] | None) -> bool:
    try:
        made = output.stat().st_mtime_ns
        return (
            inputs is not None
            and output.with_suffix(".sig").read_text() == signature
            and all(os.stat(ROOT / path).st_mtime_ns <= made for path in inputs)
        )
    except FileNotFoundError:
        return False


def run_job(job: Job, stop: threading.Event) -> str:
    """Compiles one object unless a failure elsewhere stopped the build; returns the compiler's text."""
    if stop.is_set():
        return ""
    depfile = job.output.with_suffix(".d")
    scratch = job.output.with_suffix(".tmp.o")
    job.output.parent.mkdir(parents=True, exist_ok=True)
    job.output.with_suffix(".sig").unlink(missing_ok=True)
    start = job.output.with_suffix(".start")
    start.touch()
    command = [*job.command, "-MMD", "-MF", str(depfile), "-c", job.source, "-o", str(scratch)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode != 0:
        stop.set()
        raise CompileError(f"{shlex.join(command)}\n{text}")
    # The object gets the time at which its compilation began: a header saved meanwhile is then newer.
    began = start.stat().st_mtime_ns
    start.unlink()
    os.utime(scratch, ns=(began, began))
    os.replace(scratch, job.output)
    job.output.with_suffix(".sig").write_text(job.signature)
    return text


# ---------------------------------------------------------------------------------------- the command


class BuildExt(build_ext):
    """build_ext with an object of its own for each source, in parallel, incremental."""

    def build_extension(self, ext: Extension) -> None:
        cuda = choose_cuda(ext.sources)
        sources = [path for path in ext.sources if cuda or not is_cuda_source(path)]
        if platform.machine() not in ("x86_64", "AMD64"):
            sources = [path for path in sources if not path.endswith(("_avx2.c", "_avx512.c"))]
        folder = ROOT / "build" / "obj" / f"{'cuda' if cuda else 'cpu'}-{sys.implementation.cache_tag}"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two installs from one checkout take turns
            library = self.make_library(folder, sources, cuda)
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = target.with_suffix(".tmp")
            shutil.copy2(library, scratch)
            os.replace(scratch, target)  # never write into a library that a running process has mapped

    def make_library(self, folder: Path, sources: list[str], cuda: Cuda | None) -> Path:
        jobs = self.make_jobs(folder, sources, cuda)
        stale = [job for job in jobs if not job.is_fresh()]
        stop = threading.Event()
        workers = self.parallel if isinstance(self.parallel, int) and self.parallel > 0 else None
        workers = workers or int(os.environ.get("ZEROX_JOBS") or 0) or os.cpu_count() or 1
        with ThreadPoolExecutor(workers) as pool:
            errors = []
            for job, future in [(job, pool.submit(run_job, job, stop)) for job in stale]:
                try:
                    text = future.result()
                except CompileError as error:
                    errors.append(str(error))
                    continue
                print(f"zerox: {job.source}" + (f"\n{text.rstrip()}" if text.strip() else ""), flush=True)
        if errors:
            raise CompileError("\n".join(["zerox did not compile:", *errors]))

        library = folder / "_C.so"
        link = [*c_compiler(), "-shared", "-Wl,-z,now", *(str(job.output) for job in jobs)]
        if cuda:
            link += [f"-L{cuda.lib}", *FLAGS["ZX_CUDA_LIBS"]]
        link += [*FLAGS["ZX_LIBS"], *shlex.split(os.environ.get("LDFLAGS", ""))]
        signature = "\n".join(link)
        if not is_fresh(library, signature, [str(job.output) for job in jobs]):
            done = subprocess.run([*link, "-o", str(library)], cwd=ROOT, text=True, capture_output=True, check=False)
            if done.returncode != 0:
                raise CompileError(f"zerox did not link:\n{shlex.join(link)}\n{done.stdout}{done.stderr}")
            library.with_suffix(".sig").write_text(signature)
        print(
            f"zerox: {len(stale)} of {len(jobs)} objects compiled, {'with' if cuda else 'without'} CUDA",
            flush=True,
        )
        return library

    def make_jobs(self, folder: Path, sources: list[str], cuda: Cuda | None) -> list[Job]:
        compiler = c_compiler()
        version = subprocess.run([*compiler, "--version"], text=True, capture_output=True, check=True).stdout
        blas = package_include("scipy_openblas32", "include")
        blas_digest = hashlib.sha256(Path(blas, "cblas.h").read_bytes()).hexdigest()
        warn = FLAGS["ZX_WARN"] + (["-Werror"] if os.environ.get("ZEROX_WERROR") == "1" else [])
        common = [*FLAGS["ZX_CFLAGS"], *FLAGS["ZX_OPT"], *warn, "-Icsrc"]
        common += ["-DZX_WITH_CUDA=1", "-isystem", cuda.include] if cuda else []
        common += shlex.split(os.environ.get("CFLAGS", ""))
        jobs = []
        for source in sources:
            headers, versions = [], [version]
            if source.endswith(".cu"):
                words = [cuda.nvcc, *FLAGS["ZX_NVCC"], *FLAGS["ZX_GENCODE"], "-DZX_WITH_CUDA=1", "-Icsrc"]
                if "-Werror" in warn:
                    words += ["-Werror=all-warnings"]
            else:
                words = compiler + common
                words += FLAGS["ZX_AVX2"] if source.endswith("_avx2.c") else []
                words += FLAGS["ZX_AVX512"] if source.endswith("_avx512.c") else []
                headers += ["-isystem", blas]
                versions.append(blas_digest)
            if source.startswith("csrc/py/"):
                import numpy

                words.append(f"-I{sysconfig.get_path('include')}")
                headers += ["-isystem", numpy.get_include()]
                versions.append(f"numpy {numpy.__version__}")
            output = folder / (source[len("csrc/") :].replace("/", "-") + ".o")
            jobs.append(Job(source, output, tuple(words + headers), "\n".join(words + versions)))
        return jobs


SOURCES = sorted(str(path.relative_to(ROOT)) for kind in ("*.c", "*.cu") for path in ROOT.glob(f"csrc/*/{kind}"))

setup(ext_modules=[Extension("zerox._C", SOURCES)], cmdclass={"build_ext": BuildExt})
