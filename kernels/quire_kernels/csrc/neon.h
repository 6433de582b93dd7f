// SPDX-License-Identifier: Apache-2.0
// The AVX2 types and intrinsics that the compiled kernels and avx2.h use, for ARM64 processors.
//
// A register of 256 bits is a pair of NEON registers, so a kernel's register of 512 bits is four of them. NEON has 32
// registers of 128 bits, which hold as much as the 16 registers of AVX2: the kernels' tiles fit in the same way. The
// names are those of AVX2, in our namespace. Results are those of the instruction; only the sign of a zero and of a NaN
// can differ. Arguments that are constants in AVX2 are checked for the values that occur.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#define QUIRE_INLINE inline __attribute__((always_inline))

// Constants of the compiler's header for x86.
constexpr int _MM_HINT_T0 = 3, _MM_HINT_T1 = 2;
constexpr int _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_NO_EXC = 8;
constexpr int _CMP_EQ_OQ = 0, _CMP_LT_OQ = 17, _CMP_UNORD_Q = 3;

#define _mm_prefetch(address, hint) __builtin_prefetch(address, 0, hint)

namespace quire {

using __mmask16 = uint16_t;
using __mmask32 = uint32_t;
using __m128 = float32x4_t;
using __m128i = int32x4_t;

struct __m256 {
  __m128 low, high;
};

struct __m256i {
  __m128i low, high;
};

// The lanes of a register as other types.
QUIRE_INLINE int8x16_t s8(__m128i a) { return vreinterpretq_s8_s32(a); }
QUIRE_INLINE uint8x16_t u8(__m128i a) { return vreinterpretq_u8_s32(a); }
QUIRE_INLINE int16x8_t s16(__m128i a) { return vreinterpretq_s16_s32(a); }
QUIRE_INLINE uint16x8_t u16(__m128i a) { return vreinterpretq_u16_s32(a); }
QUIRE_INLINE uint32x4_t u32(__m128i a) { return vreinterpretq_u32_s32(a); }
QUIRE_INLINE int64x2_t s64(__m128i a) { return vreinterpretq_s64_s32(a); }
QUIRE_INLINE __m128i as_int(int8x16_t a) { return vreinterpretq_s32_s8(a); }
QUIRE_INLINE __m128i as_int(uint8x16_t a) { return vreinterpretq_s32_u8(a); }
QUIRE_INLINE __m128i as_int(int16x8_t a) { return vreinterpretq_s32_s16(a); }
QUIRE_INLINE __m128i as_int(uint16x8_t a) { return vreinterpretq_s32_u16(a); }
QUIRE_INLINE __m128i as_int(uint32x4_t a) { return vreinterpretq_s32_u32(a); }
QUIRE_INLINE __m128i as_int(int64x2_t a) { return vreinterpretq_s32_s64(a); }

// Memory.
template <typename T>
QUIRE_INLINE T load_register(const void* p) {
  T all;
  __builtin_memcpy(&all, p, sizeof all);
  return all;
}
QUIRE_INLINE __m128i _mm_loadu_si128(const void* p) { return load_register<__m128i>(p); }
QUIRE_INLINE void _mm_storeu_si128(void* p, __m128i a) { __builtin_memcpy(p, &a, sizeof a); }
QUIRE_INLINE __m256i _mm256_loadu_si256(const void* p) {
  return {_mm_loadu_si128(p), _mm_loadu_si128((const char*)p + 16)};
}
QUIRE_INLINE __m256 _mm256_loadu_ps(const void* p) {
  return {load_register<__m128>(p), load_register<__m128>((const char*)p + 16)};
}
QUIRE_INLINE void _mm256_storeu_si256(void* p, __m256i a) {
  _mm_storeu_si128(p, a.low);
  _mm_storeu_si128((char*)p + 16, a.high);
}
QUIRE_INLINE void _mm256_storeu_ps(void* p, __m256 a) { __builtin_memcpy(p, &a, sizeof a); }
// Lanes whose mask is negative, and no other memory.
QUIRE_INLINE __m256i _mm256_maskload_epi32(const int* p, __m256i mask) {
  int32_t all[8] = {}, selected[8];
  _mm256_storeu_si256(selected, mask);
  for (int i = 0; i < 8; i++)
    if (selected[i] < 0) all[i] = p[i];
  return _mm256_loadu_si256(all);
}

// Constants.
QUIRE_INLINE __m256 _mm256_setzero_ps() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
QUIRE_INLINE __m256i _mm256_setzero_si256() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
QUIRE_INLINE __m256 _mm256_set1_ps(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
QUIRE_INLINE __m256i _mm256_set1_epi8(int8_t x) { return {as_int(vdupq_n_s8(x)), as_int(vdupq_n_s8(x))}; }
QUIRE_INLINE __m256i _mm256_set1_epi16(int16_t x) { return {as_int(vdupq_n_s16(x)), as_int(vdupq_n_s16(x))}; }
QUIRE_INLINE __m256i _mm256_set1_epi32(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
QUIRE_INLINE __m256i _mm256_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h) {
  return {__m128i{a, b, c, d}, __m128i{e, f, g, h}};
}
template <typename... Numbers>
QUIRE_INLINE __m128i _mm_setr_epi8(Numbers... numbers) {
  const int8_t all[16] = {(int8_t)numbers...};
  return _mm_loadu_si128(all);
}

// Casts.
QUIRE_INLINE __m256 _mm256_castsi256_ps(__m256i a) {
  return {vreinterpretq_f32_s32(a.low), vreinterpretq_f32_s32(a.high)};
}
QUIRE_INLINE __m256i _mm256_castps_si256(__m256 a) {
  return {vreinterpretq_s32_f32(a.low), vreinterpretq_s32_f32(a.high)};
}
QUIRE_INLINE __m128i _mm256_castsi256_si128(__m256i a) { return a.low; }
QUIRE_INLINE __m128 _mm256_castps256_ps128(__m256 a) { return a.low; }
QUIRE_INLINE __m128i _mm256_extracti128_si256(__m256i a, int) { return a.high; }
QUIRE_INLINE __m128 _mm256_extractf128_ps(__m256 a, int) { return a.high; }
QUIRE_INLINE __m256i _mm256_broadcastsi128_si256(__m128i a) { return {a, a}; }
QUIRE_INLINE float _mm256_cvtss_f32(__m256 a) { return vgetq_lane_f32(a.low, 0); }
QUIRE_INLINE float _mm_cvtss_f32(__m128 a) { return vgetq_lane_f32(a, 0); }
QUIRE_INLINE int32_t _mm_cvtsi128_si32(__m128i a) { return vgetq_lane_s32(a, 0); }

// Operations on lanes, of registers of 128 bits (`half`) and of 256 bits (`name`).
#define QUIRE_LANES2(name, half, T256, T128, expression)            \
  QUIRE_INLINE T128 half(T128 a, T128 b) { return expression; }     \
  QUIRE_INLINE T256 name(T256 a, T256 b) { return {half(a.low, b.low), half(a.high, b.high)}; }
#define QUIRE_LANES3(name, half, expression)                                  \
  QUIRE_INLINE __m128 half(__m128 a, __m128 b, __m128 c) { return expression; } \
  QUIRE_INLINE __m256 name(__m256 a, __m256 b, __m256 c) {                    \
    return {half(a.low, b.low, c.low), half(a.high, b.high, c.high)};         \
  }

QUIRE_LANES2(_mm256_add_ps, _mm_add_ps, __m256, __m128, vaddq_f32(a, b))
QUIRE_LANES2(_mm256_sub_ps, _mm_sub_ps, __m256, __m128, vsubq_f32(a, b))
QUIRE_LANES2(_mm256_mul_ps, _mm_mul_ps, __m256, __m128, vmulq_f32(a, b))
QUIRE_LANES2(_mm256_div_ps, _mm_div_ps, __m256, __m128, vdivq_f32(a, b))
// If a or b is NaN, the result is b.
QUIRE_LANES2(_mm256_max_ps, _mm_max_ps, __m256, __m128, vbslq_f32(vcgtq_f32(a, b), a, b))
QUIRE_LANES2(_mm256_min_ps, _mm_min_ps, __m256, __m128, vbslq_f32(vcltq_f32(a, b), a, b))
QUIRE_LANES3(_mm256_fmadd_ps, _mm_fmadd_ps, vfmaq_f32(c, a, b))
QUIRE_LANES3(_mm256_fmsub_ps, _mm_fmsub_ps, vfmaq_f32(vnegq_f32(c), a, b))
QUIRE_LANES3(_mm256_fnmadd_ps, _mm_fnmadd_ps, vfmsq_f32(c, a, b))
// Lanes of b where c is negative.
QUIRE_LANES3(_mm256_blendv_ps, _mm_blendv_ps,
             vbslq_f32(vcltzq_s32(vreinterpretq_s32_f32(c)), b, a))
QUIRE_LANES2(_mm256_andnot_ps, _mm_andnot_ps, __m256, __m128,
             vreinterpretq_f32_s32(vbicq_s32(vreinterpretq_s32_f32(b), vreinterpretq_s32_f32(a))))

QUIRE_LANES2(_mm256_and_si256, _mm_and_si128, __m256i, __m128i, vandq_s32(a, b))
QUIRE_LANES2(_mm256_or_si256, _mm_or_si128, __m256i, __m128i, vorrq_s32(a, b))
QUIRE_LANES2(_mm256_andnot_si256, _mm_andnot_si128, __m256i, __m128i, vbicq_s32(b, a))
QUIRE_LANES2(_mm256_add_epi16, _mm_add_epi16, __m256i, __m128i, as_int(vaddq_s16(s16(a), s16(b))))
QUIRE_LANES2(_mm256_add_epi32, _mm_add_epi32, __m256i, __m128i, vaddq_s32(a, b))
QUIRE_LANES2(_mm256_sub_epi32, _mm_sub_epi32, __m256i, __m128i, vsubq_s32(a, b))
QUIRE_LANES2(_mm256_max_epi32, _mm_max_epi32, __m256i, __m128i, vmaxq_s32(a, b))
QUIRE_LANES2(_mm256_cmpeq_epi32, _mm_cmpeq_epi32, __m256i, __m128i, as_int(vceqq_s32(a, b)))
QUIRE_LANES2(_mm256_cmpgt_epi32, _mm_cmpgt_epi32, __m256i, __m128i, as_int(vcgtq_s32(a, b)))
QUIRE_LANES2(_mm256_unpacklo_epi8, _mm_unpacklo_epi8, __m256i, __m128i, as_int(vzip1q_u8(u8(a), u8(b))))
QUIRE_LANES2(_mm256_unpackhi_epi8, _mm_unpackhi_epi8, __m256i, __m128i, as_int(vzip2q_u8(u8(a), u8(b))))
QUIRE_LANES2(_mm256_unpacklo_epi16, _mm_unpacklo_epi16, __m256i, __m128i, as_int(vzip1q_u16(u16(a), u16(b))))
QUIRE_LANES2(_mm256_unpackhi_epi16, _mm_unpackhi_epi16, __m256i, __m128i, as_int(vzip2q_u16(u16(a), u16(b))))
QUIRE_LANES2(_mm256_unpacklo_epi32, _mm_unpacklo_epi32, __m256i, __m128i, vzip1q_s32(a, b))
QUIRE_LANES2(_mm256_unpackhi_epi32, _mm_unpackhi_epi32, __m256i, __m128i, vzip2q_s32(a, b))
QUIRE_LANES2(_mm256_unpacklo_epi64, _mm_unpacklo_epi64, __m256i, __m128i, as_int(vzip1q_s64(s64(a), s64(b))))
QUIRE_LANES2(_mm256_unpackhi_epi64, _mm_unpackhi_epi64, __m256i, __m128i, as_int(vzip2q_s64(s64(a), s64(b))))
// Narrower lanes of a, then those of b, with saturation.
QUIRE_LANES2(_mm256_packs_epi32, _mm_packs_epi32, __m256i, __m128i,
             as_int(vcombine_s16(vqmovn_s32(a), vqmovn_s32(b))))
QUIRE_LANES2(_mm256_packus_epi32, _mm_packus_epi32, __m256i, __m128i,
             as_int(vcombine_u16(vqmovun_s32(a), vqmovun_s32(b))))
QUIRE_LANES2(_mm256_packs_epi16, _mm_packs_epi16, __m256i, __m128i,
             as_int(vcombine_s8(vqmovn_s16(s16(a)), vqmovn_s16(s16(b)))))
QUIRE_LANES2(_mm256_packus_epi16, _mm_packus_epi16, __m256i, __m128i,
             as_int(vcombine_u8(vqmovun_s16(s16(a)), vqmovun_s16(s16(b)))))
// Bytes of a by the lower 4 bits of b; 0 where b is negative.
QUIRE_LANES2(_mm256_shuffle_epi8, _mm_shuffle_epi8, __m256i, __m128i,
             as_int(vqtbl1q_u8(u8(a), vandq_u8(u8(b), vdupq_n_u8(0x8f)))))
// Sums of the products of neighbouring words.
QUIRE_LANES2(_mm256_madd_epi16, _mm_madd_epi16, __m256i, __m128i,
             vpaddq_s32(vmull_s16(vget_low_s16(s16(a)), vget_low_s16(s16(b))), vmull_high_s16(s16(a), s16(b))))
// Sums of the products of neighbouring unsigned bytes of a and signed bytes of b, with saturation.
QUIRE_INLINE __m128i _mm_maddubs_epi16(__m128i a, __m128i b) {
  const int16x8_t first = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(u8(a)))), vmovl_s8(vget_low_s8(s8(b))));
  const int16x8_t second = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(u8(a))), vmovl_high_s8(s8(b)));
  return as_int(vqaddq_s16(vuzp1q_s16(first, second), vuzp2q_s16(first, second)));
}
QUIRE_INLINE __m256i _mm256_maddubs_epi16(__m256i a, __m256i b) {
  return {_mm_maddubs_epi16(a.low, b.low), _mm_maddubs_epi16(a.high, b.high)};
}

#undef QUIRE_LANES2
#undef QUIRE_LANES3

// Shifts.
#define QUIRE_SHIFT(name, type, operation) \
  QUIRE_INLINE __m256i name(__m256i a, int by) { return {as_int(type(a.low) operation by), as_int(type(a.high) operation by)}; }
QUIRE_SHIFT(_mm256_slli_epi16, u16, <<)
QUIRE_SHIFT(_mm256_srli_epi16, u16, >>)
QUIRE_SHIFT(_mm256_slli_epi32, u32, <<)
QUIRE_SHIFT(_mm256_srli_epi32, u32, >>)
#undef QUIRE_SHIFT
QUIRE_INLINE __m128i _mm_srli_si128(__m128i a, int by) {
  return by == 8 ? as_int(vextq_u8(u8(a), vdupq_n_u8(0), 8)) : (__builtin_trap(), a);
}

// Conversions.
QUIRE_INLINE __m256 _mm256_cvtepi32_ps(__m256i a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
QUIRE_INLINE __m256i _mm256_cvtps_epi32(__m256 a) { return {vcvtnq_s32_f32(a.low), vcvtnq_s32_f32(a.high)}; }
QUIRE_INLINE __m256i _mm256_cvtepu16_epi32(__m128i a) {
  return {as_int(vmovl_u16(vget_low_u16(u16(a)))), as_int(vmovl_high_u16(u16(a)))};
}
QUIRE_INLINE __m256i _mm256_cvtepi16_epi32(__m128i a) {
  return {vmovl_s16(vget_low_s16(s16(a))), vmovl_high_s16(s16(a))};
}
QUIRE_INLINE __m256i _mm256_cvtepi8_epi16(__m128i a) {
  return {as_int(vmovl_s8(vget_low_s8(s8(a)))), as_int(vmovl_high_s8(s8(a)))};
}
// The lower 8 bytes.
QUIRE_INLINE __m256i _mm256_cvtepi8_epi32(__m128i a) {
  return _mm256_cvtepi16_epi32(as_int(vmovl_s8(vget_low_s8(s8(a)))));
}
QUIRE_INLINE __m256i _mm256_cvtepu8_epi32(__m128i a) {
  return _mm256_cvtepu16_epi32(as_int(vmovl_u8(vget_low_u8(u8(a)))));
}
QUIRE_INLINE __m256 _mm256_cvtph_ps(__m128i a) {
  const float16x8_t halves = vreinterpretq_f16_s32(a);
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
QUIRE_INLINE __m256 _mm256_round_ps(__m256 a, int rounding) {
  if (rounding != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) __builtin_trap();
  return {vrndnq_f32(a.low), vrndnq_f32(a.high)};
}

// Comparisons.
QUIRE_INLINE __m128 compare_half(__m128 a, __m128 b, int order) {
  const uint32x4_t ordered = vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b));
  if (order == _CMP_EQ_OQ) return vreinterpretq_f32_u32(vceqq_f32(a, b));
  if (order == _CMP_LT_OQ) return vreinterpretq_f32_u32(vcltq_f32(a, b));
  if (order == _CMP_UNORD_Q) return vreinterpretq_f32_u32(vmvnq_u32(ordered));
  __builtin_trap();
}
QUIRE_INLINE __m256 _mm256_cmp_ps(__m256 a, __m256 b, int order) {
  return {compare_half(a.low, b.low, order), compare_half(a.high, b.high, order)};
}
// The signs of all lanes as bits.
QUIRE_INLINE int _mm256_movemask_ps(__m256 a) {
  const int32x4_t by = {0, 1, 2, 3};
  const uint32x4_t low = vshrq_n_u32(vreinterpretq_u32_f32(a.low), 31);
  const uint32x4_t high = vshrq_n_u32(vreinterpretq_u32_f32(a.high), 31);
  return vaddvq_u32(vshlq_u32(low, by)) | vaddvq_u32(vshlq_u32(high, by)) << 4;
}

// Permutations.
QUIRE_INLINE __m128i _mm_shuffle_epi32(__m128i a, int lanes) {
  return lanes == 0x4e ? vextq_s32(a, a, 2) : lanes == 0xb1 ? vrev64q_s32(a) : (__builtin_trap(), a);
}
QUIRE_INLINE __m256i _mm256_permute4x64_epi64(__m256i a, int lanes) {
  if (lanes != 0xd8) __builtin_trap();
  return {as_int(vtrn1q_s64(s64(a.low), s64(a.high))), as_int(vtrn2q_s64(s64(a.low), s64(a.high)))};
}
QUIRE_INLINE __m256i _mm256_permute2x128_si256(__m256i a, __m256i b, int halves) {
  const auto half = [&](int i) __attribute__((always_inline)) { return i == 0 ? a.low : i == 1 ? a.high : i == 2 ? b.low : b.high; };
  return {half(halves & 3), half(halves >> 4 & 3)};
}
// Lanes of a by the lower 3 bits of the index.
QUIRE_INLINE __m256 _mm256_permutevar8x32_ps(__m256 a, __m256i index) {
  const uint8x16x2_t table = {vreinterpretq_u8_f32(a.low), vreinterpretq_u8_f32(a.high)};
  const auto select = [&](__m128i lanes) __attribute__((always_inline)) {
    const uint32x4_t bytes = (u32(lanes) & 7) * 0x04040404u + 0x03020100u;
    return vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(bytes)));
  };
  return {select(index.low), select(index.high)};
}
// Words 0, 2, 1 and 3 of each lower or upper half of 128 bits.
QUIRE_INLINE __m256i _mm256_shufflelo_epi16(__m256i a, int) {
  const auto swap = [](int16x8_t w) __attribute__((always_inline)) { return as_int(__builtin_shufflevector(w, w, 0, 2, 1, 3, 4, 5, 6, 7)); };
  return {swap(s16(a.low)), swap(s16(a.high))};
}
QUIRE_INLINE __m256i _mm256_shufflehi_epi16(__m256i a, int) {
  const auto swap = [](int16x8_t w) __attribute__((always_inline)) { return as_int(__builtin_shufflevector(w, w, 0, 1, 2, 3, 4, 6, 5, 7)); };
  return {swap(s16(a.low)), swap(s16(a.high))};
}

// Reductions read lane 0 of these.
QUIRE_INLINE __m128 _mm_movehl_ps(__m128, __m128 b) { return vextq_f32(b, b, 2); }
QUIRE_INLINE __m128 _mm_movehdup_ps(__m128 a) { return vtrn2q_f32(a, a); }
QUIRE_INLINE __m128 _mm_add_ss(__m128 a, __m128 b) { return vaddq_f32(a, b); }
QUIRE_INLINE __m128 _mm_max_ss(__m128 a, __m128 b) { return _mm_max_ps(a, b); }

}  // namespace quire
