/* The sum of squares of elements in double; they have been read just now. */
#include "vectors.h"

typedef double doubles __attribute__((vector_size(2 * BYTES))); /* of a vector of floats */

#define CHAINS 4 /* sums that grow side by side */

INLINE doubles squared(floats values) {
    doubles wide = __builtin_convertvector(values, doubles);
    return wide * wide;
}

INLINE double squares(int type, const char *near, int64_t count) {
    const int size = size_of(type);
    const int64_t step = BYTES / size, whole = count / (CHAINS * step) * CHAINS * step;
    doubles sums[CHAINS] = {{0}};
    for (int64_t i = 0; i < whole; i += CHAINS * step) {
#if !defined(__clang__)
#pragma GCC unroll 4
#endif
        for (int chain = 0; chain < CHAINS; chain++) {
            words a = load(near + (i + chain * step) * size);
            if (type == FLOAT32) {
                sums[chain] += squared((floats)a);
                continue;
            }
            floats first, second;
            widen_all(type, a, &first, &second);
            sums[chain] += squared(first) + squared(second);
        }
    }
    doubles total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += total[lane];
    for (int64_t i = whole; i < count; i++) {
        double value = as_float(widen(type, near + i * size));
        sum += value * value;
    }
    return sum;
}

/* type: 0 float32, 1 bfloat16, 2 float16 */
double rankscope_squares(int type, const char *near, int64_t count) {
    if (type == FLOAT32)
        return squares(FLOAT32, near, count);
    if (type == BFLOAT16)
        return squares(BFLOAT16, near, count);
    return squares(FLOAT16, near, count);
}
