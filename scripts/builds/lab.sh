# A cluster inside this machine, set up as bed.py does it for the other benchmarks, and measurements
# of its nodes from outside. The sourcing script sets $programs and $lab.
# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034

processors=$(nproc)
nodes=() first=() address=()

# The control group that counts a node's CPU time, in version 1 or 2.
group() {
    local mount
    for mount in cpuacct cpu,cpuacct .; do
        [[ ! -d /sys/fs/cgroup/$mount/tern-lab/$lab/node$1 ]] || { echo "/sys/fs/cgroup/$mount/tern-lab/$lab/node$1"; return; }
    done
    echo "bench-builds: no control group counts what node $1 uses" >&2
    return 1
}

# CPU microseconds used by all of these nodes.
used() {
    local node place
    for node; do
        place=$(group "$node")
        cat "$place/cpuacct.usage" 2>/dev/null || sed -n 's/^usage_usec \(.*\)/\1000/p' "$place/cpu.stat"
    done | awk '{ sum += $1 } END { printf "%d\n", sum / 1000 }'
}

pids() { find "$(group "$1")" -name cgroup.procs -exec cat {} + 2>/dev/null || true; }

# Bytes sent by all nodes, read from outside, so that the nodes are not disturbed.
sent() {
    local node
    for node in "${nodes[@]}"; do
        sed -n 's/^ *eth0: *//p' "/proc/${first[node]}/net/dev"
    done | awk '{ sum += $9 } END { printf "%d\n", sum }'
}

# Gives the lab priority over all other processes of this machine (10000), or ends that priority
# (100).
go_first() {
    local path
    for path in /sys/fs/cgroup/{cpu,cpu\,cpuacct,.}/tern-lab{,"/$lab"}; do
        [[ ! -e $path/cpu.shares ]] || echo $(($1 == 100 ? 1024 : 262144)) >"$path/cpu.shares"
        [[ ! -e $path/cpu.weight ]] || echo "$1" >"$path/cpu.weight"
    done
}

# Runs a script on a node, bound to the node's processor.
on() {
    "$programs/tern" lab exec --lab "$lab" "$1" -- taskset -c $((($1 - 1) % processors)) \
        bash -c "PATH=$programs:\$PATH; cd; $2" </dev/null
}

# Creates a cluster of this many nodes: together they have 3/4 of the machine, or one processor
# each.
up() {
    local node pid
    speed=$(awk -v n="$1" -v cpus="$processors" 'BEGIN { s = 0.75 * cpus / n; printf "%.4f", (s > 1 ? 1 : s) }')
    mapfile -t nodes < <(seq "$1")
    "$programs/tern" lab up --lab "$lab" --nodes "$1" --speed "$speed" ${TERN_LINK:+--link "$TERN_LINK"} >/dev/null
    go_first 10000
    for node in "${nodes[@]}"; do
        # Before ternd starts any commands: a process that queries the node's number of CPUs must
        # get 1.
        for pid in $(pids "$node"); do
            taskset -apc $(((node - 1) % processors)) "$pid" >/dev/null 2>&1 || true
        done
        first[node]=$(pids "$node" | head -n1)
        address[node]=$(on "$node" "ip -4 -o addr show eth0" | sed 's|.*inet \([0-9.]*\)/.*|\1|')
    done
    for node in "${nodes[@]}"; do
        on "$node" "for i in {1..120}; do for n in ${nodes[*]}; do mosctl getload \$n || { sleep 0.5; continue 2; }; done; exit 0; done
            exit 1" >/dev/null 2>&1 || { echo "bench-builds: node $node has not received the load of the others" >&2; exit 1; }
    done
}

# Takes the lab down, which kills all processes in the nodes, daemons too.
down() {
    go_first 100
    "$programs/tern" lab down --lab "$lab" >/dev/null 2>&1 || true
}
