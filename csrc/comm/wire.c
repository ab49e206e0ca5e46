/* wire.c - see wire.h. */
#include "comm/wire.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

void zx_conn_init(zx_conn *conn, int fd)
{
    *conn = (zx_conn){.fd = fd};
}

void zx_conn_close(zx_conn *conn)
{
    if (conn->fd >= 0) {
        close(conn->fd);
    }
    zx_free(conn->in.data);
    zx_free(conn->out.data);
    *conn = (zx_conn){.fd = -1};
}

static zx_status buffer_room(zx_buffer *b, size_t more)
{
    if (b->len + more <= b->cap) {
        return ZX_OK;
    }
    size_t cap = b->cap ? b->cap : 1024;
    while (cap < b->len + more) {
        cap *= 2;
    }
    void *data = NULL;
    ZX_TRY(zx_alloc(ZX_MEM_COMM, cap, &data));
    if (b->len > 0) {
        memcpy(data, b->data, b->len);
    }
    zx_free(b->data);
    b->data = data;
    b->cap = cap;
    return ZX_OK;
}

static void buffer_drop(zx_buffer *b, size_t bytes)
{
    b->len -= bytes;
    if (b->len > 0) {
        memmove(b->data, b->data + bytes, b->len);
    }
}

static void buffer_put(zx_buffer *b, const void *data, size_t bytes)
{
    if (bytes > 0) {
        memcpy(b->data + b->len, data, bytes);
        b->len += bytes;
    }
}

zx_status zx_conn_send(zx_conn *conn, zx_wire_head head, const void *part_a, size_t a_bytes, const void *part_b,
                       size_t b_bytes)
{
    head.magic = ZX_WIRE_MAGIC;
    head.bytes = a_bytes + b_bytes;
    ZX_TRY(buffer_room(&conn->out, sizeof head + a_bytes + b_bytes));
    buffer_put(&conn->out, &head, sizeof head);
    buffer_put(&conn->out, part_a, a_bytes);
    buffer_put(&conn->out, part_b, b_bytes);
    return zx_conn_flush(conn);
}

zx_status zx_conn_flush(zx_conn *conn)
{
    size_t done = 0;
    while (done < conn->out.len) {
        ssize_t n = send(conn->fd, conn->out.data + done, conn->out.len - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            done += (size_t)n;
        } else if (errno != EINTR) {
            break;
        }
    }
    int err = done < conn->out.len ? errno : 0;
    buffer_drop(&conn->out, done);
    if (err != 0 && err != EAGAIN && err != EWOULDBLOCK) {
        ZX_FAIL_SYS(err, "send", "a bootstrap connection broke while sending");
    }
    return ZX_OK;
}

zx_status zx_conn_read(zx_conn *conn, size_t most, bool *closed)
{
    *closed = false;
    while (conn->in.len < most) {
        ZX_TRY(buffer_room(&conn->in, 4096));
        ssize_t n = recv(conn->fd, conn->in.data + conn->in.len, conn->in.cap - conn->in.len, MSG_DONTWAIT);
        if (n > 0) {
            conn->in.len += (size_t)n;
            continue;
        }
        if (n < 0 && errno == EINTR) {
            continue;
        }
        *closed = n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
        break;
    }
    return ZX_OK;
}

zx_status zx_conn_next(zx_conn *conn, size_t max_bytes, zx_wire_head *head, const char **payload)
{
    *payload = NULL;
    if (conn->in.len < sizeof *head) {
        return ZX_OK;
    }
    memcpy(head, conn->in.data, sizeof *head);
    if (head->magic != ZX_WIRE_MAGIC) {
        ZX_FAIL(ZX_ERR_PEER, "the other end does not speak zerox's protocol (it began with 0x%08x)", head->magic);
    }
    if (head->bytes > max_bytes) {
        ZX_FAIL(ZX_ERR_PEER, "the other end announced a message of %llu bytes, at most %zu are accepted",
                (unsigned long long)head->bytes, max_bytes);
    }
    head->what[ZX_WHAT_TEXT - 1] = '\0';
    if (conn->in.len - sizeof *head >= head->bytes) {
        *payload = conn->in.data + sizeof *head;
    }
    return ZX_OK;
}

void zx_conn_pop(zx_conn *conn, const zx_wire_head *head)
{
    buffer_drop(&conn->in, sizeof *head + (size_t)head->bytes);
}
