export PYTHONPATH="$PWD:$PWD/kernels/drafts" PYTHONUNBUFFERED=1 FA_CACHE=/tmp/c1
O=$OUT; mkdir -p /tmp/o
n="next_32 D128"; l="late_32 D128"
D128="hopper_forward D128 INNER=1 ORDER=2 DRAIN=1,$n,$n SPLIT=0,$n DRAIN=0,$n DRAIN=0 SPLIT=0,$l,$l SPLIT=0,$n Q_REG=1,$l Q_REG=1,$n REGS=40,next_31 D128"
n="next_32 D64"; l="late_32 D64"
D64="hopper_forward D64 INNER=1 ORDER=2 DRAIN=1 POLY=1,$n,$n SPLIT=0,$n POLY=1,$n DRAIN=0,$n DRAIN=0 POLY=1,$l,$l POLY=1,$l SPLIT=0 POLY=1,$n SKIP=0,next_31 D64"
(export CUDA_VISIBLE_DEVICES=0; timeout 120 python3 kernels/drafts/look.py d128 "$D128" > $O/d128.txt 2>&1
timeout 125 python3 kernels/drafts/backward_mma_variants.py > $O/b23.txt 2>&1) &
(export CUDA_VISIBLE_DEVICES=1; timeout 120 python3 kernels/drafts/look.py d64 "$D64" > $O/d64.txt 2>&1
i=5; for v in "late_32 D128" "late_32 D64"; do i=$((i+1))
timeout 60 ncu --clock-control none -k "regex:warp_spec|ping_pong" --launch-skip 2 --launch-count 1 --section SourceCounters --section WarpStateStats --section ComputeWorkloadAnalysis --section SpeedOfLight --section SchedulerStats -o /tmp/o/r$i -f python3 kernels/drafts/look.py ncu "$v" > /tmp/o/log$i.txt 2>&1
(ncu -i /tmp/o/r$i.ncu-rep > /tmp/o/ncu$i.txt 2>&1; ncu -i /tmp/o/r$i.ncu-rep --page source --csv > /tmp/o/src$i.csv 2>&1); done
timeout 100 python3 -m helpers.bench 20_causal_gqa > /tmp/o/b20.txt 2>&1) &
(export CUDA_VISIBLE_DEVICES=2; cd $PWD; OUT=/tmp/o timeout 130 python3 kernels/drafts/hopper_backward_variants.py > $O/b33.txt 2>&1
timeout 100 python3 -m helpers.bench 21_split_kv > /tmp/o/b21.txt 2>&1) &
(export CUDA_VISIBLE_DEVICES=3; timeout 125 python3 kernels/drafts/backward_fp32_variants.py --seconds 110 > $O/b22.txt 2>&1) &
for t in $(seq 1 44); do sleep 5; [ $(jobs -r | wc -l) -eq 0 ] && break; done
cp -r data/nvidia-h200 /tmp/o/data; tar czf $OUT/x.tgz -C /tmp o
for f in d128 d64; do grep -v "registers," $O/$f.txt; done; for f in b33 b22 b23; do tail -45 $O/$f.txt | cut -c1-150; done; date
