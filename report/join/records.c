/* SPDX-License-Identifier: Apache-2.0 */
/* What the join does with each record of samples, over whole columns: records.py calls it through ctypes.
 *
 * A record's address has a number: the cell in the high half, the place within the cell in the low one (attribution.py).
 * Columns come from captures, which are hostile: every index is checked before it is used. Nothing here allocates memory,
 * keeps state or knows of files. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t s64;

#define PUBLIC __attribute__((visibility("default")))

enum { WORD_BITS = 64, PLACE_BITS = 32 };
enum { NARROW_BITS = 8, NARROW_COUNTERS = 16, WIDE_BITS = 16, WHOLE_BITS = 64 };
enum { PAGES_BITS = 12, FEW = 16 };
enum { TOGETHER = 128 }; /* so many records are looked up at a time */
enum { WRONG = -1 };

static const u64 MIXER = 0x9E3779B97F4A7C15; /* 2^64 / golden ratio */

/* Where records have addresses: Addresses.Pages of records.py. */
struct pages {
    const u64 *number; /* [count], ascending: the address >> page_bits */
    const s64 *first;  /* [count]: where the page begins in the table */
    u64 count;
    const s64 *table; /* [size]: by address, its number, or -1 */
    u64 size;
    u64 mask;              /* of the first word: its bits of an address */
    u32 shift;             /* an address in bytes is these << shift */
    u32 unit_bits;         /* a page has a place for each multiple of 1 << unit_bits bytes */
    u32 page_bits;
};

/* Counters follow one another, from a bit of the record on: Counters of records.py. */
struct counters {
    u32 words, first_bit, bits, count;
};

static s64 first_slot(const struct pages *pages, u64 page) {
    u64 low = 0, high = pages->count;
    while (low < high) {
        u64 middle = low + (high - low) / 2;
        if (pages->number[middle] < page)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == pages->count || pages->number[low] != page)
        return WRONG;
    u64 first = (u64)pages->first[low], length = (u64)1 << (pages->page_bits - pages->unit_bits);
    return first <= pages->size && length <= pages->size - first ? (s64)first : WRONG;
}

/* Writes the number of each record's address, -1 if it has none; returns how many have none. */
PUBLIC u64 join_number(const struct pages *pages, const u64 *words, u64 records, s64 *numbers) {
    struct {
        u64 page;
        s64 first;
    } known[1 << PAGES_BITS];
    for (u64 i = 0; i < 1 << PAGES_BITS; i++)
        known[i].page = UINT64_MAX; /* no page has this number, as it has several addresses */
    u64 missing = 0, in_page = ((u64)1 << pages->page_bits) - 1;
    for (u64 begin = 0, end; begin < records; begin = end) {
        end = records - begin < TOGETHER ? records : begin + TOGETHER;
        for (u64 i = begin; i < end; i++) { /* first all places in the table, so that these are fetched meanwhile */
            u64 address = (words[i] & pages->mask) << pages->shift, page = address >> pages->page_bits;
            u64 at = page * MIXER >> (WORD_BITS - PAGES_BITS);
            if (known[at].page != page) {
                known[at].page = page;
                known[at].first = first_slot(pages, page);
            }
            s64 first = known[at].first;
            s64 slot = first < 0 ? WRONG : first + (s64)((address & in_page) >> pages->unit_bits);
            if (slot >= 0)
                __builtin_prefetch(pages->table + slot);
            numbers[i] = slot;
        }
        for (u64 i = begin; i < end; i++) {
            s64 number = numbers[i] < 0 ? WRONG : pages->table[numbers[i]];
            numbers[i] = number;
            missing += number < 0;
        }
    }
    return missing;
}

static int ascending(const void *one, const void *other) {
    s64 a = *(const s64 *)one, b = *(const s64 *)other;
    return (a > b) - (a < b);
}

static void sort(s64 *values, u64 count) {
    if (count > FEW) {
        qsort(values, count, sizeof *values, ascending);
        return;
    }
    for (u64 i = 1; i < count; i++) {
        s64 value = values[i];
        u64 at = i;
        for (; at && values[at - 1] > value; at--)
            values[at] = values[at - 1];
        values[at] = value;
    }
}

/* Writes the distinct pairs of a read and a cell, ascending, at most as many as records.
 *
 * lengths: [reads], the records of each. seen: [cells], -1 each; it is scratch.
 * Returns the number of pairs; -1 if a number has no cell, or the lengths do not add up. */
PUBLIC s64 join_pairs(const s64 *numbers, u64 records, const s64 *lengths, u64 reads, s64 *seen, u64 cells, s64 *pair_read,
                      s64 *pair_cell) {
    u64 pairs = 0, at = 0;
    for (u64 read = 0; read < reads; read++) {
        u64 length = (u64)lengths[read], first = pairs;
        if (length > records - at)
            return WRONG;
        for (u64 end = at + length; at < end; at++) {
            u64 cell = (u64)(numbers[at] >> PLACE_BITS);
            if (cell >= cells)
                return WRONG;
            if (seen[cell] != (s64)read) {
                seen[cell] = (s64)read;
                pair_read[pairs] = (s64)read;
                pair_cell[pairs++] = (s64)cell;
            }
        }
        sort(pair_cell + first, pairs - first);
    }
    return at == records ? (s64)pairs : WRONG;
}

/* Pairs with a value each, and the records that belong to them: Pairs of records.py. */
struct pairs {
    const s64 *numbers; /* [records], of their addresses */
    u64 records;
    const s64 *lengths; /* [reads], the records of each */
    u64 reads;
    const s64 *read, *cell, *value; /* [pairs], ascending by read */
    u64 pairs;
    s64 *of_cell; /* [cells]: scratch */
    u64 cells;
    u64 step; /* a record's value is that of its pair, plus the address's place within its cell times this */
};

/* Goes through the records of a read after the other. */
struct walk {
    u64 read, pair, at, end;
};

static struct walk begin_walk(const struct pairs *pairs) {
    for (u64 i = 0; i < pairs->cells; i++)
        pairs->of_cell[i] = WRONG;
    return (struct walk){0};
}

/* Goes on to the next read, if the walk is at the end of one; false if the lengths do not add up, or a pair is wrong. */
static bool next_read(const struct pairs *pairs, struct walk *walk) {
    while (walk->at == walk->end) {
        if (walk->read == pairs->reads)
            return false;
        u64 length = (u64)pairs->lengths[walk->read];
        if (length > pairs->records - walk->at)
            return false;
        for (; walk->pair < pairs->pairs && (u64)pairs->read[walk->pair] == walk->read; walk->pair++) {
            if ((u64)pairs->cell[walk->pair] >= pairs->cells)
                return false;
            pairs->of_cell[pairs->cell[walk->pair]] = pairs->value[walk->pair];
        }
        walk->end += length;
        walk->read++;
    }
    return true;
}

/* Whether the reads have no records but those that the walk has seen. */
static bool is_whole(const struct pairs *pairs, const struct walk *walk) {
    if (walk->at != walk->end)
        return false;
    for (u64 read = walk->read; read < pairs->reads; read++)
        if (pairs->lengths[read])
            return false;
    return true;
}

/* The value of a record; -1 if its pair is not there. */
static inline s64 value_of(const struct pairs *pairs, u64 record) {
    u64 number = (u64)pairs->numbers[record], cell = number >> PLACE_BITS;
    if (cell >= pairs->cells || pairs->of_cell[cell] < 0)
        return WRONG;
    return (s64)((u64)pairs->of_cell[cell] + (u32)number * pairs->step);
}

/* Writes the value of each record: [records]. Returns 0; -1 if the lengths do not add up, or a record's pair is not there. */
PUBLIC int join_place(const struct pairs *pairs, s64 *values) {
    struct walk walk = begin_walk(pairs);
    while (walk.at < pairs->records) {
        if (!next_read(pairs, &walk))
            return WRONG;
        for (; walk.at < walk.end; walk.at++)
            if ((values[walk.at] = value_of(pairs, walk.at)) < 0)
                return WRONG;
    }
    return is_whole(pairs, &walk) ? 0 : WRONG;
}

/* 64 bits of a record, from a bit on. */
static inline u64 window(const u64 *const *words, u32 count, u32 bit, u64 record) {
    u32 word = bit / WORD_BITS, shift = bit % WORD_BITS;
    u64 low = word < count ? words[word][record] >> shift : 0;
    u64 high = shift && word + 1 < count ? words[word + 1][record] << (WORD_BITS - shift) : 0;
    return low | high;
}

static u64 low_bits(u32 bits) { return bits < WORD_BITS ? ((u64)1 << bits) - 1 : UINT64_MAX; }

/* 64 bits of each record, from a bit on, for loops over many records: bits that are not there are 0. */
struct window {
    const u64 *low, *high; /* [records] */
    u64 low_mask, high_mask;
    u32 shift;
};

static struct window windows(const u64 *const *words, u32 count, u32 bit, u64 mask) {
    u32 word = bit / WORD_BITS, shift = bit % WORD_BITS;
    bool has_low = word < count, has_high = shift && word + 1 < count;
    return (struct window){
        .low = words[has_low ? word : 0],
        .high = words[has_high ? word + 1 : 0],
        .low_mask = has_low ? mask : 0,
        .high_mask = has_high ? mask : 0,
        .shift = shift,
    };
}

static inline u64 in_window(const struct window *window, u64 record) {
    u64 high = window->high[record] << 1 << (WORD_BITS - 1 - window->shift); /* no shift by 64 */
    return (window->low[record] >> window->shift & window->low_mask) | (high & window->high_mask);
}

typedef u64 both __attribute__((vector_size(NARROW_COUNTERS)));
typedef u8 bytes __attribute__((vector_size(NARROW_COUNTERS)));
typedef uint16_t halves __attribute__((vector_size(NARROW_COUNTERS)));
typedef u32 sums __attribute__((vector_size(NARROW_COUNTERS)));

static inline void add_four(u32 *row, sums counts) {
    sums sum;
    memcpy(&sum, row, sizeof sum);
    sum += counts;
    memcpy(row, &sum, sizeof sum);
}

static inline sums low_halves(halves each) {
    return (sums)__builtin_shuffle(each, (halves){0}, (halves){0, 8, 1, 9, 2, 10, 3, 11});
}

static inline sums high_halves(halves each) {
    return (sums)__builtin_shuffle(each, (halves){0}, (halves){4, 12, 5, 13, 6, 14, 7, 15});
}

/* Counters of 8 bits, as two words of each record. */
struct narrow {
    struct window first, second;
    bool last; /* there are so many that the last quarter of a row has some */
};

static struct narrow narrow(const struct counters *counters, const u64 *const *words) {
    u32 bits = counters->count * NARROW_BITS;
    return (struct narrow){
        .first = windows(words, counters->words, counters->first_bit, low_bits(bits)),
        .second = windows(words, counters->words, counters->first_bit + WORD_BITS,
                          bits > WORD_BITS ? low_bits(bits - WORD_BITS) : 0),
        .last = counters->count > 3 * NARROW_COUNTERS / 4,
    };
}

static inline void add_record(const struct narrow *narrow, u64 record, u32 *row) {
    const bytes to_low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const bytes to_high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    bytes each = (bytes)(both){in_window(&narrow->first, record), in_window(&narrow->second, record)};
    halves low = (halves)__builtin_shuffle(each, (bytes){0}, to_low);
    halves high = (halves)__builtin_shuffle(each, (bytes){0}, to_high);
    add_four(row, low_halves(low));
    add_four(row + 4, high_halves(low));
    add_four(row + 8, low_halves(high));
    if (narrow->last)
        add_four(row + 12, high_halves(high));
}

/* Adds the counters of records, from `begin` on, to the rows of their slots: [records]. */
static void add_some(const struct counters *counters, const u64 *const *words, u64 begin, const s64 *slots, u64 records,
                     void *rows) {
    if (counters->bits == NARROW_BITS) {
        struct narrow each = narrow(counters, words);
        for (u64 i = 0; i < records; i++)
            add_record(&each, begin + i, (u32 *)rows + (u64)slots[i] * NARROW_COUNTERS);
        return;
    }
    for (u64 i = 0; i < records; i++) {
        u64 *row = (u64 *)rows + (u64)slots[i] * counters->count;
        for (u32 counter = 0; counter < counters->count; counter++) {
            u32 bit = counters->first_bit + counter * counters->bits;
            row[counter] += window(words, counters->words, bit, begin + i) & low_bits(counters->bits);
        }
    }
}

static bool is_known(const struct counters *counters) {
    bool is_narrow = counters->bits == NARROW_BITS && counters->count <= NARROW_COUNTERS;
    return counters->words && (is_narrow || counters->bits == WIDE_BITS || counters->bits == WHOLE_BITS);
}

/* Tells the CPU that a row will be written. */
static inline void fetch(const struct counters *counters, const void *rows, u64 slot) {
    u64 bytes = counters->bits == NARROW_BITS ? NARROW_COUNTERS * sizeof(u32) : counters->count * sizeof(u64);
    __builtin_prefetch((const void *)((uintptr_t)rows + slot * bytes), 1); /* wherever that is */
}

/* Adds the counters of records to the rows of their slots.
 *
 * Counters of 8 bits: a row is 16 u32, of which the first `count` have sums; of 16 or 64 bits: `count` u64.
 * words: at least one column. Returns 0; -1 if there is no such layout or slot. */
PUBLIC int join_add(const struct counters *counters, const u64 *const *words, const s64 *slots, u64 records, void *rows,
                    u64 count) {
    u64 last = 0;
    for (u64 i = 0; i < records; i++)
        last = (u64)slots[i] > last ? (u64)slots[i] : last;
    if ((records && last >= count) || !is_known(counters))
        return WRONG;
    for (u64 begin = 0, some; begin < records; begin += some) {
        some = records - begin < TOGETHER ? records - begin : TOGETHER;
        for (u64 i = 0; i < some; i++)
            fetch(counters, rows, (u64)slots[begin + i]);
        add_some(counters, words, begin, slots + begin, some, rows);
    }
    return 0;
}

/* Adds the counters of records to the rows that are their values, as `join_place` and `join_add` would.
 *
 * The slots do not go through memory, which takes as long as the additions. Returns 0; -1 where these would, when some
 * records have been added. */
PUBLIC int join_sum(const struct pairs *pairs, const struct counters *counters, const u64 *const *words, void *rows,
                    u64 count) {
    if (!is_known(counters))
        return WRONG;
    s64 slots[TOGETHER];
    struct walk walk = begin_walk(pairs);
    while (walk.at < pairs->records) {
        u64 begin = walk.at, last = 0;
        u64 end = pairs->records - begin < TOGETHER ? pairs->records : begin + TOGETHER;
        while (walk.at < end) {
            if (!next_read(pairs, &walk))
                return WRONG;
            for (u64 until = walk.end < end ? walk.end : end; walk.at < until; walk.at++) {
                u64 slot = (u64)value_of(pairs, walk.at);
                last = slot > last ? slot : last;
                slots[walk.at - begin] = (s64)slot;
                fetch(counters, rows, slot);
            }
        }
        if (last >= count) /* -1, as a slot, is the largest of all */
            return WRONG;
        add_some(counters, words, begin, slots, end - begin, rows);
    }
    return is_whole(pairs, &walk) ? 0 : WRONG;
}
