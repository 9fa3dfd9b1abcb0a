/* Kernels over S, the stored type of weights and KV. Included by kernels.c only. */

struct PASTE(rope_call, SUFFIX) {
    const float *qkv, *cos_sin, *q_norm, *k_norm;
    const int32_t *positions, *slots;
    float *q;
    S *kv;
    int64_t T, H, K, D, range;
    float eps;
};

static void PASTE(rope_rows, SUFFIX)(const void *context, int64_t at) {
    const struct PASTE(rope_call, SUFFIX) *c = context;
    int64_t H = c->H, K = c->K, D = c->D;
    for (int64_t t = at * c->range; t < c->T && t < (at + 1) * c->range; t++) {
        const float *row = c->qkv + t * (H + 2 * K) * D, *v = row + (H + K) * D;
        const float *cs = c->cos_sin + (int64_t)c->positions[t] * D;
        for (int64_t h = 0; h < H; h++) rotate(row + h * D, c->q + (t * H + h) * D, c->q_norm, c->eps, cs, D);
        S *k_out = c->kv + (int64_t)c->slots[t] * 2 * K * D, *v_out = k_out + K * D;
        float rotated[D];
        for (int64_t h = 0; h < K; h++) {
            rotate(row + (H + h) * D, rotated, c->k_norm, c->eps, cs, D);
            for (int64_t i = 0; i < D; i++) k_out[h * D + i] = S_OF(rotated[i]);
        }
        for (int64_t i = 0; i < K * D; i++) v_out[i] = S_OF(v[i]);
    }
}

/* qkv[t] = [H*D | K*D | K*D]  ->  q[t] rotated; K rotated and V stored at kv[slots[t]].
 * cos_sin[p] = [cos (D/2) | sin (D/2)]; kv is [slots, 2, K, D]. */
API void PASTE(rope_store, SUFFIX)(const float *qkv, const int32_t *positions, const int32_t *slots, const float *cos_sin,
                                   const float *q_norm, const float *k_norm, float eps, float *q, S *kv, int64_t T,
                                   int64_t H, int64_t K, int64_t D) {
    struct PASTE(rope_call, SUFFIX) call = {qkv, cos_sin, q_norm, k_norm, positions, slots, q, kv, T, H, K, D,
                                            rows_at_once(T, H * D), eps};
    each_task((T + call.range - 1) / call.range, PASTE(rope_rows, SUFFIX), &call);
}

/* ---- Skinny product: out[t, n] = x[t] . w[n] (+ bias[n]) for few rows, w as stored, [N, K]. ----
 * Four rows of weights at a time meet up to six rows of x, with all 24 sums in registers (named, not indexed:
 * the compiler keeps arrays in memory); for more rows of x the four are widened once and stay in the
 * first-level cache. */

#define SUMS(t) v16 a##t = {0}, b##t = {0}, c##t = {0}, d##t = {0};
#define STEP(t)                                                                                              \
    {                                                                                                        \
        v16 xt = load_f32(x + t * K + k);                                                                    \
        a##t += xt * w0;                                                                                     \
        b##t += xt * w1;                                                                                     \
        c##t += xt * w2;                                                                                     \
        d##t += xt * w3;                                                                                     \
    }
#define STORE(t) PASTE(store_quad, SUFFIX)(sums_of_4(a##t, b##t, c##t, d##t), x + t * K, w, bias, out + t * N, k, K);

/* Adds bias and the tail of K that fills no vector, and stores four outputs of one row. */
INLINE void PASTE(store_quad, SUFFIX)(v4 total, const float *restrict x, const S *restrict w,
                                      const float *restrict bias, float *restrict out, int64_t k, int64_t K) {
    if (bias) total += *(const v4u *)bias;
    for (int n = 0; n < 4; n++)
        for (int64_t i = k; i < K; i++) total[n] += x[i] * S_F32(w[n * K + i]);
    *(v4u *)out = total;
}

#define PRODUCT(ROWS, EACH)                                                                                  \
    static void PASTE(product_##ROWS, SUFFIX)(const float *restrict x, const S *restrict w,                  \
                                              const float *restrict bias, float *restrict out, int64_t K,    \
                                              int64_t N) {                                                   \
        EACH(SUMS)                                                                                           \
        int64_t k = 0;                                                                                       \
        for (; k + LANES <= K; k += LANES) {                                                                 \
            v16 w0 = S_LOAD(w + k), w1 = S_LOAD(w + K + k);                                                  \
            v16 w2 = S_LOAD(w + 2 * K + k), w3 = S_LOAD(w + 3 * K + k);                                      \
            EACH(STEP)                                                                                       \
        }                                                                                                    \
        EACH(STORE)                                                                                          \
    }

#define ROWS_1(F) F(0)
#define ROWS_2(F) F(0) F(1)
#define ROWS_3(F) F(0) F(1) F(2)
#define ROWS_4(F) F(0) F(1) F(2) F(3)
#define ROWS_5(F) F(0) F(1) F(2) F(3) F(4)
#define ROWS_6(F) F(0) F(1) F(2) F(3) F(4) F(5)

PRODUCT(1, ROWS_1)
PRODUCT(2, ROWS_2)
PRODUCT(3, ROWS_3)
PRODUCT(4, ROWS_4)
PRODUCT(5, ROWS_5)
#ifdef S_IS_FLOAT
PRODUCT(6, ROWS_6)
#endif

#undef SUMS
#undef STEP
#undef STORE
#undef PRODUCT
#undef ROWS_1
#undef ROWS_2
#undef ROWS_3
#undef ROWS_4
#undef ROWS_5
#undef ROWS_6

#ifdef S_IS_FLOAT
INLINE const float *PASTE(widened, SUFFIX)(const S *w, int64_t count) {
    (void)count;
    return w;
}
#else
INLINE const float *PASTE(widened, SUFFIX)(const S *restrict w, int64_t count) {
    float *restrict wide = scratch_of((size_t)count + LANES);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) *(v16u *)(wide + i) = S_LOAD(w + i);
    for (; i < count; i++) wide[i] = S_F32(w[i]);
    return wide;
}
#endif

struct PASTE(linear_call, SUFFIX) {
    const float *x, *bias;
    const S *w;
    float *out;
    int64_t T, K, N, range;
};

/* A range of the fours of rows of weights. */
static void PASTE(range_of_quads, SUFFIX)(const void *context, int64_t at) {
    const struct PASTE(linear_call, SUFFIX) *c = context;
    int64_t T = c->T, K = c->K, N = c->N;
    for (int64_t quad = at * c->range; quad < N / 4 && quad < (at + 1) * c->range; quad++) {
        const float *x = c->x, *b = c->bias ? c->bias + quad * 4 : NULL;
        const S *rows = c->w + quad * 4 * K;
        float *o = c->out + quad * 4;
        int64_t t = 0;
        if (T >= 6) {
            const float *wide = PASTE(widened, SUFFIX)(rows, 4 * K);
            for (; t + 6 <= T; t += 6) product_6_f32(x + t * K, wide, b, o + t * N, K, N);
        }
        switch (T - t) {
        case 5: PASTE(product_5, SUFFIX)(x + t * K, rows, b, o + t * N, K, N); break;
        case 4: PASTE(product_4, SUFFIX)(x + t * K, rows, b, o + t * N, K, N); break;
        case 3: PASTE(product_3, SUFFIX)(x + t * K, rows, b, o + t * N, K, N); break;
        case 2: PASTE(product_2, SUFFIX)(x + t * K, rows, b, o + t * N, K, N); break;
        case 1: PASTE(product_1, SUFFIX)(x + t * K, rows, b, o + t * N, K, N); break;
        }
    }
}

API void PASTE(linear, SUFFIX)(const float *restrict x, const S *restrict w, const float *restrict bias,
                               float *restrict out, int64_t T, int64_t K, int64_t N) {
    int64_t quads = N / 4, range = N * K > LEAST_WORK ? range_size(quads) : quads + !quads;
    struct PASTE(linear_call, SUFFIX) call = {x, bias, w, out, T, K, N, range};
    each_task((quads + range - 1) / range, PASTE(range_of_quads, SUFFIX), &call);
    for (int64_t n = quads * 4; n < N; n++) {
        for (int64_t t = 0; t < T; t++) {
            float sum = bias ? bias[n] : 0.f;
            for (int64_t i = 0; i < K; i++) sum += x[t * K + i] * S_F32(w[n * K + i]);
            out[t * N + n] = sum;
        }
    }
}

/* ---- Mixture of experts: rows in order of expert, counts[e] of each, through that expert's MLP. ----
 * x, out: [sum of counts, N]; gate_up: [E, 2 I, N], gate first; down: [E, N, I]. One expert is one task: its weights
 * are read once. */
API void PASTE(expert_mlps, SUFFIX)(const float *restrict x, const int64_t *restrict counts,
                                    const S *restrict gate_up, const S *restrict down, float *restrict out,
                                    int64_t E, int64_t N, int64_t I) {
    int64_t *starts = malloc((size_t)E * sizeof(int64_t)), total = 0;
    if (!starts) abort();
    for (int64_t e = 0; e < E; total += counts[e++]) starts[e] = total;
    float *inner = malloc((size_t)total * 3 * I * sizeof(float));
    if (!inner && total) abort();
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t e = 0; e < E; e++) {
        if (counts[e] == 0) continue;
        float *wide = inner + starts[e] * 3 * I, *narrow = wide + counts[e] * 2 * I;
        PASTE(linear, SUFFIX)(x + starts[e] * N, gate_up + e * 2 * I * N, NULL, wide, counts[e], N, 2 * I);
        silu_mul(wide, narrow, counts[e], I);
        PASTE(linear, SUFFIX)(narrow, down + e * N * I, NULL, out + starts[e] * N, counts[e], I, N);
    }
    free(inner);
    free(starts);
}

/* ---- Paged attention: one row of the batch, one key/value head, some of its G query heads. ---- */

/* Where a row's tokens lie: token t of the row is slot table[t / block] * block + t % block. */
#define KV_AT(side, t, sides)                                                                                \
    (kv + (((int64_t)table[(t) / block] * block + (t) % block) * (sides) + (side)) * K * D + head * D)

/* scores[g, t - from] = q[g] . key[t] for `heads` (1, 2 or 4) query heads: four sums at a time, which are
 * one token of four heads, two tokens of two, or four tokens of one. */
INLINE void PASTE(scores_of, SUFFIX)(const float *restrict q, const S *restrict kv,
                                     const int32_t *restrict table, int64_t from, int64_t len, int64_t block,
                                     int64_t head, int64_t K, float *restrict scores, int64_t stride,
                                     const int vectors, const int sides, const int heads) {
    const int64_t D = vectors * LANES, step = sides * K * D;
    const int tokens = 4 / heads;
    const float *q0 = q, *q1 = q + (heads > 1) * D, *q2 = q + (heads > 2) * 2 * D;
    const float *q3 = heads > 2 ? q + 3 * D : q1;
    for (int64_t t = from; t < len;) {
        int64_t left = block - t % block, stop = t + left < len ? t + left : len;
        const S *k = KV_AT(0, t, sides);
        for (; t < stop; t += tokens, k += tokens * step) {
            int64_t count = stop - t < tokens ? stop - t : tokens, last = (count - 1) * step;
            const S *k0 = k, *k1 = heads == 1 && step < last ? k + step : heads == 1 ? k + last : k;
            const S *k2 = heads == 1 ? (2 * step < last ? k + 2 * step : k + last) : heads == 2 ? k + last : k;
            const S *k3 = heads == 4 ? k : k + last;
            v16 a = {0}, b = {0}, c = {0}, d = {0};
            for (int n = 0; n < tokens; n++) prefetch(k + (AHEAD + n) * step, D * sizeof(S));
            UNROLL
            for (int i = 0; i < vectors; i++) {
                a += load_f32(q0 + i * LANES) * S_LOAD(k0 + i * LANES);
                b += load_f32(q1 + i * LANES) * S_LOAD(k1 + i * LANES);
                c += load_f32(q2 + i * LANES) * S_LOAD(k2 + i * LANES);
                d += load_f32(q3 + i * LANES) * S_LOAD(k3 + i * LANES);
            }
            v4 sums = sums_of_4(a, b, c, d);
            float *to = scores + t - from;
            for (int n = 0; n < count; n++)
                for (int g = 0; g < heads; g++) to[g * stride + n] = sums[n * heads + g];
        }
        t = stop;
    }
}

/* out[g] = sum over t of weights[g, t - from] * value[t] / total[g], 64 numbers of each head at a time. */
INLINE void PASTE(values_of, SUFFIX)(const float *restrict weights, const float *restrict total,
                                     const S *restrict kv, const int32_t *restrict table, int64_t from,
                                     int64_t len, int64_t block, int64_t head, int64_t K, int64_t stride,
                                     float *restrict out, const int vectors, const int sides,
                                     const int heads) {
    const int64_t D = vectors * LANES, step = sides * K * D;
    for (int64_t at = 0; at < D; at += 4 * LANES) {
#define SUMS(g) v16 a##g = {0}, b##g = {0}, c##g = {0}, d##g = {0};
#define STEP(g)                                                                                              \
    if (g < heads) {                                                                                         \
        float p = weights[g * stride + t - from];                                                            \
        a##g += p * v0;                                                                                      \
        b##g += p * v1;                                                                                      \
        c##g += p * v2;                                                                                      \
        d##g += p * v3;                                                                                      \
    }
#define STORE(g)                                                                                             \
    if (g < heads) {                                                                                         \
        v16u *o = (v16u *)(out + g * D + at);                                                                \
        o[0] = a##g / total[g];                                                                              \
        o[1] = b##g / total[g];                                                                              \
        o[2] = c##g / total[g];                                                                              \
        o[3] = d##g / total[g];                                                                              \
    }
        SUMS(0) SUMS(1) SUMS(2) SUMS(3)
        for (int64_t t = from; t < len;) {
            int64_t left = block - t % block, stop = t + left < len ? t + left : len;
            const S *v = KV_AT(sides - 1, t, sides) + at;
            for (; t < stop; t++, v += step) {
                prefetch(v + AHEAD * step, 4 * LANES * sizeof(S));
                v16 v0 = S_LOAD(v), v1 = S_LOAD(v + LANES), v2 = S_LOAD(v + 2 * LANES), v3 = S_LOAD(v + 3 * LANES);
                STEP(0) STEP(1) STEP(2) STEP(3)
            }
        }
        STORE(0) STORE(1) STORE(2) STORE(3)
    }
#undef SUMS
#undef STEP
#undef STORE
}

#define HEADS_AT_ONCE 4
#define HEADS_OF_TASK 16

/* One function for each shape, so that each gets all registers to itself: VECTORS and SIDES are numbers for the head
 * sizes met most, else what the call says. */
#define GROUP(NAME, HEADS, VECTORS, SIDES)                                                                   \
    static __attribute__((noinline)) void PASTE(group_##NAME##_##HEADS, SUFFIX)(                             \
        const float *restrict q, const S *restrict kv, const int32_t *restrict table, int64_t from,          \
        int64_t len, int64_t block, int64_t head, int64_t K, int vectors, int sides,                         \
        float *restrict scores, float *restrict out, float *restrict lse) {                                  \
        (void)vectors, (void)sides;                                                                          \
        int64_t n = len - from;                                                                              \
        float total[HEADS_AT_ONCE];                                                                          \
        PASTE(scores_of, SUFFIX)(q, kv, table, from, len, block, head, K, scores, n, VECTORS, SIDES, HEADS); \
        for (int g = 0; g < HEADS; g++) exponentials(scores + g * n, n, total + g, lse + g);                 \
        PASTE(values_of, SUFFIX)                                                                             \
        (scores, total, kv, table, from, len, block, head, K, n, out, VECTORS, SIDES, HEADS);                \
    }
#define GROUPS(NAME, VECTORS, SIDES)                                                                         \
    GROUP(NAME, 1, VECTORS, SIDES) GROUP(NAME, 2, VECTORS, SIDES) GROUP(NAME, 4, VECTORS, SIDES)

GROUPS(64, 4, 2)
GROUPS(128, 8, 2)
GROUPS(any, vectors, sides)
#undef GROUPS
#undef GROUP

#define CALL(NAME, HEADS)                                                                                    \
    for (; g + HEADS <= heads; g += HEADS)                                                                   \
        PASTE(group_##NAME##_##HEADS, SUFFIX)                                                                \
        (q + g * D, kv, table, from, len, block, head, K, D / LANES, sides, scores, out + g * D, lse + g);
#define ATTEND(NAME) CALL(NAME, 4) CALL(NAME, 2) CALL(NAME, 1)

/* Head sizes that are no multiple of 64. */
static void PASTE(attend_any, SUFFIX)(const float *restrict q, const S *restrict kv,
                                      const int32_t *restrict table, int64_t from, int64_t len, int64_t block,
                                      int64_t head, int64_t K, int64_t D, int64_t sides, float *restrict scores,
                                      float *restrict out, float *restrict lse) {
    float total;
    for (int64_t t = from; t < len; t++) {
        const S *k = KV_AT(0, t, sides);
        float dot = 0.f;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < D; i++) dot += q[i] * S_F32(k[i]);
        scores[t - from] = dot;
    }
    exponentials(scores, len - from, &total, lse);
    for (int64_t i = 0; i < D; i++) out[i] = 0.f;
    for (int64_t t = from; t < len; t++) {
        const S *v = KV_AT(sides - 1, t, sides);
        float p = scores[t - from] / total;
        for (int64_t i = 0; i < D; i++) out[i] += p * S_F32(v[i]);
    }
}

struct PASTE(paged_call, SUFFIX) {
    const float *q_RHD;
    const S *kv;
    const int32_t *tables, *lens;
    float *out_RHD, *lse_RH;
    int64_t table_stride, H, K, D, sides, block, window;
    float scale;
};

/* One row, one key/value head, up to HEADS_OF_TASK of its query heads. */
static void PASTE(paged_task, SUFFIX)(const void *context, int64_t task) {
    const struct PASTE(paged_call, SUFFIX) *c = context;
    const S *kv = c->kv;
    int64_t H = c->H, K = c->K, D = c->D, sides = c->sides, block = c->block;
    int64_t G = H / K, parts = (G + HEADS_OF_TASK - 1) / HEADS_OF_TASK;
    int64_t r = task / (K * parts), head = task / parts % K, first = task % parts * HEADS_OF_TASK;
    int64_t heads = G - first < HEADS_OF_TASK ? G - first : HEADS_OF_TASK;
    int64_t len = c->lens[r], at = r * H + head * G + first;
    int64_t from = c->window > 0 && len > c->window ? len - c->window : 0;
    const int32_t *table = c->tables + r * c->table_stride;
    float *q = scratch_of((size_t)(heads * D + HEADS_AT_ONCE * (len - from))), *scores = q + heads * D;
    float *out = c->out_RHD + at * D, *lse = c->lse_RH + at;
    for (int64_t i = 0; i < heads * D; i++) q[i] = c->q_RHD[at * D + i] * c->scale;
    int64_t g = 0;
    if (sides == 2 && D == 64) {
        ATTEND(64)
    } else if (sides == 2 && D == 128) {
        ATTEND(128)
    } else if (D % 64 == 0) {
        ATTEND(any)
    }
    for (; g < heads; g++)
        PASTE(attend_any, SUFFIX)(q + g * D, kv, table, from, len, block, head, K, D, sides, scores, out + g * D, lse + g);
}

/* Row r attends to tokens [max(0, lens[r] - window), lens[r]) of tables[r]; window 0 means no window.
 * q, out: [R, H, D]; kv: [slots, sides, K, D]; lse: [R, H], natural log. lens[r] >= 1. */
API void PASTE(attend_paged, SUFFIX)(const float *restrict q_RHD, const S *restrict kv,
                                     const int32_t *restrict tables, int64_t table_stride,
                                     const int32_t *restrict lens, float *restrict out_RHD,
                                     float *restrict lse_RH, int64_t R, int64_t H, int64_t K, int64_t D,
                                     int64_t sides, int64_t block, int64_t window, float scale) {
    struct PASTE(paged_call, SUFFIX) call = {q_RHD, kv, tables, lens, out_RHD, lse_RH, table_stride,
                                             H, K, D, sides, block, window, scale};
    each_task(R * K * ((H / K + HEADS_OF_TASK - 1) / HEADS_OF_TASK), PASTE(paged_task, SUFFIX), &call);
}

#undef KV_AT
#undef CALL
#undef ATTEND
#undef HEADS_AT_ONCE
#undef HEADS_OF_TASK
