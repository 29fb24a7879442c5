import random, statistics as st, sys, time, concurrent.futures as cf
import torch
import lazy32
from helpers.measure import by_family
from helpers.run import families
from helpers.run.kernel import load
edit = lazy32.edit
o32, o33 = (open(f"kernels/{f}.cu").read() for f in ("32_ping_pong", "33_backward_wgmma"))
n32, n33 = (open(f"probe/short/{f}.cu").read() for f in ("32_ping_pong", "33_backward_wgmma"))
def rule(cap, mb): return edit(n33, ("min(int64_t(8), (16 << 20)", f"min(int64_t({cap}), ({mb} << 20)"))
V = {("32", "base"): o32, ("32", "new"): n32, ("33", "base"): o33, ("33", "new"): n33, ("33", "8, 24"): rule(8, 24), ("33", "16, 16"): rule(16, 16), ("33", "8, 32"): rule(8, 32), ("33", "1"): rule(1, 16), ("33", "8, 12"): rule(8, 12)}
def build(item): return item[0], load(source=item[1], device="cuda", quiet=True)
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
    for D in (128, 64):
        for N in (512, 1000, 1024, 2048, 3072, 4096, 6144, 8192, 16384, 32768):
            for Hkv, det in ((1, False), (1, True)):
                H = 2048 // D
                B = max(1, by_family.TOKENS // N)
                q, do = (torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                k, v = (torch.randn(B, H // Hkv, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                x = (q, k, v)
                o, lse = K["32", "base"](*x, causal=True)
                row(f"33 {N} D{D} c {'det' if det else '   '}", {n: (lambda kk=kk: kk(*x, o, lse, do, causal=True, deterministic=det)) for (r, n), kk in K.items() if r == "33"}, "base")
    print(f"{time.time()-begin:.0f} s", flush=True)
    for name in ("randn", "Q × 2", "growing", "sawtooth", "falling"):
        family = every[name]
        for N in (1024, 2048, 4096, 16384):
            for D in (128, 64):
                for causal in (False, True):
                    if N == 16384 and D == 64: continue
                    cell = by_family.Cell(family, "bf16", causal, (by_family.TOKENS // N, by_family.WIDTH // D, N, N, D))
                    calls = by_family.calls({n: k for (r, n), k in K.items() if r == "32"}, cell.tensors(False), causal, by_family.WITHOUT)
                    row(f"{name:14} {N:5} D{D} {'c ' if causal else 'nc'}", {n: c for n, c in calls.items() if ("32", n) in K}, "base", 5)
    print(f"{time.time()-begin:.0f} s", flush=True)
