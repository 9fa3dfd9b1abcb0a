/* Kernels over A (activations) and C (KV). Included by kernels.c only. */

/* out[t] = rms_norm(x[t]) * w, after x[t] += delta[t] when delta is given (the residual stream). */
API void PASTE(add_rms_norm, SUFFIX)(A *restrict x, const A *restrict delta, const float *restrict w,
                                     A *restrict out, int64_t T, int64_t N, float eps) {
#pragma omp parallel for if (T * N > 65536)
    for (int64_t t = 0; t < T; t++) {
        A *row = x + t * N;
        float sum = 0.f;
        if (delta) {
            const A *add = delta + t * N;
            for (int64_t i = 0; i < N; i++) {
                row[i] = A_OF(A_F32(row[i]) + A_F32(add[i]));
            }
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < N; i++) {
            float v = A_F32(row[i]);
            sum += v * v;
        }
        float scale = 1.f / sqrtf(sum / (float)N + eps);
        A *o = out + t * N;
#pragma omp simd
        for (int64_t i = 0; i < N; i++) o[i] = A_OF(A_F32(A_OF(A_F32(row[i]) * scale)) * w[i]);
    }
}

/* out[t, i] = silu(gate_up[t, i]) * gate_up[t, N + i] */
API void PASTE(silu_mul, SUFFIX)(const A *restrict gate_up, A *restrict out, int64_t T, int64_t N) {
#pragma omp parallel for if (T * N > 65536)
    for (int64_t t = 0; t < T; t++) {
        const A *gate = gate_up + t * 2 * N, *up = gate + N;
        A *o = out + t * N;
#pragma omp simd
        for (int64_t i = 0; i < N; i++) {
            float g = A_F32(gate[i]);
            o[i] = A_OF(g / (1.f + expf(-g)) * A_F32(up[i]));
        }
    }
}

/* One head: optional RMS norm (weight w), then rotate the two halves by the angles of its position. */
static inline void PASTE(rotate, SUFFIX)(const A *restrict in, float *restrict out, const float *restrict w,
                                         float eps, const float *restrict cs, int64_t D) {
    int64_t half = D / 2;
    float scale = 1.f;
    if (w) {
        float sum = 0.f;
        for (int64_t i = 0; i < D; i++) sum += A_F32(in[i]) * A_F32(in[i]);
        scale = 1.f / sqrtf(sum / (float)D + eps);
    }
    for (int64_t i = 0; i < half; i++) {
        float a = A_F32(in[i]), b = A_F32(in[half + i]);
        if (w) {
            a = A_F32(A_OF(a * scale)) * w[i];
            b = A_F32(A_OF(b * scale)) * w[half + i];
        }
        out[i] = a * cs[i] - b * cs[half + i];
        out[half + i] = b * cs[i] + a * cs[half + i];
    }
}

/* qkv[t] = [H*D | K*D | K*D]  ->  q[t] rotated; K rotated and V stored at kv[slots[t]].
 * cos_sin[p] = [cos (D/2) | sin (D/2)]; kv is [slots, 2, K, D]. */
API void PASTE(rope_store, SUFFIX)(const A *restrict qkv, const int32_t *restrict positions,
                                   const int32_t *restrict slots, const float *restrict cos_sin,
                                   const float *restrict q_norm, const float *restrict k_norm, float eps,
                                   A *restrict q, C *restrict kv, int64_t T, int64_t H, int64_t K, int64_t D) {
#pragma omp parallel for if (T * H * D > 65536)
    for (int64_t t = 0; t < T; t++) {
        const A *row = qkv + t * (H + 2 * K) * D;
        const float *cs = cos_sin + (int64_t)positions[t] * D;
        float rotated[D];
        for (int64_t h = 0; h < H; h++) {
            PASTE(rotate, SUFFIX)(row + h * D, rotated, q_norm, eps, cs, D);
            A *o = q + (t * H + h) * D;
            for (int64_t i = 0; i < D; i++) o[i] = A_OF(rotated[i]);
        }
        C *k_out = kv + (int64_t)slots[t] * 2 * K * D, *v_out = k_out + K * D;
        for (int64_t h = 0; h < K; h++) {
            PASTE(rotate, SUFFIX)(row + (H + h) * D, rotated, k_norm, eps, cs, D);
            for (int64_t i = 0; i < D; i++) k_out[h * D + i] = C_OF(A_F32(A_OF(rotated[i])));
        }
        const A *v = row + (H + K) * D;
        for (int64_t i = 0; i < K * D; i++) v_out[i] = C_OF(A_F32(v[i]));
    }
}

/* Attention of G query heads over the tokens [from, len) of one row's block table; D is a constant where
 * the caller is inlined with one, which lets the compiler keep a head in registers. */
static inline __attribute__((always_inline)) void PASTE(attend_head, SUFFIX)(
    const float *restrict q, const C *restrict kv, const int32_t *restrict table, int64_t from, int64_t len,
    int64_t block_size, int64_t k_head, int64_t K, int64_t D, int64_t G, float *restrict scores,
    A *restrict out, float *restrict lse) {
    int64_t count = len - from, stride = 2 * K * D;
    for (int64_t t = from; t < len;) {
        int64_t in_block = t % block_size, stop = t - in_block + block_size;
        if (stop > len) stop = len;
        const C *k = kv + ((int64_t)table[t / block_size] * block_size + in_block) * stride + k_head * D;
        for (; t < stop; t++, k += stride) {
            for (int64_t g = 0; g < G; g++) {
                const float *qg = q + g * D;
                float dot = 0.f;
#pragma omp simd reduction(+ : dot)
                for (int64_t i = 0; i < D; i++) dot += qg[i] * C_F32(k[i]);
                scores[g * count + t - from] = dot;
            }
        }
    }
    for (int64_t g = 0; g < G; g++) {
        float *s = scores + g * count, top = s[0], sum = 0.f;
#pragma omp simd reduction(max : top)
        for (int64_t t = 0; t < count; t++) top = s[t] > top ? s[t] : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = 0; t < count; t++) {
            s[t] = expf(s[t] - top);
            sum += s[t];
        }
        float acc[D];
        for (int64_t i = 0; i < D; i++) acc[i] = 0.f;
        for (int64_t t = from; t < len;) {
            int64_t in_block = t % block_size, stop = t - in_block + block_size;
            if (stop > len) stop = len;
            const C *v = kv + ((int64_t)table[t / block_size] * block_size + in_block) * stride + (K + k_head) * D;
            for (; t < stop; t++, v += stride) {
                float p = s[t - from];
#pragma omp simd
                for (int64_t i = 0; i < D; i++) acc[i] += p * C_F32(v[i]);
            }
        }
        float inverse = 1.f / sum;
        for (int64_t i = 0; i < D; i++) out[g * D + i] = A_OF(acc[i] * inverse);
        if (lse) lse[g] = top + logf(sum);
    }
}

/* Row r attends to tokens [max(0, lens[r] - window), lens[r]) of tables[r]; window 0 means no window.
 * q, out: [R, H, D]; kv: [slots, 2, K, D]; lse: [R, H] natural log, or NULL. lens[r] >= 1. */
API void PASTE(attend_paged, SUFFIX)(const A *restrict q, const C *restrict kv,
                                     const int32_t *restrict tables, int64_t table_stride,
                                     const int32_t *restrict lens, A *restrict out, float *restrict lse,
                                     int64_t R, int64_t H, int64_t K, int64_t D, int64_t block_size,
                                     int64_t window, float scale) {
    int64_t G = H / K;
#pragma omp parallel for schedule(dynamic, 1) if (R * K > 1)
    for (int64_t task = 0; task < R * K; task++) {
        int64_t r = task / K, h = task % K, len = lens[r];
        int64_t from = window > 0 && len > window ? len - window : 0;
        float *scaled = scratch_of((size_t)(G * D + G * (len - from)));
        float *scores = scaled + G * D;
        const A *row = q + (r * H + h * G) * D;
        for (int64_t i = 0; i < G * D; i++) scaled[i] = A_F32(row[i]) * scale;
        const int32_t *table = tables + r * table_stride;
        A *o = out + (r * H + h * G) * D;
        float *l = lse ? lse + r * H + h * G : NULL;
        switch (D) {
        case 64:
            PASTE(attend_head, SUFFIX)(scaled, kv, table, from, len, block_size, h, K, 64, G, scores, o, l);
            break;
        case 128:
            PASTE(attend_head, SUFFIX)(scaled, kv, table, from, len, block_size, h, K, 128, G, scores, o, l);
            break;
        default:
            PASTE(attend_head, SUFFIX)(scaled, kv, table, from, len, block_size, h, K, D, G, scores, o, l);
        }
    }
}
