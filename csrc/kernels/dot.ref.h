/* dot.ref.h - sum of a[i * step] * b[i], over DOT_LANES interleaved partial sums that are then added in order: the
 * compiler makes vectors of it, and the rounding errors of long sums stay small. Included by other bodies. */

static REAL ZX_NAME(dot)(const void *a, int64_t at_a, int64_t step, const void *b, int64_t at_b, int64_t n)
{
    enum { DOT_LANES = 8 };
    REAL lane[DOT_LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + DOT_LANES <= n; i += DOT_LANES)
        for (int64_t l = 0; l < DOT_LANES; l++)
            lane[l] += ZX_LOAD(a, at_a + (i + l) * step) * ZX_LOAD(b, at_b + i + l);
    for (int64_t l = 0; i + l < n; l++)
        lane[l] += ZX_LOAD(a, at_a + (i + l) * step) * ZX_LOAD(b, at_b + i + l);
    for (int l = 0; l < DOT_LANES; l++)
        sum += lane[l];
    return sum;
}
