/* Proves: locales and character conversion, which load tables and modules from home's files when
 * first used. */
#include "program.h"
#include <iconv.h>
#include <langinfo.h>
#include <locale.h>
#include <wchar.h>

int main(void)
{
	do {
		CHECK(setlocale(LC_ALL, "C.UTF-8") != NULL);
		CHECK(strcmp(nl_langinfo(CODESET), "UTF-8") == 0);
		wchar_t wide[32];
		CHECK_IS(mbstowcs(wide, "Stra\xc3\x9f" "e \xe2\x82\xac", 32), 8);
		CHECK(wide[4] == 0xdf && wide[7] == 0x20ac);
		CHECK(setlocale(LC_ALL, "C") != NULL);
		iconv_t there = iconv_open("UTF-16LE", "ISO-8859-1"), back = iconv_open("ISO-8859-1", "UTF-16LE");
		CHECK(there != (iconv_t)-1 && back != (iconv_t)-1);
		char in[256], middle[512], out[256], *from = in, *to = middle;
		for (int i = 0; i < 256; i++)
			in[i] = (char)i;
		size_t left = 256, room = 512;
		CHECK_IS(iconv(there, &from, &left, &to, &room), 0);
		CHECK(left == 0 && room == 0 && middle[2 * 0xe4] == (char)0xe4 && middle[2 * 0xe4 + 1] == 0);
		from = middle, to = out, left = 512, room = 256;
		CHECK_IS(iconv(back, &from, &left, &to, &room), 0);
		CHECK(memcmp(in, out, 256) == 0);
		CHECK(iconv_close(there) == 0 && iconv_close(back) == 0);
		for (volatile int spin = 0; spin < 300000; spin++)
			;
	} while (going());
	return pass();
}
