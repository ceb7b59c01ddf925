# The commands for developers. The work is done by scripts/ and cargo.

prefix  ?= /usr/local
destdir ?=
target   = $(or $(CARGO_TARGET_DIR),target)

.PHONY: all demo test test-build test-alone test-chaos test-calls test-flaky test-storm test-kernels test-resets test-away lint bench bench-tutorial bench-others bench-files bench-dfsa bench-network bench-pauses test-suites docs man fuzz install uninstall deb clean

# Release binaries, and the names that tern is also called by.
all:
	cargo build --release --workspace --bins
	scripts/links $(target)/release

# Thirteen encoders spread over a cluster inside this machine, and their output is compared.
demo:
	scripts/demo

# Four clusters at a time: one alone would leave two CPUs idle for most of its time, and meet fewer races.
test: export TERN_LABS ?= 4
test: test-build
	cargo nextest run --workspace

# All that the tests need.
test-build:
	scripts/setup
	cargo build --workspace --bins --tests
	scripts/links $(target)/debug

# The tests of `make test` with one cluster at a time, to see whether a failure needs a second
# cluster beside it. Takes an hour.
test-alone: test-build
	cargo nextest run --workspace --profile alone

# Every test that makes a cluster, ten times, with both CPUs kept busy beside it; lists those that
# failed even once. TERN_ROUNDS=3 sets the number of rounds, TERN_TESTS='test(mfs::)' selects tests.
# Takes hours.
test-flaky: test-build
	scripts/test-flaky

# Programs that are moved at random while daemons and shims are killed and stopped, cables cut, a
# stranger takes all CPUs and many descriptors, a file system stalls, and tasks and memory are
# limited. TERN_CHAOS_SECONDS=3600 sets the duration; tests/tests/chaos/main.rs has the other
# variables.
test-chaos: test-build
	cargo nextest run --workspace --profile chaos

# Programs of random system calls that are moved at random, compared with runs without migration.
# TERN_CALLS_SECONDS=3600 sets the duration, TERN_SEED=N the first program; tests/tests/calls/main.rs
# has the other variables.
test-calls: test-build
	cargo nextest run --workspace --profile calls

# All tests, with those that `make test` leaves out because they are long, and property tests with more random cases.
test-storm:
	scripts/setup ffmpeg:ffmpeg redis-server:redis-server redis-benchmark:redis-tools go:golang-go \
		javac:default-jdk-headless node:nodejs
	cargo build --workspace --bins
	scripts/links $(target)/debug
	PROPTEST_CASES=$${PROPTEST_CASES:-4000} PROPTEST_RNG_SEED=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ') \
		cargo nextest run -E 'not package(tern-tests)'
	cargo nextest run --profile storm -p tern-tests

# Clusters of virtual machines with Debian's kernels of different versions, in software emulation:
# half an hour. Needs a network, for the kernels. TERN_KERNELS=6.1:6.12 selects one cluster,
# TERN_PROGRAMS=clocks and TERN_FLAVOURS=static select test programs.
test-kernels: all
	scripts/setup qemu-system-x86_64:qemu-system-x86 /bin/busybox:busybox-static dpkg-deb:dpkg strip:binutils
	$(MAKE) -C tests/programs OUT=$(abspath $(target))/kernel-programs
	scripts/test-kernels $(target)/release $(target)/kernel-programs

# Other people's tests on files of another node: git, SQLite, PostgreSQL, pjdfstest, fsx, stress-ng,
# fsstress; an hour. Needs a network, for their sources. SUITES="git fsx" selects suites.
test-suites: all
	scripts/setup dpkg-source:dpkg-dev /usr/include/tcl8.6/tcl.h:tcl8.6-dev tclsh:tcl /usr/include/zlib.h:zlib1g-dev \
		stress-ng:stress-ng /usr/include/xfs/xfs.h:xfslibs-dev
	scripts/test-suites $(target)/release $(target)/suites $(SUITES)

# Programs of other people's test suites, natively and on another node. The file LIST has a line
# NAME|DIRECTORY|COMMAND for each.
test-away: all
	scripts/test-away $(target)/release $(LIST)

# Resets two virtual machines in turn and checks that data saved with fsync on the other machine is
# still there. Ten minutes. TERN_KERNELS=6.12:6.12 selects one cluster, TERN_ROUNDS=3 sets the
# number of rounds.
test-resets: all
	scripts/setup qemu-system-x86_64:qemu-system-x86 /bin/busybox:busybox-static dpkg-deb:dpkg strip:binutils mkfs.ext4:e2fsprogs
	scripts/test-resets $(target)/release

lint:
	cargo xtask ci-lint

bench:
	scripts/bench

# The tutorial's five experiments, beside its own figures. TERN_SECONDS=30 is the length of a track.
bench-tutorial: all
	scripts/setup
	scripts/bench-tutorial $(target)/release

# The same jobs under mosrun, and placed by tools that do not move them.
bench-others: all
	scripts/setup ssh:openssh-client parallel:parallel dropbear:dropbear-bin
	scripts/bench-others $(target)/release

# Files of another node through /mfs and through sshfs, compared with the local disk; and `cp` over slow links.
bench-files: all
	scripts/setup ssh:openssh-client sshfs:sshfs dropbear:dropbear-bin /usr/lib/openssh/sftp-server:openssh-sftp-server
	scripts/bench-files $(target)/release

# The cost of file calls made away: flac, small files, git, a compiler, and calls a second.
bench-dfsa: all
	scripts/setup /usr/bin/g++:g++ objdump:binutils
	scripts/bench-dfsa $(target)/release

# Servers whose process has moved: relayed by home, and with connections that move. TERN_LINK=switch:100mbit limits their network.
# Then the measurements of the paper on network communicating processes in MOSIX, with 3 to 50 pairs of server and client.
bench-network: all
	scripts/setup redis-server:redis-server nginx:nginx-light wrk:wrk iperf3:iperf3
	scripts/bench-network $(target)/release
	scripts/bench-pairs $(target)/release

# How long clients wait while their server moves. TERN_CONNECTIONS, TERN_BYTES and TERN_MOVES set the load.
bench-pauses: all
	scripts/bench-pauses $(target)/release

docs:
	cargo xtask docs
	cargo doc --workspace --no-deps

man: all
	$(target)/release/tern man $(target)/man

# FUZZ names one target, FUZZ_TIME the seconds for each.
fuzz:
	scripts/fuzz $(FUZZ)

install: man
	scripts/install $(target) "$(destdir)" $(prefix)

uninstall:
	scripts/install --remove "$(destdir)" $(prefix)

deb: man
	scripts/deb $(target)

clean:
	cargo clean
