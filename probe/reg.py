import os, random, statistics as st, sys, time
import torch
from helpers.measure import ring as M
from helpers.run import ring, op
from helpers.run.kernel import load
from helpers.run.ranks import launch

def work(me, label):
    import torch, torch.distributed as dist
    line = []
    nxt, last = (me.rank + 1) % me.ranks, (me.rank - 1) % me.ranks
    for n in (1024, 8192, 32768):
        x = [torch.randn(1, 16, n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]; y = [torch.empty_like(t) for t in x]
        def shift():
            ops = [dist.P2POp(dist.isend, t, nxt) for t in x] + [dist.P2POp(dist.irecv, t, last) for t in y]
            for w in dist.batch_isend_irecv(ops): w.wait()
        ms = min(M._slowest(me, M._burst(me, M._ready(shift), 10, True, hold_ms=3.0)) for _ in range(3))
        ok = all(torch.equal(a.sum(), a.sum()) for a in y)
        line.append(f"{2*x[0].numel()*2/1e6:.0f} MB {ms*1e3:.0f} us {2*x[0].numel()*2/ms/1e6:.0f} GB/s")
    if me.rank == 0: print(f"{label:22}|", " ; ".join(line), flush=True)
    del x, y
    line = []
    for N, D, causal in ((16384, 128, True), (16384, 64, True), (16384, 128, False), (65536, 128, True), (65536, 64, True)):
        H = 2048 // D
        whole = M._inputs(me, N, D, H, False)
        q, k, v, _ = [t[:, :, : N // me.ranks].contiguous() for t in whole]
        layout = "zigzag" if causal else "contiguous"
        plan = ring.agree(q, k, v, None, causal, layout)
        one = op.operator(ring.forward_stem(q, k, causal))
        calls = {"one": lambda: one(*whole[:3], None, causal), "ring": lambda: ring.ring_attention(q, k, v, None, causal, layout, plan=plan)}
        with torch.no_grad():
            for c in calls.values(): c(); c()
            times = {n: [] for n in calls}
            for i in range(7 if N < 65536 else 5):
                for name in random.Random(N + i).sample(list(calls), 2):
                    c = 12 if N < 65536 else 2
                    times[name].append(M._slowest(me, M._burst(me, M._ready(calls[name]), c, True, hold_ms=2.0 * c if N < 65536 else 0)))
        line.append(f"{N//1024}k D{D} {'c' if causal else 'nc'} {st.median([o/t for o, t in zip(times['one'], times['ring'])]):.3f} ({st.median(times['ring']):.3f})")
        del whole, q, k, v; torch.cuda.empty_cache()
    if me.rank == 0: print(f"{label:22}|", " ; ".join(line), flush=True)

REG = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}
def ch(n): return {"NCCL_MIN_P2P_NCHANNELS": str(n)}  # of two ranks: half of them to a message
VARIANTS = {"16 channels": ch(32), "8 channels": ch(16), "reg 16": REG | ch(32), "reg 8": REG | ch(16), "reg 4": REG | ch(8), "reg 8 cap": REG | ch(16) | {"NCCL_MAX_P2P_NCHANNELS": "16"}, "reg 4 cap": REG | ch(8) | {"NCCL_MAX_P2P_NCHANNELS": "8"}}
if __name__ == "__main__":
    for s in ("50_ring", "32_ping_pong"): load(s, device="cuda", quiet=True)
    print(torch.cuda.nccl.version(), torch.__version__)
    only = sys.argv[1:]
    for label, env in VARIANTS.items():
        if only and label not in only: continue
        for k in ("NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS", *REG): os.environ.pop(k, None)
        os.environ.update(env)
        t = time.time()
        try: launch(work, torch.cuda.device_count(), label, device="cuda", timeout=60)
        except Exception as e: print(label, repr(e)[:1500])
        print(f"  {time.time()-t:.0f} s", flush=True)
