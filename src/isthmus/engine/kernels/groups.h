/* Products with weights of 4 or 8 bits, in groups of 32 that share a factor d and an offset m: w = d u + m, u unsigned.
 * Included by kernels.c only.
 *
 * x is rounded to 8 bits, a factor for each 32 numbers of a row, and the products are whole numbers: sums of 32 are exact.
 *   out[t, n] = sum over groups of  d x_d (u . x_q)  +  m x_d (sum of x_q)
 * Weights lie in tiles of 16 outputs, a tile's groups one after the other: d [16] and m [16] as float16, then the u of
 * each output in vectors of 16 x 4 bytes; of 4 bits, the low halves of a byte are the first 16 numbers of the group. */

enum { GROUP = 32, GROUP_PASS = 256 };

typedef uint16_t f16;

INLINE v16 load_f16(const f16 *p) {
#ifdef __AVX512F__
    return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    /* Exponents of float32 lie 112 higher; the product brings those of the least numbers up, too. */
    u16x32 bits = __builtin_convertvector(*(const h16u *)p, u16x32);
    return (v16)((u16x32)((v16)((bits & 0x7fffu) << 13) * 0x1p112f) | (bits & 0x8000u) << 16);
#endif
}

/* sum[i] += u[4i] s[4i] + ... + u[4i + 3] s[4i + 3], u unsigned, s signed bytes, the same four of s for each lane. */
INLINE i16x32 dot_quads(i16x32 sum, u16x32 u, const int8_t *s) {
    uint32_t quad;
    memcpy(&quad, s, 4);
#ifdef __AVX512VNNI__
    return (i16x32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, _mm512_set1_epi32((int)quad));
#else
    for (int b = 0; b < 4; b++) sum += (i16x32)((u >> (8 * b)) & 0xffu) * (int32_t)s[b];
    return sum;
#endif
}

/* A row of x, K numbers: whole numbers of 8 bits, and for each group the factor and the factor times their sum. `rows`
 * rows lie group by group, so that a product finds all of a group side by side. */
static void round_row(const float *restrict x, int8_t *restrict q, float *restrict factors, int64_t rows, int64_t K) {
    for (int64_t g = 0; g < K / GROUP; g++) {
        const float *from = x + g * GROUP;
        v16 a = load_f32(from), b = load_f32(from + LANES);
        float top = largest_of(larger_of(larger_of(a, -a), larger_of(b, -b)));
        float factor = top / 127.f, inverse = top > 0.f ? 127.f / top : 0.f;
        const v16 half = (v16){0} + 0.5f;
        a *= inverse, b *= inverse;
        i16x32 i = __builtin_convertvector(a + chosen(a < 0.f, -half, half), i16x32);
        i16x32 j = __builtin_convertvector(b + chosen(b < 0.f, -half, half), i16x32);
        typedef int8_t q16 __attribute__((vector_size(16), aligned(1), may_alias));
        *(q16 *)(q + g * rows * GROUP) = __builtin_convertvector(i, q16);
        *(q16 *)(q + g * rows * GROUP + LANES) = __builtin_convertvector(j, q16);
        factors[2 * g * rows] = factor;
        factors[2 * g * rows + 1] = factor * sum_of(__builtin_convertvector(i + j, v16));
    }
}

#define SUMS(t) v16 sum##t = {0};
#define STEP(t)                                                                                              \
    {                                                                                                        \
        const int8_t *own = q + t * GROUP;                                                                   \
        i16x32 whole = {0};                                                                                  \
        whole = dot_quads(whole, u0, own), whole = dot_quads(whole, u1, own + 4);                            \
        whole = dot_quads(whole, u2, own + 8), whole = dot_quads(whole, u3, own + 12);                       \
        whole = dot_quads(whole, u4, own + 16), whole = dot_quads(whole, u5, own + 20);                      \
        whole = dot_quads(whole, u6, own + 24), whole = dot_quads(whole, u7, own + 28);                      \
        sum##t += __builtin_convertvector(whole, v16) * (d * factors[2 * t]);                                \
        sum##t += m * factors[2 * t + 1];                                                                    \
    }
#define STORE(t) *(v16u *)(out + t * LANES) = sum##t;

/* out: [ROWS][16]. */
#define PRODUCT(ROWS, EACH)                                                                                  \
    INLINE void groups_##ROWS(const int8_t *restrict q, const float *restrict factors,                       \
                              const uint8_t *restrict tile, float *restrict out, int64_t K, const int bits) { \
        EACH(SUMS)                                                                                           \
        for (int64_t g = 0; g < K / GROUP; g++) {                                                            \
            v16 d = load_f16((const f16 *)tile), m = load_f16((const f16 *)tile + LANES);                    \
            const uint8_t *w = tile + 4 * LANES;                                                             \
            u16x32 u0 = load_pairs(w), u1 = load_pairs(w + 64), u2 = load_pairs(w + 128), u3 = load_pairs(w + 192); \
            u16x32 u4, u5, u6, u7;                                                                           \
            if (bits == 4) {                                                                                 \
                u4 = (u0 >> 4) & 0x0f0f0f0fu, u5 = (u1 >> 4) & 0x0f0f0f0fu;                                  \
                u6 = (u2 >> 4) & 0x0f0f0f0fu, u7 = (u3 >> 4) & 0x0f0f0f0fu;                                  \
                u0 &= 0x0f0f0f0fu, u1 &= 0x0f0f0f0fu, u2 &= 0x0f0f0f0fu, u3 &= 0x0f0f0f0fu;                  \
            } else {                                                                                         \
                u4 = load_pairs(w + 256), u5 = load_pairs(w + 320);                                          \
                u6 = load_pairs(w + 384), u7 = load_pairs(w + 448);                                          \
            }                                                                                                \
            EACH(STEP)                                                                                       \
            tile += 4 * LANES + bits * 2 * GROUP, q += ROWS * GROUP, factors += ROWS * 2;                    \
        }                                                                                                    \
        EACH(STORE)                                                                                          \
    }                                                                                                        \
    static void groups_##ROWS##_4(const int8_t *q, const float *factors, const uint8_t *tile, float *out, int64_t K) { \
        groups_##ROWS(q, factors, tile, out, K, 4);                                                          \
    }                                                                                                        \
    static void groups_##ROWS##_8(const int8_t *q, const float *factors, const uint8_t *tile, float *out, int64_t K) { \
        groups_##ROWS(q, factors, tile, out, K, 8);                                                          \
    }

PRODUCT(1, ROWS_1)
PRODUCT(2, ROWS_2)
PRODUCT(3, ROWS_3)
PRODUCT(4, ROWS_4)
PRODUCT(5, ROWS_5)
PRODUCT(6, ROWS_6)
PRODUCT(7, ROWS_7)
PRODUCT(8, ROWS_8)

#undef SUMS
#undef STEP
#undef STORE
#undef PRODUCT

typedef void (*groups_of_rows)(const int8_t *, const float *, const uint8_t *, float *, int64_t);
#define BOTH(ROWS) {groups_##ROWS##_4, groups_##ROWS##_8}
static const groups_of_rows GROUPS_OF[BLOCK_ROWS][2] = {BOTH(1), BOTH(2), BOTH(3), BOTH(4),
                                                        BOTH(5), BOTH(6), BOTH(7), BOTH(8)};

/* Rows of x against one tile, `count` of its outputs. */
static void groups_tile(const int8_t *restrict q, const float *restrict factors, const uint8_t *restrict tile,
                        const float *restrict bias, float *restrict out, int64_t T, int64_t K, int64_t N, int64_t count,
                        int eight) {
    float sums[BLOCK_ROWS * LANES] __attribute__((aligned(64)));
    for (int64_t t = 0; t < T; t += BLOCK_ROWS) {
        int64_t rows = T - t < BLOCK_ROWS ? T - t : BLOCK_ROWS;
        GROUPS_OF[rows - 1][eight](q + t * K, factors + t * K / (GROUP / 2), tile, sums, K);
        for (int64_t r = 0; r < rows; r++) {
            float *to = out + (t + r) * N;
            if (count == LANES) {
                v16 sum = load_f32(sums + r * LANES);
                *(v16u *)to = bias ? sum + load_f32(bias) : sum;
            } else {
                for (int64_t n = 0; n < count; n++) to[n] = sums[r * LANES + n] + (bias ? bias[n] : 0.f);
            }
        }
    }
}

/* tiles: [ceil(N / 16)][K / 32] groups as above, of `bits` 4 or 8; K is a multiple of 32. */
API void linear_groups(const float *restrict x, const uint8_t *restrict tiles, const float *restrict bias,
                       float *restrict out, int64_t T, int64_t K, int64_t N, int64_t bits) {
    int64_t factors_at = (T * K + 63) / 64 * 64, tile_bytes = K / GROUP * (4 * LANES + bits * 2 * GROUP);
    int8_t *q = room_of(1, (size_t)(factors_at / 4 + T * K / (GROUP / 2)));
    float *factors = (float *)(q + factors_at);
#pragma omp parallel for if (T * K > 65536)
    for (int64_t t = 0; t < T; t++) {
        int64_t at = t % BLOCK_ROWS, first = t - at, rows = T - first < BLOCK_ROWS ? T - first : BLOCK_ROWS;
        round_row(x + t * K, q + first * K + at * GROUP, factors + first * K / (GROUP / 2) + 2 * at, rows, K);
    }
    for (int64_t from = 0; from < T; from += GROUP_PASS) {
        int64_t rows = T - from < GROUP_PASS ? T - from : GROUP_PASS;
#pragma omp parallel for schedule(static) if (N * K > 32768)
        for (int64_t n = 0; n < N; n += LANES)
            groups_tile(q + from * K, factors + from * K / (GROUP / 2), tiles + n / LANES * tile_bytes,
                        bias ? bias + n : NULL, out + from * N + n, rows, K, N, N - n < LANES ? N - n : LANES, bits == 8);
    }
}
