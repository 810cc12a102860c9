/* A digest of the bits of memory, in integer arithmetic: a weighted sum of 32-bit words.
 *
 * Every word of a row has a 64-bit key of its own, and every row an odd multiplier. A product with
 * a key is taken in two halves, so that it needs no wider multiplication than 32 by 32 bits; only
 * the lower 32 bits of the upper half count. Words at odd places count as signed.
 */
#include <stdint.h>
#include <string.h>

#define ROW 1024 /* words; with the keys, they fit into the first-level cache */
#define MULTIPLIERS 65536 /* rows; then they begin again, times another factor */

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

double rankscope_dot(int type, const char *one, const char *other, int64_t count);

enum { BITS, FLOAT32, BFLOAT16, FLOAT16, FLOAT64 }; /* what the numbers of a part are */

/* Has `count` bytes brought nearer while others are read. */
static void fetch(const char *bytes, int64_t count) {
    for (int64_t i = 0; i < count; i += 64)
        __builtin_prefetch(bytes + i, 0, 2);
}

static double sum_of_squares(int64_t numbers, const char *bytes, int64_t count) {
    if (numbers != FLOAT64)
        return rankscope_dot(numbers - 1, bytes, bytes, count / (numbers == FLOAT32 ? 4 : 2));
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

struct tables {
    const uint32_t *low_keys, *high_keys, *signs;
    const uint64_t *multipliers;
    uint64_t block_factor; /* of the multipliers, for each time that they begin again */
};

/* Writes the digest of each part and, where they are asked for, the sum of its squares; one read.
 *
 * Behind the parts there is room for all digests, and then for all sums of squares. */
void rankscope_digests(const struct part *parts, int64_t number, const struct tables *tables) {
    const int64_t block = (int64_t)MULTIPLIERS * ROW * 4, strip = 4 * ROW * 4;
    uint64_t *sums = (uint64_t *)(parts + number);
    double *squares = (double *)(sums + number);
    for (int64_t i = 0; i < number; i++) {
        const struct part *part = &parts[i];
        uint64_t sum = 0, factor = 1;
        double square = 0;
        for (int64_t start = 0; start < part->count; start += strip) {
            const int64_t left = part->count - start, taken = left < strip ? left : strip;
            const int64_t row = start % block / (ROW * 4);
            if (left > strip)
                fetch(part->bytes + start + strip, left - strip < strip ? left - strip : strip);
            else if (i + 1 < number)
                fetch(part[1].bytes, part[1].count < strip ? part[1].count : strip);
            if (start && !row)
                factor *= tables->block_factor;
            sum += factor * rankscope_digest(part->bytes + start, taken, tables->low_keys,
                                             tables->high_keys, tables->signs,
                                             tables->multipliers + row);
            if (part->numbers)
                square += sum_of_squares(part->numbers, part->bytes + start, taken);
        }
        sums[i] = sum;
        memcpy(&squares[i], &square, 8);
    }
}
