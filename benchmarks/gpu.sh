#!/usr/bin/env bash
# All that is measured on a GPU, in under nine minutes, the most telling first:
#
#     benchmarks/gpu.sh OUT [WHEELS]
#     benchmarks/gpu.sh OUT --tiny     # small, on the CPU: whether the rows run
#
# OUT gets the output and JSON of each part. WHEELS is a folder of wheels to install what is missing
# without a network. A part that takes too long is stopped, and the next one begins.
set -uo pipefail
out=${1:?a folder for the results} wheels=${2:-} tiny=
[ "$wheels" != --tiny ] || { tiny=--tiny wheels=; }
cd "$(dirname "$0")/.."
mkdir -p "$out"
began=$SECONDS total=520

if [ -n "$wheels" ]; then
    python3 -m pip install --quiet --no-index --find-links "$wheels" --no-deps "$wheels"/*.whl
fi
export PYTHONPATH="$PWD:$PWD/adapters:$PWD/tests:$PWD/benchmarks"
export XLA_PYTHON_CLIENT_PREALLOCATE=false

part() { # part NAME SECONDS COMMAND...: at most so many seconds, and no more than are left
    local name=$1 limit=$2 left=$((total - SECONDS + began))
    shift 2
    [ "$left" -gt 15 ] || { echo "$name: the time is up"; return; }
    [ "$limit" -lt "$left" ] || limit=$left
    echo "== $name, at most $limit s"
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$out/$name.txt"
    echo "== $name ended with ${PIPESTATUS[0]} after $((SECONDS - began)) s in all"
}

part moves 80 python3 benchmarks/gpu.py --rounds 5 --json "$out/moves.json"
part up 70 python3 benchmarks/gpu_rows.py $tiny --only up --seconds 55 --json "$out/up.json"
part rows 110 python3 benchmarks/gpu_rows.py $tiny --only 'down|file|between' --seconds 95 --json "$out/rows.json"
part models 140 python3 benchmarks/gpu_rows.py $tiny --only model --seconds 110 --json "$out/models.json"
[ -n "$tiny" ] || part tests 120 python3 -m pytest -q -n 0 -m gpu -p no:cacheprovider tests
part link 40 python3 benchmarks/link.py --rounds 3
