/* Products with bfloat16 weights in tiles, summed in float32. Included by kernels.c only.
 *
 * A tile has 16 outputs, one a lane, so that no sum has to cross lanes, and is read from its first byte to its last:
 * [ceil(N / 16)][P][16] pairs, P = ceil(K / 2); what fills up a pair or a tile is 0. Three tiles meet up to eight rows of x,
 * with all 24 sums in registers. x is rounded to bfloat16 and lies pair by pair, a pair's rows side by side. Quantised
 * weights (groups.h) are widened to such tiles, three at a time, for all rows of a pass. */

enum { TILE_PASS = 256 };

/* A row of x, the `rows` of its block lying side by side. */
static void round_pairs(const float *restrict x, uint32_t *restrict pairs, int64_t rows, int64_t K) {
    for (int64_t p = 0; p < K / 2; p++)
        pairs[p * rows] = (uint32_t)bf16_of_f32(x[2 * p]) | (uint32_t)bf16_of_f32(x[2 * p + 1]) << 16;
    if (K % 2) pairs[K / 2 * rows] = bf16_of_f32(x[K - 1]);
}

#define SUMS(t) v16 a##t = {0}, b##t = {0}, c##t = {0};
#define STEP(t)                                                                                              \
    {                                                                                                        \
        u16x32 xt = all_of(x[t]);                                                                            \
        a##t = dot_pairs(a##t, xt, w0);                                                                      \
        if (tiles == 3) b##t = dot_pairs(b##t, xt, w1), c##t = dot_pairs(c##t, xt, w2);                      \
    }
#define STORE(t)                                                                                             \
    {                                                                                                        \
        v16u *to = (v16u *)(out + t * N);                                                                    \
        to[0] = a##t + add0;                                                                                   \
        if (tiles == 3) to[1] = b##t + add1, to[2] = c##t + add2;                                                \
    }
#define PRODUCT(ROWS, EACH)                                                                                  \
    INLINE void tiles_##ROWS(const uint32_t *restrict x, const uint32_t *restrict w, const float *restrict bias, \
                             float *restrict out, int64_t P, int64_t N, const int tiles) {                   \
        EACH(SUMS)                                                                                           \
        const uint32_t *end = w + P * LANES;                                                                 \
        for (const uint32_t *at = w; at < end; at += LANES, x += ROWS) {                                     \
            u16x32 w0 = load_pairs(at), w1 = w0, w2 = w0;                                                    \
            if (tiles == 3) w1 = load_pairs(at + P * LANES), w2 = load_pairs(at + 2 * P * LANES);            \
            EACH(STEP)                                                                                       \
        }                                                                                                    \
        v16 add0 = {0}, add1 = {0}, add2 = {0};                                                                    \
        if (bias) add0 = load_f32(bias);                                                                       \
        if (bias && tiles == 3) add1 = load_f32(bias + LANES), add2 = load_f32(bias + 2 * LANES);                \
        EACH(STORE)                                                                                          \
    }                                                                                                        \
    static void tiles_##ROWS##_1(const uint32_t *x, const uint32_t *w, const float *bias, float *out, int64_t P, int64_t N) { \
        tiles_##ROWS(x, w, bias, out, P, N, 1);                                                              \
    }                                                                                                        \
    static void tiles_##ROWS##_3(const uint32_t *x, const uint32_t *w, const float *bias, float *out, int64_t P, int64_t N) { \
        tiles_##ROWS(x, w, bias, out, P, N, 3);                                                              \
    }

PRODUCTS

#undef SUMS
#undef STEP
#undef STORE
#undef PRODUCT

typedef void (*tiles_of_rows)(const uint32_t *, const uint32_t *, const float *, float *, int64_t, int64_t);
#define BOTH_TILES(ROWS) {tiles_##ROWS##_1, tiles_##ROWS##_3}
static const tiles_of_rows TILES_OF[BLOCK_ROWS][2] = {BOTH_TILES(1), BOTH_TILES(2), BOTH_TILES(3), BOTH_TILES(4),
                                                      BOTH_TILES(5), BOTH_TILES(6), BOTH_TILES(7), BOTH_TILES(8)};

/* Rows of x against three tiles, or one, or the first `count` outputs of the last one. */
static void some_tiles(const uint32_t *restrict x, const uint32_t *restrict w, const float *restrict bias,
                       float *restrict out, int64_t T, int64_t P, int64_t N, int64_t count) {
    float part[BLOCK_ROWS * LANES] __attribute__((aligned(64)));
    for (int64_t t = 0; t < T; t += BLOCK_ROWS) {
        int64_t rows = T - t < BLOCK_ROWS ? T - t : BLOCK_ROWS;
        const tiles_of_rows *product = TILES_OF[rows - 1];
        if (count >= LANES) {
            product[count == 3 * LANES](x + t * P, w, bias, out + t * N, P, N);
            continue;
        }
        product[0](x + t * P, w, NULL, part, P, LANES);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t n = 0; n < count; n++) out[(t + r) * N + n] = part[r * LANES + n] + (bias ? bias[n] : 0.f);
    }
}

/* `count` tiles from output n on, as pairs. */
static const uint32_t *pairs_from(const void *tiles, int64_t n, int64_t count, int64_t K, int64_t bits) {
    if (bits == 16) return (const uint32_t *)tiles + n * ((K + 1) / 2);
    int64_t tile_bytes = K / GROUP * group_bytes(bits), size = K / 2 * LANES;
    uint32_t *pairs = (uint32_t *)scratch_of((size_t)(count * size));
    for (int64_t i = 0; i < count; i++)
        widen_tile((const uint8_t *)tiles + (n / LANES + i) * tile_bytes, pairs + i * size, K, bits);
    return pairs;
}

struct tiles_call {
    const float *wide, *bias;
    const void *tiles;
    uint32_t *x;
    float *out;
    int64_t T, K, N, bits, from, threes, range;
};

static void round_block(const void *context, int64_t block) {
    const struct tiles_call *c = context;
    int64_t first = block * BLOCK_ROWS, rows = c->T - first < BLOCK_ROWS ? c->T - first : BLOCK_ROWS;
    for (int64_t r = 0; r < rows; r++)
        round_pairs(c->wide + (first + r) * c->K, c->x + first * ((c->K + 1) / 2) + r, rows, c->K);
}

/* A range of the tiles, by threes and the rest by ones. */
static void range_of_tiles(const void *context, int64_t at) {
    const struct tiles_call *c = context;
    int64_t P = (c->K + 1) / 2, rows = c->T - c->from < TILE_PASS ? c->T - c->from : TILE_PASS;
    int64_t tasks = (c->N + LANES - 1) / LANES - 2 * c->threes;
    for (int64_t task = at * c->range; task < tasks && task < (at + 1) * c->range; task++) {
        int64_t n = (task < c->threes ? 3 * task : task + 2 * c->threes) * LANES;
        int64_t count = task < c->threes ? 3 * LANES : c->N - n < LANES ? c->N - n : LANES;
        const uint32_t *w = pairs_from(c->tiles, n, task < c->threes ? 3 : 1, c->K, c->bits);
        const float *bias = c->bias ? c->bias + n : NULL;
        some_tiles(c->x + c->from * P, w, bias, c->out + c->from * c->N + n, rows, P, c->N, count);
    }
}

API void linear_tiles(const float *restrict wide, const void *tiles, const float *restrict bias, float *restrict out,
                      int64_t T, int64_t K, int64_t N, int64_t bits) {
    int64_t threes = N / LANES / 3, tasks = (N + LANES - 1) / LANES - 2 * threes, range = range_size(tasks);
    uint32_t *x = room_of(1, (size_t)(T * ((K + 1) / 2)));
    struct tiles_call call = {wide, bias, tiles, x, out, T, K, N, bits, 0, threes, N * K > LEAST_WORK ? range : tasks};
    each_task((T + BLOCK_ROWS - 1) / BLOCK_ROWS, round_block, &call);
    for (; call.from < T; call.from += TILE_PASS) each_task((tasks + call.range - 1) / call.range, range_of_tiles, &call);
}
