/* One pass over a gradient: count sketch, squared norm, largest magnitude, non-finite count.
 *
 * Rows of `width` elements are read four at a time, so that each entry of the sketch is loaded
 * and stored once per four elements. 16-bit values are signed and compared as they are, two to a
 * word, and widened in registers. The squared norm adds up in short fp32 lanes and then in double.
 *
 * A block whose largest magnitude is not finite, or so large or small that squares leave the fp32
 * range, is read again in double; that is also where non-finite values are counted.
 */
#include "vectors.h"

#define ROWS 4             /* read side by side */
#define GROUPS 8           /* of so many rows, between two looks at the largest magnitude */
#define TILE (64 * LANES)  /* columns between two transfers of the norm from fp32 to double */
#define PERIOD 8191

/* Squares of magnitudes in this range neither overflow in a tile's sum nor lose digits. */
#define LARGEST_SAFE 0x1p58f
#define SMALLEST_SAFE 0x1p-40f

typedef struct {
    double squared_norm;
    uint32_t largest; /* bits of a non-negative float; NaN above infinity above all others */
    int64_t nonfinite;
} totals;

/* Consecutive elements of a parameter, and what their signs depend on. */
typedef struct {
    const char *at;
    int64_t position; /* of the first element, plus the parameter's shift */
    int64_t width;
    const char *period_signs; /* sign bits as wide as an element */
    const float *row_signs;   /* that of the first element's row first */
    float *sketch;            /* entry of the first element's column */
} span;

/* Up to ROWS rows that are read side by side. */
typedef struct {
    const char *at;
    int64_t stride; /* bytes between rows */
    const char *signs[ROWS];
    uint32_t row_sign[ROWS]; /* sign bits of floats */
    float *sketch;
} group;

/* Add one vector of columns, from all rows, to the sketch, the norm's lanes and the largest. */
INLINE void add_columns(int type, int rows, int sketching, const group *g, int64_t column,
                        words mask, floats norm[4], words largest[2]) {
    const int size = size_of(type);
    const words magnitude = (words){0} + (type == FLOAT32 ? 0x7fffffffu : 0x7fff7fffu);
    floats first = {0}, second = {0};
#if !defined(__clang__)
#pragma GCC unroll 4
#endif
    for (int row = 0; row < rows; row++) {
        words packed = load(g->at + row * g->stride + column * size) & mask;
        largest[row & 1] = larger(type, largest[row & 1], packed & magnitude);
        if (sketching) {
            uint32_t sign = g->row_sign[row];
            words row_sign = (words){0} + (type == FLOAT32 ? sign : sign >> 16 | sign);
            packed ^= load(g->signs[row] + column * size) ^ row_sign;
        }
        if (type == FLOAT32) {
            floats value = (floats)packed;
            first += value;
            norm[row & 3] += value * value;
        } else {
            floats one, other;
            widen_all(type, packed, &one, &other);
            first += one;
            second += other;
            norm[row & 1] += one * one;
            norm[2 + (row & 1)] += other * other;
        }
    }
    if (!sketching)
        return;
    if (type != FLOAT32 && !HALVED(type))
        interleave(&first, &second);
    float *sketch = g->sketch + column;
    store(sketch, load_floats(sketch) + first);
    if (type != FLOAT32)
        store(sketch + LANES, load_floats(sketch + LANES) + second);
}

/* Not inlined: compilers would otherwise take the vector apart, lane by lane. */
static __attribute__((noinline)) void transfer(floats norm, double *sums) {
    float lanes[LANES];
    store(lanes, norm);
    for (int lane = 0; lane < LANES; lane++)
        sums[lane] += lanes[lane];
}

/* Add rows of at least one vector of columns; the last vector overlaps its neighbour, masked. */
INLINE void add_group(int type, int rows, int sketching, const group *g, int64_t columns,
                      words largest[2], double sums[LANES]) {
    const int64_t step = BYTES / size_of(type);
    int64_t column = 0;
    while (column < columns) {
        floats norm[4] = {{0}};
        int64_t end = column + TILE < columns ? column + TILE : columns;
        for (; column + step <= end; column += step)
            add_columns(type, rows, sketching, g, column, ~(words){0}, norm, largest);
        if (column < end) {
            unsigned char keep[2 * BYTES] = {0};
            memset(keep + BYTES, 0xff, BYTES);
            words mask = load(keep + (columns - column) * size_of(type));
            add_columns(type, rows, sketching, g, columns - step, mask, norm, largest);
            column = columns;
        }
        transfer((norm[0] + norm[1]) + (norm[2] + norm[3]), sums);
    }
}

INLINE uint32_t largest_of(int type, const words largest[2]) {
    words lanes = larger(type, largest[0], largest[1]);
    uint32_t top = 0;
    if (type == FLOAT32) {
        for (int lane = 0; lane < LANES; lane++)
            top = lanes[lane] > top ? lanes[lane] : top;
        return top;
    }
    uint16_t values[2 * LANES], half = 0;
    memcpy(values, &lanes, BYTES);
    for (int lane = 0; lane < 2 * LANES; lane++)
        half = values[lane] > half ? values[lane] : half;
    return widen(type, (const char *)&half);
}

/* Read elements again in double. */
static void recount(int type, const char *at, int64_t count, totals *into) {
    enum { CHAINS = 8 };
    double sums[CHAINS] = {0};
    for (int64_t first = 0; first < count; first += CHAINS)
        for (int64_t chain = 0; chain < CHAINS && first + chain < count; chain++) {
            uint32_t bits = widen(type, at + (first + chain) * size_of(type));
            double value = as_float(bits);
            sums[chain] += value * value;
            into->nonfinite += (bits & 0x7fffffff) >= 0x7f800000;
        }
    for (int chain = 0; chain < CHAINS; chain++)
        into->squared_norm += sums[chain];
}

INLINE void set_signs(int type, group *g, int row, const span *s, int64_t rows_before) {
    int64_t position = s->position + (rows_before + row) * s->width;
    uint32_t bits;
    memcpy(&bits, s->row_signs + rows_before + row, 4);
    g->row_sign[row] = bits & 0x80000000;
    g->signs[row] = s->period_signs + position % PERIOD * size_of(type);
}

/* Add groups of rows, each of at least one vector of columns. */
INLINE void add_rows(int type, int rows, int sketching, const span *s, int64_t groups,
                     int64_t columns, totals *into) {
    words largest[2] = {{0}};
    double sums[LANES] = {0};
    for (int64_t done = 0; done < groups * rows; done += rows) {
        group g = {.stride = s->width * size_of(type), .sketch = s->sketch};
        g.at = s->at + done * g.stride;
        for (int row = 0; sketching && row < rows; row++)
            set_signs(type, &g, row, s, done);
        add_group(type, rows, sketching, &g, columns, largest, sums);
    }
    uint32_t top = largest_of(type, largest);
    into->largest = top > into->largest ? top : into->largest;
    if (top && !(as_float(top) <= LARGEST_SAFE && as_float(top) >= SMALLEST_SAFE)) {
        recount(type, s->at, groups * rows * columns, into);
        return;
    }
    for (int lane = 0; lane < LANES; lane++)
        into->squared_norm += sums[lane];
}

/* Add a few elements of one row. */
static void add_short(int type, int sketching, const span *s, int64_t columns, totals *into) {
    const int size = size_of(type);
    group g = {0};
    if (sketching)
        set_signs(type, &g, 0, s, 0);
    for (int64_t column = 0; column < columns; column++) {
        uint32_t bits = widen(type, s->at + column * size), magnitude = bits & 0x7fffffff;
        double value = as_float(bits);
        into->largest = magnitude > into->largest ? magnitude : into->largest;
        into->nonfinite += magnitude >= 0x7f800000;
        into->squared_norm += value * value;
        if (sketching) {
            uint32_t sign = (uint32_t)(uint8_t)g.signs[0][column * size + size - 1] << 24;
            s->sketch[column] += as_float(bits ^ sign ^ g.row_sign[0]);
        }
    }
}

INLINE void measure(int type, int sketching, span s, int64_t count, int64_t start, totals *into) {
    const int size = size_of(type);
    float *const sketch = s.sketch;
    for (int64_t done = 0, step; done < count; done += step) {
        int64_t column = (start + done) % s.width, left = count - done, rows = 1;
        if (sketching)
            s.sketch = sketch + column;
        if (column == 0 && left >= ROWS * s.width && s.width * size >= BYTES) {
            int64_t groups = left / (ROWS * s.width);
            groups = groups < GROUPS ? groups : GROUPS;
            add_rows(type, ROWS, sketching, &s, groups, s.width, into);
            rows = groups * ROWS;
            step = rows * s.width;
        } else {
            step = left < s.width - column ? left : s.width - column;
            if (step * size >= BYTES)
                add_rows(type, 1, sketching, &s, 1, step, into);
            else
                add_short(type, sketching, &s, step, into);
        }
        s.at += step * size;
        s.position += step;
        if (sketching)
            s.row_signs += rows;
    }
}

/* Adds a flat part of a gradient to totals.
 *
 * type: 0 float32, 1 bfloat16, 2 float16. start: position of the first element in the whole
 * parameter. period_signs: sign bits as wide as an element, of length PERIOD + width. row_signs:
 * +1 or -1, that of the first element's row first. sketch: width floats, or null for the norm
 * alone; start, period_signs, shift and row_signs are not read then. */
__attribute__((noinline)) void
rankscope_measure(int type, const char *gradient, int64_t count, int64_t start, int64_t width,
                  const char *period_signs, int64_t shift, const float *row_signs, float *sketch,
                  double *squared_norm, float *largest, int64_t *nonfinite) {
    span s = {gradient, start + shift, width, period_signs, row_signs, sketch};
    totals sums = {0};
    memcpy(&sums.largest, largest, 4);
    sums.largest &= 0x7fffffff;
    if (!sketch)
        start = 0;
    if (type == FLOAT32)
        sketch ? measure(FLOAT32, 1, s, count, start, &sums)
               : measure(FLOAT32, 0, s, count, start, &sums);
    else if (type == BFLOAT16)
        sketch ? measure(BFLOAT16, 1, s, count, start, &sums)
               : measure(BFLOAT16, 0, s, count, start, &sums);
    else
        sketch ? measure(FLOAT16, 1, s, count, start, &sums)
               : measure(FLOAT16, 0, s, count, start, &sums);
    *squared_norm += sums.squared_norm;
    memcpy(largest, &sums.largest, 4);
    *nonfinite += sums.nonfinite;
}

/* Consecutive elements of one gradient, all of which count to one row of the totals. */
typedef struct {
    int64_t source, offset; /* which gradient, and bytes from its beginning */
    int64_t count, type, row;
    int64_t start, shift;   /* as rankscope_measure takes them, and not read for norms alone */
    const float *row_signs;
} piece;

/* Adds pieces of several gradients to totals, one piece after the other.
 *
 * gradients: where each begins. period_signs: by type. sketches: rows of width floats, or null for
 * norms alone; squared_norms, largest, nonfinite: one number for each row. */
void rankscope_measure_many(const piece *pieces, int64_t number, const char *const *gradients,
                            int64_t width, const char *const *period_signs, float *sketches,
                            double *squared_norms, float *largest, int64_t *nonfinite) {
    for (const piece *p = pieces; p < pieces + number; p++)
        rankscope_measure(p->type, gradients[p->source] + p->offset, p->count, p->start, width,
                          sketches ? period_signs[p->type] : NULL, p->shift, p->row_signs,
                          sketches ? sketches + p->row * width : NULL, squared_norms + p->row,
                          largest + p->row, nonfinite + p->row);
}

/* What is handed over of the totals of a gradient, and in which form. */
typedef struct {
    int64_t rows, wide;    /* of the totals, and numbers in each of their sketches */
    int64_t micro;         /* numbers that stand before the largest one, left to the caller */
    int64_t sketches, end; /* bytes before the first sketch, and in all */
    int64_t folds;
    const float *signs; /* +1 or -1, one for each entry of a row */
} form;

/* A row that is added to a sketch: entry c, with its sign if the sketch is narrower than the row,
 * to entry c mod width. */
typedef struct {
    int64_t reduced, row; /* whether of the reduced gradient */
    int64_t width, at;    /* numbers in the sketch, and where the first of them goes */
} fold;

/* Hands over squared norms, the reduced gradient's likewise, what the caller fills in, the largest
 * element, the number of those that are not finite; and behind all numbers the sketches.
 *
 * local, reduced: totals as gradients/totals.py lays them out; the latter may be null. */
void rankscope_hand_over(const form *f, const fold *folds, const double *local,
                         const double *reduced, double *into) {
    const int64_t rows = f->rows, before = 2 * rows + (rows + 1) / 2;
    const int64_t *nonfinite = (const int64_t *)(local + rows);
    const float *largest = (const float *)(local + 2 * rows);
    float *restrict sketches = (float *)((char *)into + f->sketches);
    float most = 0;
    int64_t bad = 0;
    for (int64_t row = 0; row < rows; row++) {
        bad += nonfinite[row];
        if (most == most && !(largest[row] <= most)) /* once it is NaN, it stays so */
            most = largest[row];
    }
    memcpy(into, local, rows * sizeof(double));
    if (reduced)
        memcpy(into + rows, reduced, rows * sizeof(double));
    double *rest = into + (reduced ? 2 : 1) * rows + f->micro;
    rest[0] = most;
    rest[1] = bad;
    memset(sketches, 0, f->end - f->sketches);
    for (const fold *d = folds; d < folds + f->folds; d++) {
        const double *totals = d->reduced ? reduced : local;
        const float *restrict row = (const float *)(totals + before) + d->row * f->wide;
        float *restrict sums = sketches + d->at;
        if (d->width == f->wide) {
            for (int64_t c = 0; c < f->wide; c++)
                sums[c] += row[c];
            continue;
        }
        for (int64_t begin = 0; begin < f->wide; begin += d->width) {
            int64_t columns = f->wide - begin < d->width ? f->wide - begin : d->width;
            for (int64_t c = 0; c < columns; c++)
                sums[c] += row[begin + c] * f->signs[begin + c];
        }
    }
}
