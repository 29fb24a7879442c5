import os, re, sys, tempfile, time
from pathlib import Path
import hopper_variants as hv
import torch
from helpers.bench import measure
from helpers.kernel import Kernel
from helpers.ladder import parse
from torch.nn.attention import SDPBackend, sdpa_kernel

def variant(label):
    name, D, *macros = label.split()
    return hv.Variant(label, int(D[1:]), "", dict((k, int(v)) for k, v in (m.split("=") for m in macros)), file=name)

def kernel(v, built):
    rung = parse(hv.source_of(v), Path(f"{v.file}.cu"))
    return Kernel(rung, "cuda", hv.Library(built.library), 0.0)

def tensors(D, N):
    torch.manual_seed(N)
    return [torch.randn((16384 // N, 2048 // D, N, D), device="cuda", dtype=torch.bfloat16) for _ in range(3)]

def sdpa(backend, causal, q, k, v):
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

if __name__ == "__main__":
    mode, labels = sys.argv[1], sys.argv[2].split(",")
    vs = [variant(l) for l in labels if l != "cudnn"]
    from concurrent.futures import ThreadPoolExecutor
    folder = Path(tempfile.mkdtemp())
    with ThreadPoolExecutor(14) as pool:
        builts = list(pool.map(lambda v: hv.build(v, folder, True), vs))
    for v, b in zip(vs, builts):
        print(v.label, b.words, f"{b.registers} registers, {b.spilled} B spilled, {b.exponentials}, {b.seconds:.1f} s")
    ks = {v.name: (v.D, kernel(v, b)) for v, b in zip(vs, builts) if b.library}
    from helpers import check
    for n, (D, kern) in ks.items():
        if mode == "ncu": break
        bad = [c.explain().split("\n")[0] for c in check(kern, hv.check_cases(D)).comparisons if not c.ok]
        if bad: print("WRONG", n, len(bad), bad[0])
    if mode == "ncu":
        D, kern = next(iter(ks.values()))
        x = tensors(D, 4096)
        for _ in range(3): kern(*x)
        torch.cuda.synchronize()
    else:
        import pandas as pd
        rows = {}
        for D in (128, 64):
            mine = {n: k for n, (d, k) in ks.items() if d == D}
            if not mine: continue
            for N, causal in [(4096, False), (4096, True), (1024, False), (1024, True), (16384, False), (16384, True), (512, False), (512, True)]:
                x = tensors(D, N)
                calls = {n: (lambda q, k, v, f=f, c=causal: f(q, k, v, causal=c)) for n, f in mine.items()}
                calls["CUDNN"] = lambda q, k, v, c=causal: sdpa(SDPBackend.CUDNN_ATTENTION, c, q, k, v)
                s = measure(calls, x, rounds=7, burst_ms=3.0, seed=N)
                p = s.pivot(index="round", columns="name", values="ms")
                for n in mine:
                    rows.setdefault(n, {})[f"{N}{'c' * causal}"] = (p["CUDNN"] / p[n]).median()
                flops = 4 * 2048 * 16384 * N * (0.5 if causal else 1)
                rows.setdefault(f"TFLOPS CUDNN D{D}", {})[f"{N}{'c' * causal}"] = flops / p["CUDNN"].median() / 1e9
        t = pd.DataFrame(rows).T
        long = [c for c in t if not c.startswith("512")]
        t["geo"] = t[long].prod(axis=1) ** (1 / len(long))
        pd.set_option("display.width", 200, "display.max_columns", None, "display.max_colwidth", 60)
        print(t.round(3).to_string())
        t.to_csv(Path(os.environ["OUT"]) / f"look_{mode}.csv")
