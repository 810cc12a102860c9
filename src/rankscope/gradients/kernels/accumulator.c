/* Sums of gradients in two digits of 64 bits per element; see lab/reductions/accumulator.py for what they mean.
 *
 * Every product with a power of two and every difference here is exact, so that neither the width
 * of vectors nor fused operations change a bit.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2
#define FLOAT64 3

#define HIGH_UNITS 0x1p16 /* units of the high digit in 1.0 */
#define LOW_UNITS 0x1p52  /* units of the low digit in one of the high digit */
#define LOW_BITS 52
#define LARGE ((int64_t)1 << 53)
#define LARGEST 0x1p40
#define QUANTUM 0x1p-68
#define BLOCK 512 /* numbers that are widened, and then added, at a time */

static void widen(int type, const char *values, int64_t count, double *wide) {
    if (type == FLOAT32) {
        const float *from = (const float *)values;
        for (int64_t i = 0; i < count; i++)
            wide[i] = from[i];
    } else if (type == BFLOAT16) {
        const uint16_t *from = (const uint16_t *)values;
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = (uint32_t)from[i] << 16;
            float value;
            memcpy(&value, &bits, 4);
            wide[i] = value;
        }
    } else if (type == FLOAT16) {
        const uint16_t *from = (const uint16_t *)values;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t size = from[i] & 0x7fff, rest = size & 0x3ff;
            const uint32_t bits = (size << 13) + (112u << 23); /* as float32, if it is normal */
            float value;
            memcpy(&value, &bits, 4);
            double magnitude = size < 0x400 ? rest * 0x1p-24 : (double)value;
            if (size >= 0x7c00)
                magnitude = rest ? (double)NAN : (double)INFINITY;
            wide[i] = from[i] & 0x8000 ? -magnitude : magnitude;
        }
    } else
        memcpy(wide, values, count * sizeof(double));
}

/* Adds numbers to the digits [count][2], or puts them there if `fresh`. bounds: the largest -x and
 * the largest x so far, NaN as soon as there was one. */
void rankscope_deposit(int type, const char *values, int64_t count, int64_t *digits, int fresh,
                       double *bounds) {
    const int64_t size = type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2;
    double wide[BLOCK], below = bounds[0], above = bounds[1];
    int strange = below != below;
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t n = count - start < BLOCK ? count - start : BLOCK;
        int64_t *into = digits + 2 * start;
        widen(type, values + start * size, n, wide);
        for (int64_t i = 0; i < n; i++) {
            const double x = wide[i];
            strange |= x != x;
            below = -x > below ? -x : below;
            above = x > above ? x : above;
        }
        for (int64_t i = 0; i < n; i++) {
            const double x = fabs(wide[i]) <= LARGEST ? wide[i] : 0.0;
            const double units = x * HIGH_UNITS, high = rint(units);
            const double low = rint((units - high) * LOW_UNITS);
            const uint64_t both[2] = {(uint64_t)(int64_t)high, (uint64_t)(int64_t)low};
            into[2 * i] = (int64_t)((fresh ? 0 : (uint64_t)into[2 * i]) + both[0]);
            into[2 * i + 1] = (int64_t)((fresh ? 0 : (uint64_t)into[2 * i + 1]) + both[1]);
        }
    }
    bounds[0] = strange ? (double)NAN : below;
    bounds[1] = strange ? (double)NAN : above;
}

/* Returns a number in units of the low digit, rounded to odd where a double cannot hold it. The low
 * digit is normalized, the high one below 2^53. */
static inline double to_odd(int64_t high, int64_t low) {
    const double large = (double)high * LOW_UNITS, small = (double)low;
    const double sum = large + small, lost = small - (sum - large);
    int64_t bits;
    memcpy(&bits, &sum, 8);
    const int64_t away = (lost > 0) == (sum > 0) ? 1 : -1; /* from zero, or towards it */
    bits += lost != 0 && !(bits & 1) ? away : 0;
    double odd;
    memcpy(&odd, &bits, 8);
    return odd;
}

/* The same for any high digit: its last bits only tell whether there is more. */
static double to_odd_any(int64_t high, int64_t low) {
    if (high >= -LARGE && high < LARGE)
        return to_odd(high, low);
    const int negative = high < 0;
    if (negative) {
        high = -high;
        low = -low;
    }
    high -= low < 0;
    const int64_t odd = high >> 11 << 1 | ((high & 0x7ff) != 0 || low != 0);
    const double size = (double)odd * (LOW_UNITS * 0x1p10);
    return negative ? -size : size;
}

/* Adds up the digits [count][2] of `parts` accumulators, `stride` elements apart, divides, and
 * rounds to float32: to nearest, or to odd, for a second rounding to 16 bits. */
void rankscope_convert(const int64_t *digits, int64_t parts, int64_t stride, int64_t count,
                       double divisor, int odd, float *values) {
    uint64_t sums[2 * BLOCK];
    int64_t highs[BLOCK], lows[BLOCK];
    double wide[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t n = count - start < BLOCK ? count - start : BLOCK;
        memcpy(sums, digits + 2 * start, 2 * n * sizeof(int64_t));
        for (int64_t part = 1; part < parts; part++) {
            const int64_t *from = digits + 2 * (part * stride + start);
            for (int64_t i = 0; i < 2 * n; i++)
                sums[i] += (uint64_t)from[i];
        }
        uint64_t large = 0;
        for (int64_t i = 0; i < n; i++) {
            const int64_t low = (int64_t)sums[2 * i + 1];
            const int64_t carry = (low + ((int64_t)1 << (LOW_BITS - 1))) >> LOW_BITS;
            const int64_t high = (int64_t)(sums[2 * i] + (uint64_t)carry);
            highs[i] = high;
            lows[i] = low - (int64_t)((uint64_t)carry << LOW_BITS);
            large |= (uint64_t)(high ^ high >> 63);
        }
        if (large >> 53)
            for (int64_t i = 0; i < n; i++)
                wide[i] = to_odd_any(highs[i], lows[i]);
        else
            for (int64_t i = 0; i < n; i++)
                wide[i] = to_odd(highs[i], lows[i]);
        for (int64_t i = 0; i < n; i++) {
            const double value = wide[i] * QUANTUM / divisor;
            uint64_t bits, lost;
            memcpy(&bits, &value, 8);
            lost = bits & 0x1fffffff;
            bits = (bits ^ lost) | (uint64_t)(lost != 0) << 29;
            double cut;
            memcpy(&cut, &bits, 8);
            values[start + i] = (float)(odd ? cut : value);
        }
    }
}
