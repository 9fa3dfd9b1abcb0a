/* Kernels over S, the stored type of weights and KV. Included by kernels.c only. */

/* qkv[t] = [H*D | K*D | K*D]  ->  q[t] rotated; K rotated and V stored at kv[slots[t]].
 * cos_sin[p] = [cos (D/2) | sin (D/2)]; kv is [slots, 2, K, D]. */
API void PASTE(rope_store, SUFFIX)(const float *restrict qkv, const int32_t *restrict positions,
                                   const int32_t *restrict slots, const float *restrict cos_sin,
                                   const float *restrict q_norm, const float *restrict k_norm, float eps,
                                   float *restrict q, S *restrict kv, int64_t T, int64_t H, int64_t K,
                                   int64_t D) {
#pragma omp parallel for if (T * H * D > 65536)
    for (int64_t t = 0; t < T; t++) {
        const float *row = qkv + t * (H + 2 * K) * D, *v = row + (H + K) * D;
        const float *cs = cos_sin + (int64_t)positions[t] * D;
        for (int64_t h = 0; h < H; h++) rotate(row + h * D, q + (t * H + h) * D, q_norm, eps, cs, D);
        S *k_out = kv + (int64_t)slots[t] * 2 * K * D, *v_out = k_out + K * D;
        float rotated[D];
        for (int64_t h = 0; h < K; h++) {
            rotate(row + (H + h) * D, rotated, k_norm, eps, cs, D);
            for (int64_t i = 0; i < D; i++) k_out[h * D + i] = S_OF(rotated[i]);
        }
        for (int64_t i = 0; i < K * D; i++) v_out[i] = S_OF(v[i]);
    }
}

/* ---- Skinny product: out[t, n] = x[t] . w[n] (+ bias[n]) for few rows, w as stored, [N, K]. ----
 * Four rows of weights at a time meet up to six rows of x, with all 24 sums in registers; for more rows of x
 * the four are widened once and stay in the first-level cache. */

INLINE void PASTE(product_tile, SUFFIX)(const float *restrict x, const S *restrict w,
                                        const float *restrict bias, float *restrict out, int64_t K,
                                        int64_t N, const int rows) {
    v16 sum[6][4];
    for (int t = 0; t < rows; t++)
        for (int n = 0; n < 4; n++) sum[t][n] = (v16){0};
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        v16 w0 = S_LOAD(w + k), w1 = S_LOAD(w + K + k), w2 = S_LOAD(w + 2 * K + k), w3 = S_LOAD(w + 3 * K + k);
        for (int t = 0; t < rows; t++) {
            v16 xt = load_f32(x + t * K + k);
            sum[t][0] += xt * w0;
            sum[t][1] += xt * w1;
            sum[t][2] += xt * w2;
            sum[t][3] += xt * w3;
        }
    }
    for (int t = 0; t < rows; t++) {
        v4 total = sums_of_4(sum[t][0], sum[t][1], sum[t][2], sum[t][3]);
        for (int n = 0; n < 4; n++) {
            float rest = bias ? bias[n] : 0.f;
            for (int64_t i = k; i < K; i++) rest += x[t * K + i] * S_F32(w[n * K + i]);
            total[n] += rest;
        }
        *(v4u *)(out + t * N) = total;
    }
}

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

API void PASTE(linear, SUFFIX)(const float *restrict x, const S *restrict w, const float *restrict bias,
                               float *restrict out, int64_t T, int64_t K, int64_t N) {
    int64_t quads = N / 4;
#pragma omp parallel for schedule(static) if (N * K > 32768)
    for (int64_t quad = 0; quad < quads; quad++) {
        const S *rows = w + quad * 4 * K;
        const float *b = bias ? bias + quad * 4 : NULL;
        float *o = out + quad * 4;
        int64_t t = 0;
        if (T >= 6) {
            const float *wide = PASTE(widened, SUFFIX)(rows, 4 * K);
            for (; t + 6 <= T; t += 6) product_tile_f32(x + t * K, wide, b, o + t * N, K, N, 6);
        }
        switch (T - t) {
        case 5: PASTE(product_tile, SUFFIX)(x + t * K, rows, b, o + t * N, K, N, 5); break;
        case 4: PASTE(product_tile, SUFFIX)(x + t * K, rows, b, o + t * N, K, N, 4); break;
        case 3: PASTE(product_tile, SUFFIX)(x + t * K, rows, b, o + t * N, K, N, 3); break;
        case 2: PASTE(product_tile, SUFFIX)(x + t * K, rows, b, o + t * N, K, N, 2); break;
        case 1: PASTE(product_tile, SUFFIX)(x + t * K, rows, b, o + t * N, K, N, 1); break;
        }
    }
    for (int64_t n = quads * 4; n < N; n++) {
        for (int64_t t = 0; t < T; t++) {
            float sum = bias ? bias[n] : 0.f;
            for (int64_t i = 0; i < K; i++) sum += x[t * K + i] * S_F32(w[n * K + i]);
            out[t * N + n] = sum;
        }
    }
}

/* ---- Paged attention: one row of the batch, one key/value head, its G query heads. ---- */

/* Where a row's tokens lie: token t of the row is slot table[t / block] * block + t % block. */
#define KV_AT(side, t)                                                                                       \
    (kv + (((int64_t)table[(t) / block] * block + (t) % block) * 2 + (side)) * K * D + head * D)

/* scores[g, t - from] = q[g] . key[t], for VECTORS * 16 = D and `heads` query heads held in registers. */
INLINE void PASTE(scores_of, SUFFIX)(const float *restrict q, const S *restrict kv,
                                     const int32_t *restrict table, int64_t from, int64_t len, int64_t block,
                                     int64_t head, int64_t K, float *restrict scores, int64_t stride,
                                     const int vectors, const int heads) {
    const int64_t D = vectors * LANES, step = 2 * K * D;
    v16 query[heads][vectors];
    for (int g = 0; g < heads; g++)
        for (int i = 0; i < vectors; i++) query[g][i] = load_f32(q + g * D + i * LANES);
    for (int64_t t = from; t < len;) {
        int64_t left = block - t % block, stop = t + left < len ? t + left : len;
        const S *k = KV_AT(0, t);
        for (; t + 4 <= stop; t += 4, k += 4 * step) {
            for (int g = 0; g < heads; g++) {
                v16 sum[4] = {{0}, {0}, {0}, {0}};
                for (int n = 0; n < 4; n++)
                    for (int i = 0; i < vectors; i++) sum[n] += query[g][i] * S_LOAD(k + n * step + i * LANES);
                *(v4u *)(scores + g * stride + t - from) = sums_of_4(sum[0], sum[1], sum[2], sum[3]);
            }
        }
        for (; t < stop; t++, k += step) {
            for (int g = 0; g < heads; g++) {
                v16 sum = {0};
                for (int i = 0; i < vectors; i++) sum += query[g][i] * S_LOAD(k + i * LANES);
                scores[g * stride + t - from] = sum_of(sum);
            }
        }
    }
}

/* out[g] = sum over t of weights[g, t - from] * value[t] / total[g] */
INLINE void PASTE(values_of, SUFFIX)(const float *restrict weights, const float *restrict total,
                                     const S *restrict kv, const int32_t *restrict table, int64_t from,
                                     int64_t len, int64_t block, int64_t head, int64_t K, int64_t stride,
                                     float *restrict out, const int vectors, const int heads) {
    const int64_t D = vectors * LANES, step = 2 * K * D;
    v16 sum[heads][vectors];
    for (int g = 0; g < heads; g++)
        for (int i = 0; i < vectors; i++) sum[g][i] = (v16){0};
    for (int64_t t = from; t < len;) {
        int64_t left = block - t % block, stop = t + left < len ? t + left : len;
        const S *v = KV_AT(1, t);
        for (; t < stop; t++, v += step) {
            v16 value[vectors];
            for (int i = 0; i < vectors; i++) value[i] = S_LOAD(v + i * LANES);
            for (int g = 0; g < heads; g++) {
                float p = weights[g * stride + t - from];
                for (int i = 0; i < vectors; i++) sum[g][i] += p * value[i];
            }
        }
    }
    for (int g = 0; g < heads; g++)
        for (int i = 0; i < vectors; i++) *(v16u *)(out + g * D + i * LANES) = sum[g][i] / total[g];
}

#define HEADS_AT_ONCE 4

INLINE void PASTE(attend_group, SUFFIX)(const float *restrict q, const S *restrict kv,
                                        const int32_t *restrict table, int64_t from, int64_t len, int64_t block,
                                        int64_t head, int64_t K, float *restrict scores, float *restrict out,
                                        float *restrict lse, const int vectors, const int heads) {
    int64_t count = len - from;
    float total[HEADS_AT_ONCE];
    PASTE(scores_of, SUFFIX)(q, kv, table, from, len, block, head, K, scores, count, vectors, heads);
    for (int g = 0; g < heads; g++) exponentials(scores + g * count, count, total + g, lse + g);
    PASTE(values_of, SUFFIX)(scores, total, kv, table, from, len, block, head, K, count, out, vectors, heads);
}

#define ATTEND(VECTORS)                                                                                      \
    for (; g + 4 <= G; g += 4)                                                                               \
        PASTE(attend_group, SUFFIX)(q + g * D, kv, table, from, len, block, head, K, scores, out + g * D,    \
                                    lse + g, VECTORS, 4);                                                    \
    for (; g + 2 <= G; g += 2)                                                                               \
        PASTE(attend_group, SUFFIX)(q + g * D, kv, table, from, len, block, head, K, scores, out + g * D,    \
                                    lse + g, VECTORS, 2);                                                    \
    for (; g < G; g++)                                                                                       \
        PASTE(attend_group, SUFFIX)(q + g * D, kv, table, from, len, block, head, K, scores, out + g * D,    \
                                    lse + g, VECTORS, 1);

/* Head sizes without a form in registers. */
static void PASTE(attend_any, SUFFIX)(const float *restrict q, const S *restrict kv,
                                      const int32_t *restrict table, int64_t from, int64_t len, int64_t block,
                                      int64_t head, int64_t K, int64_t D, float *restrict scores,
                                      float *restrict out, float *restrict lse) {
    float total;
    for (int64_t t = from; t < len; t++) {
        const S *k = KV_AT(0, t);
        float dot = 0.f;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < D; i++) dot += q[i] * S_F32(k[i]);
        scores[t - from] = dot;
    }
    exponentials(scores, len - from, &total, lse);
    for (int64_t i = 0; i < D; i++) out[i] = 0.f;
    for (int64_t t = from; t < len; t++) {
        const S *v = KV_AT(1, t);
        float p = scores[t - from] / total;
        for (int64_t i = 0; i < D; i++) out[i] += p * S_F32(v[i]);
    }
}

/* Row r attends to tokens [max(0, lens[r] - window), lens[r]) of tables[r]; window 0 means no window.
 * q, out: [R, H, D]; kv: [slots, 2, K, D]; lse: [R, H], natural log. lens[r] >= 1. */
API void PASTE(attend_paged, SUFFIX)(const float *restrict q_RHD, const S *restrict kv,
                                     const int32_t *restrict tables, int64_t table_stride,
                                     const int32_t *restrict lens, float *restrict out_RHD,
                                     float *restrict lse_RH, int64_t R, int64_t H, int64_t K, int64_t D,
                                     int64_t block, int64_t window, float scale) {
    int64_t G = H / K;
#pragma omp parallel for schedule(dynamic, 1) if (R * K > 1)
    for (int64_t task = 0; task < R * K; task++) {
        int64_t r = task / K, head = task % K, len = lens[r], at = r * H + head * G;
        int64_t from = window > 0 && len > window ? len - window : 0;
        const int32_t *table = tables + r * table_stride;
        float *q = scratch_of((size_t)(G * D + HEADS_AT_ONCE * (len - from))), *scores = q + G * D;
        float *out = out_RHD + at * D, *lse = lse_RH + at;
        for (int64_t i = 0; i < G * D; i++) q[i] = q_RHD[at * D + i] * scale;
        int64_t g = 0;
        switch (D) {
        case 32: ATTEND(2) break;
        case 64: ATTEND(4) break;
        case 128: ATTEND(8) break;
        default:
            for (; g < G; g++)
                PASTE(attend_any, SUFFIX)(q + g * D, kv, table, from, len, block, head, K, D, scores,
                                          out + g * D, lse + g);
        }
    }
}

#undef KV_AT
#undef ATTEND
#undef HEADS_AT_ONCE
