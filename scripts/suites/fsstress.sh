#!/bin/bash
# fsstress.sh SOURCES: runs xfstests' random operations on a tree in three processes, then reads and
# removes the tree.
set -u
. "$(dirname "$0")/checks.sh"

for seed in ${TERN_SEEDS:-1 2 3 4}; do
    mkdir "tree$seed"
    check "seed $seed" timeout 300 "$1/xfstests/fsstress" -d "$PWD/tree$seed" -n "${TERN_STEPS:-1000}" -p 3 -s "$seed"
    check "seed $seed: read" bash -c "find tree$seed -type f -exec cat {} + >/dev/null"
    check "seed $seed: removed" rm -r "tree$seed"
done
