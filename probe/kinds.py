"""kinds.py STEM KIND ...: records these kinds of a rung"""
import sys
from helpers import record
from helpers.measure import bench, recording as r, workloads
k = r.right(sys.argv[1])
for kind in sys.argv[2:]:
    with bench.watch() as seen: frame = workloads.samples(kind, k, k.rung, False)
    record.save(k.rung.stem, kind, frame, extra=seen | r._versions(frame)); r.show(kind, frame, k.rung.stem)
