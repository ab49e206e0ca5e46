/* meeting.c - threads of one process as ranks: one lock, one condition variable and one hub for all of them. There is
 * no watch thread: a thread does not die alone, and whoever waits looks at the deadlines. */
#include "comm/boot.h"

#include <stdio.h>
#include <string.h>

struct zx_meeting {
    int world;
    int n_joined, n_left;
    bool open; /* all are there */
    zx_bootstrap **members; /* (world); NULL before a rank joins and after it left */
    zx_hub hub;
    pthread_mutex_t lock;
    pthread_cond_t changed;
};

static void deliver_member(void *ctx, int rank, uint64_t key, uint64_t seq, zx_status status, const char *text,
                           const void *data, size_t data_bytes)
{
    zx_meeting *meeting = ctx;
    if (meeting->members[rank] != NULL) {
        zx_boot_deliver(meeting->members[rank], key, seq, status, text, data, data_bytes);
    }
}

zx_status zx_meeting_open(int world, zx_meeting **out)
{
    zx_status zx_rc_ = ZX_OK;
    zx_meeting *meeting = NULL;
    *out = NULL;
    if (world < 1) {
        ZX_FAIL(ZX_ERR_ARG, "a meeting of %d ranks is impossible: at least 1 is needed", world);
    }
    ZX_TRY(ZX_NEW(ZX_MEM_COMM, meeting));
    meeting->world = world;
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_COMM, world, meeting->members), fail);
    ZX_TRY_GOTO(zx_hub_open(&meeting->hub, world, deliver_member, meeting), fail);
    ZX_TRY_GOTO(zx_boot_cond_init(&meeting->changed), fail);
    pthread_mutex_init(&meeting->lock, NULL);
    *out = meeting;
    return ZX_OK;
fail:
    zx_hub_close(&meeting->hub);
    zx_free(meeting->members);
    zx_free(meeting);
    return zx_rc_;
}

void zx_meeting_close(zx_meeting *meeting)
{
    if (meeting == NULL) {
        return;
    }
    pthread_cond_destroy(&meeting->changed);
    pthread_mutex_destroy(&meeting->lock);
    zx_hub_close(&meeting->hub);
    zx_free(meeting->members);
    zx_free(meeting);
}

static zx_status late(const zx_meeting *meeting, const zx_bootstrap *bs)
{
    char text[ZX_HUB_TEXT];
    int at = 0;
    text[0] = '\0';
    for (int i = 0; i < meeting->world && at < ZX_HUB_TEXT - 16; i++) {
        if (meeting->members[i] == NULL) {
            at += snprintf(text + at, (size_t)(ZX_HUB_TEXT - at), " %d", i);
        }
    }
    ZX_FAIL(ZX_ERR_TIMEOUT, "rank %d waited %.1f s in the meeting of %d ranks for rank%s", bs->rank, bs->timeout_s,
            meeting->world, text);
}

static zx_status join_locked(zx_meeting *meeting, zx_bootstrap *bs)
{
    int64_t end = zx_now_ns() + (int64_t)(bs->timeout_s * 1e9);
    while (meeting->hub.left[bs->rank]) { /* the others have still to leave the last round */
        if (zx_now_ns() > end) {
            ZX_FAIL(ZX_ERR_TIMEOUT, "rank %d cannot join the meeting again: other ranks did not leave it for %.1f s",
                    bs->rank, bs->timeout_s);
        }
        ZX_TRY(zx_boot_pause(bs, "meeting"));
    }
    if (meeting->members[bs->rank] != NULL) {
        ZX_FAIL(ZX_ERR_ARG, "rank %d is in the meeting already: each rank joins once", bs->rank);
    }
    meeting->members[bs->rank] = bs;
    bs->meeting = meeting;
    meeting->n_joined++;
    if (meeting->n_joined == meeting->world) {
        meeting->open = true;
        pthread_cond_broadcast(&meeting->changed);
    }
    while (!meeting->open) {
        if (zx_now_ns() > end) {
            return late(meeting, bs);
        }
        ZX_TRY(zx_boot_pause(bs, "meeting"));
    }
    return ZX_OK;
}

zx_status zx_meeting_join(zx_meeting *meeting, zx_bootstrap *bs)
{
    if (meeting->world != bs->world) {
        ZX_FAIL(ZX_ERR_ARG, "rank %d expects a world of %d ranks, the meeting is for %d", bs->rank, bs->world,
                meeting->world);
    }
    bs->lock = &meeting->lock;
    bs->changed = &meeting->changed;
    pthread_mutex_lock(&meeting->lock);
    zx_status status = join_locked(meeting, bs);
    pthread_mutex_unlock(&meeting->lock);
    return status;
}

void zx_meeting_leave(zx_meeting *meeting, zx_bootstrap *bs)
{
    pthread_mutex_lock(&meeting->lock);
    while (bs->hooks_running) {
        zx_boot_cond_wait(&meeting->changed, &meeting->lock, 100 * 1000000);
    }
    meeting->members[bs->rank] = NULL;
    if (!meeting->open) {
        meeting->n_joined--;
    } else {
        zx_hub_leave(&meeting->hub, bs->rank);
        meeting->n_left++;
    }
    if (meeting->open && meeting->n_left == meeting->world) {
        meeting->open = false;
        meeting->n_joined = 0;
        meeting->n_left = 0;
        memset(meeting->hub.left, 0, (size_t)meeting->world * sizeof *meeting->hub.left);
    }
    pthread_cond_broadcast(&meeting->changed);
    pthread_mutex_unlock(&meeting->lock);
}

zx_status zx_meeting_enter(zx_meeting *meeting, const zx_hub_entry *entry)
{
    return zx_hub_enter(&meeting->hub, entry);
}

static void fault_all(zx_meeting *meeting, zx_bootstrap *from, zx_status status, const char *text)
{
    for (int i = 0; i < meeting->world; i++) {
        zx_bootstrap *bs = meeting->members[i];
        if (bs != NULL) {
            zx_boot_fault(bs, bs == from ? status : ZX_ERR_PEER, text);
        }
    }
}

void zx_meeting_look(zx_meeting *meeting)
{
    for (int i = 0; i < meeting->world; i++) {
        char text[ZX_HUB_TEXT];
        zx_bootstrap *bs = meeting->members[i];
        if (bs != NULL && zx_hub_overdue(&meeting->hub, bs->timeout_s, text)) {
            for (int k = 0; k < meeting->world; k++) {
                if (meeting->members[k] != NULL) {
                    zx_boot_fault(meeting->members[k], ZX_ERR_TIMEOUT, text);
                }
            }
            return;
        }
    }
}

void zx_meeting_fail(zx_meeting *meeting, zx_bootstrap *from, zx_status status, const char *text)
{
    pthread_mutex_lock(&meeting->lock);
    fault_all(meeting, from, status, text);
    for (int i = 0; i < meeting->world; i++) {
        zx_bootstrap *bs = meeting->members[i];
        if (bs != NULL && zx_boot_claim_hooks(bs)) {
            pthread_mutex_unlock(&meeting->lock);
            zx_boot_call_hooks(bs);
            pthread_mutex_lock(&meeting->lock);
        }
    }
    pthread_mutex_unlock(&meeting->lock);
}
