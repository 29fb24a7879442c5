"""Records rungs without the seconds of their builds: timings, error, memory. All kernels are built first, side by side."""
import concurrent.futures as cf, sys, time
from helpers import record
from helpers.ladder.rung import rung
from helpers.measure import recording as r
from helpers.run.kernel import load
def build(stem): load(stem, device="cuda", quiet=True)
if __name__ == "__main__":
    stems = [rung(s).stem for s in sys.argv[1:]]
    b = time.time()
    with cf.ThreadPoolExecutor(12) as pool: list(pool.map(build, stems))
    print(f"built in {time.time()-b:.0f} s", flush=True)
    for stem in stems:
        b = time.time()
        kernel = r.right(stem); g = kernel.rung
        for kind, frame, seen in r.timings(kernel):
            record.save(g.stem, kind, frame, extra=seen)
            r.show(kind, frame, g.stem)
        record.save(g.stem, "error", r.errors(kernel, g.op, dtypes=g.dtypes))
        if g.op == "attention" and "forward" in record.kinds(g):
            record.save(g.stem, "memory", r.memories(kernel, g.stem, dtypes=g.dtypes))
        print(f"== {stem}: {time.time()-b:.0f} s", flush=True)
