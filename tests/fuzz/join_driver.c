/* SPDX-License-Identifier: Apache-2.0 */
/* Runs report/join/records.c on made-up columns for fuzz_join.py, which compiles both with sanitizers.
 *
 * Arguments: a seed and a number of cases. Each column has memory of exactly its size, so that a sanitizer sees each access
 * beyond it. About half of the cases are damaged: lengths, cells, slots and first slots of pages are any numbers then.
 * Prints how many calls did their work, and how many were refused; exits with 1 if one that was right was refused, or if the
 * sum of what was added is wrong. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t s64;

struct pages {
    const u64 *number;
    const s64 *first;
    u64 count;
    const s64 *table;
    u64 size, mask;
    u32 shift, unit_bits, page_bits;
};

struct counters {
    u32 words, first_bit, bits, count;
};

struct pairs {
    const s64 *numbers;
    u64 records;
    const s64 *lengths;
    u64 reads;
    const s64 *read, *cell, *value;
    u64 pairs;
    s64 *of_cell;
    u64 cells, step;
};

u64 join_number(const struct pages *pages, const u64 *words, u64 records, s64 *numbers);
s64 join_pairs(const s64 *numbers, u64 records, const s64 *lengths, u64 reads, s64 *seen, u64 cells, s64 *pair_read,
               s64 *pair_cell);
int join_place(const struct pairs *pairs, s64 *values);
int join_add(const struct counters *counters, const u64 *const *words, const s64 *slots, u64 records, void *rows, u64 count);
int join_sum(const struct pairs *pairs, const struct counters *counters, const u64 *const *words, void *rows, u64 count);

enum { MOST_RECORDS = 200, MOST_READS = 8, MOST_CELLS = 40, MOST_PAGES = 6, MOST_WORDS = 6 };
enum { UNIT_BITS = 3, PAGE_BITS = 7, PLACES = 1 << (PAGE_BITS - UNIT_BITS), NARROW = 8, COLUMNS = 16 };

static u64 state;

static u64 chance(void) { /* splitmix64 */
    u64 z = state += 0x9E3779B97F4A7C15ULL;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ z >> 27) * 0x94D049BB133111EBULL;
    return z ^ z >> 31;
}

static u64 below(u64 end) { return chance() % end; }

static void *column(u64 count, size_t each) { /* of exactly this size */
    void *memory = malloc(count * each ? count * each : 1);
    if (!memory)
        abort();
    for (u64 i = 0; i < count * each; i++)
        ((unsigned char *)memory)[i] = (unsigned char)chance();
    return memory;
}

static s64 any(void) {
    static const s64 numbers[] = {0, -1, 1, INT64_MAX, INT64_MIN, 0xFFFFFFFF, 0x100000000, -0x100000000};
    return below(2) ? numbers[below(sizeof numbers / sizeof *numbers)] : (s64)chance();
}

static void damage(s64 *values, u64 count) {
    for (u64 times = below(3); count && times; times--)
        values[below(count)] = any();
}

static u64 done, refused;

static bool one(void) {
    bool damaged = below(2), right = true;
    u64 reads = below(MOST_READS), cells = 1 + below(MOST_CELLS), records = 0, pages = below(MOST_PAGES);
    s64 *lengths = column(reads, sizeof *lengths);
    for (u64 i = 0; i < reads; i++)
        records += (u64)(lengths[i] = (s64)below(MOST_RECORDS / MOST_READS));
    s64 *numbers = column(records, sizeof *numbers), *values = column(records, sizeof *values);
    u64 *number = column(pages, sizeof *number);
    s64 *first = column(pages, sizeof *first), *table = column(pages * PLACES, sizeof *table);
    u32 words = 1 + (u32)below(MOST_WORDS);
    const u64 *record[MOST_WORDS];
    for (u32 i = 0; i < words; i++)
        record[i] = column(records, sizeof **record);

    /* Numbers: of pages that are there, or not. */
    for (u64 i = 0; i < pages; i++)
        number[i] = 2 * i, first[i] = (s64)((pages - 1 - i) * PLACES);
    for (u64 i = 0; i < pages * PLACES; i++)
        table[i] = below(5) ? (s64)(below(cells) << 32 | below(PLACES)) : -1;
    if (damaged)
        damage(first, pages), damage((s64 *)number, pages);
    u64 mask = damaged ? chance() : (2 * MOST_PAGES << (PAGE_BITS - UNIT_BITS)) - 1;
    struct pages where = {number, first, pages, table, pages * PLACES, mask, UNIT_BITS, UNIT_BITS, PAGE_BITS};
    u64 missing = join_number(&where, record[0], records, numbers), negative = 0;
    for (u64 i = 0; i < records; i++) {
        negative += numbers[i] < 0;
        if (numbers[i] < 0)
            numbers[i] = (s64)(below(cells) << 32);
    }
    right &= missing == negative;

    /* Pairs, and a slot for each record. */
    if (damaged)
        damage(numbers, records), damage(lengths, reads);
    s64 *seen = column(cells, sizeof *seen), *of_cell = column(cells, sizeof *of_cell);
    memset(seen, -1, cells * sizeof *seen);
    s64 *pair_read = column(records, sizeof *pair_read), *pair_cell = column(records, sizeof *pair_cell);
    s64 pairs = join_pairs(numbers, records, lengths, reads, seen, cells, pair_read, pair_cell);
    right &= damaged || pairs >= 0;
    u64 count = pairs < 0 ? below(records + 1) : (u64)pairs, rows = 1 + below(100) + PLACES;
    s64 *value = column(count, sizeof *value);
    for (u64 i = 0; i < count; i++)
        value[i] = (s64)below(rows - PLACES);
    if (damaged)
        damage(value, count), damage(pair_read, records), damage(pair_cell, records);
    struct pairs of_pairs = {numbers, records, lengths, reads, pair_read, pair_cell, value, count, of_cell, cells, below(2)};
    int placed = join_place(&of_pairs, values);
    right &= damaged || !placed;

    /* Sums: in one step, and in two. */
    u32 bits = NARROW << below(4), counts = 1 + (u32)below(COLUMNS);
    if (damaged && !below(8))
        counts += COLUMNS;
    struct counters counters = {words, bits == NARROW ? (u32)below(100) : bits * (u32)below(5), bits, counts};
    u64 size = rows * (bits == NARROW ? COLUMNS * sizeof(u32) : counts * sizeof(u64));
    void *sums = calloc(1, size), *same = calloc(1, size);
    if (!sums || !same)
        abort();
    int summed = join_sum(&of_pairs, &counters, record, same, rows);
    bool both = !placed && !join_add(&counters, record, values, records, sums, rows);
    right &= both == !summed && (!both || !memcmp(sums, same, size));
    memset(sums, 0, size);
    if (placed)
        for (u64 i = 0; i < records; i++)
            values[i] = (s64)below(rows);
    if (damaged)
        damage(values, records);
    int added = join_add(&counters, record, values, records, sums, rows);
    bool is_known = bits == NARROW ? counts <= COLUMNS : bits == 16 || bits == 64;
    right &= damaged || !is_known || !added;
    if (!added && bits == NARROW) { /* bit by bit */
        u64 expected = 0, found = 0;
        for (u64 i = 0; i < records; i++)
            for (u32 bit = 0; bit < counts * NARROW; bit++) {
                u32 at = counters.first_bit + bit;
                expected += at / 64 < words ? (record[at / 64][i] >> at % 64 & 1) << bit % NARROW : 0;
            }
        for (u64 i = 0; i < rows * COLUMNS; i++)
            found += ((u32 *)sums)[i];
        right &= expected == found;
    }
    refused += (pairs < 0) + !!placed + !!summed + !!added;
    done += (pairs >= 0) + !placed + !summed + !added;
    for (u32 i = 0; i < words; i++)
        free((void *)record[i]);
    void *columns[] = {lengths, numbers, values, number, first, table, seen, of_cell, pair_read, pair_cell, value, sums, same};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        free(columns[i]);
    return right;
}

int main(int count, char **words) {
    u64 seed = count > 1 ? strtoull(words[1], NULL, 0) : 1, cases = count > 2 ? strtoull(words[2], NULL, 0) : 1;
    for (u64 i = 0; i < cases; i++) {
        state = seed + i;
        if (!one()) {
            printf("seed %" PRIu64 " is wrong\n", seed + i);
            return 1;
        }
    }
    printf("%" PRIu64 " calls did their work, %" PRIu64 " were refused\n", done, refused);
    return 0;
}
