/* A digest of the bits of memory, in integer arithmetic: a weighted sum of 32-bit words.
 *
 * Every word of a row has a 64-bit key of its own, and every row an odd multiplier. A product with
 * a key is taken in two halves, so that it needs no wider multiplication than 32 by 32 bits; only
 * the lower 32 bits of the upper half count. Words at odd places count as signed: they are moved up
 * by 2^31, and what this adds to a row, the same for every row, is taken away again.
 */
#include "vectors.h"

#define ROW 4096 /* bytes; with the keys, they fit into the first-level cache */
#define MULTIPLIERS 65536 /* rows; then they begin again, times another factor */

typedef uint64_t pairs __attribute__((vector_size(BYTES))); /* of words; the odd one is the upper */

struct tables {
    const char *low_keys;  /* their lower halves, ROW bytes */
    const char *odd_keys;  /* the same of odd words, each at the place before it */
    const char *high_keys; /* their upper halves, ROW bytes */
    const uint64_t *multipliers;
    uint64_t block_factor; /* of the multipliers, for each time that they begin again */
    uint64_t moved;        /* what moving the words at odd places adds to a row */
};

/* The products of the lower halves, in 64 bits. */
INLINE pairs products(pairs a, pairs b) {
#if BYTES == 64
    return (pairs)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif BYTES == 32
    return (pairs)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (pairs)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
    return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

/* The weighted sum of a row; meanwhile, the row at `next` is brought nearer. */
INLINE uint64_t add_row(const char *row, const char *next, const struct tables *tables) {
    pairs even = {0}, odd = {0};
    words high = {0};
#if !defined(__clang__)
#pragma GCC unroll 4
#endif
    for (int i = 0; i < ROW; i += BYTES) {
        pairs moved = (pairs)load(row + i) ^ (uint64_t)1 << 63;
        if (i % 64 == 0)
            __builtin_prefetch(next + i, 0, 3);
        even += products(moved, (pairs)load(tables->low_keys + i));
        odd += products(moved >> 32, (pairs)load(tables->odd_keys + i));
        high += (words)moved * load(tables->high_keys + i);
    }
    uint64_t low_sum = 0;
    uint32_t high_sum = 0;
    even += odd;
    for (int lane = 0; lane < LANES / 2; lane++)
        low_sum += even[lane];
    for (int lane = 0; lane < LANES; lane++)
        high_sum += high[lane];
    return low_sum + ((uint64_t)high_sum << 32) - tables->moved;
}

/* Rows from number `first` on, `count` bytes in all; after them come those at `next`. */
static uint64_t add_rows(const char *bytes, int64_t count, int64_t first, const char *next,
                         const struct tables *tables) {
    uint64_t sum = 0, factor = 1;
    for (int64_t block = first / MULTIPLIERS; block; block--)
        factor *= tables->block_factor;
    for (int64_t row = first % MULTIPLIERS; count > 0; row++, bytes += ROW, count -= ROW) {
        char padded[ROW];
        const char *from = bytes;
        if (count < ROW) {
            memcpy(padded, bytes, count);
            memset(padded + count, 0, ROW - count);
            from = padded;
        }
        if (row == MULTIPLIERS) {
            factor *= tables->block_factor;
            row = 0;
        }
        sum += factor * tables->multipliers[row] *
               add_row(from, count > ROW ? bytes + ROW : next, tables);
    }
    return sum;
}

/* Returns the digest of `count` bytes, padded with zeros to whole rows, that begin row `first`. */
uint64_t rankscope_digest(const char *bytes, int64_t count, int64_t first,
                          const struct tables *tables) {
    return add_rows(bytes, count, first, bytes, tables);
}

double rankscope_squares(int type, const char *near, int64_t count);

enum { BITS, SINGLE, BRAIN, HALF, DOUBLE }; /* what the numbers of a part are */

static double sum_of_squares(int64_t numbers, const char *bytes, int64_t count) {
    if (numbers != DOUBLE)
        return rankscope_squares(numbers - 1, bytes, count / (numbers == SINGLE ? 4 : 2));
    double sum = 0;
    for (int64_t i = 0; i < count; i += 8) {
        double value;
        memcpy(&value, bytes + i, 8);
        sum += value * value;
    }
    return sum;
}

struct part {
    const char *bytes;
    int64_t count;   /* of bytes */
    int64_t numbers; /* BITS where no squares are asked for */
};

/* Adds each part's digest to a word and, where it is asked for, finds the sum of its squares; one
 * read.
 *
 * Behind the parts there are all words, and then room for all sums of squares. */
void rankscope_digests(const struct part *parts, int64_t number, const struct tables *tables) {
    const int64_t strip = 4 * ROW;
    uint64_t *sums = (uint64_t *)(parts + number);
    double *squares = (double *)(sums + number);
    for (int64_t i = 0; i < number; i++) {
        const struct part *part = &parts[i];
        const char *after = i + 1 < number ? part[1].bytes : part->bytes;
        double square = 0;
        for (int64_t start = 0; start < part->count; start += strip) {
            const int64_t left = part->count - start, taken = left < strip ? left : strip;
            const char *bytes = part->bytes + start, *next = left > strip ? bytes + strip : after;
            sums[i] += add_rows(bytes, taken, start / ROW, next, tables);
            if (part->numbers)
                square += sum_of_squares(part->numbers, bytes, taken);
        }
        memcpy(&squares[i], &square, 8);
    }
}
