/* wire.h - frames over nonblocking TCP sockets, for the bootstrap: a header of fixed size, then a payload. Both ends
 * run the same build on machines of one byte order (the greeting's magic number checks that). */
#ifndef ZX_COMM_WIRE_H
#define ZX_COMM_WIRE_H

#include "comm/hub.h"

typedef enum zx_frame_type {
    ZX_FRAME_HELLO = 1, /* payload zx_hello */
    ZX_FRAME_ACCEPTED,  /* rank 0: you are in; the others are still awaited */
    ZX_FRAME_START,     /* all are here; payload: world process ids (int64) */
    ZX_FRAME_REFUSED,   /* payload text */
    ZX_FRAME_GATHER,    /* payload: n_ranks members (int32), then the contribution */
    ZX_FRAME_RESULT,    /* payload: the gathered bytes, or text */
    ZX_FRAME_ABORT,     /* payload text; status */
    ZX_FRAME_BYE,
} zx_frame_type;

enum { ZX_WIRE_MAGIC = 0x7a780002, ZX_WIRE_VERSION = 1, ZX_TOKEN_TEXT = 256, ZX_JOB_TEXT = 64 };
#define ZX_WIRE_MAX_BYTES ((size_t)64 << 20) /* of a payload */

typedef struct zx_wire_head {
    uint32_t magic;
    uint16_t type;
    uint16_t status;
    int32_t from;
    int32_t n_ranks;
    uint64_t key, seq;
    uint64_t bytes; /* of the payload */
    char what[ZX_WHAT_TEXT];
} zx_wire_head;

typedef struct zx_hello {
    uint32_t version;
    int32_t world, rank;
    int32_t unused;
    int64_t pid;
    char job[ZX_JOB_TEXT];
    char token[ZX_TOKEN_TEXT];
} zx_hello;

typedef struct zx_buffer {
    char *data;
    size_t len, cap;
} zx_buffer;

typedef struct zx_conn {
    int fd; /* -1: none */
    zx_buffer in, out;
} zx_conn;

void zx_conn_init(zx_conn *conn, int fd); /* takes fd */
void zx_conn_close(zx_conn *conn);
/* Sends at once what the socket takes and keeps the rest for zx_conn_flush. Parts may be NULL with 0 bytes. */
ZX_CHECKED zx_status zx_conn_send(zx_conn *conn, zx_wire_head head, const void *part_a, size_t a_bytes,
                                  const void *part_b, size_t b_bytes);
ZX_CHECKED zx_status zx_conn_flush(zx_conn *conn);
/* Reads what there is, until `most` bytes are held. *closed: the other end closed or reset the connection. */
ZX_CHECKED zx_status zx_conn_read(zx_conn *conn, size_t most, bool *closed);
/* The next whole frame, or NULL; an error for bytes that are no frame or a payload above max_bytes. The pointers
 * are valid until the next read or pop. */
ZX_CHECKED zx_status zx_conn_next(zx_conn *conn, size_t max_bytes, zx_wire_head *head, const char **payload);
void zx_conn_pop(zx_conn *conn, const zx_wire_head *head);

#endif
