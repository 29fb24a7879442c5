"""Errors of variants of 32 on the emulator by family: norm of the difference over that of the exact output."""
import sys, time, torch
from helpers.run.kernel import load
from helpers.run import families
from helpers.measure.by_family import Cell
from helpers.run.reference import Case
N, H, D = int(sys.argv[1]), int(sys.argv[5]), int(sys.argv[4])
names = sys.argv[2].split(",")
K = {n: load(source=open(f"probe/32_{n}.cu" if n != "base" else "kernels/32_ping_pong.cu").read(), device="cpu", quiet=True) for n in names}
every = families.every()
for fam in sys.argv[3].split(","):
    f = every[fam]
    for causal in ((0, 1) if f.causal is None else (f.causal,)):
        for dtype in ("fp16",):
            x = f.inputs((1, H, N, N, D), dtype, "cpu", causal=bool(causal))
            exact = Case(fam, *x[:3], causal=bool(causal)).exact()[0]
            out = []
            for n, k in K.items():
                b = time.time(); o, lse = k(*x, causal=bool(causal)); 
                out.append(f"{n} {((o.double()-exact).norm()/exact.norm()).item():.3e} ({time.time()-b:.0f} s)")
            print(fam, "causal" if causal else "", dtype, "; ".join(out), flush=True)
