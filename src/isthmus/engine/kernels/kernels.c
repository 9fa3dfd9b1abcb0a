/* CPU kernels of the engine: what torch would need many small calls or a gather for.
 *
 * Each kernel is written once, in body.h, over an activation type A and a KV type C, and compiled for the
 * three pairs the engine uses. `plain.py` holds the same operations in torch: the reference in tests, and the
 * path on CUDA or without a C compiler. All tensors are dense and row-major unless a stride is passed.
 *
 * Legend: T tokens (rows), H query heads, K key/value heads, D head size, N hidden size.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

typedef uint16_t bf16;

static inline float f32_of_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest even, as torch does; NaN stays NaN. */
static inline bf16 bf16_of_f32(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40u;
    return (bf16)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

static inline float f32_of_f32(float x) { return x; }

/* One scratch buffer a thread, grown on demand and kept: the decode loop allocates nothing. */
static _Thread_local float *scratch;
static _Thread_local size_t scratch_size;

static float *scratch_of(size_t count) {
    if (count > scratch_size) {
        free(scratch);
        scratch_size = count + count / 2;
        if (posix_memalign((void **)&scratch, 64, scratch_size * sizeof(float))) abort();
    }
    return scratch;
}

#define A float
#define A_F32 f32_of_f32
#define A_OF(x) (x)
#define C float
#define C_F32 f32_of_f32
#define C_OF(x) (x)
#define SUFFIX _f32_f32
#include "body.h"
#undef C
#undef C_F32
#undef C_OF
#undef SUFFIX

#define C bf16
#define C_F32 f32_of_bf16
#define C_OF(x) bf16_of_f32(x)
#define SUFFIX _f32_bf16
#include "body.h"
#undef A
#undef A_F32
#undef A_OF
#undef SUFFIX

#define A bf16
#define A_F32 f32_of_bf16
#define A_OF(x) bf16_of_f32(x)
#define SUFFIX _bf16_bf16
#include "body.h"
