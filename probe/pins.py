"""Variants of 32 by family beside FA3 and cuDNN: ratios to base and FA3 / each."""
import concurrent.futures as cf, sys, time
import pandas as pd, torch
from helpers import record
from helpers.measure import bench, by_family
from helpers.run.kernel import load
from helpers.ladder.rung import rung
NAMES = sys.argv[1].split(",")
def text(n): return open("kernels/32_ping_pong.cu" if n == "base" else f"probe/32_{n}.cu").read()
def build(n): return n, load(source=text(n), device="cuda", quiet=True)
if __name__ == "__main__":
    with cf.ThreadPoolExecutor(8) as pool: K = dict(pool.map(build, NAMES))
    print("built", flush=True)
    rows, begin = [], time.time()
    r32 = rung("32")
    lengths = (512, 1024, 2048, 4096, 16384)
    for cell in by_family.cells(r32, lengths):
        if cell.dtype != "fp16": continue
        if cell.family.name not in ("randn",) and cell.shape[2] in (512, 2048) and cell.family.N is None: continue
        x = cell.tensors(False)
        calls = by_family.calls(K, x, cell.causal, (*by_family.WITHOUT, "SDPA FLASH"))
        f = bench.measure(calls, (), 5, burst_ms=2.5)
        ms = f.groupby("name")["ms"].median()
        row = {"family": cell.family.name, "c": int(cell.causal), "D": cell.shape[4], "N": cell.shape[2]}
        row |= {n: ms["base"] / ms[n] for n in NAMES if n != "base"}
        row |= {f"{p}/{n}": ms[p] / ms[n] for p in ("FA3", "SDPA CUDNN") if p in ms for n in NAMES}
        rows.append(row)
        del calls, x; torch.cuda.empty_cache()
    t = pd.DataFrame(rows); pd.set_option("display.width", 250, "display.max_rows", 400, "display.max_columns", 30)
    t.to_csv(sys.argv[2], index=False)
    print(t.round(3).to_string(index=False))
    print(t.groupby(["family", "c", "D"])[[c for c in t if c not in ("family", "c", "D", "N")]].agg(record.geometric_mean).round(3).to_string())
    print(f"{time.time() - begin:.0f} s")
