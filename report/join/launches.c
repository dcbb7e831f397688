/* Which launches of a kernel can be running while a read is sampled, and which came last, for report/join/launches.py.
 *
 * The launches of a placement are in slices: those of one site in one bucket of time. All work is in columns of numbers
 * that launches.py has made; nothing here allocates. */
#include <stdbool.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint64_t u64;
typedef int32_t s32;
typedef int64_t s64;

#define PUBLIC __attribute__((visibility("default")))

enum { WRONG = -1 };

/* _Launches of launches.py. Each column but those that start with `first` is of slices or launches. */
struct launches {
    u64 window; /* ns, which is also the length of a bucket */
    u64 placements, slices, launches;
    const s64 *first_slice;  /* [placements + 1]: where the slices of each begin, which ascend by bucket, then site */
    const u64 *bucket;       /* [slices] */
    const s64 *same_site;    /* [slices]: the first of the slices that precede it without a gap, of its placement and site */
    const s32 *site;         /* [slices] */
    const s64 *first;        /* [slices + 1]: where the launches of each begin */
    const u64 *time;         /* [launches], ns, ascending within a slice */
    const s64 *before;       /* [launches + 1]: how many launches are before each, as one can stand for several */
    const s64 *first_launch; /* [placements + 1]: where the launches of each begin in `by_time` */
    const u64 *by_time;      /* [launches], ns, ascending within a placement */
};

/* Pairs of a read and a cell, and the placements of each that are looked at. */
struct looked_at {
    const s64 *pair, *placement; /* [count] */
    u64 count;
    const u64 *begins, *ends; /* [pairs], ns, of the read; a begin is not behind its end */
    u64 pairs;
};

/* The first of ascending values, from `low` to before `high`, that is at least as large; `high` if none is. */
static u64 at_least(const u64 *values, u64 low, u64 high, u64 value) {
    while (low < high) {
        u64 middle = low + (high - low) / 2;
        if (values[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static u64 above(const u64 *values, u64 low, u64 high, u64 value) {
    return value == UINT64_MAX ? high : at_least(values, low, high, value + 1);
}

static u64 smaller(u64 one, u64 other) { return one < other ? one : other; }

static u64 larger(u64 one, u64 other) { return one > other ? one : other; }

static bool is_range(u64 low, u64 high, u64 size) { return low <= high && high <= size; }

/* Where a placement's launches are in `by_time`; false if there is no such placement. */
static bool launches_of(const struct launches *launches, u64 placement, u64 *first, u64 *end) {
    if (placement >= launches->placements)
        return false;
    *first = (u64)launches->first_launch[placement];
    *end = (u64)launches->first_launch[placement + 1];
    return is_range(*first, *end, launches->launches);
}

/* For each, writes since when launches count (ns), the range of slices that have these, and whether a single site has all
 * launches of the window. Returns how many slices there are in all ranges; -1 if there is no such pair or placement. */
PUBLIC s64 launches_find(const struct launches *launches, const struct looked_at *looked_at, u64 *since, s64 *first, s64 *stop,
                         u8 *single) {
    u64 slices = 0;
    for (u64 i = 0; i < looked_at->count; i++) {
        u64 pair = (u64)looked_at->pair[i], placement = (u64)looked_at->placement[i], earliest, end;
        if (pair >= looked_at->pairs || !launches_of(launches, placement, &earliest, &end))
            return WRONG;
        u64 low = (u64)launches->first_slice[placement], high = (u64)launches->first_slice[placement + 1];
        if (!is_range(low, high, launches->slices))
            return WRONG;
        u64 begin = looked_at->begins[pair], until = looked_at->ends[pair];
        u64 oldest = begin - smaller(begin, launches->window);
        u64 latest = above(launches->by_time, earliest, end, until);
        u64 youngest = latest > earliest ? launches->by_time[latest - 1] : until;
        /* Those that are at most one and a half times as old as the latest, or were made while the read was sampled. */
        u64 from = larger(smaller(begin, youngest - smaller((until - youngest) / 2, youngest)), oldest);
        u64 behind = above(launches->bucket, low, high, until / launches->window);
        u64 of_window = at_least(launches->bucket, low, behind, oldest / launches->window);
        single[i] = behind > of_window && (u64)launches->same_site[behind - 1] <= of_window;
        since[i] = from;
        first[i] = (s64)at_least(launches->bucket, of_window, behind, from / launches->window);
        stop[i] = (s64)behind;
        slices += behind - (u64)first[i];
    }
    return (s64)slices;
}

/* Writes an entry for each slice that has launches between: its pair, placement, site and number of launches.
 *
 * since, first, stop: from `launches_find`. Returns the number of entries, at most that of all slices. */
PUBLIC s64 launches_count(const struct launches *launches, const struct looked_at *looked_at, const u64 *since, const s64 *first,
                          const s64 *stop, s64 *pair, s64 *placement, s64 *site, double *weight) {
    u64 entries = 0;
    for (u64 i = 0; i < looked_at->count; i++) {
        u64 until = looked_at->ends[looked_at->pair[i]];
        for (s64 slice = first[i]; slice < stop[i]; slice++) {
            u64 low = (u64)launches->first[slice], high = (u64)launches->first[slice + 1];
            u64 begin = at_least(launches->time, low, high, since[i]), end = above(launches->time, begin, high, until);
            if (begin == end)
                continue;
            pair[entries] = looked_at->pair[i];
            placement[entries] = looked_at->placement[i];
            site[entries] = launches->site[slice];
            weight[entries++] = (double)(launches->before[end] - launches->before[begin]);
        }
    }
    return (s64)entries;
}

/* Writes which launch of each placement, by time, is the last one up to a time: an index into `by_time`; -1: none.
 *
 * placements, times: [count], ns. Returns 0; -1 if there is no such placement. */
PUBLIC s64 launches_last(const struct launches *launches, const s64 *placements, const u64 *times, u64 count, s64 *last) {
    for (u64 i = 0; i < count; i++) {
        u64 placement = (u64)placements[i], first, end;
        if (!launches_of(launches, placement, &first, &end))
            return WRONG;
        u64 behind = above(launches->by_time, first, end, times[i]);
        last[i] = behind > first ? (s64)behind - 1 : -1;
    }
    return 0;
}
