/* The inner product of two gradients in double, in one pass over both. */
#include "vectors.h"

typedef double doubles __attribute__((vector_size(2 * BYTES))); /* of a vector of floats */

#define CHAINS 4    /* sums that grow side by side */
#define AHEAD 65536 /* bytes between reading and prefetching */

INLINE doubles product(floats one, floats other) {
    return __builtin_convertvector(one, doubles) * __builtin_convertvector(other, doubles);
}

INLINE double dot(int type, const char *one, const char *other, int64_t count, int far) {
    const int size = size_of(type);
    const int64_t step = BYTES / size, whole = count / (CHAINS * step) * CHAINS * step;
    doubles sums[CHAINS] = {{0}};
    for (int64_t i = 0; i < whole; i += CHAINS * step) {
#if !defined(__clang__)
#pragma GCC unroll 4
#endif
        for (int chain = 0; chain < CHAINS; chain++) {
            int64_t at = (i + chain * step) * size;
            if (far) {
                __builtin_prefetch(one + at + AHEAD, 0, 2);
                __builtin_prefetch(other + at + AHEAD, 0, 2);
            }
            words a = load(one + at), b = load(other + at);
            if (type == FLOAT32) {
                sums[chain] += product((floats)a, (floats)b);
                continue;
            }
            floats a_first, a_second, b_first, b_second;
            widen_all(type, a, &a_first, &a_second);
            widen_all(type, b, &b_first, &b_second);
            sums[chain] += product(a_first, b_first) + product(a_second, b_second);
        }
    }
    doubles total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += total[lane];
    for (int64_t i = whole; i < count; i++)
        sum += (double)as_float(widen(type, one + i * size)) *
               (double)as_float(widen(type, other + i * size));
    return sum;
}

/* Returns the inner product of `count` elements.
 *
 * type: of both, 0 float32, 1 bfloat16, 2 float16. */
double rankscope_dot(int type, const char *one, const char *other, int64_t count) {
    if (type == FLOAT32)
        return dot(FLOAT32, one, other, count, 1);
    if (type == BFLOAT16)
        return dot(BFLOAT16, one, other, count, 1);
    return dot(FLOAT16, one, other, count, 1);
}

/* Returns the inner product of elements with themselves; they have been read just now. */
double rankscope_squares(int type, const char *near, int64_t count) {
    if (type == FLOAT32)
        return dot(FLOAT32, near, near, count, 0);
    if (type == BFLOAT16)
        return dot(BFLOAT16, near, near, count, 0);
    return dot(FLOAT16, near, near, count, 0);
}
