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

/* A block of rows of x, named: the compiler keeps arrays in memory, and their sums must stay in registers. */
enum { BLOCK_ROWS = 8 };
#define ROWS_1(F) F(0)
#define ROWS_2(F) ROWS_1(F) F(1)
#define ROWS_3(F) ROWS_2(F) F(2)
#define ROWS_4(F) ROWS_3(F) F(3)
#define ROWS_5(F) ROWS_4(F) F(4)
#define ROWS_6(F) ROWS_5(F) F(5)
#define ROWS_7(F) ROWS_6(F) F(6)
#define ROWS_8(F) ROWS_7(F) F(7)
#define PRODUCTS                                                                                             \
    PRODUCT(1, ROWS_1) PRODUCT(2, ROWS_2) PRODUCT(3, ROWS_3) PRODUCT(4, ROWS_4)                              \
    PRODUCT(5, ROWS_5) PRODUCT(6, ROWS_6) PRODUCT(7, ROWS_7) PRODUCT(8, ROWS_8)
