# The small tools, each in its typical use, and pipes between them.
set -u
export LC_ALL=C TZ=UTC
rounds=${1:-3}

material() {
    awk 'BEGIN { s = 1; for (i = 0; i < 6000; i++) { s = (s * 16807) % 2147483647; printf "%d %d word%d\n", s % 1000, i, s % 77 } }' >table
    head -c 300000 /dev/zero | openssl enc -aes-128-ctr -K 00 -iv 00 >noise 2>/dev/null || seq 60000 >noise
    mkdir -p tree/{one,two,three}/{x,y}
    local f; for f in tree/*/*; do split -n 3 -d table "$f/part"; done
    ln -s ../table tree/link; ln table tree/hard; touch -d '2001-02-03 04:05:06' tree/one/x/part00
    chmod 600 tree/two/x/part01; chmod 755 tree/two/y/part02; mkfifo tree/three/pipe
}

texts() {
    sort -k1,1n -k3,3 table | md5sum
    sort --parallel=1 -S 200K -T . -r -k3 table | sha256sum
    sort -u -k3,3 table | cut -d' ' -f3 | head -5
    join -1 1 -2 1 <(sort -k1,1 table) <(sort -k1,1 table | uniq -w3 | head -50) | cksum
    comm -12 <(cut -d' ' -f1 table | sort -u) <(seq 0 3 999 | sort) | wc -l
    comm -3 <(seq 1 20 | sort) <(seq 10 30 | sort) | tr '\t' '>' | paste -sd,
    uniq -c <(cut -d' ' -f3 table | sort) | sort -rn | head -4 | tr -s ' '
    tr 'a-z' 'n-za-m' <table | rev | fold -w 30 | nl | tail -3
    expand -t4 <(printf 'a\tb\n') | unexpand -a | od -c | head -2
    fmt -w 40 <(cut -d' ' -f3 table | head -60) | pr -t -2 -l 10 | sha1sum
    csplit -s -f cs -n 3 table 1000 '{3}' && wc -l cs*
    shuf --random-source=noise table | b2sum
    tsort <(printf 'a b\nb c\na d\n'); factor 600851475143 97; numfmt --to=iec 123456789; seq -w 8 11; expr 7 \* 6
    base64 noise | base32 | tail -c 40; printf '%s' abc | basenc --base16; sum noise; cksum table
    tac table | head -1; ptx -G -w 40 <(echo "one two three") | cksum
}

files() {
    cp -a tree copy && diff -r --no-dereference tree/one copy/one && echo "cp -a: the same"
    stat -c '%n %a %h %F' copy/link copy/three/pipe copy/two/x/part01 copy/two/y/part02 copy/one/x/part00
    stat -c %Y copy/one/x/part00
    find copy -type f -name 'part0[12]' -size +1k -printf '%P %s %m\n' | sort | head -5
    find copy -type f -print0 | sort -z | xargs -0 -n 5 sha256sum | sha256sum
    find copy \( -type p -o -type l \) -exec basename {} \; | sort
    find copy -type f -newermt 2001-01-01 ! -newermt 2002-01-01
    tar -C copy -cf all.tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner . && sha256sum <all.tar
    tar -tvf all.tar | head -4 | tr -s ' '
    mkdir out && tar -C out -xpf all.tar && diff -r --no-dereference copy/two out/two && echo "tar: the same"
    tar --sort=name --mtime=@0 -cf - copy/one | gzip -n | tee all.tgz | sha256sum; gzip -dc all.tgz | tar -tf - | wc -l
    du -a --apparent-size copy/one | awk '{ s += $1 } END { print (s > 0) }'
    mv copy/one/x copy/two/moved; rm -r copy/three; rmdir copy/one/y 2>/dev/null || echo "not empty"
    install -m 711 -D table deep/er/installed; stat -c %a deep/er/installed
    truncate -s 100000 sparse; dd if=/dev/zero of=sparse bs=1 seek=99999 count=1 conv=notrunc status=none; cksum sparse
    ln -sf nowhere dangling; readlink dangling; readlink -m deep/../deep/er/./installed | sed "s|$PWD/||"; realpath --relative-to=deep deep/er
    touch -r tree/one/x/part00 stamped; stat -c %Y stamped; test stamped -ot table && echo older
    cmp table tree/hard && echo hard; cmp <(head -100 table) <(head -101 table); split -b 70000 noise piece.; cat piece.* | cmp - noise && echo whole
    mktemp -d XXXXXXXX | wc -c; rm -rf out deep copy
}

processes() {
    seq 200 | xargs -n 7 echo | tail -2; seq 40 | xargs -P 3 -I{} sh -c 'echo $(({} * {})) >sq.{}'; cat $(seq -f 'sq.%g' 40) | paste -sd+ | bc 2>/dev/null || cat $(seq -f 'sq.%g' 40) | awk '{ s += $1 } END { print s }'
    rm -f sq.*
    timeout 0.1 sleep 100; echo "timeout $?"; timeout -s KILL 0.1 sleep 100; echo "killed $?"
    env -i A=1 B=2 sh -c 'echo $A$B${HOME-none}' ; nice -n 5 nice; nohup true 2>&1 | wc -l
    (echo one; sleep 0.05; echo two) | tee t1 t2 | cat -n; cmp t1 t2 && echo "tee: the same"
    dd if=noise bs=1000 skip=3 count=50 2>/dev/null | dd bs=777 iflag=fullblock status=none | sha1sum
    dd if=table of=dd.out bs=64 conv=ucase,sync status=none; sha1sum dd.out
    yes no | head -c 100001 | wc -c; head -c -10 table | tail -n +5990; tail -n 3 -f table & p=$!; sleep 0.2; kill $p; wait $p 2>/dev/null; echo "tail $?"
    stdbuf -oL printf 'x\ny\n' | grep -c .; setsid -w sh -c 'exit 5'; echo "setsid $?"
    test -t 0 || echo "no terminal"; id -u; pwd | sed 's|.*/||'; uname -s; getconf PAGESIZE; chroot / true && echo root
    printf 'hello\n' | sed -n 'l;s/l/L/gp' ; echo 'a b c' | awk '{ $2 = ""; print NF, $0 }'; grep -nE 'word7[0-3]$' table | tail -2; egrep -c '^9' table 2>/dev/null
    for s in HUP INT QUIT ABRT TERM USR1; do sh -c "kill -$s \$\$"; echo "$s $?"; done 2>/dev/null
}

for ((round = 1; round <= rounds; round++)); do
    mkdir "round$round" && cd "round$round" || exit
    material
    for part in texts files processes; do
        "$part" >"../$part.$round" 2>../err
        sed -E "s/: +[0-9]+ /: PID /" <../err >"../$part.err.$round"
        echo "round $round: $part: $(sha256sum <"../$part.$round")"
    done
    cd ..
    rm -rf "round$round" err
done
cat ./texts.1 ./files.1 ./processes.1
