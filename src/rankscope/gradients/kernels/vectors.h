/* Vectors as wide as the processor's, and the few operations on them that C does not have. */
#ifndef RANKSCOPE_VECTORS_H
#define RANKSCOPE_VECTORS_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "16-bit values are taken out of little-endian words"
#endif

#if defined(__AVX512BW__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif

#define LANES (BYTES / 4)
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(BYTES)));
typedef uint32_t words __attribute__((vector_size(BYTES)));
typedef int32_t signed_words __attribute__((vector_size(BYTES)));
typedef int16_t signed_halves __attribute__((vector_size(BYTES)));

enum { FLOAT32, BFLOAT16, FLOAT16 };

INLINE int size_of(int type) { return type == FLOAT32 ? 4 : 2; }

INLINE words load(const void *at) {
    words loaded;
    memcpy(&loaded, at, BYTES);
    return loaded;
}

INLINE floats load_floats(const float *at) { return (floats)load(at); }

INLINE void store(float *at, floats value) { memcpy(at, &value, BYTES); }

/* The larger of two magnitudes, lane by lane; their sign bits are zero. */
INLINE words larger(int type, words a, words b) {
    if (type == FLOAT32) {
#if BYTES == 64
        return (words)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif BYTES == 32
        return (words)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
        words above = (words)((signed_words)a > (signed_words)b);
        return (a & above) | (b & ~above);
#endif
    }
#if BYTES == 64
    return (words)_mm512_max_epi16((__m512i)a, (__m512i)b);
#elif BYTES == 32
    return (words)_mm256_max_epi16((__m256i)a, (__m256i)b);
#else
    words above = (words)((signed_halves)a > (signed_halves)b);
    return (a & above) | (b & ~above);
#endif
}

/* Float32 bits of float16 bits, by integer arithmetic and one exact subtraction. */
INLINE words widen_float16(words half) {
    words magnitude = half & 0x7fff;
    words normal = (magnitude << 13) + (112u << 23);
    words infinite = (magnitude << 13) | 0x7f800000;
    words small = (words)((floats)(magnitude | 0x3f000000) - 0.5f);
    words is_small = (words)((signed_words)magnitude < 0x400);
    words is_infinite = (words)((signed_words)magnitude > 0x7bff);
    words bits = (small & is_small) | (infinite & is_infinite) | (normal & ~is_small & ~is_infinite);
    return bits | (half & 0x8000) << 16;
}

/* The float32 bits of one element. */
INLINE uint32_t widen(int type, const char *at) {
    uint32_t word;
    uint16_t half;
    if (type == FLOAT32) {
        memcpy(&word, at, 4);
        return word;
    }
    memcpy(&half, at, 2);
    return type == BFLOAT16 ? (uint32_t)half << 16 : widen_float16((words){0} + half)[0];
}

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Widen 16-bit values, into even and odd columns or, where HALVED, a lower and an upper half. */
#if BYTES == 64 || (BYTES == 32 && defined(__F16C__))
#define HALVED(type) ((type) == FLOAT16)
#else
#define HALVED(type) 0
#endif

INLINE void widen_all(int type, words packed, floats *first, floats *second) {
    if (type == BFLOAT16) {
        *first = (floats)(packed << 16);
        *second = (floats)(packed & 0xffff0000u);
        return;
    }
#if BYTES == 64
    *first = (floats)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)packed));
    *second = (floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)packed, 1));
#elif BYTES == 32 && defined(__F16C__)
    *first = (floats)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)packed));
    *second = (floats)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)packed, 1));
#else
    *first = (floats)widen_float16(packed & 0xffff);
    *second = (floats)widen_float16(packed >> 16);
#endif
}

/* Put sums of even and odd columns back into the order of columns. */
INLINE void interleave(floats *even, floats *odd) {
#if BYTES == 64
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    floats first = (floats)_mm512_permutex2var_ps((__m512)*even, low, (__m512)*odd);
    *odd = (floats)_mm512_permutex2var_ps((__m512)*even, high, (__m512)*odd);
    *even = first;
#elif BYTES == 32
    __m256 low = _mm256_unpacklo_ps((__m256)*even, (__m256)*odd);
    __m256 high = _mm256_unpackhi_ps((__m256)*even, (__m256)*odd);
    *even = (floats)_mm256_permute2f128_ps(low, high, 0x20);
    *odd = (floats)_mm256_permute2f128_ps(low, high, 0x31);
#else
    floats first = {(*even)[0], (*odd)[0], (*even)[1], (*odd)[1]};
    floats second = {(*even)[2], (*odd)[2], (*even)[3], (*odd)[3]};
    *even = first;
    *odd = second;
#endif
}

#endif
