/* rendezvous.c - how the sockets between rank 0 and the others come about.
 *
 * DESIGN
 * Rank 0 serves the listening socket and all connections that have not proved themselves with one poll: a stranger that
 * connects and says nothing costs a slot for a few seconds and blocks nobody. Who says a wrong word (protocol, token,
 * job, world, a rank that is there already) is refused with a log line, and the meeting goes on. A rank that was
 * accepted and then disappears is dead: everybody is told. The others try to connect until the deadline, because rank 0
 * may start later than they do; a refusal by rank 0 ends that at once.
 */
#define _GNU_SOURCE 1
#include "comm/boot.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { N_GUESTS = 64 }; /* connections that have not proved themselves yet */
static const int64_t guest_ns = 5000000000;
static const int64_t slice_ms = 100;

typedef struct guest {
    zx_conn conn;
    int64_t end_ns;
} guest;

static bool same_secret(const char *a, const char *b, size_t n)
{
    unsigned char differs = 0;
    for (size_t i = 0; i < n; i++) {
        differs |= (unsigned char)((unsigned char)a[i] ^ (unsigned char)b[i]);
    }
    return differs == 0;
}

static void tune_socket(int fd)
{
    int one = 1;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) < 0) {
        zx_log(ZX_LOG_DEBUG, "a bootstrap socket could not be tuned: %s", strerror(errno));
    }
}

static zx_status look_interrupt(zx_bootstrap *bs)
{
    if (bs->interrupts != NULL && zx_device_interrupted(bs->interrupts)) {
        ZX_FAIL(ZX_ERR_INTERRUPTED, "interrupted while rank %d waited for the other ranks to join", bs->rank);
    }
    return ZX_OK;
}

static zx_status find_address(const char *address, int port, struct addrinfo **out)
{
    char service[16];
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    *out = NULL;
    snprintf(service, sizeof service, "%d", port);
    ZX_TRY(zx_fault_point("resolve"));
    int err = getaddrinfo(address, service, &hints, out);
    if (err != 0) {
        ZX_FAIL(ZX_ERR_ARG,
                "the address '%s' of rank 0 cannot be found (%s): set MASTER_ADDR to a host that this "
                "machine knows",
                address, gai_strerror(err));
    }
    return ZX_OK;
}

/* ---- rank 0 ----------------------------------------------------------------------------------------- */

static zx_status open_listener(const zx_bootstrap_config *c, int *out_fd)
{
    struct addrinfo *list = NULL;
    int err = EADDRNOTAVAIL, fd = -1;
    *out_fd = -1;
    ZX_TRY(find_address(c->address, c->port, &list));
    zx_status status = zx_fault_point("listen");
    for (struct addrinfo *a = list; status == ZX_OK && a != NULL && fd < 0; a = a->ai_next) {
        int one = 1;
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0) {
            err = errno;
            continue;
        }
        if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) < 0 || bind(fd, a->ai_addr, a->ai_addrlen) < 0 ||
            listen(fd, 128) < 0) {
            err = errno;
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(list);
    ZX_TRY(status);
    if (fd < 0 && err == EADDRINUSE) {
        ZX_FAIL_SYS(err, "bind",
                    "port %d of %s, where rank 0 should listen, is in use by another program; choose "
                    "another MASTER_PORT",
                    c->port, c->address);
    }
    if (fd < 0) {
        ZX_FAIL_SYS(err, "bind", "rank 0 cannot listen on %s port %d", c->address, c->port);
    }
    *out_fd = fd;
    return ZX_OK;
}

/* Without an answer: a rank that was only slow tries again. */
static void drop(guest *g, const char *text)
{
    zx_log(ZX_LOG_WARN, "closed a connection to the bootstrap: %s", text);
    zx_conn_close(&g->conn);
}

static void refuse(guest *g, const char *text)
{
    zx_wire_head head = {.type = ZX_FRAME_REFUSED};
    zx_log(ZX_LOG_WARN, "refused a connection to the bootstrap: %s", text);
    if (zx_conn_send(&g->conn, head, text, strlen(text) + 1, NULL, 0) != ZX_OK) {
        zx_error_clear();
    }
    shutdown(g->conn.fd, SHUT_WR);
    zx_conn_close(&g->conn);
}

/* True when the guest became a rank, whose connection then owns the socket. */
static bool admit(zx_bootstrap *bs, guest *g, const zx_hello *hello)
{
    char text[ZX_HUB_TEXT];
    if (hello->version != ZX_WIRE_VERSION) {
        snprintf(text, sizeof text, "its protocol has version %u, this job's %d", hello->version, ZX_WIRE_VERSION);
    } else if (!same_secret(hello->token, bs->token, sizeof bs->token)) {
        snprintf(text, sizeof text, "its token differs from the job's");
    } else if (strncmp(hello->job, bs->job, sizeof bs->job) != 0) {
        snprintf(text, sizeof text, "it belongs to the job '%.*s', this is '%s'", ZX_JOB_TEXT - 1, hello->job, bs->job);
    } else if (hello->world != bs->world) {
        snprintf(text, sizeof text, "it expects a world of %d ranks, rank 0 one of %d", hello->world, bs->world);
    } else if (hello->rank < 1 || hello->rank >= bs->world) {
        snprintf(text, sizeof text, "it says that it is rank %d of %d", hello->rank, bs->world);
    } else if (bs->conns[hello->rank].fd >= 0) {
        snprintf(text, sizeof text, "rank %d is here already (pid %lld), and process %lld claims to be it too",
                 hello->rank, (long long)bs->pids[hello->rank], (long long)hello->pid);
    } else {
        zx_wire_head head = {.type = ZX_FRAME_ACCEPTED};
        if (zx_conn_send(&g->conn, head, NULL, 0, NULL, 0) != ZX_OK) {
            zx_error_clear();
            zx_conn_close(&g->conn);
            return false;
        }
        bs->conns[hello->rank] = g->conn;
        bs->pids[hello->rank] = hello->pid;
        zx_conn_init(&g->conn, -1);
        return true;
    }
    refuse(g, text);
    return false;
}

static bool serve_guest(zx_bootstrap *bs, guest *g)
{
    bool closed = false;
    zx_wire_head head;
    const char *payload = NULL;
    zx_status status = zx_conn_read(&g->conn, sizeof head + sizeof(zx_hello), &closed);
    if (status == ZX_OK) {
        status = zx_conn_next(&g->conn, sizeof(zx_hello), &head, &payload);
    }
    if (status != ZX_OK) {
        char text[ZX_ERROR_TEXT];
        snprintf(text, sizeof text, "%s", zx_error_last()->text);
        zx_error_clear();
        refuse(g, text);
    } else if (payload != NULL && (head.type != ZX_FRAME_HELLO || head.bytes != sizeof(zx_hello))) {
        refuse(g, "it did not greet");
    } else if (payload != NULL) {
        zx_hello hello;
        memcpy(&hello, payload, sizeof hello);
        zx_conn_pop(&g->conn, &head);
        return admit(bs, g, &hello);
    } else if (closed) {
        drop(g, "it ended before it greeted");
    }
    return false;
}

static void take_guest(guest *guests, int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        return;
    }
    int at = 0;
    for (int i = 0; i < N_GUESTS; i++) { /* a free slot, else the one whose time ends first */
        if (guests[at].conn.fd >= 0 && (guests[i].conn.fd < 0 || guests[i].end_ns < guests[at].end_ns)) {
            at = i;
        }
    }
    if (guests[at].conn.fd >= 0) {
        drop(&guests[at], "it did not greet, and others want its place");
    }
    tune_socket(fd);
    zx_conn_init(&guests[at].conn, fd);
    guests[at].end_ns = zx_now_ns() + guest_ns;
}

static void tell_all(zx_bootstrap *bs, zx_frame_type type, const void *data, size_t bytes)
{
    zx_wire_head head = {.type = (uint16_t)type, .status = ZX_ERR_PEER};
    for (int i = 1; i < bs->world; i++) {
        if (bs->conns[i].fd >= 0 && zx_conn_send(&bs->conns[i], head, data, bytes, NULL, 0) != ZX_OK) {
            zx_error_clear(); /* the watch notices the broken connection */
        }
    }
}

static zx_status fail_all(zx_bootstrap *bs, zx_status status, const char *text)
{
    tell_all(bs, ZX_FRAME_ABORT, text, strlen(text) + 1);
    ZX_FAIL(status, "%s", text);
}

static zx_status missing(zx_bootstrap *bs)
{
    char text[ZX_HUB_TEXT];
    int at = snprintf(text, sizeof text, "not all of the %d ranks joined within %.1f s; missing: rank", bs->world,
                      bs->timeout_s);
    for (int i = 1; i < bs->world && at < ZX_HUB_TEXT - 16; i++) {
        if (bs->conns[i].fd < 0) {
            at += snprintf(text + at, (size_t)(ZX_HUB_TEXT - at), " %d", i);
        }
    }
    return fail_all(bs, ZX_ERR_TIMEOUT, text);
}

static zx_status receive_all(zx_bootstrap *bs, guest *guests, int listener, int64_t end_ns)
{
    struct pollfd fds[1 + N_GUESTS + ZX_BOOT_MAX_WORLD];
    for (int n_here = 1; n_here < bs->world;) {
        ZX_TRY(look_interrupt(bs));
        if (zx_now_ns() > end_ns) {
            return missing(bs);
        }
        int n = 0;
        fds[n++] = (struct pollfd){.fd = listener, .events = POLLIN};
        for (int i = 0; i < N_GUESTS; i++) { /* poll passes over negative descriptors */
            fds[n++] = (struct pollfd){.fd = guests[i].conn.fd, .events = POLLIN};
        }
        for (int i = 1; i < bs->world; i++) {
            fds[n++] = (struct pollfd){.fd = bs->conns[i].fd, .events = POLLIN};
        }
        if (poll(fds, (nfds_t)n, slice_ms) < 0 && errno != EINTR) {
            ZX_FAIL_SYS(errno, "poll", "rank 0 cannot wait for the other ranks");
        }
        for (int i = 1; i < bs->world; i++) {
            bool closed = false;
            if (fds[N_GUESTS + i].revents == 0) {
                continue;
            }
            ZX_TRY(zx_conn_read(&bs->conns[i], sizeof(zx_wire_head), &closed));
            if (closed || bs->conns[i].in.len > 0) {
                char text[ZX_HUB_TEXT];
                snprintf(text, sizeof text, "rank %d (pid %lld) %s before all of the %d ranks had joined", i,
                         (long long)bs->pids[i], closed ? "died" : "spoke", bs->world);
                return fail_all(bs, ZX_ERR_PEER, text);
            }
        }
        for (int i = 0; i < N_GUESTS; i++) {
            if (guests[i].conn.fd >= 0 && fds[1 + i].revents != 0) {
                n_here += serve_guest(bs, &guests[i]);
            } else if (guests[i].conn.fd >= 0 && zx_now_ns() > guests[i].end_ns) {
                drop(&guests[i], "it did not greet in time");
            }
        }
        if (fds[0].revents != 0) {
            take_guest(guests, listener);
        }
    }
    return ZX_OK;
}

static zx_status receive_ranks(zx_bootstrap *bs, const zx_bootstrap_config *config, int64_t end_ns)
{
    zx_status zx_rc_ = ZX_OK;
    guest *guests = NULL;
    int listener = config->listen_fd;
    if (listener < 0) {
        ZX_TRY(open_listener(config, &listener));
    } else {
        tune_socket(listener);
    }
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_COMM, N_GUESTS, guests), done);
    for (int i = 0; i < N_GUESTS; i++) {
        zx_conn_init(&guests[i].conn, -1);
    }
    ZX_TRY_GOTO(receive_all(bs, guests, listener, end_ns), done);
    tell_all(bs, ZX_FRAME_START, bs->pids, (size_t)bs->world * sizeof *bs->pids);
done:
    for (int i = 0; guests != NULL && i < N_GUESTS; i++) {
        zx_conn_close(&guests[i].conn);
    }
    zx_free(guests);
    close(listener);
    return zx_rc_;
}

/* ---- the others ------------------------------------------------------------------------------------- */

/* One try to connect; fd is -1 when it did not work, and err says why. */
static zx_status try_connect(zx_bootstrap *bs, const struct addrinfo *a, int64_t end_ns, int *fd, int *err)
{
    *fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (*fd < 0) {
        ZX_FAIL_SYS(errno, "socket", "rank %d has no socket to reach rank 0 with", bs->rank);
    }
    *err = connect(*fd, a->ai_addr, a->ai_addrlen) < 0 ? errno : 0;
    while (*err == EINPROGRESS) {
        struct pollfd p = {.fd = *fd, .events = POLLOUT};
        zx_status status = look_interrupt(bs);
        if (status != ZX_OK) {
            close(*fd);
            *fd = -1;
            return status;
        }
        if (poll(&p, 1, slice_ms) > 0) {
            socklen_t len = sizeof *err;
            if (getsockopt(*fd, SOL_SOCKET, SO_ERROR, err, &len) < 0) {
                *err = errno;
            }
        } else if (zx_now_ns() > end_ns) {
            *err = ETIMEDOUT;
        }
    }
    if (*err != 0) {
        close(*fd);
        *fd = -1;
    }
    return ZX_OK;
}

static zx_status find_rank0(zx_bootstrap *bs, const zx_bootstrap_config *c, int64_t end_ns, int *fd)
{
    struct addrinfo *list = NULL;
    int err = 0;
    int64_t pause_ms = 5;
    *fd = -1;
    ZX_TRY(find_address(c->address, c->port, &list));
    zx_status status = zx_fault_point("connect");
    while (status == ZX_OK && *fd < 0) {
        for (struct addrinfo *a = list; status == ZX_OK && a != NULL && *fd < 0; a = a->ai_next) {
            status = try_connect(bs, a, end_ns, fd, &err);
        }
        if (status != ZX_OK || *fd >= 0) {
            break;
        }
        if (zx_now_ns() > end_ns) {
            status = zx_error_set(ZX_ERR_TIMEOUT, err, "connect", __func__, __FILE__, __LINE__,
                                  "rank %d could not reach rank 0 at %s port %d within %.1f s (%s)", bs->rank,
                                  c->address, c->port, bs->timeout_s, strerror(err));
            break;
        }
        poll(NULL, 0, (int)pause_ms);
        pause_ms = zx_min64(2 * pause_ms, slice_ms);
        status = look_interrupt(bs);
    }
    freeaddrinfo(list);
    return status;
}

/* Reads until `type` comes. *lost: the connection closed without a word. */
static zx_status await(zx_bootstrap *bs, zx_frame_type type, int64_t end_ns, bool *lost)
{
    zx_conn *conn = &bs->conns[0];
    bool closed = false;
    *lost = false;
    for (;;) {
        zx_wire_head head;
        const char *payload = NULL;
        ZX_TRY(zx_conn_flush(conn));
        ZX_TRY(zx_conn_read(conn, ZX_WIRE_MAX_BYTES, &closed));
        ZX_TRY(zx_conn_next(conn, ZX_WIRE_MAX_BYTES, &head, &payload));
        if (payload != NULL && head.type == type) {
            if (type == ZX_FRAME_START && head.bytes == (size_t)bs->world * sizeof *bs->pids) {
                memcpy(bs->pids, payload, (size_t)head.bytes);
            }
            zx_conn_pop(conn, &head);
            return ZX_OK;
        }
        if (payload != NULL) {
            int n = (int)zx_min64((int64_t)head.bytes, ZX_HUB_TEXT);
            if (head.type == ZX_FRAME_REFUSED) {
                ZX_FAIL(ZX_ERR_PEER, "rank 0 refused rank %d: %.*s", bs->rank, n, payload);
            }
            ZX_FAIL(ZX_ERR_PEER, "%.*s", head.type == ZX_FRAME_ABORT ? n : 0, payload);
        }
        if (closed) {
            *lost = true;
            return ZX_OK;
        }
        if (zx_now_ns() > end_ns) {
            ZX_FAIL(ZX_ERR_TIMEOUT, "rank %d %s within %.1f s", bs->rank,
                    type == ZX_FRAME_ACCEPTED ? "got no answer from rank 0" : "did not hear that all ranks have joined",
                    bs->timeout_s);
        }
        ZX_TRY(look_interrupt(bs));
        struct pollfd p = {.fd = conn->fd, .events = POLLIN | (conn->out.len > 0 ? POLLOUT : 0)};
        poll(&p, 1, slice_ms);
    }
}

static zx_status join(zx_bootstrap *bs, const zx_bootstrap_config *config, int64_t end_ns)
{
    zx_hello hello = {.version = ZX_WIRE_VERSION, .world = bs->world, .rank = bs->rank, .pid = getpid()};
    zx_wire_head head = {.type = ZX_FRAME_HELLO, .from = bs->rank};
    bool lost = true;
    memcpy(hello.job, bs->job, sizeof hello.job);
    memcpy(hello.token, bs->token, sizeof hello.token);
    while (lost) { /* lost before the answer: another program's port, perhaps not for long */
        int fd = -1;
        ZX_TRY(find_rank0(bs, config, end_ns, &fd));
        tune_socket(fd);
        zx_conn_close(&bs->conns[0]);
        zx_conn_init(&bs->conns[0], fd);
        zx_status status = zx_conn_send(&bs->conns[0], head, &hello, sizeof hello, NULL, 0);
        if (status == ZX_ERR_SYSTEM) {
            zx_error_clear();
            status = ZX_OK;
            bs->conns[0].out.len = 0;
        }
        ZX_TRY(status);
        ZX_TRY(await(bs, ZX_FRAME_ACCEPTED, end_ns, &lost));
        if (lost && zx_now_ns() > end_ns) {
            ZX_FAIL(ZX_ERR_TIMEOUT, "what listens at %s port %d closed each connection of rank %d for %.1f s",
                    config->address, config->port, bs->rank, bs->timeout_s);
        }
        if (lost) {
            poll(NULL, 0, slice_ms);
        }
    }
    /* Rank 0 has the better verdict on who is missing: give it time to send it. */
    ZX_TRY(await(bs, ZX_FRAME_START, end_ns + (int64_t)(bs->timeout_s * 1e9) + 1000000000, &lost));
    if (lost) {
        ZX_FAIL(ZX_ERR_PEER, "rank 0 died before all of the %d ranks had joined", bs->world);
    }
    return ZX_OK;
}

zx_status zx_rendezvous(zx_bootstrap *bs, const zx_bootstrap_config *config)
{
    int64_t end_ns = zx_now_ns() + (int64_t)(bs->timeout_s * 1e9);
    bs->pids[0] = getpid();
    if (bs->rank == 0) {
        return receive_ranks(bs, config, end_ns);
    }
    return join(bs, config, end_ns);
}
