import random, statistics as st, sys, time, concurrent.futures as cf
import torch
import lazy32
from helpers.measure import by_family, bench
from helpers.run import families, reference
from helpers.run.check import compare
from helpers.run.kernel import load
edit = lazy32.edit
old = {n: open(f"kernels/{f}.cu").read() for n, f in {"32": "32_ping_pong", "31": "31_warp_specialized", "33": "33_backward_wgmma", "23": "23_backward_mma", "20": "20_causal_gqa"}.items()}
new = {n: open(f"probe/short/{f}.cu").read() for n, f in {"32": "32_ping_pong", "31": "31_warp_specialized"}.items()}
V = {("32", "base"): old["32"], ("32", "new"): new["32"], ("31", "base"): old["31"], ("31", "new"): new["31"], ("23", "base"): old["23"], ("20", "base"): old["20"]}
for h in (2, 4, 6, 8, 12, 16):
    V["33", f"{h}"] = edit(old["33"], ("int64_t heads = a.causal ? 16 : 1;", f"int64_t heads = a.causal ? {h} : 1;"))
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
    # errors
    for name in ("growing",):
        for D in (64, 128):
            for dtype in ("fp16", "bf16"):
                cell = by_family.Cell(every[name], dtype, True, (1, 8, 4096, 4096, D))
                q, k, v, do = cell.tensors(True)
                exact = reference.Case(name, q, k, v, causal=True)
                eo, el = exact.exact()[:2]
                leaf = [x.double().requires_grad_() for x in (q, k, v)]
                s = leaf[0] @ leaf[1].mT / D ** 0.5
                s = s.masked_fill(torch.ones(4096, 4096, device="cuda", dtype=torch.bool).triu(1), -torch.inf)
                (s.softmax(-1) @ leaf[2]).backward(do.double())
                g = [x.grad for x in leaf]
                out = []
                for f in ("20", "32"):
                    o, lse = K[f, "base"](q, k, v, causal=True)
                    for b, kk in (("23", "base"), ("33", "16")):
                        d = K[b, kk](q, k, v, o, lse, do, causal=True)
                        out.append(f"{f}+{b} " + " ".join(f"{((x.double() - y).norm() / y.norm()).item():.3e}" for x, y in zip(d, g)) + f" lse {(lse.double() - el).abs().max().item():.1e}")
                qq = [x.detach().clone().requires_grad_() for x in (q, k, v)]
                from torch.nn.attention import sdpa_kernel, SDPBackend
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    oo = torch.nn.functional.scaled_dot_product_attention(*qq, is_causal=True)
                oo.backward(do)
                out.append("FLASH " + " ".join(f"{((x.grad.double() - y).norm() / y.norm()).item():.3e}" for x, y in zip(qq, g)))
                print(name, D, dtype, "\n   " + "\n   ".join(out), flush=True)
                del s, leaf, g
    print(f"{time.time()-begin:.0f} s", flush=True)
    for D in (128, 64):
        for N in (512, 1024, 2048, 4096, 8192, 16384):
            for Hkv in (1, 4):
                H = 2048 // D
                q, do = (torch.randn(by_family.TOKENS // N, H, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                k, v = (torch.randn(by_family.TOKENS // N, H // Hkv, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                x = (q, k, v)
                o, lse = K["32", "base"](*x, causal=True)
                row(f"33 {N} D{D} c 1/{Hkv}", {n: (lambda kk=kk: kk(*x, o, lse, do, causal=True)) for (r, n), kk in K.items() if r == "33"}, "16")
                if Hkv == 4 and N <= 2048:
                    for r in ("32", "31"):
                        row(f"{r} {N} D{D} c 1/{Hkv}", {n: (lambda kk=kk: kk(*x, causal=True)) for (rr, n), kk in K.items() if rr == r}, "base")
    print(f"{time.time()-begin:.0f} s", flush=True)
    for name in ("randn", "Q × 2", "Q × 4", "Q × 8", "falling", "growing", "sawtooth", "sink", "one key", "heads of gpt", "heads of rxnmapper"):
        family = every[name]
        for N in ((family.N,) if family.N else (512, 1000, 2048, 16384)):
            for D in (128, 64):
                for causal in (False, True):
                    if family.causal not in (None, causal): continue
                    if N == 16384 and D == 64: continue
                    cell = by_family.Cell(family, "bf16", causal, (by_family.TOKENS // N, by_family.WIDTH // D, N, N, D))
                    calls = by_family.calls({n: k for (r, n), k in K.items() if r == "32"}, cell.tensors(False), causal, by_family.WITHOUT)
                    row(f"{name:14} {N:5} D{D} {'c ' if causal else 'nc'}", {n: c for n, c in calls.items() if ("32", n) in K or n == "SDPA CUDNN"}, "base", 5)
    print(f"{time.time()-begin:.0f} s", flush=True)
