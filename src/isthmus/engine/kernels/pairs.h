/* Products of bfloat16 numbers summed in float32, two at a time: one instruction does both (AVX512-BF16), or two elsewhere.
 * Included by kernels.c only. */

/* sum[i] += a[2i] b[2i] + a[2i+1] b[2i+1], the lower half of 32 bits first. */
INLINE v16 dot_pairs(v16 sum, u16x32 a, u16x32 b) {
#ifdef __AVX512BF16__
    return (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + (v16)(a << 16) * (v16)(b << 16) + (v16)(a & 0xffff0000u) * (v16)(b & 0xffff0000u);
#endif
}

typedef uint32_t u16x32u __attribute__((vector_size(64), aligned(2), may_alias));
INLINE u16x32 load_pairs(const void *p) { return *(const u16x32u *)p; }
INLINE u16x32 all_of(uint32_t pair) { return (u16x32){0} + pair; }

/* 16 floats, not NaN, to bfloat16, to nearest even. */
INLINE void store_bf16(bf16 *to, v16 x) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    u16x32 bits = (u16x32)x;
    *(h16u *)to = __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, h16u);
#endif
}

/* ---- out[t, n] = x[t] . w[n] (+ bias[n]), x rounded to bfloat16, w [N, K]. Four rows of weights meet up to six rows of
 * x, as in the skinny product of body.h. ---- */

#define SUMS(t) v16 a##t = {0}, b##t = {0}, c##t = {0}, d##t = {0};
#define STEP(t)                                                                                              \
    {                                                                                                        \
        u16x32 xt = load_pairs(x + t * K + k);                                                               \
        a##t = dot_pairs(a##t, xt, w0);                                                                      \
        b##t = dot_pairs(b##t, xt, w1);                                                                      \
        c##t = dot_pairs(c##t, xt, w2);                                                                      \
        d##t = dot_pairs(d##t, xt, w3);                                                                      \
    }
#define STORE(t)                                                                                             \
    {                                                                                                        \
        v4 total = sums_of_4(a##t, b##t, c##t, d##t);                                                        \
        if (bias) total += *(const v4u *)bias;                                                               \
        for (int n = 0; n < 4; n++)                                                                          \
            for (int64_t i = k; i < K; i++) total[n] += f32_of_bf16(x[t * K + i]) * f32_of_bf16(w[n * K + i]); \
        *(v4u *)(out + t * N) = total;                                                                       \
    }
#define PRODUCT(ROWS, EACH)                                                                                  \
    static void pairs_##ROWS(const bf16 *restrict x, const bf16 *restrict w, const float *restrict bias,     \
                             float *restrict out, int64_t K, int64_t N) {                                    \
        EACH(SUMS)                                                                                           \
        int64_t k = 0;                                                                                       \
        for (; k + 2 * LANES <= K; k += 2 * LANES) {                                                         \
            u16x32 w0 = load_pairs(w + k), w1 = load_pairs(w + K + k);                                       \
            u16x32 w2 = load_pairs(w + 2 * K + k), w3 = load_pairs(w + 3 * K + k);                           \
            EACH(STEP)                                                                                       \
        }                                                                                                    \
        EACH(STORE)                                                                                          \
    }
#define ROWS_1(F) F(0)
#define ROWS_2(F) ROWS_1(F) F(1)
#define ROWS_3(F) ROWS_2(F) F(2)
#define ROWS_4(F) ROWS_3(F) F(3)
#define ROWS_5(F) ROWS_4(F) F(4)
#define ROWS_6(F) ROWS_5(F) F(5)

PRODUCT(1, ROWS_1)
PRODUCT(2, ROWS_2)
PRODUCT(3, ROWS_3)
PRODUCT(4, ROWS_4)
PRODUCT(5, ROWS_5)
PRODUCT(6, ROWS_6)

#undef SUMS
#undef STEP
#undef STORE
#undef PRODUCT

API void linear_pairs(const float *restrict wide, const bf16 *restrict w, const float *restrict bias,
                      float *restrict out, int64_t T, int64_t K, int64_t N) {
    bf16 *x = room_of(1, (size_t)(T * K + 1) / 2);
    int64_t size = T * K, quads = N / 4;
#pragma omp parallel for if (size > 65536)
    for (int64_t i = 0; i < size / LANES; i++) store_bf16(x + i * LANES, load_f32(wide + i * LANES));
    for (int64_t i = size / LANES * LANES; i < size; i++) x[i] = bf16_of_f32(wide[i]);
#pragma omp parallel for schedule(static) if (N * K > 32768)
    for (int64_t quad = 0; quad < quads; quad++) {
        const bf16 *rows = w + quad * 4 * K;
        const float *b = bias ? bias + quad * 4 : NULL;
        float *o = out + quad * 4;
        int64_t t = 0;
        for (; t + 6 <= T; t += 6) pairs_6(x + t * K, rows, b, o + t * N, K, N);
        switch (T - t) {
        case 5: pairs_5(x + t * K, rows, b, o + t * N, K, N); break;
        case 4: pairs_4(x + t * K, rows, b, o + t * N, K, N); break;
        case 3: pairs_3(x + t * K, rows, b, o + t * N, K, N); break;
        case 2: pairs_2(x + t * K, rows, b, o + t * N, K, N); break;
        case 1: pairs_1(x + t * K, rows, b, o + t * N, K, N); break;
        }
    }
    for (int64_t n = quads * 4; n < N; n++)
        for (int64_t t = 0; t < T; t++) {
            float sum = bias ? bias[n] : 0.f;
            for (int64_t i = 0; i < K; i++) sum += f32_of_bf16(x[t * K + i]) * f32_of_bf16(w[n * K + i]);
            out[t * N + n] = sum;
        }
}
