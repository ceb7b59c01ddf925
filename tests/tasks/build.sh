# GNU make builds a C project of a hundred files and more, with a library, generated sources and a program that checks it.
set -u
export LC_ALL=C
modules=${1:-100} jobs=${2:-3}
mkdir src
for ((i = 0; i < modules; i++)); do
    cat >"src/m$i.c" <<END
#include "all.h"
struct s$i { int a; unsigned b[$((i % 7 + 1))]; };
static unsigned step$i(struct s$i *s, unsigned x) {
    for (unsigned k = 0; k < sizeof s->b / sizeof *s->b; k++) s->b[k] = s->b[k] * ${i}u + x + k;
    switch (x % 4) { case 0: return s->b[0]; case 1: return x * $((i * 3 + 1)); case 2: s->a++; return x ^ s->a; }
    return x >> 1;
}
unsigned m$i(unsigned x) { struct s$i s = { $i, { 1 } }; unsigned t = 0; for (unsigned n = 0; n < 50; n++) t += step$i(&s, x + n); return t; }
END
done
{
    echo "#ifndef ALL_H"; echo "#define ALL_H"
    for ((i = 0; i < modules; i++)); do echo "unsigned m$i(unsigned);"; done
    echo "#endif"
} >src/all.h
cat >Makefile <<'END'
sources := $(sort $(wildcard src/m*.c))
objects := $(sources:src/%.c=obj/%.o)
CFLAGS  := -O1 -Wall -Werror -Isrc

all: program checked
obj gen: ; mkdir -p $@
obj/%.o: src/%.c src/all.h | obj ; @$(CC) $(CFLAGS) -c -o $@ $<
libmodules.a: $(objects) ; @rm -f $@; $(AR) rcsD $@ $(sort $^)
gen/main.c: src/all.h | gen
	@{ echo '#include <stdio.h>'; echo '#include "all.h"'; echo 'int main(void) { unsigned t = 0;'; \
	sed -n 's/^unsigned \(m[0-9]*\).*/t = t * 31 + \1(t);/p' $<; echo 'printf("%u", t); return puts("") < 0; }'; } >$@
program: gen/main.c libmodules.a ; @$(CC) $(CFLAGS) -Wl,--build-id=none -o $@ $< -L. -lmodules
checked: program ; @./program >$@ && echo "checked $$(cat $@)"
clean: ; @rm -rf obj gen program checked libmodules.a
.PHONY: all clean
END
make -j"$jobs" --output-sync=none all || exit
touch -d 2001-01-01 src/m1.c; make -j"$jobs" all | tail -1
sha256sum program libmodules.a
echo '#error broken on purpose' >>src/m2.c; make -k all 2>&1 | grep -c 'broken on purpose'
nm --defined-only libmodules.a | grep -c ' T '
