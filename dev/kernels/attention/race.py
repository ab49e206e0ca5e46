"""Race our attention against cuDNN and FA2 on one GPU: interleaved, median of many, checked in the same run.

Prints a table; writes JSON lines (benchmarks/results/<device>/attention.jsonl) with --out.
FLOPs are counted once: forward 4 S^2 d per head and document, half of it when causal; backward 2.5 times.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable

import binding as b
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time each call once a round, in turn (ms); a short spin keeps the queue ahead of the device."""
    for _ in range(3):
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {n: [] for n in calls}
    for _ in range(rounds):
        torch.cuda._sleep(400_000)
        marks = {}
        for n, call in calls.items():
            marks[n] = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            marks[n][0].record()
            call()
            marks[n][1].record()
        torch.cuda.synchronize()
        for n, (start, end) in marks.items():
            times[n].append(start.elapsed_time(end))
    return times


def gemm_rate(rounds: int) -> float:
    """Return TFLOP/s of an 8192^3 bf16 product."""
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / statistics.median(interleaved({"gemm": lambda: x @ y}, rounds)["gemm"]) * 1e-9


class Race:
    """One point of the grid: inputs in a fused QKV array, our arguments, the peers' tensors."""

    def __init__(self, lib: b.Library, d: int, causal: int, s: int, heads: int, heads_kv: int, tokens: int) -> None:
        """Draw inputs for tokens / s documents of length s."""
        n = max(1, tokens // s)
        self.lib, self.d, self.causal, self.s, self.n, self.h, self.hk = lib, d, causal, s, n, heads, heads_kv
        fused = torch.randn(n * s, heads + 2 * heads_kv, d, device="cuda", dtype=torch.bfloat16)
        self.q, self.k, self.v = fused.split([heads, heads_kv, heads_kv], 1)
        self.do = torch.randn(n * s, heads, d, device="cuda", dtype=torch.bfloat16)
        self.o, self.dq = torch.empty_like(self.do), torch.empty_like(self.do)
        self.dk, self.dv = (torch.empty(n * s, heads_kv, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.lse = torch.empty(heads, n * s, device="cuda")
        p = b.Problem(b.BF16, b.HOPPER, heads, heads_kv, d, causal, 0, d**-0.5, n, n * s, n * s, s, s)
        self.p = p
        self.work = torch.zeros(lib.workspace_bytes("forward", p), dtype=torch.uint8, device="cuda")
        self.fwd = b.ForwardArgs(
            p, *map(b.view, (self.q, self.k, self.v, self.o)), self.lse.data_ptr(), self.work.data_ptr()
        )
        self.flops = 4 * n * heads * s * s * d // (2 if causal else 1)

    def forward(self) -> None:
        """Queue our forward pass."""
        self.lib.call("forward", self.fwd, self.stream())

    def prepare_backward(self, deterministic: int) -> Callable[[], None]:
        """Return a call that queues our backward pass."""
        p = b.Problem.from_buffer_copy(self.p)
        p.deterministic = deterministic
        work = torch.empty(self.lib.workspace_bytes("backward", p), dtype=torch.uint8, device="cuda")
        views = list(map(b.view, (self.q, self.k, self.v, self.o, self.do)))
        grads = list(map(b.view, (self.dq, self.dk, self.dv)))
        args = b.BackwardArgs(p, *views, self.lse.data_ptr(), *grads, work.data_ptr())
        return lambda: (work, self.lib.call("backward", args, self.stream()))[1]

    @staticmethod
    def stream() -> b.ct.c_void_p:
        """Return torch's current stream."""
        return b.ct.c_void_p(torch.cuda.current_stream().cuda_stream)

    def batch(self, t: torch.Tensor) -> torch.Tensor:
        """View (tokens, heads, d) as (documents, heads, s, d)."""
        return t.unflatten(0, (self.n, self.s)).transpose(1, 2)

    def peer(self, backend: SDPBackend, backward: bool) -> Callable[[], object] | None:
        """Return a call of torch's attention on the same inputs, or None if the backend refuses."""
        x = [self.batch(t).detach().requires_grad_(backward) for t in (self.q, self.k, self.v)]
        gqa = self.h != self.hk

        def forward() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*x, is_causal=bool(self.causal), enable_gqa=gqa)

        try:
            out = forward()
            if not backward:
                return forward
            do = self.batch(self.do)
            torch.autograd.grad(out, x, do, retain_graph=True)
            return lambda: torch.autograd.grad(out, x, do, retain_graph=True)
        except RuntimeError as e:
            print("refused:", backend, str(e).splitlines()[0][:150])
            return None

    def errors(self, backward: bool) -> tuple[float, float]:
        """Return our and FA2's worst relative error against fp64 on the last document's last key head."""
        g, rows = self.h // self.hk, slice((self.n - 1) * self.s, None)
        q, do = (t[rows, -g:].double().transpose(0, 1) for t in (self.q, self.do))
        k, v = (t[rows, -1:].double().transpose(0, 1) for t in (self.k, self.v))
        refs = [[], [], 0, 0]
        step = min(self.s, 4096)
        for h in range(g):
            parts: list[list[torch.Tensor]] = [[], []]
            for r in range(0, self.s, step):
                seen = r + step if self.causal else self.s
                score = q[h, r : r + step] @ k[0, :seen].T * self.d**-0.5
                if self.causal:
                    row = torch.arange(r, r + step, device="cuda")[:, None]
                    score.masked_fill_(torch.arange(seen, device="cuda")[None] > row, -math.inf)
                prob = score.softmax(-1)
                o = prob @ v[0, :seen]
                parts[0].append(o)
                if backward:
                    grad = do[h, r : r + step]
                    ds = prob * (grad @ v[0, :seen].T - (grad * o).sum(-1, keepdim=True)) * self.d**-0.5
                    parts[1].append(ds @ k[0, :seen])
                    pad = (0, 0, 0, self.s - seen)
                    refs[2] = refs[2] + F.pad(ds.T @ q[h, r : r + step], pad)
                    refs[3] = refs[3] + F.pad(prob.T @ grad, pad)
            refs[0].append(torch.cat(parts[0]))
            refs[1].append(torch.cat(parts[1]) if backward else None)
        x = [self.batch(t).detach()[-1:].requires_grad_(backward) for t in (self.q, self.k, self.v)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(*x, is_causal=bool(self.causal), enable_gqa=g > 1)
        theirs, ours = [out], [self.o]
        want = [torch.stack(refs[0])]
        if backward:
            theirs += torch.autograd.grad(out, x, self.batch(self.do)[-1:])
            ours += [self.dq, self.dk, self.dv]
            want += [torch.stack(refs[1]), refs[2][None], refs[3][None]]
            theirs, ours, want = theirs[1:], ours[1:], want[1:]
        error = [0.0, 0.0]
        for t, mine, ref in zip(theirs, ours, want, strict=True):
            n = ref.shape[0]
            pair = (mine[rows, -n:].transpose(0, 1), t[0, -n:])
            for i, y in enumerate(pair):
                e = ((y.double() - ref).norm() / ref.norm()).item()
                error[i] = e if math.isnan(e) else max(error[i], e)
        return error[0], error[1]


class PackedRace(Race):
    """Documents of mixed lengths, packed; heads as in Race."""

    def __init__(self, lib: b.Library, d: int, causal: int, lens: list[int], heads: int) -> None:
        """Draw inputs for documents of the given lengths."""
        super().__init__(lib, d, causal, sum(lens), heads, heads, sum(lens))
        self.cu = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device="cuda")
        for p in (self.p, self.fwd.problem):
            p.n_docs, p.max_len_q, p.max_len_k = len(lens), max(lens), max(lens)
            p.cu_q = p.cu_k = self.cu.data_ptr()
        self.flops = sum(4 * heads * n * n * d // (2 if causal else 1) for n in lens)


def race_packed(lib: b.Library, rounds: int, commit: str, ceiling: float) -> list[dict]:
    """Race mixed lengths against equal ones of about the same work; return result lines in TFLOP/s."""
    lens, lines = [512, 2048, 1024, 512, 4096, 512, 1024, 512, 1024, 2048, 512, 1024, 512, 512, 512], []
    print("packed, mean-square length " + f"{sum(n * n for n in lens) / sum(lens):.0f}, against equal lengths of 2048")
    for kind, d, causal in itertools.product(("fwd", "bwd"), (64, 128), (1, 0)):
        mixed, equal = PackedRace(lib, d, causal, lens, 16), Race(lib, d, causal, 2048, 16, 16, sum(lens))
        calls = {}
        for name, r in (("mixed", mixed), ("equal", equal)):
            r.forward()
            calls[name] = r.forward if kind == "fwd" else r.prepare_backward(0)
        times = interleaved(calls, rounds)
        factor = 1e-9 * (1 if kind == "fwd" else 2.5)
        rate = [r.flops * factor / statistics.median(times[n]) for n, r in (("mixed", mixed), ("equal", equal))]
        mask, ratio = "causal" if causal else "full", rate[0] / rate[1]
        print(f"{kind} {d:3} {mask:6} {rate[0]:5.0f} {rate[1]:5.0f}  {ratio:.3f}")
        lines.append(
            {"bench": "attention", "case": f"{kind}-d{d}-{mask}-packed-gqa1", "unit": "TFLOP/s",
             "floor": round(ceiling, 1), "ours": round(rate[0], 1), "peer": round(rate[1], 1),
             "peer_name": "ours, equal lengths 2048", "ratio": round(ratio, 4),
             "of_floor": round(rate[0] / ceiling, 4), "spread": round(spread(times["mixed"]), 4),
             "n": rounds, "commit": commit, "device": torch.cuda.get_device_name(),
             "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        )  # fmt: skip
    return lines


def spread(times: list[float]) -> float:
    """Return (upper - lower quartile) / median."""
    q = statistics.quantiles(times, n=4)
    return (q[2] - q[0]) / q[1]


def main() -> None:
    """Race the grid that the options name."""
    a = argparse.ArgumentParser()
    a.add_argument("--d", default="64,128")
    a.add_argument("--causal", default="1,0")
    a.add_argument("--s", default="1024,2048,4096,8192,16384")
    a.add_argument("--gqa", default="1,8")
    a.add_argument("--pass", dest="passes", default="fwd,bwd")
    a.add_argument("--rounds", type=int, default=20)
    a.add_argument("--tokens", type=int, default=16384)
    a.add_argument("--peers", default="cuDNN,FA2")
    a.add_argument("--errors", type=int, default=1)
    a.add_argument("--library", default=b.LIBRARY)
    a.add_argument("--packed", type=int, default=0)
    a.add_argument("--commit", default="")
    a.add_argument("--out", default="")
    o = a.parse_args()
    torch.manual_seed(2)
    lib = b.Library(o.library)
    device, when = torch.cuda.get_device_name(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ceiling = gemm_rate(20)
    print(f"{device}, 8192^3 product {ceiling:.0f} TFLOP/s, torch {torch.__version__}")
    ints = [[int(x) for x in t.split(",")] for t in (o.gqa, o.d, o.causal, o.s)]
    lines, logs = [], {}
    print("pass  d  mask    S   gqa |  ours  cuDNN   FA2 TFLOP/s | /cuDNN /FA2 | /gemm spread | error  FA2's")
    for kind in o.passes.split(","):
        for gqa in ints[0]:
            for d in ints[1]:
                for causal in ints[2]:
                    for s in ints[3]:
                        r = Race(lib, d, causal, s, 16, 16 // gqa, o.tokens)
                        r.forward()
                        bwd = kind != "fwd"
                        ours = r.prepare_backward(kind == "det") if bwd else r.forward
                        peers = {n: r.peer(PEERS[n], bwd) for n in o.peers.split(",") if n}
                        calls = {"ours": ours} | {n: c for n, c in peers.items() if c}
                        times = interleaved(calls, o.rounds)
                        ms = {n: statistics.median(t) for n, t in times.items()}
                        flops = r.flops * (2.5 if bwd else 1)
                        rate = {n: flops / t * 1e-9 for n, t in ms.items()}
                        error = r.errors(bwd) if o.errors else (math.nan, math.nan)
                        ratios = {n: ms[n] / ms["ours"] for n in ms if n != "ours"}
                        for n, x in ratios.items():
                            logs.setdefault((kind, n, d), []).append(math.log(x))
                            name = f"{kind}-d{d}-{'causal' if causal else 'full'}-S{s}-gqa{gqa}"
                            lines.append(
                                {"bench": "attention", "case": name, "unit": "ms",
                                 "floor": round(flops / ceiling * 1e-9, 5), "ours": round(ms["ours"], 5),
                                 "peer": round(ms[n], 5), "peer_name": n, "ratio": round(x, 4),
                                 "of_floor": round(rate["ours"] / ceiling, 4),
                                 "spread": round(spread(times["ours"]), 4), "n": o.rounds, "commit": o.commit,
                                 "device": device, "when": when}
                                | ({"error": error[0], "peer_error": error[1]} if o.errors else {})
                            )  # fmt: skip
                        nan = math.nan
                        print(
                            f"{kind:4} {d:3} {'causal' if causal else 'full  '} {s:5} {gqa:3} | "
                            f"{rate['ours']:5.0f} "
                            f"{rate.get('cuDNN', nan):6.0f} {rate.get('FA2', nan):5.0f}         | "
                            f"{ratios.get('cuDNN', nan):5.2f} {ratios.get('FA2', nan):5.2f} | "
                            f"{rate['ours'] / ceiling:5.2f} {spread(times['ours']):5.3f}  | "
                            f"{error[0]:.2e} {error[1]:.2e}",
                            flush=True,
                        )
    for (kind, n, d), x in logs.items():
        print(f"{kind} d{d} against {n}: geometric mean {math.exp(statistics.mean(x)):.3f}, "
              f"lowest {math.exp(min(x)):.3f} over {len(x)} points")  # fmt: skip
    if o.packed:
        lines += race_packed(lib, o.rounds, o.commit, ceiling)
    if o.out:
        with open(o.out, "w") as f:
            f.writelines(json.dumps(x) + "\n" for x in lines)


if __name__ == "__main__":
    main()
