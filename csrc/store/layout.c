/* layout.c - parameter records to units, ranges, slices and places.
 *
 * DESIGN
 * Parameters are first ordered by unit (a stable counting sort), so that every later pass is linear. Within a
 * unit the distinct keys (dtype, trainable, reduce group) become ranges: trainable ones first, each kind in
 * order of first appearance. A parameter then takes the next aligned offset of its range, in index order; a
 * tied one takes none and shares its owner's place. A range is padded to world equal slices, each a multiple
 * of ZX_SLICE_ALIGN elements: every offset that follows from a slice is aligned for any dtype, and equal
 * slices keep collectives free of special cases.
 */
#include "store/layout.h"

#include <stdlib.h>
#include <string.h>

typedef struct layout_box { /* the layout and what it owns besides */
    zx_layout l;
    char *names;
} layout_box;

enum { MAX_ELEMS_LOG2 = 58 }; /* of one parameter: bytes and padding still fit into 63 bits */

static zx_status param_elems(const zx_param *p, int64_t *out)
{
    int64_t n = 1;
    *out = 0;
    for (int i = 0; i < p->ndim; i++) {
        if (p->shape[i] < 0 || p->box_begin[i] < 0 || p->box_begin[i] > p->global_shape[i] ||
            p->shape[i] > p->global_shape[i] - p->box_begin[i])
            ZX_FAIL(ZX_ERR_ARG,
                    "parameter %s, dimension %d: a box of %lld at %lld does not lie in a tensor of %lld: "
                    "correct its "
                    "shape",
                    p->name, i, (long long)p->shape[i], (long long)p->box_begin[i], (long long)p->global_shape[i]);
    }
    for (int i = 0; i < p->ndim; i++)
        if (__builtin_mul_overflow(n, p->shape[i], &n) || n > ((int64_t)1 << MAX_ELEMS_LOG2))
            ZX_FAIL(ZX_ERR_ARG, "parameter %s has more than 2^%d elements", p->name, MAX_ELEMS_LOG2);
    *out = n;
    return ZX_OK;
}

static zx_status check_tie(const zx_param *params, int64_t i)
{
    const zx_param *p = &params[i];
    if (p->tied_to < 0) return ZX_OK;
    if (p->tied_to >= i)
        ZX_FAIL(ZX_ERR_ARG,
                "parameter %s is tied to parameter %d, which does not stand before it (%lld): list the owner "
                "first",
                p->name, p->tied_to, (long long)i);
    const zx_param *o = &params[p->tied_to];
    bool same = p->ndim == o->ndim && p->dtype == o->dtype && p->trainable == o->trainable && p->group == o->group &&
                p->reduce_group == o->reduce_group;
    for (int k = 0; same && k < p->ndim; k++)
        same = p->shape[k] == o->shape[k] && p->global_shape[k] == o->global_shape[k] &&
               p->box_begin[k] == o->box_begin[k];
    if (!same)
        ZX_FAIL(ZX_ERR_ARG,
                "parameter %s is tied to %s but differs from it in shape, dtype, trainable, option group or "
                "reduce group: "
                "tied parameters are one tensor",
                p->name, o->name);
    while (o->tied_to >= 0)
        o = &params[o->tied_to];
    if (p->unit != o->unit && o->unit != 0)
        ZX_FAIL(ZX_ERR_ARG,
                "parameter %s (unit %d) is tied to %s (unit %d): units that share a tensor must be one unit, "
                "or the owner "
                "must lie in unit 0",
                p->name, p->unit, o->name, o->unit);
    return ZX_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const zx_param *const *)a)->name, (*(const zx_param *const *)b)->name);
}

static zx_status check_unique(const zx_param *params, int64_t n_params)
{
    zx_status zx_rc_ = ZX_OK;
    const zx_param **sorted = NULL;
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, n_params, sorted));
    for (int64_t i = 0; i < n_params; i++)
        sorted[i] = &params[i];
    qsort(sorted, (size_t)n_params, sizeof *sorted, by_name);
    for (int64_t i = 1; i < n_params; i++)
        if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0)
            ZX_FAIL_GOTO(ZX_ERR_ARG, done, "two parameters are named %s: give each a name of its own", sorted[i]->name);
done:
    zx_free(sorted);
    return zx_rc_;
}

static zx_status check_params(const zx_param *params, int64_t n_params, int32_t n_units)
{
    for (int64_t i = 0; i < n_params; i++) {
        const zx_param *p = &params[i];
        int64_t n;
        if (!p->name) ZX_FAIL(ZX_ERR_ARG, "parameter %lld has no name", (long long)i);
        if (p->unit < 0 || p->unit >= n_units)
            ZX_FAIL(ZX_ERR_ARG, "parameter %s belongs to unit %d, but there are %d units", p->name, p->unit, n_units);
        if (p->ndim < 0 || p->ndim > ZX_MAX_DIMS)
            ZX_FAIL(ZX_ERR_ARG, "parameter %s has %d dimensions, at most %d are possible", p->name, p->ndim,
                    ZX_MAX_DIMS);
        if (p->dtype != ZX_F32 && p->dtype != ZX_BF16 && p->dtype != ZX_F64)
            ZX_FAIL(ZX_ERR_ARG, "parameter %s is %s: use float32, bfloat16 or float64", p->name,
                    zx_dtype_name(p->dtype));
        if (p->group < 0 || p->reduce_group < 0)
            ZX_FAIL(ZX_ERR_ARG, "parameter %s has option group %d and reduce group %d: both count from 0", p->name,
                    p->group, p->reduce_group);
        ZX_TRY(param_elems(p, &n));
        ZX_TRY(check_tie(params, i));
    }
    return check_unique(params, n_params);
}

static zx_status copy_names(layout_box *box, const char *const *unit_names)
{
    zx_layout *l = &box->l;
    size_t bytes = 1;
    for (int64_t i = 0; i < l->n_params; i++)
        bytes += strlen(l->params[i].name) + 1;
    for (int32_t u = 0; u < l->n_units; u++)
        bytes += strlen(unit_names[u]) + 1;
    ZX_TRY(zx_alloc(ZX_MEM_STORE, bytes, (void **)&box->names));
    char *at = box->names;
    for (int64_t i = 0; i < l->n_params + l->n_units; i++) {
        bool is_param = i < l->n_params;
        const char *name = is_param ? l->params[i].name : unit_names[i - l->n_params];
        size_t length = strlen(name) + 1;
        memcpy(at, name, length);
        if (is_param)
            l->params[i].name = at;
        else
            l->units[i - l->n_params].name = at;
        at += length;
    }
    return ZX_OK;
}

static int32_t find_range(const zx_layout *l, const zx_unit *unit, const zx_param *p)
{
    for (int32_t r = unit->first_range; r < unit->first_range + unit->n_ranges; r++) {
        const zx_range *range = &l->ranges[r];
        if (range->dtype == p->dtype && range->trainable == p->trainable && range->reduce_group == p->reduce_group)
            return r;
    }
    return -1;
}

/* by_unit: parameters in unit order; first[u] .. first[u+1] are unit u's. */
static void make_ranges(zx_layout *l, const int64_t *by_unit, const int64_t *first)
{
    for (int32_t u = 0; u < l->n_units; u++) {
        zx_unit *unit = &l->units[u];
        unit->first_range = l->n_ranges;
        for (int frozen = 0; frozen < 2; frozen++) {
            for (int64_t i = first[u]; i < first[u + 1]; i++) {
                const zx_param *p = &l->params[by_unit[i]];
                if (p->tied_to >= 0 || p->trainable == (frozen == 1) || find_range(l, unit, p) >= 0) continue;
                l->ranges[l->n_ranges++] = (zx_range){
                    .unit = u, .dtype = p->dtype, .trainable = p->trainable, .reduce_group = p->reduce_group};
                unit->n_ranges++;
            }
        }
    }
}

static void place_params(zx_layout *l)
{
    for (int64_t i = 0; i < l->n_params; i++) {
        const zx_param *p = &l->params[i];
        if (p->tied_to >= 0) {
            l->places[i] = l->places[p->tied_to];
            continue;
        }
        int32_t r = find_range(l, &l->units[p->unit], p);
        zx_range *range = &l->ranges[r];
        int64_t n = 1;
        for (int k = 0; k < p->ndim; k++)
            n *= p->shape[k];
        int64_t align = (int64_t)(ZX_PARAM_ALIGN / zx_dtype_bytes(p->dtype));
        int64_t offset = zx_round_up(range->n_used, align);
        l->places[i] = (zx_place){.range = r, .offset = offset, .n = n};
        if (n > 0) range->n_used = offset + n;
        l->n_elems += n;
        l->order_begin[r + 1]++;
    }
    for (int32_t r = 0; r < l->n_ranges; r++)
        l->order_begin[r + 1] += l->order_begin[r];
    for (int64_t i = l->n_params - 1; i >= 0; i--) /* backwards: order_begin[r+1] walks down to where r begins */
        if (l->params[i].tied_to < 0) l->order[--l->order_begin[l->places[i].range + 1]] = i;
    for (int32_t r = 0; r < l->n_ranges; r++)
        l->order_begin[r] = l->order_begin[r + 1];
    int64_t n_owners = 0;
    for (int64_t i = 0; i < l->n_params; i++)
        n_owners += l->params[i].tied_to < 0;
    l->order_begin[l->n_ranges] = n_owners;
}

static void size_ranges(zx_layout *l)
{
    for (int32_t u = 0; u < l->n_units; u++) {
        zx_unit *unit = &l->units[u];
        for (int32_t r = unit->first_range; r < unit->first_range + unit->n_ranges; r++) {
            zx_range *range = &l->ranges[r];
            size_t item = zx_dtype_bytes(range->dtype);
            range->slice = zx_round_up(zx_ceil_div(range->n_used, l->world), ZX_SLICE_ALIGN);
            range->n_padded = range->slice * l->world;
            range->param_offset = unit->param_bytes;
            unit->param_bytes += (size_t)range->n_padded * item;
            range->shard_offset = l->shard_bytes;
            l->shard_bytes += (size_t)range->slice * item;
            l->n_padded += range->n_padded;
            if (!range->trainable) continue;
            range->grad_offset = unit->grad_bytes;
            unit->grad_bytes += (size_t)range->n_padded * zx_dtype_bytes(zx_dtype_sum(range->dtype));
            range->state_offset = l->state_elems;
            range->full_state_offset = l->full_state_elems;
            l->state_elems += range->slice;
            l->full_state_elems += range->n_padded;
            l->n_trainable_padded += range->n_padded;
            unit->trainable |= range->slice > 0;
        }
        unit->param_bytes = (size_t)zx_round_up((int64_t)unit->param_bytes, (int64_t)l->granule);
        unit->grad_bytes = (size_t)zx_round_up((int64_t)unit->grad_bytes, (int64_t)l->granule);
    }
}

static zx_status build(layout_box *box, const zx_param *params, const char *const *unit_names)
{
    zx_status zx_rc_ = ZX_OK;
    zx_layout *l = &box->l;
    int64_t *by_unit = NULL, *first = NULL;
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, l->n_params, l->params), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, l->n_params, l->places), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, l->n_units, l->units), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, l->n_params, l->ranges), done); /* at most one for each parameter */
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, l->n_params, l->order), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, l->n_params + 1, l->order_begin), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, l->n_params, by_unit), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, l->n_units + 1, first), done);
    if (l->n_params > 0) memcpy(l->params, params, (size_t)l->n_params * sizeof *params);
    ZX_TRY_GOTO(copy_names(box, unit_names), done);
    for (int64_t i = 0; i < l->n_params; i++) {
        first[l->params[i].unit + 1]++;
        if (l->params[i].group >= l->n_groups) l->n_groups = l->params[i].group + 1;
    }
    for (int32_t u = 0; u < l->n_units; u++)
        first[u + 1] += first[u];
    for (int64_t i = l->n_params - 1; i >= 0; i--)
        by_unit[--first[l->params[i].unit + 1]] = i;
    for (int32_t u = 0; u < l->n_units; u++)
        first[u] = first[u + 1];
    first[l->n_units] = l->n_params;
    make_ranges(l, by_unit, first);
    place_params(l);
    size_ranges(l);
done:
    zx_free(by_unit);
    zx_free(first);
    return zx_rc_;
}

zx_status zx_layout_open(const zx_param *params, int64_t n_params, const char *const *unit_names, int32_t n_units,
                         int32_t world, size_t granule, zx_layout **out)
{
    zx_status zx_rc_ = ZX_OK;
    layout_box *box = NULL;
    *out = NULL;
    if (n_params < 0 || n_units < 1 || world < 1)
        ZX_FAIL(ZX_ERR_ARG, "a layout of %lld parameters, %d units and %d ranks: needs at least one unit and one rank",
                (long long)n_params, n_units, world);
    if (granule < 256 || (granule & (granule - 1)) != 0)
        ZX_FAIL(ZX_ERR_ARG, "a granule of %zu bytes: it must be a power of two, at least 256", granule);
    for (int32_t u = 0; u < n_units; u++)
        if (!unit_names[u]) ZX_FAIL(ZX_ERR_ARG, "unit %d has no name", u);
    ZX_TRY(check_params(params, n_params, n_units));
    ZX_TRY(ZX_NEW(ZX_MEM_STORE, box));
    box->l.n_params = n_params;
    box->l.n_units = n_units;
    box->l.world = world;
    box->l.granule = granule;
    ZX_TRY_GOTO(build(box, params, unit_names), fail);
    *out = &box->l;
    return ZX_OK;
fail:
    zx_layout_close(&box->l);
    return zx_rc_;
}

void zx_layout_close(zx_layout *layout)
{
    if (!layout) return;
    layout_box *box = (layout_box *)layout; /* the layout is its first member */
    zx_free(layout->params);
    zx_free(layout->places);
    zx_free(layout->units);
    zx_free(layout->ranges);
    zx_free(layout->order);
    zx_free(layout->order_begin);
    zx_free(box->names);
    zx_free(box);
}
