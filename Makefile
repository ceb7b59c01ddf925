# What people type. Each target is a line or two: the work is in scripts/ and in cargo.

prefix  ?= /usr/local
destdir ?=
target   = $(or $(CARGO_TARGET_DIR),target)

.PHONY: all demo test test-storm lint bench bench-tutorial bench-others docs man fuzz install uninstall deb clean

# Release binaries, and the names that tern is also called by.
all:
	cargo build --release --workspace --bins
	scripts/links $(target)/release

# Thirteen encoders spread over a cluster inside this machine, and their output is compared.
demo:
	scripts/demo

test:
	scripts/setup
	cargo build --workspace --bins
	scripts/links $(target)/debug
	cargo nextest run --workspace

# The tests of the whole once more, with those that are left out of `make test` because they are long.
test-storm:
	scripts/setup
	cargo build --workspace --bins
	scripts/links $(target)/debug
	cargo nextest run --profile storm -p tern-tests

lint:
	cargo xtask ci-lint

bench:
	scripts/bench

# The tutorial's five experiments, beside its own figures. TERN_SECONDS=30 is the length of a track.
bench-tutorial: all
	scripts/setup
	scripts/bench-tutorial $(target)/release

# The same jobs under mosrun, and placed by what does not move them.
bench-others: all
	scripts/setup ssh:openssh-client parallel:parallel dropbear:dropbear-bin
	scripts/bench-others $(target)/release

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
