/* Attention of a chunk of one request, or of some tokens of it, over its KV, bfloat16 as stored, products summed in float32. Included by kernels.c
 * only.
 *
 * As in FlashAttention-2 (section 3.1) keys come in blocks, with a running maximum and sum for each query; the queries of
 * all heads that share keys are rows of one tile. Keys and values are packed once, two numbers of a sum side by side (pairs.h).
 *
 * Legend: T tokens of the chunk, H query heads, K key/value heads, G = H / K, D head size. */

enum { KEYS = 64, TILE_ROWS = 96, TILE_GROUP = 6 };
#define NO_SCORE (-1e30f)

INLINE v16 larger_of(v16 x, v16 y) { return chosen(x > y, x, y); }

INLINE float largest_of(v16 x) {
    x = larger_of(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = larger_of(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = larger_of(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return x[0] > x[1] ? x[0] : x[1];
}

/* exp of numbers not above 0 to 16 bits, which is more than a weight in bfloat16 keeps. */
INLINE v16 weight_of(v16 x) {
    x = larger_of(x, (v16){0} - 87.f);
    i16x32 n = __builtin_convertvector(x * 1.44269504f - 0.5f, i16x32);
    v16 r = x - __builtin_convertvector(n, v16) * 0.69314718f;
    v16 p = (((r * 4.1666668e-2f + 1.6666667e-1f) * r + 0.5f) * r + 1.f) * r + 1.f;
    return p * (v16)((n + 127) << 23);
}

/* One head's KV of a request, by position. */
typedef struct {
    const bf16 *kv;
    const int32_t *table;
    int64_t block, stride, head, D; /* stride: numbers a slot has; head: offset of this head's keys */
} Pages;

INLINE const bf16 *row_of(const Pages *pages, int64_t position) {
    int64_t slot = (int64_t)pages->table[position / pages->block] * pages->block + position % pages->block;
    return pages->kv + slot * pages->stride + pages->head;
}

/* Keys [first, first + KEYS) as [D / 2][KEYS] pairs; what is not in [low, L) may hold anything, and is zero here. */
static void pack_keys(const Pages *pages, int64_t first, int64_t low, int64_t L, uint32_t *restrict to) {
    int64_t half = pages->D / 2;
    for (int64_t n = 0; n < KEYS; n++) {
        if (first + n >= low && first + n < L) {
            const bf16 *key = row_of(pages, first + n);
            for (int64_t i = 0; i < half; i++) memcpy(to + i * KEYS + n, key + 2 * i, 4);
        } else {
            for (int64_t i = 0; i < half; i++) to[i * KEYS + n] = 0;
        }
    }
}

/* Values of the same as [KEYS / 2][D] pairs of two positions. */
static void pack_values(const Pages *pages, int64_t first, int64_t low, int64_t L, uint32_t *restrict to) {
    int64_t D = pages->D, half = pages->stride / 2;
    for (int64_t n = 0; n < KEYS; n += 2, to += D) {
        int64_t at = first + n;
        const bf16 *one = at >= low && at < L ? row_of(pages, at) + half : NULL;
        const bf16 *other = at + 1 >= low && at + 1 < L ? row_of(pages, at + 1) + half : NULL;
        for (int64_t i = 0; i < D; i++)
            to[i] = (one ? (uint32_t)one[i] : 0u) | (other ? (uint32_t)other[i] << 16 : 0u);
    }
}

/* scores[r][n] = q[r] . key[n] of six rows. q: [6][D / 2] pairs. */
static void chunk_scores(const uint32_t *restrict q, const uint32_t *restrict keys, float *restrict scores,
                         int64_t half) {
#define SUMS(r) v16 a##r = {0}, b##r = {0}, c##r = {0}, d##r = {0};
#define STEP(r)                                                                                              \
    {                                                                                                        \
        u16x32 x = all_of(q[r * half + i]);                                                                  \
        a##r = dot_pairs(a##r, x, k0);                                                                       \
        b##r = dot_pairs(b##r, x, k1);                                                                       \
        c##r = dot_pairs(c##r, x, k2);                                                                       \
        d##r = dot_pairs(d##r, x, k3);                                                                       \
    }
#define STORE(r)                                                                                             \
    {                                                                                                        \
        v16u *s = (v16u *)(scores + r * KEYS);                                                               \
        s[0] = a##r, s[1] = b##r, s[2] = c##r, s[3] = d##r;                                                  \
    }
    ROWS_6(SUMS)
    for (int64_t i = 0; i < half; i++) {
        const uint32_t *k = keys + i * KEYS;
        u16x32 k0 = load_pairs(k), k1 = load_pairs(k + 16), k2 = load_pairs(k + 32), k3 = load_pairs(k + 48);
        ROWS_6(STEP)
    }
    ROWS_6(STORE)
#undef SUMS
#undef STEP
#undef STORE
}

/* out[r] = out[r] * keep[r] + sum over n of p[r][n] value[n], `vectors` of 16 numbers (4 or 1) of six rows.
 * p: [6][KEYS / 2] pairs; values: [KEYS / 2][D] pairs. */
INLINE void chunk_values(const uint32_t *restrict p, const uint32_t *restrict values, const float *restrict keep,
                         float *restrict out, int64_t D, const int vectors) {
#define SUMS(r)                                                                                              \
    v16 a##r = load_f32(out + r * D) * keep[r], b##r = {0}, c##r = {0}, d##r = {0};                          \
    if (vectors == 4)                                                                                        \
        b##r = load_f32(out + r * D + 16) * keep[r], c##r = load_f32(out + r * D + 32) * keep[r],            \
        d##r = load_f32(out + r * D + 48) * keep[r];
#define STEP(r)                                                                                              \
    {                                                                                                        \
        u16x32 x = all_of(p[r * (KEYS / 2) + n]);                                                            \
        a##r = dot_pairs(a##r, x, v0);                                                                       \
        if (vectors == 4) b##r = dot_pairs(b##r, x, v1), c##r = dot_pairs(c##r, x, v2), d##r = dot_pairs(d##r, x, v3); \
    }
#define STORE(r)                                                                                             \
    *(v16u *)(out + r * D) = a##r;                                                                           \
    if (vectors == 4)                                                                                        \
        *(v16u *)(out + r * D + 16) = b##r, *(v16u *)(out + r * D + 32) = c##r, *(v16u *)(out + r * D + 48) = d##r;
    ROWS_6(SUMS)
    for (int64_t n = 0; n < KEYS / 2; n++) {
        const uint32_t *v = values + n * D;
        u16x32 v0 = load_pairs(v), v1 = v0, v2 = v0, v3 = v0;
        if (vectors == 4) v1 = load_pairs(v + 16), v2 = load_pairs(v + 32), v3 = load_pairs(v + 48);
        ROWS_6(STEP)
    }
    ROWS_6(STORE)
#undef SUMS
#undef STEP
#undef STORE
}

/* Scores of one row to weights p; keys [low, high) of the block are seen. Moves maximum and sum on, and returns by what
 * all that was summed before is multiplied. */
INLINE float chunk_weights(const float *restrict scores, int64_t low, int64_t high, bf16 *restrict p,
                           float *restrict top, float *restrict sum) {
    const i16x32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const v16 none = (v16){0} + NO_SCORE;
    v16 s[KEYS / LANES], all = {0};
    int whole = low <= 0 && high >= KEYS;
    UNROLL for (int i = 0; i < KEYS / LANES; i++) s[i] = load_f32(scores + i * LANES);
    if (!whole)
        UNROLL for (int i = 0; i < KEYS / LANES; i++) {
            i16x32 n = lane + i * LANES;
            s[i] = chosen((n >= (int32_t)low) & (n < (int32_t)high), s[i], none);
        }
    float before = *top, keep = 1.f;
    float highest = largest_of(larger_of(larger_of(s[0], s[1]), larger_of(s[2], s[3])));
    if (highest > before) {
        keep = before > NO_SCORE ? expf(before - highest) : 0.f;
        *top = highest;
    } else {
        highest = before;
    }
    UNROLL for (int i = 0; i < KEYS / LANES; i++) {
        v16 e = weight_of(s[i] - highest);
        if (!whole) e = chosen(s[i] > NO_SCORE, e, (v16){0});
        all += e;
        store_bf16(p + i * LANES, e);
    }
    *sum = *sum * keep + sum_of(all);
    return keep;
}

/* Tokens [first, stop) of the chunk, for the G heads that share these keys. packed: [blocks][D * KEYS] pairs, the keys'
 * half of each before the values'. */
static void chunk_tile(const float *restrict q_THD, const uint32_t *restrict packed, float *restrict out_THD,
                       int64_t first, int64_t stop, const int32_t *restrict at_T, int64_t head, int64_t H, int64_t G,
                       int64_t D, int64_t window, float scale) {
    int64_t half = D / 2, rows = (stop - first) * G;
    int64_t padded = (rows + TILE_GROUP - 1) / TILE_GROUP * TILE_GROUP;
    float *scores = scratch_of((size_t)(padded * (half + KEYS / 2 + D + 2) + TILE_GROUP * (KEYS + 1)));
    float *keep = scores + TILE_GROUP * KEYS, *top = keep + TILE_GROUP, *sum = top + padded, *out = sum + padded;
    uint32_t *q = (uint32_t *)(out + padded * D), *p = q + padded * half;
    for (int64_t r = 0; r < padded; r++) {
        top[r] = NO_SCORE, sum[r] = 0.f;
        for (int64_t i = 0; i < D; i++) out[r * D + i] = 0.f;
        const float *from = q_THD + ((first + r / G) * H + head * G + r % G) * D;
        for (int64_t i = 0; i < half; i++) {
            uint32_t low = r < rows ? bf16_of_f32(from[2 * i] * scale) : 0u;
            uint32_t high = r < rows ? bf16_of_f32(from[2 * i + 1] * scale) : 0u;
            q[r * half + i] = low | high << 16;
        }
    }
    int64_t from = window > 0 && at_T[first] + 1 > window ? at_T[first] + 1 - window : 0;
    for (int64_t key = from / KEYS * KEYS; key <= at_T[stop - 1]; key += KEYS) {
        const uint32_t *keys = packed + key * D, *values = keys + KEYS * half;
        for (int64_t r = 0; r < padded; r += TILE_GROUP) {
            int64_t latest = first + (r + TILE_GROUP - 1) / G;
            if (key > at_T[latest < stop ? latest : stop - 1]) continue; /* scattered tokens end far apart */
            chunk_scores(q + r * half, keys, scores, half);
            for (int64_t n = 0; n < TILE_GROUP; n++) {
                int64_t token = first + (r + n) / G; /* what fills up the last group sees what the last token does */
                int64_t last = at_T[token < stop ? token : stop - 1] - key, low = window > 0 ? last - window + 1 : 0;
                keep[n] = chunk_weights(scores + n * KEYS, low, last + 1, (bf16 *)(p + n * (KEYS / 2)), top + r + n,
                                        sum + r + n);
            }
            int64_t at = 0;
            for (; at + 64 <= D; at += 64) chunk_values(p, values + at, keep, out + r * D + at, D, 4);
            for (; at < D; at += 16) chunk_values(p, values + at, keep, out + r * D + at, D, 1);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        float *to = out_THD + ((first + r / G) * H + head * G + r % G) * D;
        for (int64_t i = 0; i < D; i++) to[i] = out[r * D + i] / sum[r];
    }
}

struct chunk_call {
    const float *q_THD;
    const bf16 *kv;
    const int32_t *table;
    uint32_t *packed;
    float *out_THD;
    const int32_t *at_T;
    int64_t T, length, H, K, D, block, window, low, blocks, tokens;
    float scale;
};

static void pack_block(const void *context, int64_t task) {
    const struct chunk_call *c = context;
    int64_t seen = c->low / KEYS, D = c->D, L = c->length;
    int64_t head = task / (c->blocks - seen), first = (seen + task % (c->blocks - seen)) * KEYS;
    Pages pages = {c->kv, c->table, c->block, 2 * c->K * D, head * D, D};
    uint32_t *to = c->packed + (head * c->blocks * KEYS + first) * D;
    pack_keys(&pages, first, c->low, L, to);
    pack_values(&pages, first, c->low, L, to + KEYS * D / 2);
}

static void chunk_task(const void *context, int64_t task) {
    const struct chunk_call *c = context;
    int64_t tiles = (c->T + c->tokens - 1) / c->tokens, head = task % c->K;
    int64_t first = (tiles - 1 - task / c->K) * c->tokens; /* the longest come first */
    int64_t stop = first + c->tokens < c->T ? first + c->tokens : c->T;
    chunk_tile(c->q_THD, c->packed + head * c->blocks * KEYS * c->D, c->out_THD, first, stop, c->at_T, head, c->H,
               c->H / c->K, c->D, c->window, c->scale);
}

/* Tokens at the ascending positions at_T of one request attend to those up to their own, or the last `window` of them
 * (0: all). q, out: [T, H, D]; kv: [slots, 2, K, D]; table: the request's blocks. D is a multiple of 16. */
API void attend_chunk_bf16(const float *restrict q_THD, const bf16 *restrict kv, const int32_t *restrict table,
                           float *restrict out_THD, const int32_t *restrict at_T, int64_t T, int64_t H, int64_t K,
                           int64_t D, int64_t block, int64_t window, float scale) {
    int64_t length = at_T[T - 1] + 1, blocks = (length + KEYS - 1) / KEYS;
    int64_t tokens = TILE_ROWS / (H / K) > 0 ? TILE_ROWS / (H / K) : 1;
    int64_t low = window > 0 && at_T[0] + 1 > window ? at_T[0] + 1 - window : 0;
    uint32_t *packed = room_of(1, (size_t)(K * blocks * KEYS * D));
    struct chunk_call call = {q_THD, kv,    table,  packed, out_THD, at_T,   T,      length, H,
                              K,     D,     block,  window, low,     blocks, tokens, scale};
    each_task(K * (blocks - low / KEYS), pack_block, &call);
    each_task(K * ((T + tokens - 1) / tokens), chunk_task, &call);
}
