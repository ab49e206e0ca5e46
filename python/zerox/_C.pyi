"""The compiled core. `zerox.Engine`, `zerox.nn` and the rest are thin Python over these types.

dtypes are named "float32", "bfloat16", "float64", "int32", "int64", "uint8". NumPy has no bfloat16: raw values
(`read_slice`, `gather`) travel as uint16, `Tensor.numpy()` widens to float32, which is exact.
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

__version__: str

class ZeroxError(Exception):
    """Base of all errors of the core. str() is one sentence with the values, then the frames in brackets."""

    status: str  # "ARG", "STATE", ... (csrc/base/zx.h)
    native: int  # errno, CUDA or NCCL code; 0 if none
    where: str  # "zx_arena_take (csrc/model/arena.c:120)"
    trace: list[str]  # frames, the origin first

class ArgumentError(ZeroxError, ValueError): ...
class StateError(ZeroxError, RuntimeError): ...
class OutOfMemoryError(ZeroxError, MemoryError): ...
class SystemCallError(ZeroxError, OSError): ...
class DeadlineError(ZeroxError, TimeoutError): ...
class PeerError(ZeroxError, ConnectionError): ...
class UnsupportedError(ZeroxError, NotImplementedError): ...
class CudaError(ZeroxError, RuntimeError): ...
class NcclError(ZeroxError, RuntimeError): ...
class BugError(ZeroxError, AssertionError): ...

class Meeting:
    """Where ranks that are threads of this process meet; one object, given to each rank's Comm."""

    def __init__(self, world: int) -> None: ...
    world: int
    def close(self) -> None: ...

class Comm:
    """One rank's device, its connection to the other ranks, and the collectives between them.

    Collectives take C-contiguous NumPy arrays (float32, float64, int32, int64, uint8; bfloat16 as uint16 with
    dtype="bfloat16"), return new arrays unless `out` is given, wait until done, and raise PeerError or DeadlineError
    (naming rank, operation and sequence number) when another rank dies, stalls or calls something else. Ctrl-C works
    inside. Concurrent use from two threads is a StateError; so is use in a forked child.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        world: int = 1,
        local_rank: int = -1,  # -1: rank
        local_world: int = -1,  # -1: world
        meeting: Meeting | None = None,
        address: str = "",
        port: int = 0,
        listen_fd: int = -1,
        token: str = "",
        job: str = "",
        timeout: float = 0.0,  # seconds; 0: ZEROX_TIMEOUT
        device: str = "cpu",  # "cpu", "ref", "null"
        threads: int = 1,
        delay_seed: int = 0,
        blas: str = "",  # path of the library; "": plain loops
        transport: str = "auto",
        ring_bytes: int = 0,
    ) -> None: ...
    rank: int
    world: int
    device: str
    transport: str
    choice: str  # why this transport
    closed: bool
    def all_gather(self, array: NDArray[Any], *, out: NDArray[Any] | None = None, dtype: str = "") -> NDArray[Any]:
        """(n...) on each rank -> (world, n...)."""
    def reduce_scatter(self, array: NDArray[Any], *, out: NDArray[Any] | None = None, dtype: str = "") -> NDArray[Any]:
        """(world, n...) on each rank -> (n...), the sum over ranks of their row `rank`."""
    def all_reduce(self, array: NDArray[Any], *, out: NDArray[Any] | None = None, dtype: str = "") -> NDArray[Any]: ...
    def broadcast(self, array: NDArray[Any], *, root: int = 0, dtype: str = "") -> NDArray[Any]:
        """In place; returns array."""
    def all_to_all(self, array: NDArray[Any], *, out: NDArray[Any] | None = None, dtype: str = "") -> NDArray[Any]:
        """(world, n...) -> (world, n...); row p of the result is row `rank` of rank p's array."""
    def send(self, array: NDArray[Any], peer: int, *, dtype: str = "") -> None: ...
    def recv(self, array: NDArray[Any], peer: int, *, dtype: str = "") -> NDArray[Any]: ...
    def barrier(self) -> None: ...
    def empty(self, shape: int | Sequence[int], dtype: str = "float32") -> NDArray[Any]:
        """Collective: zeros in registered memory, which other ranks read without a staging copy; its bytes live until
        the Comm is closed and the array is gone."""
    def split(self, colour: int, key: int = 0) -> Comm | None: ...
    def all_gather_bytes(self, what: str, data: bytes) -> list[bytes]:
        """Small control data over the set-up channel (slow); lengths may differ between ranks."""
    def abort(self, why: str) -> None:
        """This rank gives up; the others get `why`. Any thread may call it, also during another's call."""
    def check(self) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def close(self) -> None:
        """StateError while Partitioners, Engines or split Comms on it are open."""
    def __enter__(self) -> Comm: ...
    def __exit__(self, *args: object) -> None:
        """close(); after an exception, abort() with its text first."""

# (name, unit, dtype, shape, trainable, group, tied_to or -1)
_Record = tuple[str, int, str, tuple[int, ...], bool, int, int]
# (lr, beta1, beta2, eps, weight_decay, momentum, bias_correction1, bias_correction2), one for each option group
_Hyper = tuple[float, float, float, float, float, float, float, float]

class Partitioner:
    """Arrays sharded over ranks, and the verbs of the store on them, without a model.

    Units are gathered together; unit 0 is the root. Values are zero until loaded. See csrc/store/store.h.
    """

    def __init__(
        self,
        records: Sequence[_Record],
        units: Sequence[str],
        *,
        comm: Comm,
        shard_state: bool = True,
        shard_grads: bool = True,
        shard_params: bool = True,
        reduce_at: str = "micro",  # or "step"
        slots: int = 2,
        grad_slots: int = 2,
        prefetch: bool = True,
        reduce_dtype: str = "float32",
        optimizer: str = "adamw",  # or "sgd"
        moments: int = -1,  # kept by the optimizer; -1: 2 for adamw, 1 for sgd
        poison: bool = False,
    ) -> None: ...
    comm: Comm
    version: int
    closed: bool
    def acquire(self, unit: int) -> dict[str, NDArray[Any]]:
        """Read-only views of the unit's full parameters; valid until release."""
    def release(self, unit: int) -> None: ...
    def prefetch(self, unit: int) -> None: ...
    def grad(self, unit: int) -> dict[str, NDArray[Any]]:
        """Views of the unit's full gradients, to be added to; valid until reduce."""
    def reduce(self, unit: int) -> None: ...
    def count(self, loss_sum: float, denominator: float) -> None: ...
    def step(self, hyper: Sequence[_Hyper], *, max_norm: float = 0.0, loss_scale: float = 1.0) -> dict[str, float]:
        """-> norm, factor, denominator, loss_sum, skip (0 or 1)."""
    def zero_grad(self) -> None: ...
    def begin_pass(self) -> None: ...
    def abandon_pass(self) -> None: ...
    def layout(self) -> dict[str, Any]:
        """{"world", "n_elems", "n_padded", "n_trainable_padded", "params": [{name, unit, range, offset, n, shape,
        dtype, trainable, group, tied_to}], "ranges": [{unit, dtype, trainable, n_used, n_padded, slice}], "units":
        [{name, param_bytes, grad_bytes, trainable}]}"""
    def bytes(self) -> dict[str, int]:
        """The formulas (zx_store_bytes): params, master, moments, grads, control, total."""
    def bytes_held(self) -> dict[str, int]:
        """What was allocated."""
    def stats(self, reset: bool = False) -> dict[str, int]: ...
    def unit_state(self, unit: int) -> str: ...
    # values; kind: "param", "master", "moment1", "moment2"
    def has_slice(self, range: int, kind: str) -> str:
        """The dtype in which this store holds such values for a range, or ""."""
    def read_slice(self, range: int, kind: str, begin: int, n: int) -> NDArray[Any]: ...
    def load_begin(self) -> None: ...
    def write_slice(self, range: int, kind: str, begin: int, values: NDArray[Any]) -> None: ...
    def load_end(self) -> None: ...
    def gather(self, param: int) -> NDArray[Any]:
        """Collective: the whole parameter, in its dtype (uint16 for bfloat16)."""
    def pieces(self, rank: int, whole: bool = False) -> list[tuple[int, int, int, int, int]]:
        """(param, range, range_begin, begin, n): runs of elements in rank's slices (csrc/store/checkpoint.h)."""
    def close(self) -> None:
        """BufferError while arrays from acquire or grad exist."""
    def __enter__(self) -> Partitioner: ...
    def __exit__(self, *args: object) -> None: ...

class Engine(Partitioner):
    """A model's tape, activation arena and sharded state on one rank (csrc/model/engine.h)."""

    def __init__(
        self,
        records: Sequence[_Record],
        units: Sequence[str],
        *,
        comm: Comm | None,  # None: planning only, for any world, on the null device
        world: int = 0,  # with comm=None
        total_bytes: int = 0,  # with comm=None: what the device pretends to have
        dtype: str = "float32",  # of activations: float32, bfloat16, float64
        memory_limit: int = 0,
        spare_bytes: int = 0,
        shard_state: bool = True,
        shard_grads: bool = True,
        shard_params: bool = True,
        reduce_at: str = "micro",
        slots: int = 2,
        grad_slots: int = 2,
        prefetch: bool = True,
        reduce_dtype: str = "float32",
        optimizer: str = "adamw",
        moments: int = -1,
        poison: bool = False,
    ) -> None: ...
    dtype: str
    generation: int
    in_pass: bool
    dry: bool
    def planned(self, signature: int) -> bool: ...
    def begin(self, signature: int, *, train: bool, dry: bool) -> None: ...
    def end(self) -> None: ...
    def abandon(self) -> None: ...
    def input(self, name: str, array: NDArray[Any], *, dtype: str = "") -> Tensor:
        """int32 stays; float arrays are converted to dtype (default: the engine's). Kept until the next pass."""
    def param(self, index: int) -> Tensor: ...
    def enter(self, unit: int, recompute: bool) -> None: ...
    def exit(self, unit: int) -> None: ...
    def apply(
        self,
        op: str,
        inputs: Sequence[Tensor | None],
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
    ) -> Tensor: ...
    def backward(self, loss: Tensor) -> None: ...
    def read_grad(self, param: int) -> NDArray[Any]:
        """The full gradient of a parameter, where one is held (reduce_at step, or before reduce), in the sum type."""
    def memory(self) -> dict[str, Any]:
        """zx_engine_memory: store (dict), activations, spare, scratch, comm, total, limit, n_deviations, flops."""

class Tensor:
    """A value on the tape. Made by Engine.input, param and apply; never by users."""

    engine: Engine
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_total: bool  # a counted loss {sum, number of labels}
    def numpy(self) -> NDArray[Any]:
        """A copy; bfloat16 is widened to float32."""
    def item(self) -> float:
        """The value of a one-element tensor; the mean (sum / count) of a counted loss."""
    def keep(self) -> Tensor:
        """A copy with memory of its own, which outlives the pass."""
    def __float__(self) -> float: ...
    def __add__(self, other: Tensor | float) -> Tensor: ...
    def __radd__(self, other: Tensor | float) -> Tensor: ...
    def __mul__(self, other: Tensor | float) -> Tensor: ...
    def __rmul__(self, other: Tensor | float) -> Tensor: ...
    def __sub__(self, other: Tensor) -> Tensor: ...
    def __neg__(self) -> Tensor: ...
    def __truediv__(self, other: float) -> Tensor: ...
    def __matmul__(self, other: Tensor) -> Tensor: ...
    def sum(self) -> Tensor: ...
    def mean(self) -> Tensor: ...

def ops() -> dict[str, tuple[int, int, int]]:
    """Built-in operations: name -> (fewest inputs, most inputs, outputs)."""

def checkpoint_overlap(
    src_box: tuple[Sequence[int], Sequence[int], Sequence[int]],  # global shape, begin, shape
    src_begin: int,
    src_n: int,
    dst_box: tuple[Sequence[int], Sequence[int], Sequence[int]],
    dst_begin: int,
    dst_n: int,
) -> list[tuple[int, int, int]]:
    """(src, dst, n) runs of elements shared by a saved and a wanted run (csrc/store/checkpoint.h)."""

def fault_point(name: str) -> None:
    """Passes a fault point; tests make the n-th fail."""

def fault_arm(n: int) -> None: ...
def fault_passed() -> int: ...
def memory_stats() -> dict[str, dict[str, int]]:
    """Counted memory by class: n_allocs, n_live, live_bytes, peak_bytes."""

def env_table() -> list[tuple[str, str, str, str]]:
    """(name, value, default, help) of every environment variable that zerox reads."""

def isa() -> str:
    """Instruction set that the CPU kernels use: "plain", "avx2", "avx512"."""

def timeline_enable(n_events: int) -> None: ...
def timeline_read() -> list[tuple[str, int, int, int, int, int]]:
    """(name, lane, rank, begin_ns, end_ns, bytes), oldest first."""
