"""How this process finds the other ranks: from what a launcher put into the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from zerox import _C
from zerox.blas import find_blas


@dataclass(frozen=True)
class Place:
    """This process among all: rank of world, and among those on this host."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


_LAUNCHERS = (
    ("torchrun or zerox run", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ("Open MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                  "OMPI_COMM_WORLD_LOCAL_SIZE")),
    ("Slurm", ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")),
)  # fmt: skip


def _whole(env: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = env[name].split("(")[0]
    if not text.isdigit() or not low <= int(text) < high:
        raise ValueError(
            f"environment variable {name} is {env[name]!r}; it must be a whole number from {low} to {high - 1}"
        )
    return int(text)


def place_from_environment(env: Mapping[str, str] = os.environ) -> Place:
    """The place that a launcher gave this process; a single rank where none did."""
    for launcher, (rank_name, world_name, local_name, local_world_name) in _LAUNCHERS:
        if rank_name not in env:
            continue
        if launcher == "Slurm" and "SLURM_STEP_ID" not in env:
            continue  # inside an allocation, but not started by srun
        if world_name not in env:
            raise ValueError(f"{rank_name} is set and {world_name} is not: {launcher} sets both")
        world = _whole(env, world_name, 1, 1 << 20)
        rank = _whole(env, rank_name, 0, world)
        local_world = _whole(env, local_world_name, 1, world + 1) if local_world_name in env else world
        local_rank = _whole(env, local_name, 0, local_world) if local_name in env else rank % local_world
        if world == 1:
            return Place(0, 1, 0, 1, "", 0)
        missing = [n for n in ("MASTER_ADDR", "MASTER_PORT") if not env.get(n)]
        if missing:
            raise ValueError(
                f"{missing[0]} is not set: ranks started by {launcher} need the address and port of rank 0"
            )
        return Place(rank, world, local_rank, local_world, env["MASTER_ADDR"], _whole(env, "MASTER_PORT", 1, 65536))
    return Place(0, 1, 0, 1, "", 0)


def default_threads(local_world: int) -> int:
    """Threads a rank computes with: ZEROX_THREADS, else its share of the cores this process may use."""
    asked = os.environ.get("ZEROX_THREADS", "0")
    if asked not in ("", "0"):
        return _whole(os.environ, "ZEROX_THREADS", 1, 1025)
    return max(len(os.sched_getaffinity(0)) // local_world, 1)


def connect(
    *,
    device: str = "cpu",
    threads: int | None = None,
    timeout: float | None = None,
    transport: str = "auto",
) -> _C.Comm:
    """This process's rank, joined to the others (collective); close it, or let the engine that asked for it do so.

    threads: for computation; None: this rank's share of the cores. timeout: seconds that a wait for another rank may
    take; None: ZEROX_TIMEOUT (300). Raises PeerError or DeadlineError when the others do not come.
    """
    place = place_from_environment()
    # The launcher's socket serves one meeting; for a later one rank 0 listens at the same port itself.
    listen_fd = int(os.environ.pop("ZEROX_LISTEN_FD", "-1"))
    return _C.Comm(
        rank=place.rank,
        world=place.world,
        local_rank=place.local_rank,
        local_world=place.local_world,
        address=place.address,
        port=place.port,
        listen_fd=listen_fd if place.rank == 0 else -1,
        token=os.environ.get("ZEROX_TOKEN", "") or os.environ.get("TORCHELASTIC_RUN_ID", ""),
        job=os.environ.get("ZEROX_JOB", "") or os.environ.get("SLURM_JOB_ID", ""),
        timeout=timeout or 0.0,
        device=device,
        threads=threads or default_threads(place.local_world),
        delay_seed=_whole(os.environ, "ZEROX_DELAY", 0, 1 << 63) if os.environ.get("ZEROX_DELAY") else 0,
        blas=find_blas(),
        transport=transport,
    )
