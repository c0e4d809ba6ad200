#!/usr/bin/env bash
# Builds on a machine with one GPU, without network, and checks and times everything there within
# 8 minutes. With --emulate the same code runs on the CPU with what is built already, at tiny sizes.
#
#   tests/gpu/run.sh [--emulate] [--out FILE.json] [--logs FOLDER] [--only SECTION ...]
#
# PYTHON names the interpreter, python3 otherwise. The exit status is 0 if no check failed.
# To keep the results in bench/RESULTS.md: --out bench/results/gpu.json, then python -m bench.render.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}

case " $* " in
  *" --emulate "*) exec "$python" "$here/main.py" "$@" ;;
esac

caller=$PWD
cd "$root"
# Where ninja is, if it was installed beside the interpreter.
PATH=$(dirname "$(command -v "$python")"):$PATH
described=$("$python" "$here/environment.py") || { echo "$described" >&2; exit 1; }
echo "$described"
capability=$("$python" -c 'import json, sys; print(json.loads(sys.argv[1])["machine"]["capability"])' \
  "$(tail -n 1 <<<"$described")")

# For this card alone: nothing else runs here.
log=$root/build/gpu-build.log
mkdir -p "$root/build"
started=$SECONDS
echo "building for $capability, log in $log ..."
export PYDIST_CUDA=1 TORCH_CUDA_ARCH_LIST=$capability MAX_JOBS=${MAX_JOBS:-$(nproc)}
if [ -z "${CUDA_HOME:-}" ] && [ -x /usr/local/cuda/bin/nvcc ]; then
  export CUDA_HOME=/usr/local/cuda
fi
if ! "$python" setup.py -q build_ext --inplace >"$log" 2>&1; then
  tail -n 40 "$log" >&2
  echo "The build failed; its whole log is $log." >&2
  exit 1
fi
echo "built in $((SECONDS - started)) s"

cd "$caller"
# Before any other pydist that may be installed.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$here/main.py" "$@"
