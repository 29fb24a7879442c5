mkdir -p /tmp/w /tmp/site
cp probe/fa4c/*.whl /tmp/w/; cat /tmp/w/part_aa /tmp/w/part_ab probe/fa4c/part_ac > /tmp/w/nvidia_cutlass_dsl_libs_cu13-4.8.1-cp312-cp312-manylinux_2_28_x86_64.whl; rm -f /tmp/w/part_a?
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site /tmp/w/*.whl 2>&1 | tail -2
ls -d /tmp/site/nvidia_cutlass_dsl/*
