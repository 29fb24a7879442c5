"""Order at short N for 20, 30 to 33 and 23; thresholds of 32's peaked()."""
import random, statistics as st, sys, time, concurrent.futures as cf
import torch
import lazy32
from helpers.measure import by_family
from helpers.run import families, op
from helpers.run.kernel import load
edit, short = lazy32.edit, lazy32.short
text = {n: open(f"kernels/{f}.cu").read() for n, f in {"32": "32_ping_pong", "31": "31_warp_specialized", "30": "30_tma_wgmma", "20": "20_causal_gqa", "33": "33_backward_wgmma", "23": "23_backward_mma"}.items()}
least = lambda s, n=2048: edit(s, ("int64_t(4) * a.Nk * d", f"int64_t(4) * max(a.Nk, {n}) * d"))
A = lambda s: short(least(s), 512)
thr = lambda s, t: edit(s, ("least < 1.01f", f"least < {t}f"))
V = {("32", "base"): lambda s: s, ("32", "A"): A, ("32", "thr 1.5"): lambda s: thr(A(s), "1.5"), ("32", "thr 2"): lambda s: thr(A(s), "2."), ("32", "thr 3"): lambda s: thr(A(s), "3."), ("32", "thr 4"): lambda s: thr(A(s), "4."),
     ("32", "1024"): lambda s: short(least(s), 1024)}
for r in ("31", "30", "20"):
    V[r, "base"] = lambda s: s; V[r, "2048"] = least; V[r, "1024"] = lambda s: least(s, 1024); V[r, "4096"] = lambda s: least(s, 4096)
for h in (4, 8, 16, 32):
    V["33", f"{h}"] = lambda s, h=h: edit(s, ("int64_t heads = a.causal ? 16 : 1;", f"int64_t heads = a.causal ? {h} : 1;"))
    V["23", f"{h}"] = lambda s, h=h: edit(s, ("a.causal ? min(16, a.B * a.H) : 1", f"a.causal ? min({h}, a.B * a.H) : 1"))
def build(item):
    (r, name), make = item
    return (r, name), load(source=make(text[r]), device="cuda", quiet=True)
if __name__ == "__main__":
    with cf.ThreadPoolExecutor(12) as pool: K = dict(pool.map(build, V.items()))
    print("built", flush=True)
    def burst(call, n):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call(); torch.cuda.synchronize(); time.sleep(0.025); torch.cuda._sleep(4_000_000)
        a.record()
        for _ in range(n): call()
        b.record(); b.synchronize(); return a.elapsed_time(b) / n
    def row(label, calls, base, rounds=5):
        n = max(1, min(20, int(4 / (burst(calls[base], 2)))))
        t = {c: [] for c in calls}
        for i in range(rounds):
            for c in random.sample(list(calls), len(calls)): t[c].append(burst(calls[c], n))
        b = st.median(t[base])
        print(label, f"{b:.4f}", " ".join(f"{c}:{b/st.median(x):.3f}" for c, x in t.items() if c != base), flush=True)
    begin = time.time()
    every = families.every()
    for r in ("31", "30", "20"):
        for N in (512, 1024, 2048):
            for D in (128, 64):
                x = [torch.randn(by_family.TOKENS // N, 2048 // D, N, D, device="cuda", dtype=torch.float16) for _ in range(3)]
                row(f"{r} {N} D{D} c", {n: (lambda k=k: k(*x, causal=True)) for (q, n), k in K.items() if q == r}, "base")
    print(f"{time.time()-begin:.0f} s", flush=True)
    f = K["32", "base"]
    for r in ("33", "23"):
        for N in (512, 1024, 2048, 4096):
            for D in (128, 64):
                x = [torch.randn(by_family.TOKENS // N, 2048 // D, N, D, device="cuda", dtype=torch.float16) for _ in range(4)]
                o, lse = f(*x[:3], causal=True)
                row(f"{r} {N} D{D} c", {n: (lambda k=k: k(*x[:3], o, lse, x[3], causal=True)) for (q, n), k in K.items() if q == r}, "16")
    print(f"{time.time()-begin:.0f} s", flush=True)
    for name in ("randn", "Q × 2", "Q × 4", "falling", "sawtooth", "sink", "heads of gpt"):
        family = every[name]
        for N in ((family.N,) if family.N else (1024, 4096)):
            for D in (128, 64):
                for causal in (False, True):
                    if family.causal not in (None, causal): continue
                    cell = by_family.Cell(family, "fp16", causal, (by_family.TOKENS // N, by_family.WIDTH // D, N, N, D))
                    calls = by_family.calls({n: k for (r, n), k in K.items() if r == "32"}, cell.tensors(False), causal, by_family.WITHOUT)
                    row(f"{name:14} {N:5} D{D} {'c ' if causal else 'nc'}", {n: c for n, c in calls.items() if ("32", n) in K or n == "SDPA CUDNN"}, "base")
    print(f"{time.time()-begin:.0f} s", flush=True)
