/* error.c - the thread-local error record. It is reached through functions only, so that translation units in
 * other languages need no agreement about thread-local storage. */
#define _GNU_SOURCE 1
#include "base/zx.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local zx_error t_error;

const zx_error *zx_error_last(void)
{
    return &t_error;
}

void zx_error_clear(void)
{
    t_error.status = ZX_OK;
    t_error.native = 0;
    t_error.text[0] = '\0';
    t_error.n_frames = 0;
}

zx_status zx_error_raise(const zx_error *saved)
{
    if (saved != &t_error) t_error = *saved;
    return t_error.status;
}

/* strerror is not safe among threads, and strerror_r exists in two incompatible forms; glibc's returns the
 * text. */
static void append_errno(char *text, size_t text_bytes, int err)
{
    char buf[128];
    const char *what = strerror_r(err, buf, sizeof buf);
    size_t used = strlen(text);
    snprintf(text + used, text_bytes - used, ": %s (errno %d)", what, err);
}

zx_status zx_error_set(zx_status status, int native, const char *expr, const char *func, const char *file, int line,
                       const char *fmt, ...)
{
    /* The arguments may point into the record itself (a text that is wrapped), so it is written last. */
    char text[ZX_ERROR_TEXT];
    va_list ap;
    va_start(ap, fmt);
    if (vsnprintf(text, sizeof text, fmt, ap) < 0) snprintf(text, sizeof text, "(unformattable) %.200s", fmt);
    va_end(ap);
    if (status == ZX_ERR_SYSTEM && native != 0) append_errno(text, sizeof text, native);
    t_error.status = status;
    t_error.native = native;
    memcpy(t_error.text, text, sizeof text);
    t_error.n_frames = 1;
    t_error.frames[0] = (zx_frame){.expr = expr, .func = func, .file = file, .line = line};
    return status;
}

/* When the record is full the last frame is replaced: the origin and the entry point say more than the
 * middle. */
void zx_error_frame(const char *expr, const char *func, const char *file, int line)
{
    int at = t_error.n_frames < ZX_ERROR_FRAMES ? t_error.n_frames++ : ZX_ERROR_FRAMES - 1;
    t_error.frames[at] = (zx_frame){.expr = expr, .func = func, .file = file, .line = line};
}

const char *zx_status_name(zx_status status)
{
    static const char *const names[ZX_N_STATUS] = {
        "OK", "ARG", "STATE", "NOMEM", "SYSTEM", "CUDA", "NCCL", "TIMEOUT", "PEER", "UNSUPPORTED", "INTERRUPTED", "BUG",
    };
    return (unsigned)status < ZX_N_STATUS ? names[status] : "?";
}
