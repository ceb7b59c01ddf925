# Typical work of a shell: pipes, jobs, traps, descriptors, substitutions. The output is the same each time: no pid, no time.
set -u
# Defined before the functions that use them are read.
shopt -s globstar nullglob extglob
rounds=${1:-6}

numbers() {
    local -A squares=()
    local -a list=()
    for ((i = 0; i < 3000; i++)); do squares[$((i * 7 % 1009))]=$((i * i % 10007)); list+=("$i"); done
    local total=0 key
    for key in "${!squares[@]}"; do ((total += squares[$key])); done
    echo "numbers: ${#squares[@]} squares, $total, last ${list[-1]}, slice ${list[*]:5:3}"
}

pipes() {
    seq 1 4000 | awk '{ print $1 % 97 }' | sort -n | uniq -c | sort -rn | head -3 | tr -s ' '
    false | true | (exit 3)
    echo "pipes: ${PIPESTATUS[*]}"
    paste -d: <(seq 3) <(seq 4 6) <(printf '%s\n' a b c)
    seq 5 > >(tac >tac.txt)
    until [ "$(wc -l 2>&1 <tac.txt)" = 5 ]; do :; done
    cat tac.txt
    yes | head -n 2000 | wc -l
}

descriptors() {
    exec 5>five.txt 6<>six.txt
    echo "to five" >&5; printf 'a\nb\n' >&6
    { echo out; echo err >&2; } 2>&1 >&5 | sed 's/^/caught: /'
    exec 5>&- 6>&-
    echo more >&5 || echo "five is closed"
    cat five.txt six.txt
    while IFS=: read -r -u 7 user _ number _; do [ "$number" = 0 ] && echo "root is $user"; done 7</etc/passwd
    cat <<END | tr a-z A-Z
here is $((6 * 7)), $(echo "nested $(echo "twice")")
END
    cat <<<"a string"
} 2>/dev/null

traps() {
    (
        trap 'echo "got USR1"' USR1
        trap 'echo "got TERM"; exit 9' TERM
        trap 'echo "the end"' EXIT
        kill -USR1 $BASHPID
        for ((i = 0; i < 500; i++)); do :; done
        kill -TERM $BASHPID
        echo "not reached"
    )
    echo "traps: $?"
    (trap '' INT; kill -INT $BASHPID; echo "ignored INT"; sh -c 'kill -INT $$; echo "so does its child"')
    sh -c 'kill -KILL $$'
    echo "killed: $?"
    sh -c 'kill -SEGV $$' 2>/dev/null
    echo "segv: $?"
} 2>/dev/null

jobs_of_ours() {
    local pids=() pid n status=()
    for n in 1 2 3 4 5; do (for ((i = 0; i < 800 * n; i++)); do :; done; exit "$n") & pids+=($!); done
    for pid in "${pids[@]}"; do wait "$pid"; status+=($?); done
    echo "jobs: ${status[*]}"
    # Whether the child has stopped is asked of wait, not of /proc, which has another state letter for a traced process
    # (docs/reference/limits.md).
    /usr/bin/python3 -S - <<END
import os, signal, sys
child = os.fork()
if child == 0:
    while True: signal.pause()
for send, option, has in ((signal.SIGSTOP, os.WUNTRACED, os.WIFSTOPPED), (signal.SIGCONT, os.WCONTINUED, os.WIFCONTINUED)):
    os.kill(child, send)
    print("told:", has(os.waitpid(child, option)[1]))
os.kill(child, signal.SIGTERM)
print("ended:", os.WTERMSIG(os.waitpid(child, 0)[1]))
END
    timeout 0.2 sleep 60; echo "timeout: $?"
    timeout 60 true; echo "in time: $?"
    # If both have ended, the first wait -n may have reaped the other as well, and the second has none left.
    (exit 4) & wait -n; echo "one of them: $?"; (exit 5) & wait $!; echo "the other: $?"
} 2>/dev/null

conversations() {
    mkfifo fifo
    (while read -r line; do echo "heard $line"; done <fifo) &
    local reader=$! i
    for i in 1 2 3 4 5; do echo "word $i"; done >fifo
    wait $reader
    rm fifo
    coproc BC { while read -r a b; do echo $((a + b)); done; }
    local to=${BC[1]} from=${BC[0]} pid=$BC_PID answer
    for i in 1 2 3 4 5 6; do echo "$i $((i * i))" >&"$to"; read -r answer <&"$from"; echo -n "$answer "; done
    eval "exec $to>&-"; wait "$pid"
    echo "coproc: $?"
    read -r -t 0.1 answer < <(sleep 0.5); echo "nothing to read: $(($? > 128))"
    mapfile -t lines < <(seq 100 103); echo "lines: ${lines[*]}"
}

files() {
    mkdir -p a/b/c; for i in {1..20}; do echo "file $i" >"a/b/f$i"; done
    ln -s b/f1 a/link; ln a/b/f2 a/b/c/hard; chmod 640 a/b/f3; (umask 027; : >a/masked)
    echo "files:" a/**/f1? a/b/!(f*) a/nothing*
    [ a/b/f2 -ef a/b/c/hard ] && echo same
    [ -L a/link ] && readlink a/link
    set -C; echo x >a/masked; echo "noclobber: $?"; echo y >|a/masked; set +C
    stat -c '%A %h %s' a/b/f2 a/b/f3 a/masked
    (ulimit -f 1; dd if=/dev/zero of=big bs=1024 count=64; echo "limit: $?")
    rm -rf a big
} 2>/dev/null

words() {
    local text="The quick brown fox" i
    echo "${text,,} ${text^^} ${text/quick/slow} ${text##* } ${text%% *} ${#text} ${text:4:5} ${text@Q}"
    printf '%05d|%-8s|%8s|%x|%q|%(%Y)T\n' 42 left right 255 "a b" 0
    IFS=, read -ra parts <<<"x,y,,z"; echo "${#parts[@]} parts"
    while getopts "ab:c" option -a -b value -c; do echo -n "$option${OPTARG:-} "; done; echo; OPTIND=1
    case foo.tar.gz in *.zip) echo zip ;; *.tar.*) echo tar ;;& *.gz) echo gz ;; esac
    for i in {a..e}{1..3}; do echo -n "$i "; done; echo
    [[ "2026-11-22" =~ ^([0-9]+)-([0-9]+) ]] && echo "${BASH_REMATCH[2]}"
    let 'i = 5, i <<= 3, i ^= 9'; echo "$i $((16#ff)) $((2 ** 40)) $((-7 / 2)) $((-7 % 3))"
    hanoi() { (($1)) && { hanoi $(($1 - 1)); ((++steps)); hanoi $(($1 - 1)); }; }
    steps=0; hanoi 9; echo "hanoi: $steps"
}

for ((round = 1; round <= rounds; round++)); do
    mkdir "round$round" && cd "round$round" || exit
    for part in numbers pipes descriptors traps jobs_of_ours conversations files words; do
        "$part" >"../$part.$round"
        echo "round $round: $part: $? $(cksum <"../$part.$round")"
    done
    cd .. && cmp -s "words.1" "words.$round" || echo "round $round is another"
done
cat ./*.1
exit 7
