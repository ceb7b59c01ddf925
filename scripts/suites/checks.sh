# What the suites share: a test says `ok NAME` or `not ok NAME`; whatever else is printed is for who looks into the log.

check() { # NAME COMMAND...
    local name=$1
    shift
    if "$@" 2>&1 </dev/null; then echo "ok $name"; else echo "not ok $name"; fi
}

# Says for a test of several parts that it has come to its end, or how it ended.
ended() { # NAME STATUS
    if (($2 == 124 || $2 == 137)); then
        echo "not ok $1: cut by time"
    elif (($2 > 128)); then
        echo "not ok $1: killed by signal $(($2 - 128))"
    else
        echo "ok $1: came to its end"
    fi
}
