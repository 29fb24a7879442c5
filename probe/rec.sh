# rec.sh OUT "record arguments" ...: records one after the other, packs data/ after each
out=$1; shift
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
for r in "$@"; do b=$(date +%s); python3 -m helpers record $r > /tmp/rec.log 2>&1; rc=$?
  echo "== $r: rc $rc, $(( $(date +%s) - b )) s"; cat /tmp/rec.log >> $out/rec.log; [ $rc = 0 ] && tail -${TAIL:-2} /tmp/rec.log || tail -8 /tmp/rec.log
  tar czf $out/data.tgz data/nvidia-h[12]00*; done
