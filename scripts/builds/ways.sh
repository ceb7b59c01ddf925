# The ways to build: the prerequisites of each, its daemons, and the command on node 1. Sourced
# after lab.sh. The sourcing script sets $make, $lab and $programs, and defines `wrong`, which
# records a failure.
# shellcheck shell=bash
# shellcheck disable=SC2154

# Number of parallel jobs on each node, in all ways: the number that Tern runs on a node of one CPU.
jobs=2

# The prerequisites of each way: programs, and the packages that contain them.
needs() {
    case $1 in
        make) echo make:make gcc:gcc g++:g++ ;;
        mpmake) echo "$programs/mpmake:scripts/links" "$programs/mexec:scripts/links" ;;
        distcc) echo distcc:distcc distccd:distcc ;;
        pump) echo distcc-pump:distcc-pump distcc:distcc distccd:distcc ;;
        icecream) echo icecc:icecc iceccd:icecc icecc-scheduler:icecc ;;
        *) return 1 ;;
    esac
}

# Whether a program of this name runs in a node's control group. Outside of it, its CPU time would
# not be counted.
runs() {
    local pid
    for pid in $(pids "$1"); do
        [[ $(cat "/proc/$pid/comm" 2>/dev/null) != "$2" ]] || return 0
    done
    return 1
}

# Starts a daemon on a node.
daemon() {
    local node=$1 name=${2%% *}
    on "$node" "$2" >&2 || { wrong "$name does not start on node $node"; return 1; }
    for _ in {1..100}; do
        ! runs "$node" "$name" || return 0
        sleep 0.1
    done
    wrong "$name is not seen on node $node"
    return 1
}

start() {
    local node
    case $1 in
        distcc | pump)
            for node in "${nodes[@]:1}"; do
                # The daemon drops root's privileges and runs as this user.
                daemon "$node" "distccd --daemon --user distccd --jobs $jobs --allow ${address[1]} --log-file /tmp/distccd.log" || return
            done
            ;;
        icecream)
            daemon 1 "icecc-scheduler -d -n $lab -l /tmp/scheduler.log" || return
            for node in "${nodes[@]}"; do
                daemon "$node" "iceccd -d -n $lab -s ${address[1]} -N node$node -m $jobs -b /tmp/icecc -l /tmp/iceccd.log" || return
            done
            # The daemons need about ten seconds to report to the scheduler, which treats them as
            # fully loaded (1000) until then. They also count as loaded while other processes keep
            # the whole machine busy, because they measure the machine.
            for _ in {1..60}; do
                [[ $(on 1 "exec 3<>/dev/tcp/127.0.0.1/8766; printf 'listcs\nquit\n' >&3; cat <&3" |
                    grep -c ' load=[0-9]\{1,3\}$') != "${#nodes[@]}" ]] || return 0
                sleep 1
            done
            wrong "icecream, ${#nodes[@]} nodes: its scheduler sees not all of them, or as busy; does something else run here?"
            return 1
            ;;
    esac
}

# Stops the daemons that `start` has started, in these nodes only.
stop() {
    local node pid
    for node in "${nodes[@]}"; do
        for pid in $(pids "$node"); do
            case $(cat "/proc/$pid/comm" 2>/dev/null) in distccd | iceccd | icecc-scheduler) kill "$pid" 2>/dev/null || true ;; esac
        done
    done
}

# The command to run on node 1. The compiling nodes are listed before node 1, which also does the
# rest of the build.
typed() {
    local node hosts="" all=$((jobs * ${#nodes[@]})) more=""
    [[ $1 != pump ]] || more=,cpp,lzo # pump mode ignores servers without these options
    for node in "${nodes[@]:1}"; do hosts+="${address[node]}/$jobs$more "; done
    case $1 in
        make) echo "$make -j$jobs CC=gcc CXX=g++" ;;
        mpmake) echo "mp$make -j$all CC=gcc CXX=g++" ;;
        distcc) echo "DISTCC_HOSTS='${hosts}localhost/$jobs' $make -j$all CC='distcc gcc' CXX='distcc g++'" ;;
        pump) echo "DISTCC_HOSTS='${hosts}localhost/$jobs' distcc-pump $make -j$all CC='distcc gcc' CXX='distcc g++'" ;;
        icecream) echo "$make -j$all CC='icecc gcc' CXX='icecc g++'" ;;
    esac
}
