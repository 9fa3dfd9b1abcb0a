/* Products with weights of 4 or 8 bits, in groups of 32 that share a factor d and an offset m: w = d u + m, u unsigned.
 * Included by kernels.c only.
 *
 * For few rows: x is rounded to whole numbers of 15 bits, with a factor for each 32 numbers of a row, written as two digits
 * of 8 bits, and the products are of whole numbers: sums of 32 are exact. (With 8 bits SmolLM2 says something else.)
 *   out[t, n] = sum over groups of  d x_d (u . (128 high + low))  +  m x_d (sum of 128 high + low)
 * For many rows tiles of weights are widened to bfloat16 in a core's cache; see tiles.h.
 * Weights lie in tiles of 16 outputs, a tile's groups one after the other: d [16] and m [16] as float16, then the u of
 * each output in vectors of 16 x 4 bytes; of 4 bits, the low halves of a byte are the first 16 numbers of the group. */

enum { GROUP = 32, DIGITS = 2 * GROUP, GROUP_PASS = 128 };

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

typedef int8_t q16 __attribute__((vector_size(16), aligned(1), may_alias));

/* 16 numbers to the nearest whole ones, and those to two digits: 128 high + low. */
INLINE i16x32 digits_of(v16 x, int8_t *restrict high, int8_t *restrict low) {
    const v16 half = (v16){0} + 0.5f;
    i16x32 whole = __builtin_convertvector(x + chosen(x < 0.f, -half, half), i16x32), upper = (whole + 64) >> 7;
    *(q16 *)high = __builtin_convertvector(upper, q16);
    *(q16 *)low = __builtin_convertvector(whole - (upper << 7), q16);
    return whole;
}

/* A row of x, K numbers: of each group the high digits, then the low ones, and the factor and the factor times their sum.
 * `rows` rows lie group by group, so that a product finds all of a group side by side. */
static void round_row(const float *restrict x, int8_t *restrict q, float *restrict factors, int64_t rows, int64_t K) {
    for (int64_t g = 0; g < K / GROUP; g++, q += rows * DIGITS, factors += rows * 2) {
        v16 a = load_f32(x + g * GROUP), b = load_f32(x + g * GROUP + LANES);
        float top = largest_of(larger_of(larger_of(a, -a), larger_of(b, -b)));
        float inverse = top > 0.f ? 16256.f / top : 0.f;
        i16x32 whole = digits_of(a * inverse, q, q + GROUP) + digits_of(b * inverse, q + LANES, q + GROUP + LANES);
        factors[0] = top / 16256.f;
        factors[1] = factors[0] * sum_of(__builtin_convertvector(whole, v16));
    }
}

#define SUMS(t) v16 sum##t = {0};
#define STEP(t)                                                                                              \
    {                                                                                                        \
        const int8_t *own = q + t * DIGITS;                                                                  \
        i16x32 high = {0}, low = {0};                                                                        \
        BOTH_DIGITS(0, u0) BOTH_DIGITS(4, u1) BOTH_DIGITS(8, u2) BOTH_DIGITS(12, u3)                         \
        BOTH_DIGITS(16, u4) BOTH_DIGITS(20, u5) BOTH_DIGITS(24, u6) BOTH_DIGITS(28, u7)                      \
        sum##t += __builtin_convertvector((high << 7) + low, v16) * (d * factors[2 * t]);                    \
        sum##t += m * factors[2 * t + 1];                                                                    \
    }
#define BOTH_DIGITS(at, u) high = dot_quads(high, u, own + at), low = dot_quads(low, u, own + GROUP + at);
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
            tile += 4 * LANES + bits * 2 * GROUP, q += ROWS * DIGITS, factors += ROWS * 2;                    \
        }                                                                                                    \
        EACH(STORE)                                                                                          \
    }                                                                                                        \
    static void groups_##ROWS##_4(const int8_t *q, const float *factors, const uint8_t *tile, float *out, int64_t K) { \
        groups_##ROWS(q, factors, tile, out, K, 4);                                                          \
    }                                                                                                        \
    static void groups_##ROWS##_8(const int8_t *q, const float *factors, const uint8_t *tile, float *out, int64_t K) { \
        groups_##ROWS(q, factors, tile, out, K, 8);                                                          \
    }

PRODUCTS

#undef SUMS
#undef STEP
#undef STORE
#undef PRODUCT
#undef BOTH_DIGITS

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
        GROUPS_OF[rows - 1][eight](q + t * K * 2, factors + t * K / (GROUP / 2), tile, sums, K);
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

INLINE int64_t group_bytes(int64_t bits) { return 4 * LANES + bits * 2 * GROUP; }

struct groups_call {
    const float *x, *bias;
    const uint8_t *tiles;
    int8_t *q;
    float *factors, *out;
    int64_t T, K, N, bits, from, range;
};

static void digits_of_block(const void *context, int64_t block) {
    const struct groups_call *c = context;
    int64_t first = block * BLOCK_ROWS, rows = c->T - first < BLOCK_ROWS ? c->T - first : BLOCK_ROWS;
    for (int64_t r = 0; r < rows; r++)
        round_row(c->x + (first + r) * c->K, c->q + first * c->K * 2 + r * DIGITS,
                  c->factors + first * c->K / (GROUP / 2) + 2 * r, rows, c->K);
}

static void range_of_groups(const void *context, int64_t at) {
    const struct groups_call *c = context;
    int64_t rows = c->T - c->from < GROUP_PASS ? c->T - c->from : GROUP_PASS, bytes = c->K / GROUP * group_bytes(c->bits);
    for (int64_t n = at * c->range * LANES; n < c->N && n < (at + 1) * c->range * LANES; n += LANES)
        groups_tile(c->q + c->from * c->K * 2, c->factors + c->from * c->K / (GROUP / 2), c->tiles + n / LANES * bytes,
                    c->bias ? c->bias + n : NULL, c->out + c->from * c->N + n, rows, c->K, c->N,
                    c->N - n < LANES ? c->N - n : LANES, c->bits == 8);
}

/* tiles: [ceil(N / 16)][K / 32] groups as above, of `bits` 4 or 8; K is a multiple of 32. */
API void linear_groups(const float *restrict x, const uint8_t *restrict tiles, const float *restrict bias,
                       float *restrict out, int64_t T, int64_t K, int64_t N, int64_t bits) {
    int64_t factors_at = (T * K * 2 + 63) / 64 * 64, count = (N + LANES - 1) / LANES;
    int8_t *q = room_of(1, (size_t)(factors_at / 4 + T * K / (GROUP / 2)));
    float *factors = (float *)(q + factors_at);
    int64_t range = N * K > LEAST_WORK ? range_size(count) : count;
    struct groups_call call = {x, bias, tiles, q, factors, out, T, K, N, bits, 0, range};
    each_task((T + BLOCK_ROWS - 1) / BLOCK_ROWS, digits_of_block, &call);
    for (; call.from < T; call.from += GROUP_PASS) each_task((count + range - 1) / range, range_of_groups, &call);
}

/* 16 floats to bfloat16, in the lower halves of the lanes. */
INLINE u16x32 low_bf16(v16 x) {
#ifdef __AVX512BF16__
    return (u16x32)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    u16x32 bits = (u16x32)x;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#endif
}

/* Byte `at` of each lane as a weight in bfloat16. */
INLINE u16x32 weight_of_byte(u16x32 u, int at, v16 d, v16 m) {
    return low_bf16(__builtin_convertvector((i16x32)((u >> (8 * at)) & 0xffu), v16) * d + m);
}

/* One tile to pairs of bfloat16, [K / 2][16]. */
static void widen_tile(const uint8_t *restrict tile, uint32_t *restrict pairs, int64_t K, int64_t bits) {
    for (int64_t g = 0; g < K / GROUP; g++, tile += group_bytes(bits)) {
        v16 d = load_f16((const f16 *)tile), m = load_f16((const f16 *)tile + LANES);
        for (int64_t i = 0; i < GROUP / 4; i++, pairs += 2 * LANES) {
            u16x32 u = load_pairs(tile + 4 * LANES + (bits == 4 ? i % 4 : i) * 64);
            if (bits == 4) u = (i < 4 ? u : u >> 4) & 0x0f0f0f0fu;
            for (int n = 0; n < 2; n++) {
                u16x32 low = weight_of_byte(u, 2 * n, d, m), high = weight_of_byte(u, 2 * n + 1, d, m);
                *(u16x32u *)(pairs + n * LANES) = low | high << 16;
            }
        }
    }
}
