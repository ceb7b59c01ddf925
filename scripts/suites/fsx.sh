#!/bin/bash
# fsx.sh SOURCES: random reads, writes, mappings and truncations of a file against a copy in memory.
set -u
. "$(dirname "$0")/checks.sh"

for seed in ${TERN_SEEDS:-1 2 3 4 5 6 7 8}; do
    check "seed $seed" timeout 300 "$1/fsx/bin/fsx" -N "${TERN_STEPS:-3000}" -S "$seed" "file$seed"
done
