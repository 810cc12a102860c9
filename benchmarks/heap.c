/* Counts what glibc's allocator has handed out in this process, by all threads: loaded before all
 * other libraries, it stands before malloc and free. Sizes are those of the blocks, which malloc
 * rounds up. */

#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *block, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

static atomic_long held, peak;

static void add(long bytes) {
    long now = atomic_fetch_add(&held, bytes) + bytes;
    long seen = atomic_load(&peak);
    while (now > seen && !atomic_compare_exchange_weak(&peak, &seen, now)) {
    }
}

static void *taken(void *block) {
    if (block) add((long)malloc_usable_size(block));
    return block;
}

void *malloc(size_t size) { return taken(__libc_malloc(size)); }

void *calloc(size_t count, size_t size) { return taken(__libc_calloc(count, size)); }

void *memalign(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size)); }

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *given = memalign(alignment, size);
    if (!given) return ENOMEM;
    *block = given;
    return 0;
}

void *realloc(void *block, size_t size) {
    long before = block ? (long)malloc_usable_size(block) : 0;
    void *moved = __libc_realloc(block, size);
    if (moved || !size) atomic_fetch_sub(&held, before);
    return taken(moved);
}

void free(void *block) {
    if (block) atomic_fetch_sub(&held, (long)malloc_usable_size(block));
    __libc_free(block);
}

long heap_held(void) { return atomic_load(&held); }

/* Returns the most that was held since the last call, and begins anew. */
long heap_peak(void) { return atomic_exchange(&peak, atomic_load(&held)); }
