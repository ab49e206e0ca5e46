/* xent.ref.h - softmax cross-entropy of one row of V logits.
 *
 * Sums run over ZX_XENT_LANES interleaved partial sums that are then added in order: the shape of vector registers,
 * so that the AVX2 path can give the same bits. */

static REAL ZX_NAME(xent_lse)(const void *logits, int64_t n_vocab)
{
    REAL lane[ZX_XENT_LANES];
    for (int l = 0; l < ZX_XENT_LANES; l++)
        lane[l] = -(REAL)INFINITY;
    bool any_nan = false;
    for (int64_t i = 0; i < n_vocab; i++) {
        REAL x = ZX_LOAD(logits, i), *m = &lane[i % ZX_XENT_LANES];
        any_nan |= x != x;
        *m = *m > x ? *m : x;
    }
    REAL max = -(REAL)INFINITY, sum = 0;
    for (int l = 0; l < ZX_XENT_LANES; l++)
        max = max > lane[l] ? max : lane[l];
    if (any_nan) return (REAL)NAN;
    if (max == -(REAL)INFINITY) return max;
    for (int l = 0; l < ZX_XENT_LANES; l++)
        lane[l] = 0;
    for (int64_t i = 0; i < n_vocab; i++)
        lane[i % ZX_XENT_LANES] += ZX_EXP(ZX_LOAD(logits, i) - max);
    for (int l = 0; l < ZX_XENT_LANES; l++)
        sum += lane[l];
    return max + ZX_LOG(sum);
}

static void ZX_NAME(xent_fwd)(const void *logits, int64_t n_vocab, void *lse, int64_t row)
{
    ZX_STORE_SUM(lse, row, ZX_NAME(xent_lse)(logits, n_vocab));
}

/* The loss of a row, given its lse. A label past the vocabulary is NaN. */
static double ZX_NAME(xent_loss)(const void *logits, int64_t n_vocab, const void *lse, int64_t row, int64_t label)
{
    return label < n_vocab ? (double)(ZX_LOAD_SUM(lse, row) - ZX_LOAD(logits, label)) : (double)NAN;
}

static double ZX_NAME(xent_sum_load)(const void *p, int64_t i)
{
    return (double)ZX_LOAD_SUM(p, i);
}
static void ZX_NAME(xent_sum_store)(void *p, int64_t i, double x)
{
    ZX_STORE_SUM(p, i, (REAL)x);
}

static void ZX_NAME(xent_bwd)(const void *logits, int64_t n_vocab, const void *lse, int64_t row, int64_t label,
                              const void *dloss, void *dlogits)
{
    REAL scale = ZX_LOAD_SUM(dloss, 0), l = ZX_LOAD_SUM(lse, row);
    if (label < 0) {
        for (int64_t i = 0; i < n_vocab; i++)
            ZX_STORE(dlogits, i, 0);
        return;
    }
    if (label >= n_vocab) scale = (REAL)NAN;
    REAL at_label = label < n_vocab ? ZX_LOAD(logits, label) : 0;
    for (int64_t i = 0; i < n_vocab; i++)
        ZX_STORE(dlogits, i, ZX_EXP(ZX_LOAD(logits, i) - l) * scale);
    if (label < n_vocab) ZX_STORE(dlogits, label, (ZX_EXP(at_label - l) - (REAL)1) * scale);
}
