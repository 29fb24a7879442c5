export PYTHONPATH=$PWD:$PWD/probe:$PWD/probe/fa3:/tmp/site:$(ls -d /tmp/site/nvidia_cutlass_dsl/*packages 2>/dev/null | paste -sd:)
