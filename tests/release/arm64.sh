#!/usr/bin/env bash
# The emulator on AArch64, before a release: compares what the X-ray counts with this machine's and runs the emulator's tests.
#
#     sudo tests/release/arm64.sh FOLDER [PYTEST'S ARGUMENTS]
#
# Takes 90 minutes on two cores (by default: tests/emulator and tests/lessons/test_museum.py), or ten with `tests/emulator/test_tma.py`.
# FOLDER becomes a Debian 12 for arm64 (2 GB), whose programs qemu runs. It is kept for the next time: see with `mount` that nothing
# is mounted in it before you remove it. Only the compiler is this machine's own, the same g++ as a cross compiler: by qemu it
# would take ten times as long. Needs Debian 12 on x86-64, tests/release/counts.py and
#     apt-get install debootstrap qemu-user-static binfmt-support g++-12-aarch64-linux-gnu
#
# qemu on x86-64 makes the stores of a thread visible in their order, as an Arm core does not: tests/emulator/test_fences.py shows
# what is missing there on both only in part. Run `make test-all` on an Arm machine where one is to be had.
set -euo pipefail
root=$(realpath "${1:?give a folder for the Debian, on a file system that allows programs and devices}")
shift
checkout=$(realpath "$(dirname "$0")/../..")
python=${PYTHON:-$checkout/.venv/bin/python}
tests=("$@")
[ $# -gt 0 ] || tests=(tests/emulator tests/lessons/test_museum.py)

# ---- Debian, and Python's packages: torch 2.8's wheel for AArch64 is the last that is a CPU build
mountpoint -q /proc/sys/fs/binfmt_misc || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
update-binfmts --enable qemu-aarch64
if [ ! -e "$root/made" ]; then
  debootstrap --arch=arm64 --variant=minbase --include=g++,python3,python3-venv,python3-dev,binutils bookworm "$root" http://deb.debian.org/debian
  chroot "$root" python3 -m venv --without-pip /venv
  platforms=()
  for glibc in 2_17 2_26 2_27 2_28; do platforms+=(--platform "manylinux_${glibc}_aarch64"); done
  wheels=("$python" -m pip install --quiet --python-version 311 --only-binary=:all: "${platforms[@]}" --platform manylinux2014_aarch64)
  to=$root/venv/lib/python3.11/site-packages
  "${wheels[@]}" --no-deps --target "$to" torch==2.8.0  # its dependencies would be those of this machine
  "${wheels[@]}" --target "$to" filelock typing-extensions sympy networkx jinja2 fsspec numpy pandas matplotlib pytest packaging setuptools \
    nbformat nbclient
  "${wheels[@]}" --target "$root/ninja" ninja
  cp "$root/ninja/bin/ninja" "$root/venv/bin/"
  # This machine's compiler, found by its own paths under /host.
  mkdir -p "$root"/{host,checkout,cache,lib64}
  ln -sfn /host/usr/lib/x86_64-linux-gnu "$root/usr/lib/x86_64-linux-gnu"
  ln -sf /host/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 "$root/lib64/"
  ln -sfn /host/usr/aarch64-linux-gnu "$root/usr/aarch64-linux-gnu"
  printf '#!/bin/sh\nexec /host/usr/bin/aarch64-linux-gnu-g++-12 "$@"\n' > "$root/venv/bin/c++"
  chmod +x "$root/venv/bin/c++"
  touch "$root/made"
fi

# ---- what is mounted is unmounted, however this ends
mounted=()
leave() { for place in "${mounted[@]}"; do umount --lazy "$root/$place"; done; }
trap leave EXIT
attach() { mount --bind "$1" "$root/$2"; mounted=("$2" "${mounted[@]}"); }
attach / host
mount -o remount,ro,bind "$root/host"
attach "$checkout" checkout
attach /proc proc
attach /dev dev
attach /dev/shm dev/shm
there() {
  chroot "$root" env -i HOME=/root PATH=/venv/bin:/usr/bin:/bin LANG=C.UTF-8 FA_CACHE=/cache OMP_NUM_THREADS=1 \
    PYTHONPATH=/checkout PYTHONDONTWRITEBYTECODE=1 sh -c 'cd /checkout && exec "$@"' sh "$@"
}
there sh -c 'test "$(uname -m)" = aarch64 && c++ --version | head -n 1'

# ---- the counts, side by side
(cd "$checkout" && PYTHONPATH=. "$python" tests/release/counts.py > "$root/counts.here")
there python3 tests/release/counts.py > "$root/counts.there"
diff "$root/counts.here" "$root/counts.there" && echo "$(wc -l < "$root/counts.here") kernels, the same counts"

# ---- the tests
there python3 -m pytest -p no:cacheprovider --all -q "${tests[@]}"
