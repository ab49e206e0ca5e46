/* fds.c - descriptors from rank to rank of one host.
 *
 * Processes: each rank binds a datagram socket to a random name in the abstract namespace (nothing is left behind) and
 * tells the others name and a random word through the bootstrap, which is authenticated. Who sends a descriptor says
 * that word; any other datagram is dropped. Threads: the number itself goes around, and the receiver duplicates it.
 */
#define _GNU_SOURCE 1
#include "comm/boot.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

typedef struct card { /* what each rank tells the others */
    char name[48];    /* of its socket, without the leading zero byte */
    uint64_t word[2];
    int32_t gives, fd;
} card;

typedef struct letter {
    uint64_t word[2];
    int32_t from; /* index in the group */
    int32_t unused;
} letter;

static socklen_t abstract_name(struct sockaddr_un *addr, const char *name)
{
    *addr = (struct sockaddr_un){.sun_family = AF_UNIX};
    snprintf(addr->sun_path + 1, sizeof addr->sun_path - 1, "%s", name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

static zx_status bind_random(card *mine, int *out_fd)
{
    uint64_t random[4];
    struct sockaddr_un addr;
    *out_fd = -1;
    ZX_TRY(zx_fault_point("unix socket"));
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) {
        ZX_FAIL_SYS(errno, "getrandom", "no random bytes for the name of a socket");
    }
    snprintf(mine->name, sizeof mine->name, "zerox/%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    mine->word[0] = random[2];
    mine->word[1] = random[3];
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        ZX_FAIL_SYS(errno, "socket", "no socket to exchange descriptors with");
    }
    socklen_t len = abstract_name(&addr, mine->name);
    if (bind(fd, (struct sockaddr *)&addr, len) < 0) {
        int err = errno;
        close(fd);
        ZX_FAIL_SYS(err, "bind", "no name for the socket that exchanges descriptors");
    }
    *out_fd = fd;
    return ZX_OK;
}

/* *sent stays false while the receiver's queue is full. */
static zx_status send_fd(int sock, const card *to, int from, int fd, bool *sent)
{
    struct sockaddr_un addr;
    letter text = {.word = {to->word[0], to->word[1]}, .from = from};
    struct iovec io = {.iov_base = &text, .iov_len = sizeof text};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct msghdr msg = {.msg_name = &addr,
                         .msg_namelen = abstract_name(&addr, to->name),
                         .msg_iov = &io,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof control.bytes};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    *sent = sendmsg(sock, &msg, MSG_NOSIGNAL) >= 0;
    if (!*sent && errno != EAGAIN && errno != EINTR && errno != ENOBUFS) {
        ZX_FAIL_SYS(errno, "sendmsg",
                    "a descriptor could not be sent to another rank of this host; all ranks of the "
                    "communicator must share one network namespace");
    }
    return ZX_OK;
}

/* Takes one datagram, if there is one. */
static void receive_fd(int sock, const card *cards, int n, int me, int *out_fds)
{
    letter text = {0};
    struct iovec io = {.iov_base = &text, .iov_len = sizeof text};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct msghdr msg = {
        .msg_iov = &io, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t got = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0) {
        return;
    }
    int fd = -1;
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    if (c != NULL && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof fd)) {
        memcpy(&fd, CMSG_DATA(c), sizeof fd);
    }
    bool known = got == (ssize_t)sizeof text &&
                 ((text.word[0] ^ cards[me].word[0]) | (text.word[1] ^ cards[me].word[1])) == 0 && text.from >= 0 &&
                 text.from < n && cards[text.from].gives && out_fds[text.from] < 0;
    if (known) {
        out_fds[text.from] = fd;
    } else {
        zx_log(ZX_LOG_WARN, "dropped a message of a stranger to the socket that exchanges descriptors");
        if (fd >= 0) {
            close(fd);
        }
    }
}

static zx_status swap_fds(zx_bootstrap *bs, const zx_group *group, const char *what, int sock, const card *cards,
                          int me, int fd, int *out_fds)
{
    int64_t end_ns = zx_now_ns() + (int64_t)(bs->timeout_s * 1e9);
    int n_sent = fd < 0 ? group->n_ranks : 0;
    for (;;) {
        int missing = -1;
        while (n_sent < group->n_ranks) {
            bool sent = n_sent == me;
            if (!sent) {
                ZX_TRY(send_fd(sock, &cards[n_sent], me, fd, &sent));
            }
            if (!sent) {
                break;
            }
            n_sent++;
        }
        for (int i = 0; i < group->n_ranks; i++) {
            receive_fd(sock, cards, group->n_ranks, me, out_fds);
        }
        for (int i = 0; i < group->n_ranks; i++) {
            missing = i != me && cards[i].gives && out_fds[i] < 0 ? i : missing;
        }
        if (missing < 0 && n_sent == group->n_ranks) {
            return ZX_OK;
        }
        ZX_TRY(zx_bootstrap_health(bs));
        if (bs->interrupts != NULL && zx_device_interrupted(bs->interrupts)) {
            ZX_FAIL(ZX_ERR_INTERRUPTED, "interrupted while rank %d exchanged descriptors for '%s'", bs->rank, what);
        }
        if (zx_now_ns() > end_ns) {
            ZX_FAIL(ZX_ERR_TIMEOUT, "rank %d %s rank %d to exchange a descriptor for '%s' within %.1f s", bs->rank,
                    missing >= 0 ? "waited for" : "could not reach", (int)group->ranks[missing >= 0 ? missing : n_sent],
                    what, bs->timeout_s);
        }
        struct pollfd p = {.fd = sock, .events = POLLIN};
        poll(&p, 1, n_sent < group->n_ranks ? 1 : 100);
    }
}

static zx_status copy_fds(zx_bootstrap *bs, zx_group *group, const char *what, const card *cards, int me, int *out_fds)
{
    int err = 0;
    for (int i = 0; i < group->n_ranks && err == 0; i++) {
        if (i != me && cards[i].gives) {
            out_fds[i] = fcntl(cards[i].fd, F_DUPFD_CLOEXEC, 0);
            err = out_fds[i] < 0 ? errno : 0;
        }
    }
    ZX_TRY(zx_group_all_gather(bs, group, what, NULL, 0, NULL)); /* now the givers may close theirs */
    if (err != 0) {
        ZX_FAIL_SYS(err, "fcntl", "a descriptor of another rank could not be duplicated for '%s'", what);
    }
    return ZX_OK;
}

zx_status zx_group_exchange_fds(zx_bootstrap *bs, zx_group *group, const char *what, int fd, int *out_fds)
{
    zx_status zx_rc_ = ZX_OK;
    card mine = {.gives = fd >= 0, .fd = fd};
    card *cards = NULL;
    int sock = -1, me = 0;
    for (int i = 0; i < group->n_ranks; i++) {
        out_fds[i] = -1;
        me = group->ranks[i] == bs->rank ? i : me;
    }
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_COMM, group->n_ranks, cards));
    if (bs->meeting == NULL) {
        ZX_TRY_GOTO(bind_random(&mine, &sock), fail);
    }
    ZX_TRY_GOTO(zx_group_all_gather(bs, group, what, &mine, sizeof mine, cards), fail);
    if (bs->meeting != NULL) {
        ZX_TRY_GOTO(copy_fds(bs, group, what, cards, me, out_fds), fail);
    } else {
        ZX_TRY_GOTO(swap_fds(bs, group, what, sock, cards, me, fd, out_fds), fail);
    }
    goto done;
fail:
    for (int i = 0; i < group->n_ranks; i++) {
        if (out_fds[i] >= 0) {
            close(out_fds[i]);
            out_fds[i] = -1;
        }
    }
done:
    if (sock >= 0) {
        close(sock);
    }
    zx_free(cards);
    return zx_rc_;
}
