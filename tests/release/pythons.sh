#!/usr/bin/env bash
# Before a release: with each Python, the newest packages, and with the oldest one the oldest packages that pyproject.toml allows.
#
#     tests/release/pythons.sh [3.10 3.14 ...]     (as `uv python find` finds them: on PATH)
#
# Each is a new environment: some 3 minutes and 4 GB that are freed again. Not in CI, which has one Python.
set -euo pipefail
cd "$(dirname "$0")/../.."
versions=("${@:-3.10 3.11 3.12 3.13 3.14}")
read -ra versions <<< "${versions[*]}"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/uv" && "$scratch/uv/bin/pip" install --quiet --disable-pip-version-check uv
uv=$scratch/uv/bin/uv

install() { # PYTHON RESOLUTION: into $scratch/venv, torch's CPU build where it can be reached
  local packages=("$uv" pip install --quiet --only-binary :all: --python "$scratch/venv/bin/python")
  rm -rf "$scratch/venv" && "$uv" venv --quiet --python "$1" "$scratch/venv" &&
    { "${packages[@]}" --resolution "$2" --torch-backend=cpu -r pyproject.toml 2> "$scratch/why" ||
      "${packages[@]}" --resolution "$2" -r pyproject.toml; } &&
    "${packages[@]}" "pytest>=8" "pytest-xdist>=3" packaging pyyaml tomli vermin &&
    "$uv" pip install --quiet --python "$scratch/venv/bin/python" --no-deps -e .
}

try() { # what a Python or its packages can break: imports, tables, figures, magics, and a kernel on the emulator
  "$scratch/venv/bin/python" -m pytest --all -p no:cacheprovider --disable-warnings tests/ladder tests/record tests/figures \
    tests/house/test_install.py tests/house/test_face.py tests/house/test_commands.py tests/run/test_magic.py \
    tests/lessons/test_pairs.py tests/lessons/test_exercise.py &&
    "$scratch/venv/bin/python" -m helpers check 04 --device cpu
}

failed=() tried=0
for version in "${versions[@]}"; do
  if ! "$uv" python find --quiet --no-python-downloads "$version" > /dev/null 2>&1; then
    echo "== Python $version: not on this machine, not tried"
    continue
  fi
  for resolution in highest $([ "$version" = 3.10 ] && echo lowest-direct); do
    echo "== Python $version, $resolution versions"
    tried=$((tried + 1))
    { install "$version" "$resolution" && try; } || failed+=("$version $resolution")
  done
done
echo "pythons: $tried environments tried, ${#failed[@]} failed"
[ "$tried" != 0 ] && [ ${#failed[@]} = 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
