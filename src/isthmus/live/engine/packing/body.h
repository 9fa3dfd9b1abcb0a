/* Quantisation over S, the bits of a stored number of TYPE. Included by packing.c only.
 * ORDERED: the signed integer of S's width; MAGNITUDE: all its bits but the sign; LARGEST: of TYPE, finite. */

typedef S PASTE(any_, TYPE) ANYWHERE;

/* Floats ordered as integers, and back: the mapping is its own inverse. NaN and infinity come out at the ends. */
INLINE ORDERED PASTE(ordered_, TYPE)(ORDERED x) { return x ^ ((x >> (8 * sizeof(S) - 1)) & MAGNITUDE); }

/* The least and the greatest of each channel. */
static void PASTE(ranges_, TYPE)(const PASTE(any_, TYPE) *restrict x, float *restrict least, float *restrict greatest,
                                 int64_t n, int64_t C) {
    for (int64_t start = 0; start < C; start += TILE) {
        int64_t width = C - start < TILE ? C - start : TILE;
        ORDERED low[TILE], high[TILE];
        for (int64_t c = 0; c < width; c++) low[c] = high[c] = PASTE(ordered_, TYPE)((ORDERED)x[start + c]);
        for (int64_t t = 1; t < n; t++) {
            for (int64_t c = 0; c < width; c++) {
                ORDERED value = PASTE(ordered_, TYPE)((ORDERED)x[t * C + start + c]);
                low[c] = value < low[c] ? value : low[c];
                high[c] = value > high[c] ? value : high[c];
            }
        }
        for (int64_t c = 0; c < width; c++) {
            least[start + c] = PASTE(widen_, TYPE)((S)PASTE(ordered_, TYPE)(low[c]));
            greatest[start + c] = PASTE(widen_, TYPE)((S)PASTE(ordered_, TYPE)(high[c]));
        }
    }
}

/* One block: [highest rank, how far below it each channel is, granules of each channel, n rows of C bytes]. */
static void PASTE(pack_block_, TYPE)(const PASTE(any_, TYPE) *restrict x, uint8_t *restrict out, int64_t n,
                                     int64_t C) {
    float low[C], high[C], inverse[C];
    uint32_t rank[C], highest = LOWEST_RANK;
    uint8_t *below = out + HEADER, *rows = below + 2 * C;
    int8_t *granules = (int8_t *)below + C;
    int32_t offset[C];
    PASTE(ranges_, TYPE)(x, low, high, n, C);
    for (int64_t c = 0; c < C; c++) {
        rank[c] = rank_of(low[c], high[c]);
        uint32_t valid = rank[c] <= HIGHEST_RANK ? rank[c] : LOWEST_RANK;
        highest = valid > highest ? valid : highest;
    }
    *(u16 *)out = (uint16_t)highest;
    uint32_t floor_rank = highest > LOWEST_RANK + MOST_BELOW ? highest - MOST_BELOW : LOWEST_RANK;
    for (int64_t c = 0; c < C; c++) {
        int number = rank[c] <= HIGHEST_RANK;
        uint32_t kept = rank[c] > floor_rank ? rank[c] : floor_rank;
        kept = number ? kept : highest;
        below[c] = (uint8_t)(highest - kept);
        inverse[c] = 1.f / float_of(kept << RANK_BITS);
        float base = number ? low[c] * inverse[c] * (1.f / GRANULE) : 0.f;
        int32_t whole = (int32_t)base; /* towards zero */
        whole -= (float)whole > base;
        whole = whole < -MOST_GRANULES ? -MOST_GRANULES : whole; /* 1 / scale may be rounded up */
        granules[c] = (int8_t)(number ? whole : NO_NUMBER);
        offset[c] = GRANULE * whole;
        inverse[c] = number ? inverse[c] : 0.f;
    }
    for (int64_t t = 0; t < n; t++) {
        for (int64_t c = 0; c < C; c++) {
            /* Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits. */
            float steps = PASTE(widen_, TYPE)(x[t * C + c]) * inverse[c];
            uint8_t byte = (uint8_t)((int32_t)bits_of(steps + 0x1.8p23f) - offset[c]);
            rows[t * C + c] = steps == steps ? byte : 0;
        }
    }
}

/* An integer of 11 bits times a scale of 5: exact in float32, rounded once to TYPE. */
static int PASTE(unpack_block_, TYPE)(const uint8_t *restrict in, PASTE(any_, TYPE) *restrict x, int64_t n,
                                      int64_t C) {
    const uint8_t *below = in + HEADER, *rows = below + 2 * C;
    const int8_t *granules = (const int8_t *)below + C;
    uint32_t highest = *(const u16 *)in, deepest = 0;
    float scale[C];
    int32_t offset[C];
    for (int64_t c = 0; c < C; c++) deepest = below[c] > deepest ? below[c] : deepest;
    if (highest > HIGHEST_RANK || highest < LOWEST_RANK + deepest) return 0;
    for (int64_t c = 0; c < C; c++) {
        uint32_t bits = (highest - below[c]) << RANK_BITS;
        scale[c] = float_of(granules[c] == NO_NUMBER ? 0x7fc00000u : bits);
        offset[c] = GRANULE * granules[c];
    }
    for (int64_t t = 0; t < n; t++) {
        for (int64_t c = 0; c < C; c++) {
            float value = (float)(rows[t * C + c] + offset[c]) * scale[c];
            value = value > LARGEST ? LARGEST : value;
            value = value < -LARGEST ? -LARGEST : value;
            x[t * C + c] = PASTE(narrow_, TYPE)(value);
        }
    }
    return 1;
}

API void PASTE(pack_, TYPE)(const PASTE(any_, TYPE) *x, uint8_t *out, int64_t tokens, int64_t block, int64_t C) {
    for (; tokens > 0; tokens -= block, x += block * C, out += HEADER + (2 + block) * C)
        PASTE(pack_block_, TYPE)(x, out, tokens < block ? tokens : block, C);
}

/* 0 when the scales are none that `pack` writes. */
API int PASTE(unpack_, TYPE)(const uint8_t *in, PASTE(any_, TYPE) *x, int64_t tokens, int64_t block, int64_t C) {
    for (; tokens > 0; tokens -= block, x += block * C, in += HEADER + (2 + block) * C)
        if (!PASTE(unpack_block_, TYPE)(in, x, tokens < block ? tokens : block, C)) return 0;
    return 1;
}

#undef S
#undef ORDERED
#undef MAGNITUDE
#undef LARGEST
#undef TYPE
