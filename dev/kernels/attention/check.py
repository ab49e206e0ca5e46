"""Check both paths against the host reference in double, beside FA2's own error; exit 1 if anything is off.

Every output lies in a larger array of NaN: what must be written is poisoned, what must not be is watched.
"""

import argparse
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import binding as b
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"bf16": (b.BF16, torch.bfloat16), "fp16": (b.FP16, torch.float16)}


def cases() -> list[dict]:
    """Return the problems: lengths per document, heads, options."""
    out = []
    lengths = [[1], [127], [128], [129, 1, 64], [255, 0, 300, 31], [500]]
    for d, causal, lens in itertools.product((64, 128), (0, 1), lengths):
        out.append(dict(d=d, causal=causal, lens_q=lens, lens_k=lens, heads=(2, 2), dtype="bf16", kind="random"))
    for d, causal in itertools.product((64, 128), (0, 1)):
        out.append(dict(d=d, causal=causal, lens_q=[384] * 2, lens_k=[384] * 2, heads=(4, 1), equal=1))
        out.append(dict(d=d, causal=causal, lens_q=[300], lens_k=[300], heads=(2, 1), dtype="fp16"))
        out.append(dict(d=d, causal=causal, lens_q=[200, 3], lens_k=[70, 260], heads=(2, 1)))
        out.append(dict(d=d, causal=causal, lens_q=[70, 5], lens_k=[0, 9], heads=(2, 2)))
        out.append(dict(d=d, causal=causal, lens_q=[260], lens_k=[260], heads=(1, 1), kind="large"))
        out.append(dict(d=d, causal=causal, lens_q=[260], lens_k=[260], heads=(1, 1), kind="hot"))
    return [dict(dict(dtype="bf16", kind="random", equal=0), **c) for c in out]


def guarded(n: int, heads: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an array of NaN (n + 2, heads + 1, d) and the (n, heads, d) view in its middle."""
    whole = torch.full((n + 2, heads + 1, d), float("nan"), dtype=dtype, device="cuda")
    return whole, whole[1 : n + 1, :heads]


def host(t: torch.Tensor) -> np.ndarray:
    """Copy a 2-byte tensor to the host as raw bits."""
    return t.contiguous().view(torch.int16).cpu().numpy()


def relative(x: np.ndarray, ref: np.ndarray) -> float:
    """Return |x - ref| / |ref|; NaN when x holds one."""
    scale = np.linalg.norm(ref)
    return float(np.linalg.norm(x - ref) / (scale if scale > 0 else 1.0))


def offsets(lens: list[int]) -> np.ndarray:
    """Return int32 cumulative offsets (n + 1)."""
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def fa2(c: dict, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> tuple | None:
    """Return FA2's o, dq, dk, dv (tokens, heads, d), or None where its mask is another one."""
    if c["lens_q"] != c["lens_k"] or 0 in c["lens_q"]:
        return None
    g = c["heads"][0] // c["heads"][1]
    outs = []
    for s, e in itertools.pairwise(offsets(c["lens_q"])):
        x = [t[s:e].transpose(0, 1)[None].detach().clone().requires_grad_() for t in (q, k, v)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            kk, vv = (t.repeat_interleave(g, 1) for t in x[1:])
            o = F.scaled_dot_product_attention(x[0], kk, vv, is_causal=bool(c["causal"]))
        grads = torch.autograd.grad(o, x, do[s:e].transpose(0, 1)[None])
        outs.append([t[0].transpose(0, 1).detach().double().cpu().numpy() for t in (o, *grads)])
    return tuple(np.concatenate(t) for t in zip(*outs, strict=True))


class Problem:
    """Inputs, outputs and arguments of one case on the device, and its reference."""

    def __init__(self, lib: b.Library, c: dict) -> None:
        """Draw the inputs of case c."""
        self.lib, self.c = lib, c
        h, hk = c["heads"]
        d, (code, dtype) = c["d"], DTYPES[c["dtype"]]
        nq, nk = sum(c["lens_q"]), sum(c["lens_k"])
        fused = torch.randn(max(nq, nk), h + 2 * hk, d, device="cuda").to(dtype)
        if c["kind"] == "large":
            fused *= 8
        if c["kind"] == "hot":
            fused[nk // 3, h] *= 30
        self.q, self.k, self.v = fused[:nq, :h], fused[:nk, h : h + hk], fused[:nk, h + hk :]
        self.do = torch.randn(nq, h, d, device="cuda").to(dtype)
        self.cu = [offsets(c["lens_q"]), offsets(c["lens_k"])]
        self.cu_dev = [torch.from_numpy(x).cuda() for x in self.cu]
        p = b.Problem(code, 0, h, hk, d, c["causal"], 0, d**-0.5, len(c["lens_q"]), nq, nk)
        p.max_len_q, p.max_len_k = max(c["lens_q"]), max(c["lens_k"])
        self.p = p
        self.wholes = {
            "o": guarded(nq, h, d, dtype),
            "dq": guarded(nq, h, d, dtype),
            "dk": guarded(nk, hk, d, dtype),
            "dv": guarded(nk, hk, d, dtype),
        }
        self.lse = torch.full((h, nq), float("nan"), device="cuda")
        self.bits = [host(t) for t in (self.q, self.k, self.v, self.do)]

    def set_offsets(self, on_device: bool) -> None:
        """Point the problem at its offsets, unless the case leaves them out."""
        if not self.c["equal"]:
            self.p.cu_q, self.p.cu_k = (
                x.data_ptr() if on_device else y.ctypes.data for x, y in zip(self.cu_dev, self.cu, strict=True)
            )

    def reference(self) -> None:
        """Compute o, lse, dq, dk, dv in double on the host, without the device: any thread may do it."""
        (h, hk), d, nq, nk = self.c["heads"], self.c["d"], self.p.n_tokens_q, self.p.n_tokens_k
        self.set_offsets(False)
        q, k, v, do = self.bits
        self.ref = {n: np.zeros((nq, h, d)) for n in ("o", "dq")} | {n: np.zeros((nk, hk, d)) for n in ("dk", "dv")}
        self.ref["lse"] = np.zeros((h, nq))
        r = {n: x.ctypes.data_as(b.ct.POINTER(b.ct.c_double)) for n, x in self.ref.items()}
        fwd = b.ForwardArgs(self.p, b.view(q), b.view(k), b.view(v))
        self.lib.call("forward_ref", fwd, r["o"], r["lse"])
        bwd = b.BackwardArgs(self.p, b.view(q), b.view(k), b.view(v), b.View(), b.view(do))
        self.lib.call("backward_ref", bwd, r["dq"], r["dk"], r["dv"])

    def clear(self) -> None:
        """Poison every output."""
        for whole, _ in self.wholes.values():
            whole.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def run(self, path: int, backward: bool, deterministic: int) -> dict[str, np.ndarray]:
        """Run forward, and backward if asked; return the results; complain about writes outside the views."""
        self.clear()
        self.set_offsets(True)
        self.p.path, self.p.deterministic = path, deterministic
        out = {n: inner for n, (_, inner) in self.wholes.items()}
        q, k, v, o = (b.view(t) for t in (self.q, self.k, self.v, out["o"]))
        work = torch.zeros(self.lib.workspace_bytes("forward", self.p), dtype=torch.uint8, device="cuda")
        self.lib.call("forward", b.ForwardArgs(self.p, q, k, v, o, self.lse.data_ptr(), work.data_ptr()), None)
        names = ["o"]
        if backward:
            work2 = torch.empty(self.lib.workspace_bytes("backward", self.p), dtype=torch.uint8, device="cuda")
            work2.fill_(0x7F)
            grads = (b.view(out[n]) for n in ("dq", "dk", "dv"))
            args = b.BackwardArgs(self.p, q, k, v, o, b.view(self.do), self.lse.data_ptr(), *grads, work2.data_ptr())
            self.lib.call("backward", args, None)
            names += ["dq", "dk", "dv"]
        torch.cuda.synchronize()
        assert not work.any(), "the forward workspace was not left zero"
        for n in names:
            whole, inner = self.wholes[n]
            untouched = whole.isnan().sum().item() - inner.isnan().sum().item()
            assert untouched == whole.numel() - inner.numel(), f"{n}: written outside its view"
        got = {n: out[n].double().cpu().numpy() for n in names}
        got["lse"] = self.lse.double().cpu().numpy()
        return got


def lse_error(got: np.ndarray, ref: np.ndarray) -> float:
    """Return the largest difference; rows that see nothing must say -inf on both sides."""
    none = np.isneginf(ref)
    if not np.array_equal(none, np.isneginf(got)):
        return float("nan")
    return float(np.max(np.abs(np.where(none, 0, got) - np.where(none, 0, ref)), initial=0.0))


def main() -> int:
    """Run all cases on the paths asked for; print what is off and the worst errors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default="plain,hopper")
    parser.add_argument("--backward", default="plain,hopper", help="paths whose backward pass is checked")
    parser.add_argument("--deterministic", default="plain,hopper", help="paths whose fixed order is checked")
    options = parser.parse_args()
    torch.manual_seed(1)
    lib = b.Library()
    bad, n_checks, worst = 0, 0, {}
    problems = [Problem(lib, c) for c in cases()]
    with ThreadPoolExecutor() as pool:
        list(pool.map(Problem.reference, problems))
    for problem in problems:
        c = problem.c
        peer = fa2(c, problem.q, problem.k, problem.v, problem.do)
        for name in options.path.split(","):
            backward = name in options.backward.split(",")
            path = b.HOPPER if name == "hopper" else b.PLAIN
            runs = [("", problem.run(path, backward, 0))]
            if backward and name in options.deterministic.split(","):
                runs.append(("det", problem.run(path, backward, 1)))
                again = problem.run(path, backward, 1)
                if any(not np.array_equal(again[n], x) for n, x in runs[1][1].items()):
                    bad += 1
                    print("NOT REPEATED", name, c)
            for mode, got in runs:
                for i, n in enumerate(("o", "dq", "dk", "dv")):
                    if n not in got:
                        continue
                    error = relative(got[n], problem.ref[n])
                    peer_error = relative(peer[i], problem.ref[n]) if peer else 0.0
                    unit = 2.0**-9 if c["dtype"] == "bf16" else 2.0**-12
                    bound = max(1.2 * peer_error, 2 * unit if peer else 4 * unit)
                    n_checks += 1
                    ratio = error / bound
                    if not ratio <= worst.get((name, n), (0.0,))[0]:
                        worst[name, n] = (ratio, error, peer_error, str(c))
                    if not error <= bound:
                        bad += 1
                        print(f"BAD {name}{mode} {n}: error {error:.2e}, FA2 {peer_error:.2e}", c)
                error = lse_error(got["lse"], problem.ref["lse"])
                n_checks += 1
                if not error <= 1e-4 * max(
                    1.0, float(np.abs(problem.ref["lse"][np.isfinite(problem.ref["lse"])]).max(initial=0))
                ):
                    bad += 1
                    print(f"BAD {name} lse: error {error:.2e}", c)
    for (name, n), (ratio, error, peer_error, where) in sorted(worst.items()):
        print(f"worst {name:6} {n:2}: {error:.2e} (FA2 {peer_error:.2e}), {ratio:.2f} of the bound; {where}")
    print(f"{n_checks} checks, {bad} bad")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
