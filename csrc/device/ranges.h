/* ranges.h - a sorted list of disjoint address ranges: what is reserved, and what lies behind it. Pure. */
#ifndef ZX_DEVICE_RANGES_H
#define ZX_DEVICE_RANGES_H

#include "base/zx.h"

typedef struct zx_range {
    uintptr_t begin, end; /* end is not part of it */
    void *owner;          /* whatever the user of the list needs; NULL is fine */
} zx_range;

/* Zero-initialised = empty. */
typedef struct zx_ranges {
    zx_range *at;
    int64_t n, capacity;
} zx_ranges;

void zx_ranges_close(zx_ranges *r);
/* Makes room, so that the next insertion cannot fail. */
ZX_CHECKED zx_status zx_ranges_grow(zx_ranges *r);
/* Index of the first range that ends after addr; n if there is none. */
int64_t zx_ranges_find(const zx_ranges *r, uintptr_t addr);
/* Whether [begin, end) meets any range. */
bool zx_ranges_overlap(const zx_ranges *r, uintptr_t begin, uintptr_t end);
/* Needs room (zx_ranges_grow) and a range that meets no other. */
void zx_ranges_insert(zx_ranges *r, zx_range range);
void zx_ranges_remove(zx_ranges *r, int64_t index);

#endif
