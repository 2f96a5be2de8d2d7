#!/usr/bin/env bash
# Profiles `npmoe bench`: every kernel by its name, which says op and format.
#
#   bench/profile.sh graphs [arguments of npmoe bench]   steps as they run: kernels inside CUDA graphs
#   bench/profile.sh ranges [arguments of npmoe bench]   steps without graphs: NVTX ranges step, layer, op
#   bench/profile.sh ncu    [arguments of npmoe bench]   without graphs, counters of the kernels of a step
#
# Writes npmoe-MODE.nsys-rep (or .ncu-rep) here, or under the path in OUT, and prints a summary.
# PYTHON names the interpreter that has npmoe, KERNELS how many kernels ncu looks at.
set -euo pipefail

python=${PYTHON:-python3}
usage() {
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
need() {
  command -v "$1" > /dev/null && return
  echo "profile.sh: $1 is not on the PATH. It comes with NVIDIA $2: https://developer.nvidia.com/$3" >&2
  if [ "$1" = nsys ] && command -v ncu > /dev/null; then
    echo "profile.sh: ncu is there; it shows the same kernels one by one: $0 ncu $arguments" >&2
  fi
  exit 1
}

[ $# -ge 1 ] || usage
mode=$1
shift
arguments=$*
out=${OUT:-npmoe-$mode}
case $mode in
  graphs)
    need nsys "Nsight Systems" nsight-systems
    nsys profile --trace=cuda,nvtx --cuda-graph-trace=node --force-overwrite=true --output="$out" \
      "$python" -m npmoe bench --device cuda "$@"
    nsys stats --report cuda_gpu_kern_sum "$out.nsys-rep"
    ;;
  ranges)
    need nsys "Nsight Systems" nsight-systems
    nsys profile --trace=cuda,nvtx --force-overwrite=true --output="$out" \
      "$python" -m npmoe bench --device cuda --nvtx "$@"
    nsys stats --report nvtx_gpu_proj_sum --report cuda_gpu_kern_sum "$out.nsys-rep"
    ;;
  ncu)
    need ncu "Nsight Compute" nsight-compute
    ncu --nvtx --nvtx-include "step/" --launch-count "${KERNELS:-100}" --clock-control none \
      --force-overwrite --export "$out" "$python" -m npmoe bench --device cuda --nvtx "$@"
    ncu --import "$out.ncu-rep" --print-summary per-kernel
    ;;
  *) usage ;;
esac
