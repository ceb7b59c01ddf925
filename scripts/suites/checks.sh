# Functions shared by the suites. A test prints `ok NAME` or `not ok NAME`; all other output is only
# for the log.

check() { # NAME COMMAND...
    local name=$1
    shift
    if "$@" 2>&1 </dev/null; then echo "ok $name"; else echo "not ok $name"; fi
}

# Reports whether a test of several parts has completed, passed or failed, and had any parts.
ended() { # NAME STATUS SAID: SAID is the test's output
    if (($2 == 124 || $2 == 137)); then
        echo "not ok $1: cut by time"
    elif (($2 > 1)); then
        echo "not ok $1: ended with $2"
    elif [[ -z $3 ]]; then
        echo "not ok $1: tested nothing"
    fi
    echo "$3"
}
