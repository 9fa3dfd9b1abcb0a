/* What `isthmus.live.engine.codecs` does to KV bytes on a slow link: 8 bits per channel, and the split that lets an
 * entropy coder find what is regular in floating-point numbers. One core, no allocation, any alignment.
 *
 * `PlainPacking` in plain.py holds the same in numpy: the reference, and what runs without a C compiler. Both
 * give the same bytes, hence no contraction of a * b + c here (-ffp-contract=off).
 *
 * Legend: n tokens of one block, C channels (K and V, heads, head_dim).
 */
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

/* Wire data stands at any address. */
#define ANYWHERE __attribute__((aligned(1), may_alias))
typedef uint16_t u16 ANYWHERE;
typedef uint32_t u32 ANYWHERE;

enum { TILE = 256 }; /* channels whose ranges stay in the first-level cache */

/* A scale is a float32 with the 4 highest bits of its mantissa; its rank is what is left of it without the sign
 * and the 19 bits that are zero. Of a block the highest rank is kept, and of each channel how far below it is. */
enum { RANK_BITS = 19, LOWEST_RANK = 0x10, HIGHEST_RANK = 0xfef, MOST_BELOW = 255 };
/* A base is a whole number of granules of so many scales each, from -127 to 127; -128 says the channel is NaN. */
enum { GRANULE = 8, MOST_GRANULES = 127, NO_NUMBER = -128, HEADER = 2 };

INLINE uint32_t bits_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE float widen_bf16(uint16_t x) { return float_of((uint32_t)x << 16); }

/* Round to nearest even; NaN stays NaN. */
INLINE uint16_t narrow_bf16(float f) {
    uint32_t bits = bits_of(f), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

INLINE float widen_f32(uint32_t x) { return float_of(x); }
INLINE uint32_t narrow_f32(float f) { return bits_of(f); }

/* In integers, as not every compiler knows a half. 2^112 is the distance between the two exponents' biases. */
INLINE float widen_f16(uint16_t x) {
    uint32_t magnitude = x & 0x7fffu, finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
    return float_of((magnitude >= 0x7c00u ? magnitude << 13 | 0x7f800000u : finite) | (uint32_t)(x & 0x8000u) << 16);
}

/* Round to nearest even; |f| is at most 65504, or f is NaN. Adding 1/2 to what will be subnormal rounds it to a
 * multiple of 2^-24, and leaves that multiple in the low bits. */
INLINE uint16_t narrow_f16(float f) {
    uint32_t bits = bits_of(f), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t half = magnitude < 113u << 23 ? subnormal : normal;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

/* The rank of the least scale by which bytes and granules span the channel: a granule of them is lost to rounding
 * the base down. HIGHEST_RANK + 1 or more for a channel with NaN or infinity in it, or too wide for float32. */
INLINE uint32_t rank_of(float low, float high) {
    float span = (high - low) / (255 - GRANULE), far = float_of(bits_of(low) & 0x7fffffffu) / (GRANULE * MOST_GRANULES);
    uint32_t rank = (bits_of(span > far ? span : far) + ((1u << RANK_BITS) - 1)) >> RANK_BITS;
    int finite = (bits_of(low) & 0x7f800000u) != 0x7f800000u && (bits_of(high) & 0x7f800000u) != 0x7f800000u;
    rank = rank > LOWEST_RANK ? rank : LOWEST_RANK;
    return finite ? rank : HIGHEST_RANK + 1;
}

#define S uint32_t
#define ORDERED int32_t
#define MAGNITUDE 0x7fffffff
#define LARGEST 0x1.fffffep127f
#define TYPE f32
#include "body.h"

#define S uint16_t
#define ORDERED int16_t
#define MAGNITUDE 0x7fff
#define LARGEST 0x1.fep127f
#define TYPE bf16
#include "body.h"

#define S uint16_t
#define ORDERED int16_t
#define MAGNITUDE 0x7fff
#define LARGEST 65504.f
#define TYPE f16
#include "body.h"

/* Sign and exponent change places with the mantissa, so that the exponent fills the high byte: only its bits are
 * regular. `count` numbers of source; each plane is `count` long. */
API void split_16(const u16 *restrict source, uint8_t *restrict low, uint8_t *restrict high, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint16_t x = (uint16_t)(source[i] << 1 | source[i] >> 15);
        low[i] = (uint8_t)x;
        high[i] = (uint8_t)(x >> 8);
    }
}

API void join_16(u16 *restrict target, const uint8_t *restrict low, const uint8_t *restrict high, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint16_t x = (uint16_t)(low[i] | high[i] << 8);
        target[i] = (uint16_t)(x >> 1 | x << 15);
    }
}

API void split_32(const u32 *restrict source, u16 *restrict low, uint8_t *restrict middle, uint8_t *restrict high,
                  int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t x = source[i] << 1 | source[i] >> 31;
        low[i] = (uint16_t)x;
        middle[i] = (uint8_t)(x >> 16);
        high[i] = (uint8_t)(x >> 24);
    }
}

API void join_32(u32 *restrict target, const u16 *restrict low, const uint8_t *restrict middle,
                 const uint8_t *restrict high, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t x = (uint32_t)low[i] | (uint32_t)middle[i] << 16 | (uint32_t)high[i] << 24;
        target[i] = x >> 1 | x << 31;
    }
}
