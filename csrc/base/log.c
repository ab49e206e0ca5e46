/* log.c - one line to stderr. A line is formatted first and written with one call, so lines of several
 * threads and processes do not mix. */
#include "base/thread.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static _Thread_local int t_rank_plus_1; /* 0 = no rank: thread-local data starts at zero */

void zx_log_set_rank(int rank)
{
    t_rank_plus_1 = rank < 0 ? 0 : rank + 1;
}

int zx_log_rank(void)
{
    return t_rank_plus_1 - 1;
}

static void write_line(const char *text, size_t length)
{
    while (length > 0) {
        ssize_t n = write(STDERR_FILENO, text, length);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return; /* there is nowhere to report that stderr is gone */
        text += n;
        length -= (size_t)n;
    }
}

static int format_prefix(char *line, size_t line_bytes)
{
    int rank = zx_log_rank();
    return rank < 0 ? snprintf(line, line_bytes, "zerox: ") : snprintf(line, line_bytes, "zerox[%d]: ", rank);
}

static int max_level(void)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    static _Atomic int cached; /* level + 1 */
    int known = atomic_load_explicit(&cached, memory_order_relaxed);
    if (known != 0) return known - 1;
    const char *text = zx_env_text(ZX_ENV_LOG);
    int level = -1;
    for (int i = 0; i <= ZX_LOG_DEBUG; i++)
        if (strcmp(text, names[i]) == 0) level = i;
    bool unknown = level < 0;
    if (unknown) level = ZX_LOG_WARN;
    int expected = 0;
    if (atomic_compare_exchange_strong(&cached, &expected, level + 1) && unknown)
        zx_log(ZX_LOG_WARN, "ZEROX_LOG is '%.32s': it must be error, warn, info or debug; warn is used", text);
    return level;
}

void zx_log(zx_log_level level, const char *fmt, ...)
{
    if ((int)level > max_level()) return;
    int saved_errno = errno;
    char line[1024];
    size_t used = (size_t)format_prefix(line, sizeof line);
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line + used, sizeof line - used - 1, fmt, ap);
    va_end(ap);
    if (n > 0) used += (size_t)n < sizeof line - used - 1 ? (size_t)n : sizeof line - used - 2;
    line[used++] = '\n';
    write_line(line, used);
    errno = saved_errno;
}
