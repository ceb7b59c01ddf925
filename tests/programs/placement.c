/* Proves: NUMA policies: the policy that was set is the one that is read, pages are on an
 * allowed node, and invalid policies are refused. */
#include "program.h"
#include <sys/mman.h>
#include <sys/syscall.h>

enum { DEFAULT, PREFERRED, BIND, INTERLEAVE, LOCAL };
enum { OF_NODE = 1, OF_ADDRESS = 2, ALLOWED = 4 };
enum { PAGE = 4096, BITS = 1024 };
typedef unsigned long mask[BITS / (8 * sizeof(long))];

static long get(int *policy, unsigned long *nodes, void *at, unsigned long flags)
{
	return syscall(SYS_get_mempolicy, policy, nodes, nodes ? BITS : 0, at, flags);
}

int main(void)
{
	int policy = -1;
	mask allowed = { 0 }, nodes = { 0 }, none = { 0 }, first = { 1 };
	if (get(&policy, nodes, NULL, 0) < 0 && errno == ENOSYS) {
		do
			rest_ms(1);
		while (going());
		return pass(); /* a kernel without NUMA support */
	}
	CHECK_IS(get(NULL, allowed, NULL, ALLOWED), 0);
	CHECK(allowed[0] & 1);
	char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(page != MAP_FAILED);
	page[0] = 1;
	do {
		CHECK_IS(get(NULL, nodes, NULL, ALLOWED), 0);
		CHECK(memcmp(nodes, allowed, sizeof nodes) == 0);
		CHECK_IS(get(&policy, nodes, NULL, 0), 0);
		CHECK(policy == DEFAULT && memcmp(nodes, none, sizeof nodes) == 0);
		CHECK_IS(syscall(SYS_set_mempolicy, PREFERRED, first, BITS), 0);
		CHECK_IS(get(&policy, nodes, NULL, 0), 0);
		CHECK(policy == PREFERRED && memcmp(nodes, first, sizeof nodes) == 0);
		/* a child inherits it */
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			CHECK_IS(get(&policy, NULL, NULL, 0), 0);
			_exit(policy);
		}
		await_exit(child, PREFERRED);
		CHECK_IS(syscall(SYS_set_mempolicy, DEFAULT, NULL, 0), 0);
		CHECK_IS(get(&policy, NULL, NULL, 0), 0);
		CHECK_IS(policy, DEFAULT);
		CHECK_IS(syscall(SYS_set_mempolicy, BIND, none, BITS), -1);
		CHECK_IS(errno, EINVAL);
		CHECK_IS(syscall(SYS_set_mempolicy, 99, first, BITS), -1);
		CHECK_IS(errno, EINVAL);
		/* the node of a page, as OpenMP and allocators query it */
		int node = -1;
		CHECK_IS(get(&node, NULL, page, OF_NODE | OF_ADDRESS), 0);
		CHECK(node >= 0 && node < BITS);
		CHECK_IS(get(&policy, NULL, page, OF_ADDRESS), 0);
		CHECK_IS(policy, DEFAULT);
		CHECK_IS(get(&node, NULL, (void *)8, OF_NODE | OF_ADDRESS), -1);
		CHECK_IS(errno, EFAULT);
		CHECK_IS(get(&policy, NULL, page, 0), -1);
		CHECK_IS(errno, EINVAL);
		rest_ms(1);
	} while (going());
	return pass();
}
