# What the suites share: a test says `ok NAME` or `not ok NAME`; whatever else is printed is for who looks into the log.

check() { # NAME COMMAND...
    local name=$1
    shift
    if "$@" 2>&1 </dev/null; then echo "ok $name"; else echo "not ok $name"; fi
}

# Says of a test of several parts whether it has come to its end, good or bad, and had any.
ended() { # NAME STATUS SAID: lines of what it said
    if (($2 == 124 || $2 == 137)); then
        echo "not ok $1: cut by time"
    elif (($2 > 1)); then
        echo "not ok $1: ended with $2"
    elif [[ -z $3 ]]; then
        echo "not ok $1: tested nothing"
    fi
    echo "$3"
}
