/* What is read of a batch on the host: a digest of each sample, and how many labels count. */
#include <stdint.h>

static int counts(const char *mask, int size, int64_t i) {
    if (size == 8)
        return ((const int64_t *)mask)[i] != 0;
    return size == 4 ? ((const int32_t *)mask)[i] != 0 : mask[i] != 0;
}

/* Writes a digest of each of `samples` rows of `length` words. Zeros at a row's end change nothing.
 *
 * mask: which words count, numbers of `size` bytes; NULL if all do. weights: one per place among
 * those that count, `places` of them; then they begin again. mix: an odd number. */
void rankscope_samples(const int64_t *words, const char *mask, int size, int64_t samples,
                       int64_t length, const uint64_t *weights, int64_t places, uint64_t mix,
                       int64_t *digests) {
    for (int64_t row = 0; row < samples; row++) {
        uint64_t total = 0;
        int64_t place = 0;
        for (int64_t i = row * length; i < (row + 1) * length; i++) {
            if (mask && !counts(mask, size, i))
                continue;
            total += (uint64_t)words[i] * weights[place];
            place = place + 1 == places ? 0 : place + 1;
        }
        total = (total ^ (uint64_t)((int64_t)total >> 29)) * mix;
        digests[row] = (int64_t)(total ^ (uint64_t)((int64_t)total >> 32));
    }
}

/* Returns how many labels are not `ignored`, from the place `first` on in each row. */
int64_t rankscope_labels(const int64_t *labels, int64_t rows, int64_t length, int64_t first,
                         int64_t ignored) {
    int64_t count = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = first; i < length; i++)
            count += labels[row * length + i] != ignored;
    return count;
}
