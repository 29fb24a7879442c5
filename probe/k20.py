"""Variants of 20 beside 13 and FLASH: k20.py"""
import concurrent.futures as cf, time
import pandas as pd, torch
from helpers import record
from helpers.measure import bench, by_family
from helpers.run.kernel import load
from helpers.ladder.rung import rung
import subprocess
OLD = open("probe/k20_before.cu").read()
K = {}
def build(item): return item[0], load(**item[1], device="cuda", quiet=True)
if __name__ == "__main__":
    with cf.ThreadPoolExecutor(4) as pool:
        K = dict(pool.map(build, {"20": {"which": "20"}, "before": {"source": OLD}, "13": {"which": "13"}}.items()))
    rows = []
    for cell in by_family.cells(rung("20"), (512, 1024, 4096, 16384)):
        if cell.dtype != "fp16" or cell.family.name not in ("randn", "Q × 2", "falling", "one key", "growing"): continue
        x = cell.tensors(False)
        own = {n: k for n, k in K.items() if n != "13" or not cell.causal}
        calls = by_family.calls(own, x, cell.causal, (*by_family.WITHOUT, "SDPA CUDNN", "FA3", "FA4"))
        ms = bench.measure(calls, (), 5, burst_ms=2.5).groupby("name")["ms"].median()
        rows.append({"family": cell.family.name, "c": int(cell.causal), "D": cell.shape[4], "N": cell.shape[2], "gain": ms["before"] / ms["20"], "x FLASH": ms["SDPA FLASH"] / ms["20"], "x 13": ms.get("13", float("nan")) / ms["20"], "before x 13": ms.get("13", float("nan")) / ms["before"]})
    t = pd.DataFrame(rows); print(t.round(3).to_string(index=False))
    print(t.groupby(["c", "D"])[["gain", "x FLASH", "x 13", "before x 13"]].agg(record.geometric_mean).round(3))
