/* hub.c - see hub.h. */
#include "comm/hub.h"

#include <stdio.h>
#include <string.h>

struct zx_hub_call {
    zx_hub_call *next;
    uint64_t key, seq;
    size_t bytes;
    char what[ZX_WHAT_TEXT];
    int64_t begin_ns;
    int first;      /* the rank that opened it */
    int n_ranks, n_arrived;
    bool failed;
    char text[ZX_HUB_TEXT]; /* if failed */
    int32_t *ranks; /* (n_ranks) */
    bool *arrived;  /* (n_ranks) */
    char *data;     /* (n_ranks, bytes) */
};

static void call_free(zx_hub_call *call)
{
    if (call == NULL) {
        return;
    }
    zx_free(call->ranks);
    zx_free(call->arrived);
    zx_free(call->data);
    zx_free(call);
}

zx_status zx_hub_open(zx_hub *hub, int world, zx_hub_deliver deliver, void *ctx)
{
    *hub = (zx_hub){.world = world, .deliver = deliver, .ctx = ctx};
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_COMM, world, hub->left));
    return ZX_OK;
}

void zx_hub_close(zx_hub *hub)
{
    while (hub->calls != NULL) {
        zx_hub_call *next = hub->calls->next;
        call_free(hub->calls);
        hub->calls = next;
    }
    zx_free(hub->left);
    hub->left = NULL;
}

static zx_status call_open(zx_hub *hub, const zx_hub_entry *e, zx_hub_call **out)
{
    zx_status zx_rc_ = ZX_OK;
    zx_hub_call *call = NULL;
    *out = NULL;
    ZX_TRY(ZX_NEW(ZX_MEM_COMM, call));
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_COMM, e->n_ranks, call->ranks), fail);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_COMM, e->n_ranks, call->arrived), fail);
    ZX_TRY_GOTO(zx_alloc_array(ZX_MEM_COMM, e->n_ranks, e->bytes, (void **)&call->data), fail);
    call->key = e->key;
    call->seq = e->seq;
    call->bytes = e->bytes;
    call->first = e->from;
    call->n_ranks = e->n_ranks;
    call->begin_ns = zx_now_ns();
    snprintf(call->what, sizeof call->what, "%s", e->what);
    memcpy(call->ranks, e->ranks, (size_t)e->n_ranks * sizeof *e->ranks);
    call->next = hub->calls;
    hub->calls = call;
    *out = call;
    return ZX_OK;
fail:
    call_free(call);
    return zx_rc_;
}

static void call_remove(zx_hub *hub, zx_hub_call *call)
{
    zx_hub_call **link = &hub->calls;
    while (*link != call) {
        link = &(*link)->next;
    }
    *link = call->next;
    call_free(call);
}

/* Everybody who waits gets the text; the call stays for those who are still to come. */
static void call_fail(zx_hub *hub, zx_hub_call *call)
{
    call->failed = true;
    for (int i = 0; i < call->n_ranks; i++) {
        if (call->arrived[i]) {
            hub->deliver(hub->ctx, call->ranks[i], call->key, call->seq, ZX_ERR_PEER, call->text, NULL, 0);
        }
    }
}

static int find_member(const int32_t *ranks, int n_ranks, int rank)
{
    for (int i = 0; i < n_ranks; i++) {
        if (ranks[i] == rank) {
            return i;
        }
    }
    return -1;
}

/* The group's call, or the failed one that this contribution is a late part of. */
static zx_hub_call *find_call(const zx_hub *hub, const zx_hub_entry *e)
{
    zx_hub_call *found = NULL;
    for (zx_hub_call *call = hub->calls; call != NULL; call = call->next) {
        if (call->key != e->key) {
            continue;
        }
        if (call->failed && call->seq == e->seq) {
            return call;
        }
        found = call->failed ? found : call;
    }
    return found;
}

zx_status zx_hub_enter(zx_hub *hub, const zx_hub_entry *e)
{
    zx_hub_call *call = find_call(hub, e);
    if (call == NULL) {
        for (int i = 0; i < e->n_ranks; i++) {
            if (e->ranks[i] < 0 || e->ranks[i] >= hub->world) {
                ZX_FAIL(ZX_ERR_BUG, "rank %d names rank %d as a member, the world is %d", e->from, (int)e->ranks[i],
                        hub->world);
            }
            if (hub->left[e->ranks[i]]) {
                char text[ZX_HUB_TEXT];
                snprintf(text, sizeof text, "'%s' cannot complete: rank %d has closed its bootstrap", e->what,
                         (int)e->ranks[i]);
                hub->deliver(hub->ctx, e->from, e->key, e->seq, ZX_ERR_PEER, text, NULL, 0);
                return ZX_OK;
            }
        }
        ZX_TRY(call_open(hub, e, &call));
    }
    int at = find_member(call->ranks, call->n_ranks, e->from);
    if (at < 0 || call->arrived[at]) {
        ZX_FAIL(ZX_ERR_BUG, "rank %d called '%s' twice, or is no member of its group", e->from, e->what);
    }
    bool same = call->seq == e->seq && call->bytes == e->bytes && call->n_ranks == e->n_ranks &&
                strcmp(call->what, e->what) == 0 &&
                memcmp(call->ranks, e->ranks, (size_t)e->n_ranks * sizeof *e->ranks) == 0;
    if (!same && !call->failed) {
        snprintf(call->text, sizeof call->text,
                 "the ranks disagree: rank %d called '%s' (#%llu, %zu bytes, %d ranks), rank %d called '%s' (#%llu, "
                 "%zu bytes, %d ranks); all ranks must make the same calls in the same order",
                 call->first, call->what, (unsigned long long)call->seq, call->bytes, call->n_ranks, e->from, e->what,
                 (unsigned long long)e->seq, e->bytes, e->n_ranks);
        call_fail(hub, call);
    }
    call->arrived[at] = true;
    call->n_arrived++;
    if (call->failed) {
        hub->deliver(hub->ctx, e->from, e->key, e->seq, ZX_ERR_PEER, call->text, NULL, 0);
    } else if (e->bytes > 0) {
        memcpy(call->data + (size_t)at * e->bytes, e->data, e->bytes);
    }
    if (call->n_arrived == call->n_ranks) {
        if (!call->failed) {
            for (int i = 0; i < call->n_ranks; i++) {
                hub->deliver(hub->ctx, call->ranks[i], call->key, call->seq, ZX_OK, NULL, call->data,
                             call->bytes * (size_t)call->n_ranks);
            }
        }
        call_remove(hub, call);
    }
    return ZX_OK;
}

void zx_hub_leave(zx_hub *hub, int rank)
{
    hub->left[rank] = true;
    for (zx_hub_call *call = hub->calls, *next; call != NULL; call = next) {
        next = call->next;
        int at = find_member(call->ranks, call->n_ranks, rank);
        if (at < 0) {
            continue;
        }
        if (!call->failed) {
            snprintf(call->text, sizeof call->text, "'%s' cannot complete: rank %d has closed its bootstrap",
                     call->what, rank);
            call_fail(hub, call);
        }
        if (!call->arrived[at]) {
            call->arrived[at] = true;
            call->n_arrived++;
        }
        if (call->n_arrived == call->n_ranks) {
            call_remove(hub, call);
        }
    }
}

bool zx_hub_pending(const zx_hub *hub)
{
    return hub->calls != NULL;
}

bool zx_hub_overdue(const zx_hub *hub, double timeout_s, char text[ZX_HUB_TEXT])
{
    int64_t now = zx_now_ns();
    for (const zx_hub_call *call = hub->calls; call != NULL; call = call->next) {
        if (call->failed || (double)(now - call->begin_ns) < timeout_s * 1e9) {
            continue;
        }
        int at = snprintf(text, ZX_HUB_TEXT, "'%s', which rank %d waits in, was not reached within %.1f s by rank",
                          call->what, call->first, timeout_s);
        for (int i = 0; i < call->n_ranks && at < ZX_HUB_TEXT - 16; i++) {
            if (!call->arrived[i]) {
                at += snprintf(text + at, (size_t)(ZX_HUB_TEXT - at), " %d", (int)call->ranks[i]);
            }
        }
        return true;
    }
    return false;
}
