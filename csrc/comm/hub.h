/* hub.h - where the contributions of a small host-side gather come together: in rank 0's watch thread for processes,
 * in the meeting for threads. It holds no socket and no lock: its owner serialises the calls and delivers the answers.
 *
 * A call is identified by its group (a key that all members computed alike). The first contribution opens it; when
 * every member has contributed, each gets all of them in the group's order. Members that disagree (name, size, number,
 * members) all get the same error, also those that come late.
 */
#ifndef ZX_COMM_HUB_H
#define ZX_COMM_HUB_H

#include "base/zx.h"

enum { ZX_WHAT_TEXT = 48, ZX_HUB_TEXT = 512 };

typedef struct zx_hub_entry { /* one contribution; everything is borrowed for the call */
    int from;
    uint64_t key; /* of the group */
    uint64_t seq; /* number of the call in its group */
    int n_ranks;
    const int32_t *ranks; /* (n_ranks) members, in the group's order */
    const char *what;
    size_t bytes;
    const void *data;
} zx_hub_entry;

/* data: n_ranks x bytes in the group's order (ZX_OK), or text says what went wrong. */
typedef void (*zx_hub_deliver)(void *ctx, int rank, uint64_t key, uint64_t seq, zx_status status, const char *text,
                               const void *data, size_t data_bytes);

typedef struct zx_hub_call zx_hub_call;

typedef struct zx_hub {
    int world;
    zx_hub_call *calls;
    bool *left; /* (world) ranks that closed orderly */
    zx_hub_deliver deliver;
    void *ctx;
} zx_hub;

ZX_CHECKED zx_status zx_hub_open(zx_hub *hub, int world, zx_hub_deliver deliver, void *ctx);
void zx_hub_close(zx_hub *hub); /* a zeroed hub is fine */
ZX_CHECKED zx_status zx_hub_enter(zx_hub *hub, const zx_hub_entry *entry);
/* A rank left orderly: calls that still need it fail for those who wait. */
void zx_hub_leave(zx_hub *hub, int rank);
bool zx_hub_pending(const zx_hub *hub);
/* True when a call waits for longer than timeout_s; text then names the call and the ranks that did not come. */
bool zx_hub_overdue(const zx_hub *hub, double timeout_s, char text[ZX_HUB_TEXT]);

#endif
