# A repository's life: init, many commits, branches, merges, a conflict, gc, clone over a local path, fetch, bundle.
set -u
export LC_ALL=C TZ=UTC GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=$PWD/gitconfig HOME=$PWD GIT_PAGER=cat GIT_EDITOR=true
export GIT_AUTHOR_NAME=A GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=C GIT_COMMITTER_EMAIL=c@d
commits=${1:-12}
# Packs made by several threads differ from run to run.
cat >gitconfig <<'END'
[init]
    defaultBranch = main
[core]
    preloadIndex = false
    fsync = none
[pack]
    threads = 1
[index]
    threads = 1
[grep]
    threads = 1
[checkout]
    workers = 1
[gc]
    auto = 0
[maintenance]
    auto = false
[advice]
    detachedHead = false
    mergeConflict = false
END
at() { export GIT_AUTHOR_DATE="@$((1700000000 + $1 * 60)) +0000" GIT_COMMITTER_DATE="@$((1700000000 + $1 * 60)) +0000"; }

git init -q here && cd here || exit
for ((n = 1; n <= commits; n++)); do
    at "$n"; mkdir -p "dir$((n % 5))"
    seq $((n * 10)) $((n * 10 + 200)) >"dir$((n % 5))/file$n"; echo "line $n" >>log
    git add -A && git commit -q -m "commit $n" || exit
done
at 100; git checkout -q -b side HEAD~5; echo side >side; echo "side line" >>log; git add -A; git commit -q -m side
git checkout -q main; git merge -q side -m merge; echo "merge: $?"
git status --porcelain; { sed '/^[<=>]/d' log; } >log.new; mv log.new log; git add log; git commit -q -m "merge side"
at 101; git tag -a v1 -m one; git checkout -q -b topic HEAD~2; echo topic >topic; git add topic; git commit -q -m topic
git rebase -q main; echo "rebase: $?"; git checkout -q main; git merge -q --ff-only topic
git log --oneline --graph --all | cat; git diff --stat HEAD~3; git blame log | tail -2; git grep -n 'side' | cat
git stash list; echo dirty >>log; git stash -q; git stash pop -q; git checkout -q -- log
git gc -q; git fsck --strict; git count-objects -v | grep -E '^(count|in-pack|packs|garbage)'
cd ..; git clone -q --no-local here there && git clone -q --local here near && git clone -q --bare here bare.git
cd there; at 102; echo there >there; git add there; git commit -q -m there; git push -q origin HEAD:incoming
cd ../here; git log -1 --format='%H %s' incoming; git bundle create ../all.bundle --all 2>/dev/null
cd ..; git clone -q all.bundle fromfile 2>/dev/null; git -C fromfile log -1 --format='%H %T %s' origin/main
git -C here archive --format=tar HEAD | sha256sum; git -C near fetch -q; git -C near rev-parse origin/incoming
git -C here format-patch -q -2 -o "$PWD/patches" --zero-commit --no-signature; ls patches; git -C here bisect start HEAD HEAD~8 >bisect 2>&1; git -C here bisect run sh -c '! test -e topic' >>bisect 2>&1; tail -3 bisect; git -C here bisect reset -q
# Indexes and reflogs have inode numbers and times in them, so only their entries are compared.
for r in here there near bare.git fromfile; do git -C "$r" rev-list --all --objects | sort | sha256sum; git -C "$r" ls-files -s 2>/dev/null | sha256sum; done
rm -rf here there near fromfile bare.git
