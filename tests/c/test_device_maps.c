/* test_device_maps.c - random reserving, mapping and unmapping against a model that keeps one record a page. */
#include "device_tools.h"

#include <stdlib.h>

enum { PAGE = 4096, N_PAGES = 24, N_RESERVED = 3, N_MEMS = 4, MEM_PAGES = 6, N_STEPS = 4000 };

typedef struct page {
    int mem;     /* -1: nothing is mapped */
    int at;      /* page of the object */
    int mapping; /* number of the call that mapped it */
} page;

typedef struct world {
    zx_device *dev;
    char *base[N_RESERVED];
    zx_mem *mem[N_MEMS];
    page pages[N_RESERVED][N_PAGES];
    int n_mappings;
    unsigned seed;
} world;

static int below(world *w, int n)
{
    return (int)((unsigned)rand_r(&w->seed) % (unsigned)n);
}

/* Objects carry their number and the page's in each page's first word. */
static int tag(int mem, int at)
{
    return 1000 * (mem + 1) + at;
}

/* A page tells which one it is, so what the device shows is compared with the model page by page. */
static int count_wrong_pages(world *w)
{
    int n_wrong = 0;
    for (int r = 0; r < N_RESERVED; r++)
        for (int p = 0; p < N_PAGES; p++) {
            page *m = &w->pages[r][p];
            if (m->mem >= 0) n_wrong += *(int *)(void *)(w->base[r] + p * PAGE) != tag(m->mem, m->at);
        }
    return n_wrong;
}

static void try_map(world *w)
{
    int r = below(w, N_RESERVED), first = below(w, N_PAGES), n = below(w, 7);
    int mem = below(w, N_MEMS), at = below(w, MEM_PAGES + 1);
    zx_status want = ZX_OK;
    if (at + n > MEM_PAGES || first + n > N_PAGES)
        want = ZX_ERR_ARG;
    else
        for (int p = first; p < first + n; p++)
            if (w->pages[r][p].mem >= 0) want = ZX_ERR_STATE;
    size_t bytes = (size_t)n * PAGE;
    CHECK_STATUS(zx_device_map(w->dev, w->base[r] + first * PAGE, w->mem[mem], (size_t)at * PAGE, bytes), want);
    if (want != ZX_OK) return;
    w->n_mappings++;
    for (int p = 0; p < n; p++)
        w->pages[r][first + p] = (page){mem, at + p, w->n_mappings};
}

static bool same_mapping(const page *a, const page *b)
{
    return a->mem >= 0 && b->mem >= 0 && a->mapping == b->mapping;
}

static void try_unmap(world *w)
{
    int r = below(w, N_RESERVED), first = below(w, N_PAGES), n = below(w, N_PAGES - first + 1);
    page *pages = w->pages[r];
    int n_mapped = 0;
    for (int p = first; p < first + n; p++)
        n_mapped += pages[p].mem >= 0;
    zx_status want = ZX_OK;
    if (n > 0 && n_mapped == 0) want = ZX_ERR_STATE;
    if (n > 0 && n_mapped > 0) {
        if (first > 0 && same_mapping(&pages[first - 1], &pages[first])) want = ZX_ERR_ARG;
        int end = first + n;
        if (end < N_PAGES && same_mapping(&pages[end - 1], &pages[end])) want = ZX_ERR_ARG;
    }
    CHECK_STATUS(zx_device_unmap(w->dev, w->base[r] + first * PAGE, (size_t)n * PAGE), want);
    if (want != ZX_OK) return;
    for (int p = first; p < first + n; p++)
        pages[p].mem = -1;
}

static void open_reservation(world *w, int r)
{
    CHECK_OK(zx_device_reserve(w->dev, N_PAGES * PAGE, (void **)&w->base[r]));
    for (int p = 0; p < N_PAGES; p++)
        w->pages[r][p].mem = -1;
}

/* Writes the tags of a new object through a window that is closed again. */
static void open_mem(world *w, int i)
{
    char *window;
    CHECK_OK(zx_mem_open(w->dev, MEM_PAGES * PAGE, false, &w->mem[i]));
    CHECK_OK(zx_device_reserve(w->dev, MEM_PAGES * PAGE, (void **)&window));
    CHECK_OK(zx_device_map(w->dev, window, w->mem[i], 0, MEM_PAGES * PAGE));
    for (int at = 0; at < MEM_PAGES; at++)
        *(int *)(void *)(window + at * PAGE) = tag(i, at);
    zx_device_unreserve(w->dev, window, MEM_PAGES * PAGE);
}

static void run_world(unsigned seed)
{
    live before = live_now();
    world w = {.dev = open_cpu(1), .seed = seed};
    CHECK_OR_RETURN(w.dev != NULL);
    for (int r = 0; r < N_RESERVED; r++)
        open_reservation(&w, r);
    for (int i = 0; i < N_MEMS; i++)
        open_mem(&w, i);
    for (int step = 0; step < N_STEPS; step++) {
        int what = below(&w, 200);
        if (what == 0) { /* the whole reservation goes, with what is mapped */
            int r = below(&w, N_RESERVED);
            zx_device_unreserve(w.dev, w.base[r], N_PAGES * PAGE);
            open_reservation(&w, r);
        } else if (what == 1) { /* another object takes the place of one whose mappings stay */
            int i = below(&w, N_MEMS);
            zx_mem_close(w.mem[i]);
            open_mem(&w, i);
        } else if (what < 130) {
            try_map(&w);
        } else {
            try_unmap(&w);
        }
        if (step % 50 == 0 && !CHECK_EQ_I64(count_wrong_pages(&w), 0)) break;
    }
    CHECK(w.n_mappings > N_STEPS / 20);
    for (int i = 0; i < N_MEMS; i++)
        zx_mem_close(w.mem[i]);
    CHECK_EQ_I64(count_wrong_pages(&w), 0);
    for (int r = 0; r < N_RESERVED; r++)
        zx_device_unreserve(w.dev, w.base[r], N_PAGES * PAGE);
    zx_device_close(w.dev);
    check_live_is(before);
}

static void test_random_mappings_match_the_model(void)
{
    for (unsigned seed = 1; seed <= 5; seed++)
        run_world(seed);
}

int main(void)
{
    RUN(test_random_mappings_match_the_model);
    return check_report();
}
