/* A digest of the bits of memory, in integer arithmetic: a weighted sum of 32-bit words.
 *
 * Every word of a row has a 64-bit key of its own, and every row an odd multiplier. A product with
 * a key is taken in two halves, so that it needs no wider multiplication than 32 by 32 bits; only
 * the lower 32 bits of the upper half count. Words at odd places count as signed.
 */
#include <stdint.h>
#include <string.h>

#define ROW 1024 /* words; with the keys, they fit into the first-level cache */

typedef uint32_t __attribute__((aligned(1), may_alias)) loose; /* at any address */

static uint64_t add_row(const loose *words, const uint32_t *low_keys, const uint32_t *high_keys,
                        const uint32_t *signs) {
    uint64_t low = 0;
    uint32_t high = 0;
    for (int i = 0; i < ROW; i++) {
        uint32_t negative = (uint32_t)((int32_t)words[i] >> 31);
        low += (uint64_t)words[i] * low_keys[i];
        high += words[i] * high_keys[i] - (negative & signs[i]);
    }
    return low + ((uint64_t)high << 32);
}

/* Returns the digest of `count` bytes, padded with zeros to whole rows.
 *
 * low_keys, high_keys: halves of the keys, ROW each. signs: the lower halves at odd places, where
 * words are signed, and zeros. multipliers: one per row. */
uint64_t rankscope_digest(const char *bytes, int64_t count, const uint32_t *low_keys,
                          const uint32_t *high_keys, const uint32_t *signs,
                          const uint64_t *multipliers) {
    const int64_t size = ROW * 4, rows = count / size, rest = count % size;
    uint64_t sum = 0;
    for (int64_t row = 0; row < rows; row++)
        sum += multipliers[row] *
               add_row((const loose *)(bytes + row * size), low_keys, high_keys, signs);
    if (rest) {
        char padded[ROW * 4] = {0};
        memcpy(padded, bytes + rows * size, rest);
        sum += multipliers[rows] *
               add_row((const loose *)padded, low_keys, high_keys, signs);
    }
    return sum;
}
