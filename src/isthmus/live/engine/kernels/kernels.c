/* CPU kernels of the engine: what torch would need many small calls, a gather or a slow product for.
 *
 * Activations are float32; weights as rows and KV are float32 or bfloat16, so each kernel is written once, in body.h,
 * over that stored type S. Weights in tiles have tiles.h and groups.h, loops on several threads pool.h. `plain.py`
 * holds the same operations in torch: the reference in tests, and the path on CUDA or without a C compiler. All
 * tensors are dense and row-major unless a stride is passed.
 *
 * Legend: T tokens (rows), H query heads, K key/value heads, D head size, N width.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

/* Vectors of 16 floats: one AVX-512 register, or what the compiler makes of it elsewhere. */
enum { LANES = 16 };
typedef float v16 __attribute__((vector_size(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
typedef float v4u __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t u16x32 __attribute__((vector_size(64)));
typedef int32_t i16x32 __attribute__((vector_size(64)));
typedef uint16_t h16u __attribute__((vector_size(32), aligned(2), may_alias));

typedef uint16_t bf16;

INLINE float f32_of_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest even, as torch does; NaN stays NaN. */
INLINE bf16 bf16_of_f32(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40u;
    return (bf16)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

INLINE float f32_of_f32(float x) { return x; }
INLINE float f32_to_f32(float x) { return x; }
INLINE v16 load_f32(const float *p) { return *(const v16u *)p; }
#ifdef __AVX512F__ /* one instruction, where the compiler makes five of the form below */
INLINE v16 load_bf16(const bf16 *p) {
    return (v16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
#else
INLINE v16 load_bf16(const bf16 *p) {
    return (v16)(__builtin_convertvector(*(const h16u *)p, u16x32) << 16);
}
#endif

/* No memcpy here: a vector whose address is taken lives in memory, and the sums must stay in registers. */
INLINE v4 quarter_sums(v16 x) {
    v8 half = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
}

/* The sums of four vectors, side by side. */
INLINE v4 sums_of_4(v16 a, v16 b, v16 c, v16 d) {
    typedef int32_t i4 __attribute__((vector_size(16)));
    v4 p = quarter_sums(a), q = quarter_sums(b), r = quarter_sums(c), s = quarter_sums(d);
    v4 pq = __builtin_shuffle(p, q, (i4){0, 4, 1, 5}) + __builtin_shuffle(p, q, (i4){2, 6, 3, 7});
    v4 rs = __builtin_shuffle(r, s, (i4){0, 4, 1, 5}) + __builtin_shuffle(r, s, (i4){2, 6, 3, 7});
    return __builtin_shuffle(pq, rs, (i4){0, 1, 4, 5}) + __builtin_shuffle(pq, rs, (i4){2, 3, 6, 7});
}

INLINE float sum_of(v16 x) {
    v4 quarter = quarter_sums(x);
    return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

/* a where the mask is set, else b. */
INLINE v16 chosen(i16x32 mask, v16 a, v16 b) { return (v16)((mask & (i16x32)a) | (~mask & (i16x32)b)); }

/* exp of each lane, within 2 ulp; arguments beyond what float32 can hold are clamped to it.
 * exp(x) = 2^n * exp(r) with |r| <= ln(2) / 2, and a polynomial of degree 6 for exp(r). */
INLINE v16 exp_of(v16 x) {
    const v16 high = (v16){0} + 88.f, low = (v16){0} - 87.f, half = (v16){0} + 0.5f;
    x = chosen(x > high, high, x);
    x = chosen(x < low, low, x);
    v16 t = x * 1.44269504f;
    i16x32 n = __builtin_convertvector(t + chosen(t < 0.f, -half, half), i16x32);
    v16 whole = __builtin_convertvector(n, v16);
    v16 r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    v16 p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
             1.6666665459e-1f) * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.f) * (v16)((n + 127) << 23);
}

/* Loads `count` < 16 floats, the other lanes being `rest`. */
INLINE v16 load_some(const float *p, int64_t count, float rest) {
    v16 x = (v16){0} + rest;
    memcpy(&x, p, (size_t)count * sizeof(float));
    return x;
}

/* A head's keys are a short run in each token, too far apart for the hardware to foresee: ask some tokens ahead.
 * The address may lie past the memory; a prefetch of nothing does nothing. */
enum { AHEAD = 12 };
INLINE void prefetch(const void *p, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)p + at);
}

/* Two scratch buffers a thread, grown on demand and kept: the hot loop allocates nothing. The second is for what one
 * thread makes and all of a call read. */
static _Thread_local void *rooms[2];
static _Thread_local size_t room_sizes[2];

static void *room_of(int which, size_t count) {
    if (count > room_sizes[which]) {
        free(rooms[which]);
        room_sizes[which] = count + count / 2;
        if (posix_memalign(&rooms[which], 64, room_sizes[which] * sizeof(float))) abort();
    }
    return rooms[which];
}

static float *scratch_of(size_t count) { return room_of(0, count); }

/* A product with fewer weights is not worth a second thread. */
enum { LEAST_WORK = 32768 };

#include "pool.h"

/* Rows of a loop over tokens that is little work each: one range, or several if it is much in all. */
INLINE int64_t rows_at_once(int64_t T, int64_t N) { return T * N > 65536 ? range_size(T) : T + !T; }

struct norm_call {
    float *x, *out;
    const float *delta, *w;
    int64_t T, N, range;
    float eps;
};

static void norm_rows(const void *context, int64_t at) {
    const struct norm_call *c = context;
    int64_t N = c->N;
    for (int64_t t = at * c->range; t < c->T && t < (at + 1) * c->range; t++) {
        float *restrict row = c->x + t * N, *restrict o = c->out + t * N, sum = 0.f;
        if (c->delta) {
            const float *restrict add = c->delta + t * N;
            for (int64_t i = 0; i < N; i++) row[i] += add[i];
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < N; i++) sum += row[i] * row[i];
        float scale = 1.f / sqrtf(sum / (float)N + c->eps);
        const float *restrict w = c->w;
        for (int64_t i = 0; i < N; i++) o[i] = row[i] * scale * w[i];
    }
}

/* x[t] += delta[t] when delta is given (the residual stream); out[t] = rms_norm(x[t]) * w. */
API void add_rms_norm(float *x, const float *delta, const float *w, float *out, int64_t T, int64_t N, float eps) {
    struct norm_call call = {x, out, delta, w, T, N, rows_at_once(T, N), eps};
    each_task((T + call.range - 1) / call.range, norm_rows, &call);
}

/* One thread: it runs beside the threads that compute. */
API void copy_slices(char *target, const int64_t *targets, const char *source, const int64_t *sources,
                     int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; i++) memcpy(target + targets[i], source + sources[i], (size_t)size);
}

struct silu_call {
    const float *gate_up;
    float *out;
    int64_t T, N, range;
};

static void silu_rows(const void *context, int64_t at) {
    const struct silu_call *c = context;
    int64_t N = c->N;
    for (int64_t t = at * c->range; t < c->T && t < (at + 1) * c->range; t++) {
        const float *gate = c->gate_up + t * 2 * N, *up = gate + N;
        float *o = c->out + t * N;
        int64_t i = 0;
        for (; i + LANES <= N; i += LANES) {
            v16 g = load_f32(gate + i);
            *(v16u *)(o + i) = g / (1.f + exp_of(-g)) * load_f32(up + i);
        }
        if (i < N) {
            v16 g = load_some(gate + i, N - i, 0.f);
            v16 rest = g / (1.f + exp_of(-g)) * load_some(up + i, N - i, 0.f);
            memcpy(o + i, &rest, (size_t)(N - i) * sizeof(float));
        }
    }
}

/* out[t, i] = silu(gate_up[t, i]) * gate_up[t, N + i] */
API void silu_mul(const float *gate_up, float *out, int64_t T, int64_t N) {
    struct silu_call call = {gate_up, out, T, N, rows_at_once(T, N)};
    each_task((T + call.range - 1) / call.range, silu_rows, &call);
}

struct part_call {
    float *out_THD, *lse_TH;
    const float *part_RJD, *part_lse_RJ;
    const int64_t *rows;
    int64_t first, R, H, J, head, D, range;
};

/* The sum over two sets of keys from the sums over each, weighed by the exponentials of their lse. */
static void part_rows(const void *context, int64_t task) {
    const struct part_call *c = context;
    int64_t D = c->D;
    for (int64_t r = task * c->range; r < c->R && r < (task + 1) * c->range; r++) {
        int64_t row = c->rows ? c->rows[r] : c->first + r;
        for (int64_t j = 0; j < c->J; j++) {
            int64_t at = row * c->H + c->head + j;
            float here = c->lse_TH[at], there = c->part_lse_RJ[r * c->J + j];
            if (there == -INFINITY) continue;
            float most = here > there ? here : there;
            float a = expf(here - most), b = expf(there - most), total = a + b;
            float *o = c->out_THD + at * D;
            const float *p = c->part_RJD + (r * c->J + j) * D;
            a /= total;
            b /= total;
            for (int64_t i = 0; i < D; i++) o[i] = o[i] * a + p[i] * b;
            c->lse_TH[at] = most + logf(total);
        }
    }
}

/* out[row, head + j] and lse of R rows, named or from `first` on, take in those of a part with heads [head, head + J). */
API void add_part(float *out_THD, float *lse_TH, const float *part_RJD, const float *part_lse_RJ, const int64_t *rows,
                  int64_t first, int64_t R, int64_t H, int64_t J, int64_t head, int64_t D) {
    struct part_call call = {out_THD, lse_TH, part_RJD, part_lse_RJ, rows,
                             first,   R,      H,        J,           head, D, rows_at_once(R, J * D)};
    each_task((R + call.range - 1) / call.range, part_rows, &call);
}

/* One head: optional RMS norm (weight w), then rotate the two halves by the angles of its position. */
INLINE void rotate(const float *restrict in, float *restrict out, const float *restrict w, float eps,
                   const float *restrict cs, int64_t D) {
    int64_t half = D / 2;
    float scale = 1.f;
    if (w) {
        float sum = 0.f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < D; i++) sum += in[i] * in[i];
        scale = 1.f / sqrtf(sum / (float)D + eps);
    }
    for (int64_t i = 0; i < half; i++) {
        float a = in[i] * scale, b = in[half + i] * scale;
        if (w) {
            a *= w[i];
            b *= w[half + i];
        }
        out[i] = a * cs[i] - b * cs[half + i];
        out[half + i] = b * cs[i] + a * cs[half + i];
    }
}

/* Turns scores into exp(score - max); total is their sum, lse the natural log of the sum of exponentials. */
INLINE void exponentials(float *restrict s, int64_t count, float *total, float *lse) {
    float top = s[0], sum = 0.f;
#pragma omp simd reduction(max : top)
    for (int64_t t = 0; t < count; t++) top = s[t] > top ? s[t] : top;
    v16 sums = {0};
    int64_t t = 0;
    for (; t + LANES <= count; t += LANES) {
        v16 e = exp_of(load_f32(s + t) - top);
        *(v16u *)(s + t) = e;
        sums += e;
    }
    if (t < count) {
        v16 e = exp_of(load_some(s + t, count - t, top) - top);
        memcpy(s + t, &e, (size_t)(count - t) * sizeof(float));
        for (; t < count; t++) sum += s[t];
    }
    *total = sum + sum_of(sums);
    *lse = top + logf(*total);
}

/* ---- Gated delta rule behind a short convolution; see isthmus/engine/linear for the formulas. ----
 * A token's C = 2 J K + H V channels are the queries and keys of J heads and the values of H heads. A window has the W
 * inputs before a token, oldest first; taps: [W + 1, C], the last for the token itself. */

/* silu of the convolution of token t of a run; its queries to length 1 / sqrt(K), its keys to length 1. */
static void convolve_token(const float *restrict x, int64_t stride, int64_t t, const float *restrict window,
                           const float *restrict taps, float *restrict out, int64_t C, int64_t W, int64_t J,
                           int64_t K) {
    const float *own = x + t * stride;
    for (int64_t c = 0; c < C; c++) out[c] = own[c] * taps[W * C + c];
    for (int64_t w = 0; w < W; w++) {
        int64_t at = t - W + w;
        const float *input = at < 0 ? window + (at + W) * C : x + at * stride, *tap = taps + w * C;
        for (int64_t c = 0; c < C; c++) out[c] += input[c] * tap[c];
    }
    int64_t c = 0;
    for (; c + LANES <= C; c += LANES) {
        v16 g = load_f32(out + c);
        *(v16u *)(out + c) = g / (1.f + exp_of(-g));
    }
    if (c < C) {
        v16 g = load_some(out + c, C - c, 0.f);
        g = g / (1.f + exp_of(-g));
        memcpy(out + c, &g, (size_t)(C - c) * sizeof(float));
    }
    for (int64_t j = 0; j < 2 * J; j++) {
        float *head = out + j * K, sum = 0.f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < K; i++) sum += head[i] * head[i];
        float scale = 1.f / sqrtf((sum + 1e-6f) * (j < J ? (float)K : 1.f));
        for (int64_t i = 0; i < K; i++) head[i] *= scale;
    }
}

/* The window after T tokens. */
static void move_window(const float *restrict x, int64_t stride, int64_t T, float *window, int64_t C, int64_t W) {
    for (int64_t w = 0; w < W; w++) {
        int64_t at = T - W + w;
        memmove(window + w * C, at < 0 ? window + (at + W) * C : x + at * stride, (size_t)C * sizeof(float));
    }
}

/* VECTORS vectors of a head's columns through T tokens: the rule does not mix columns, so that these stay in the first
 * level of cache. Query and key read the decayed state in one pass over it; the query also reads what its own token
 * writes. x: q, k, v of the head at q_at, k_at, v_at of each token's C numbers. room: 3 K floats. */
#define COLUMNS(VECTORS)                                                                                     \
    static void delta_columns_##VECTORS(const float *restrict x, int64_t C, int64_t q_at, int64_t k_at,      \
                                        int64_t v_at, const float *restrict decay, int64_t decay_stride,     \
                                        int64_t decays, const float *restrict beta, int64_t beta_stride,     \
                                        float *restrict state, int64_t V, float *restrict out,               \
                                        int64_t out_stride, int64_t T, int64_t K, float *restrict room) {    \
        float *factor = room, *qs = room + K, *ks = room + 2 * K;                                            \
        for (int64_t t = 0; t < T; t++) {                                                                    \
            const float *q = x + t * C + q_at, *k = x + t * C + k_at, *v = x + t * C + v_at;                 \
            float meet = decayed(q, k, decay + t * decay_stride, decays, factor, qs, ks, K);                 \
            v16 seen[VECTORS] = {0}, read[VECTORS] = {0};                                                    \
            for (int64_t i = 0; i < K; i++)                                                                  \
                UNROLL for (int n = 0; n < VECTORS; n++) {                                                   \
                    v16 s = load_f32(state + i * V + n * LANES);                                             \
                    seen[n] += ks[i] * s;                                                                    \
                    read[n] += qs[i] * s;                                                                    \
                }                                                                                            \
            UNROLL for (int n = 0; n < VECTORS; n++) {                                                       \
                seen[n] = (load_f32(v + n * LANES) - seen[n]) * beta[t * beta_stride];                       \
                *(v16u *)(out + t * out_stride + n * LANES) = read[n] + meet * seen[n];                      \
            }                                                                                                \
            for (int64_t i = 0; i < K; i++)                                                                  \
                UNROLL for (int n = 0; n < VECTORS; n++) {                                                   \
                    float *s = state + i * V + n * LANES;                                                    \
                    *(v16u *)s = load_f32(s) * factor[i] + k[i] * seen[n];                                   \
                }                                                                                            \
        }                                                                                                    \
    }

/* exp of the decay for each of K keys, query and key times it; gives query . key. */
static float decayed(const float *restrict q, const float *restrict k, const float *restrict decay,
                     int64_t decays, float *restrict factor, float *restrict qs, float *restrict ks, int64_t K) {
    float meet = 0.f;
    int64_t at = 0;
    if (decays == 1) {
        float one = expf(decay[0]);
        for (; at < K; at++) factor[at] = one;
    }
    for (; at + LANES <= K; at += LANES) *(v16u *)(factor + at) = exp_of(load_f32(decay + at));
    for (; at < K; at++) factor[at] = expf(decay[at]);
#pragma omp simd reduction(+ : meet)
    for (int64_t i = 0; i < K; i++) {
        qs[i] = q[i] * factor[i];
        ks[i] = k[i] * factor[i];
        meet += q[i] * k[i];
    }
    return meet;
}

COLUMNS(4)
COLUMNS(1)
#undef COLUMNS

/* The same for one column. */
static void delta_column(const float *restrict x, int64_t C, int64_t q_at, int64_t k_at, int64_t v_at,
                         const float *restrict decay, int64_t decay_stride, int64_t decays,
                         const float *restrict beta, int64_t beta_stride, float *restrict state, int64_t V,
                         float *restrict out, int64_t out_stride, int64_t T, int64_t K, float *restrict room) {
    float *factor = room, *qs = room + K, *ks = room + 2 * K;
    for (int64_t t = 0; t < T; t++) {
        const float *q = x + t * C + q_at, *k = x + t * C + k_at;
        float meet = decayed(q, k, decay + t * decay_stride, decays, factor, qs, ks, K), seen = 0.f, read = 0.f;
        for (int64_t i = 0; i < K; i++) {
            seen += ks[i] * state[i * V];
            read += qs[i] * state[i * V];
        }
        seen = (x[t * C + v_at] - seen) * beta[t * beta_stride];
        out[t * out_stride] = read + meet * seen;
        for (int64_t i = 0; i < K; i++) state[i * V] = state[i * V] * factor[i] + k[i] * seen;
    }
}

/* Head h through T tokens. */
static void delta_head(const float *restrict x, const float *restrict decay, const float *restrict beta,
                       float *restrict state, float *restrict out, int64_t h, int64_t T, int64_t H, int64_t J,
                       int64_t K, int64_t V, int64_t decays) {
    int64_t C = 2 * J * K + H * V, j = h / (H / J), at = 0;
    float *room = scratch_of((size_t)(3 * K));
#define RUN(FUNCTION)                                                                                        \
    FUNCTION(x, C, j * K, (J + j) * K, 2 * J * K + h * V + at, decay + h * decays, H * decays, decays, beta + h, H, \
             state + h * K * V + at, V, out + h * V + at, H * V, T, K, room)
    for (; at + 4 * LANES <= V; at += 4 * LANES) RUN(delta_columns_4);
    for (; at + LANES <= V; at += LANES) RUN(delta_columns_1);
    for (; at < V; at++) RUN(delta_column);
#undef RUN
}

/* T tokens of one request. qkv: [T, C] with `stride` between tokens; decay: [T, H, decays], one a head or one a key;
 * beta: [T, H]; out: [T, H, V]. window and state [H, K, V] move on. */
API void delta_run(const float *restrict qkv, const float *restrict decay, const float *restrict beta,
                   float *window, float *state, const float *restrict taps, float *restrict out, int64_t stride,
                   int64_t T, int64_t H, int64_t J, int64_t K, int64_t V, int64_t W, int64_t decays) {
    int64_t C = 2 * J * K + H * V;
    float *inputs = malloc((size_t)(T * C) * sizeof(float));
    if (!inputs) abort();
#pragma omp parallel for if (T * C > 16384)
    for (int64_t t = 0; t < T; t++) convolve_token(qkv, stride, t, window, taps, inputs + t * C, C, W, J, K);
    move_window(qkv, stride, T, window, C, W);
#pragma omp parallel for schedule(dynamic, 1) if (T * H * K * V > 32768)
    for (int64_t h = 0; h < H; h++) delta_head(inputs, decay, beta, state, out, h, T, H, J, K, V, decays);
    free(inputs);
}

/* One token each of R requests: as above with a request for each token. The window and state of request r lie at
 * slots[r] times their strides. */
API void delta_step(const float *restrict qkv, const float *restrict decay, const float *restrict beta,
                    float *windows, float *states, const int64_t *restrict slots, const float *restrict taps,
                    float *restrict out, int64_t stride, int64_t window_stride, int64_t state_stride, int64_t R,
                    int64_t H, int64_t J, int64_t K, int64_t V, int64_t W, int64_t decays) {
    int64_t C = 2 * J * K + H * V;
    float *inputs = malloc((size_t)(R * C) * sizeof(float));
    if (!inputs) abort();
#pragma omp parallel for if (R * C > 16384)
    for (int64_t r = 0; r < R; r++) {
        float *window = windows + slots[r] * window_stride;
        convolve_token(qkv + r * stride, stride, 0, window, taps, inputs + r * C, C, W, J, K);
        move_window(qkv + r * stride, stride, 1, window, C, W);
    }
#pragma omp parallel for if (R * H * K * V > 32768)
    for (int64_t task = 0; task < R * H; task++) {
        int64_t r = task / H;
        delta_head(inputs + r * C, decay + r * H * decays, beta + r * H, states + slots[r] * state_stride,
                   out + r * H * V, task % H, 1, H, J, K, V, decays);
    }
    free(inputs);
}

#define S float
#define S_F32 f32_of_f32
#define S_OF f32_to_f32
#define S_LOAD load_f32
#define S_IS_FLOAT
#define SUFFIX _f32
#include "body.h"
#undef S
#undef S_F32
#undef S_OF
#undef S_LOAD
#undef S_IS_FLOAT
#undef SUFFIX

#define S bf16
#define S_F32 f32_of_bf16
#define S_OF bf16_of_f32
#define S_LOAD load_bf16
#define SUFFIX _bf16
#include "body.h"
#include "pairs.h"
#include "chunk.h"
#include "groups.h"
#include "tiles.h"
