#!/bin/bash
# fsstress.sh SOURCES: xfstests' random operations on a tree, by three processes, and whether all of that can be read and removed.
set -u
. "$(dirname "$0")/checks.sh"

for seed in ${TERN_SEEDS:-1 2 3 4}; do
    mkdir "tree$seed"
    check "seed $seed" timeout 300 "$1/xfstests/fsstress" -d "$PWD/tree$seed" -n "${TERN_STEPS:-1000}" -p 3 -s "$seed"
    check "seed $seed: read" bash -c "find tree$seed -type f -exec cat {} + >/dev/null"
    check "seed $seed: removed" rm -r "tree$seed"
done
