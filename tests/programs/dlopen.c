/* Proves: libraries loaded and unloaded while the program runs, called through their symbols,
 * with their own TLS and lazily bound functions. */
#include "program.h"
#include <dlfcn.h>

int main(void)
{
	double first = 0;
	do {
		void *libm = dlopen("libm.so.6", RTLD_LAZY);
		CHECK(libm != NULL);
		double (*power)(double, double) = (double (*)(double, double))dlsym(libm, "pow");
		double (*sine)(double) = (double (*)(double))dlsym(libm, "sin");
		CHECK(power && sine);
		double sum = 0;
		for (int i = 1; i < 20000; i++)
			sum += sine(i) * power(i, 0.5);
		if (first == 0) {
			first = sum;
			say("sum %.17g\n", sum);
		}
		CHECK(sum == first);
		CHECK(dlsym(libm, "no_such_symbol") == NULL);
		CHECK(dlerror() != NULL);
		CHECK_IS(dlclose(libm), 0);
		/* a library the program was not linked with: mapped and unmapped each time */
		void *other = dlopen("libnss_files.so.2", RTLD_NOW);
		if (!other)
			other = dlopen("libresolv.so.2", RTLD_NOW);
		CHECK(other != NULL);
		CHECK_IS(dlclose(other), 0);
		CHECK(dlopen("libnothing-of-that-name.so", RTLD_NOW) == NULL);
	} while (going());
	return pass();
}
