/* env.c - the one table of environment variables. */
#include "base/zx.h"

#include <errno.h>
#include <stdlib.h>

static const struct {
    const char *name, *def, *help;
} g_table[ZX_N_ENV] = {
#define X(id, name, def, help) {name, def, help},
    ZX_ENV_LIST(X)
#undef X
};

const char *zx_env_name(zx_env var)
{
    return (unsigned)var < ZX_N_ENV ? g_table[var].name : "";
}

const char *zx_env_default(zx_env var)
{
    return (unsigned)var < ZX_N_ENV ? g_table[var].def : "";
}

const char *zx_env_help(zx_env var)
{
    return (unsigned)var < ZX_N_ENV ? g_table[var].help : "";
}

/* An empty value counts as unset: that is how shells unset a variable for one command. */
const char *zx_env_text(zx_env var)
{
    if ((unsigned)var >= ZX_N_ENV) return "";
    const char *value = getenv(g_table[var].name);
    return value != NULL && value[0] != '\0' ? value : g_table[var].def;
}

zx_status zx_env_int(zx_env var, int64_t lo, int64_t hi, int64_t *out)
{
    *out = 0;
    const char *text = zx_env_text(var);
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || value < lo || value > hi)
        ZX_FAIL(ZX_ERR_ARG, "%s is '%.64s': it must be a whole number from %lld to %lld", zx_env_name(var), text,
                (long long)lo, (long long)hi);
    *out = value;
    return ZX_OK;
}
