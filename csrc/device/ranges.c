/* ranges.c - a sorted array with binary search: there are hundreds of ranges, and they change at set-up only.
 */
#include "device/ranges.h"

#include <string.h>

void zx_ranges_close(zx_ranges *r)
{
    zx_free(r->at);
    *r = (zx_ranges){0};
}

zx_status zx_ranges_grow(zx_ranges *r)
{
    if (r->n < r->capacity) return ZX_OK;
    int64_t capacity = r->capacity == 0 ? 16 : 2 * r->capacity;
    zx_range *at = NULL;
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_MISC, capacity, at));
    if (r->n > 0) memcpy(at, r->at, (size_t)r->n * sizeof *at);
    zx_free(r->at);
    r->at = at;
    r->capacity = capacity;
    return ZX_OK;
}

int64_t zx_ranges_find(const zx_ranges *r, uintptr_t addr)
{
    int64_t lo = 0, hi = r->n;
    while (lo < hi) {
        int64_t mid = lo + (hi - lo) / 2;
        if (r->at[mid].end > addr)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

bool zx_ranges_overlap(const zx_ranges *r, uintptr_t begin, uintptr_t end)
{
    int64_t i = zx_ranges_find(r, begin);
    return begin < end && i < r->n && r->at[i].begin < end;
}

void zx_ranges_insert(zx_ranges *r, zx_range range)
{
    int64_t i = zx_ranges_find(r, range.begin);
    memmove(&r->at[i + 1], &r->at[i], (size_t)(r->n - i) * sizeof *r->at);
    r->at[i] = range;
    r->n++;
}

void zx_ranges_remove(zx_ranges *r, int64_t index)
{
    r->n--;
    memmove(&r->at[index], &r->at[index + 1], (size_t)(r->n - index) * sizeof *r->at);
}
