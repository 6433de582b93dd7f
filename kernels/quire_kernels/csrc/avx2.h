// SPDX-License-Identifier: Apache-2.0
// The AVX-512 types and intrinsics that the compiled kernels use, for processors that have AVX2, FMA and F16C only.
//
// A register of 512 bits is a pair of 256 bits. The names are those of AVX-512, in our namespace, where they hide the
// compiler's: a kernel is written once. Results are those of the instruction, with two exceptions: sums are in another
// order, and numbers that float32 cannot represent as normal ones are kept in bf16 but become 0 in a power of two. Masks
// are integers. Those of loads and stores of 8 and 16 bits select the first elements, as `first` makes them.
#pragma once

#ifdef __aarch64__
#include "neon.h"
#else
#include <immintrin.h>
#endif

#include <cstdint>

// Intrinsics that compilers define as macros.
#undef _mm512_cmp_ps_mask
#undef _mm512_mask_cmp_ps_mask
#undef _mm512_roundscale_ps
#undef _mm512_setr_epi32
#undef _mm512_shuffle_i32x4
#undef _mm512_slli_epi32
#undef _mm512_srli_epi16
#undef _mm512_srli_epi32
#undef _mm512_ternarylogic_epi32

#define _mm512_cmp_ps_mask(a, b, order) compare<order>(a, b)
#define _mm512_mask_cmp_ps_mask(mask, a, b, order) ((__mmask16)((mask) & compare<order>(a, b)))
#define _mm512_roundscale_ps(a, rounding) round_lanes<rounding>(a)
#define _mm512_shuffle_i32x4(a, b, lanes) shuffle_lanes<lanes>(a, b)
#define _mm512_ternarylogic_epi32(a, b, c, table) combine<table>(a, b, c)

#undef QUIRE_INLINE
#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

struct __m512 {
  __m256 low, high;
};

struct __m512i {
  __m256i low, high;
};

// Define an operation on registers of T by the operation on their halves.
#define QUIRE_BINARY(name, T, half) \
  QUIRE_INLINE T name(T a, T b) { return {half(a.low, b.low), half(a.high, b.high)}; }
#define QUIRE_TERNARY(name, T, half) \
  QUIRE_INLINE T name(T a, T b, T c) { return {half(a.low, b.low, c.low), half(a.high, b.high, c.high)}; }

QUIRE_BINARY(_mm512_add_ps, __m512, _mm256_add_ps)
QUIRE_BINARY(_mm512_sub_ps, __m512, _mm256_sub_ps)
QUIRE_BINARY(_mm512_mul_ps, __m512, _mm256_mul_ps)
QUIRE_BINARY(_mm512_div_ps, __m512, _mm256_div_ps)
QUIRE_BINARY(_mm512_max_ps, __m512, _mm256_max_ps)
QUIRE_BINARY(_mm512_min_ps, __m512, _mm256_min_ps)
QUIRE_TERNARY(_mm512_fmadd_ps, __m512, _mm256_fmadd_ps)
QUIRE_TERNARY(_mm512_fmsub_ps, __m512, _mm256_fmsub_ps)
QUIRE_TERNARY(_mm512_fnmadd_ps, __m512, _mm256_fnmadd_ps)
QUIRE_BINARY(_mm512_add_epi32, __m512i, _mm256_add_epi32)
QUIRE_BINARY(_mm512_add_epi16, __m512i, _mm256_add_epi16)
QUIRE_BINARY(_mm512_sub_epi32, __m512i, _mm256_sub_epi32)
QUIRE_BINARY(_mm512_madd_epi16, __m512i, _mm256_madd_epi16)
QUIRE_BINARY(_mm512_maddubs_epi16, __m512i, _mm256_maddubs_epi16)
QUIRE_BINARY(_mm512_max_epi32, __m512i, _mm256_max_epi32)
QUIRE_BINARY(_mm512_and_si512, __m512i, _mm256_and_si256)
QUIRE_BINARY(_mm512_or_si512, __m512i, _mm256_or_si256)
// These work within lanes of 128 bits in both widths.
QUIRE_BINARY(_mm512_unpacklo_epi8, __m512i, _mm256_unpacklo_epi8)
QUIRE_BINARY(_mm512_unpackhi_epi8, __m512i, _mm256_unpackhi_epi8)
QUIRE_BINARY(_mm512_unpacklo_epi16, __m512i, _mm256_unpacklo_epi16)
QUIRE_BINARY(_mm512_unpackhi_epi16, __m512i, _mm256_unpackhi_epi16)
QUIRE_BINARY(_mm512_unpacklo_epi32, __m512i, _mm256_unpacklo_epi32)
QUIRE_BINARY(_mm512_unpackhi_epi32, __m512i, _mm256_unpackhi_epi32)
QUIRE_BINARY(_mm512_unpacklo_epi64, __m512i, _mm256_unpacklo_epi64)
QUIRE_BINARY(_mm512_unpackhi_epi64, __m512i, _mm256_unpackhi_epi64)

#undef QUIRE_BINARY
#undef QUIRE_TERNARY

QUIRE_INLINE __m512i _mm512_slli_epi32(__m512i a, int by) {
  return {_mm256_slli_epi32(a.low, by), _mm256_slli_epi32(a.high, by)};
}
QUIRE_INLINE __m512i _mm512_srli_epi16(__m512i a, int by) {
  return {_mm256_srli_epi16(a.low, by), _mm256_srli_epi16(a.high, by)};
}
QUIRE_INLINE __m512i _mm512_srli_epi32(__m512i a, int by) {
  return {_mm256_srli_epi32(a.low, by), _mm256_srli_epi32(a.high, by)};
}

// Constants.
QUIRE_INLINE __m512 _mm512_setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
QUIRE_INLINE __m512i _mm512_setzero_si512() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
QUIRE_INLINE __m512 _mm512_set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
QUIRE_INLINE __m512i _mm512_set1_epi8(char x) { return {_mm256_set1_epi8(x), _mm256_set1_epi8(x)}; }
QUIRE_INLINE __m512i _mm512_set1_epi16(int16_t x) { return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
QUIRE_INLINE __m512i _mm512_set1_epi32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
template <typename... Numbers>
QUIRE_INLINE __m512i _mm512_setr_epi32(Numbers... numbers) {
  const int32_t all[16] = {numbers...};
  return {_mm256_loadu_si256((const __m256i*)all), _mm256_loadu_si256((const __m256i*)(all + 8))};
}

// Memory.
QUIRE_INLINE __m512 _mm512_loadu_ps(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
QUIRE_INLINE __m512 _mm512_load_ps(const float* p) { return _mm512_loadu_ps(p); }
QUIRE_INLINE void _mm512_storeu_ps(float* p, __m512 a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
QUIRE_INLINE void _mm512_store_ps(float* p, __m512 a) { _mm512_storeu_ps(p, a); }
QUIRE_INLINE __m512i _mm512_loadu_si512(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
QUIRE_INLINE __m512i _mm512_load_si512(const void* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE void _mm512_storeu_si512(void* p, __m512i a) {
  _mm256_storeu_si256((__m256i*)p, a.low);
  _mm256_storeu_si256((__m256i*)p + 1, a.high);
}
QUIRE_INLINE void _mm512_store_si512(void* p, __m512i a) { _mm512_storeu_si512(p, a); }

// Lanes whose bit is set, as all ones.
QUIRE_INLINE __m512i lanes_of(__mmask16 mask) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i low = _mm256_set1_epi32(mask), high = _mm256_set1_epi32(mask >> 8);
  return {_mm256_cmpeq_epi32(_mm256_and_si256(low, bits), bits),
          _mm256_cmpeq_epi32(_mm256_and_si256(high, bits), bits)};
}

QUIRE_INLINE __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* p) {
  if (mask == 0xffff) return _mm512_loadu_si512(p);
  const __m512i lanes = lanes_of(mask);
  return {_mm256_maskload_epi32((const int*)p, lanes.low), _mm256_maskload_epi32((const int*)p + 8, lanes.high)};
}
QUIRE_INLINE __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* p) {
  const __m512i bits = _mm512_maskz_loadu_epi32(mask, p);
  return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)};
}
QUIRE_INLINE __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* p) {
  if (mask == 0xffff) return _mm256_loadu_si256((const __m256i*)p);
  __m256i all = _mm256_setzero_si256();
  __builtin_memcpy(&all, p, 2 * __builtin_ctz(~mask));
  return all;
}
QUIRE_INLINE void _mm256_mask_storeu_epi16(void* p, __mmask16 mask, __m256i a) {
  if (mask == 0xffff)
    _mm256_storeu_si256((__m256i*)p, a);
  else
    __builtin_memcpy(p, &a, 2 * __builtin_ctz(~mask));
}
// Any mask.
QUIRE_INLINE void _mm512_mask_storeu_epi16(void* p, __mmask32 mask, __m512i a) {
  if (mask == ~0u) return _mm512_storeu_si512(p, a);
  int16_t words[32];
  _mm512_storeu_si512(words, a);
  for (; mask; mask &= mask - 1) __builtin_memcpy((int16_t*)p + __builtin_ctz(mask), words + __builtin_ctz(mask), 2);
}

// Conversions.
QUIRE_INLINE __m512 _mm512_castsi512_ps(__m512i a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
QUIRE_INLINE __m512i _mm512_castps_si512(__m512 a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
QUIRE_INLINE float _mm512_cvtss_f32(__m512 a) { return _mm256_cvtss_f32(a.low); }
QUIRE_INLINE __m512 _mm512_cvtepi32_ps(__m512i a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
QUIRE_INLINE __m512i _mm512_cvtps_epi32(__m512 a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
QUIRE_INLINE __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))};
}
QUIRE_INLINE __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return {_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))};
}
QUIRE_INLINE __m512i _mm512_cvtepu8_epi32(__m128i a) {
  return {_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))};
}
QUIRE_INLINE __m512 _mm512_cvtph_ps(__m256i a) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
}

// Words of the lower halves of all lanes: the instruction packs lanes of 128 bits, which the permutation reorders.
QUIRE_INLINE __m256i pack_words(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}
QUIRE_INLINE __m128i _mm512_cvtepi32_epi8(__m512i a) {
  const __m256i byte = _mm256_set1_epi32(255);
  const __m256i words = pack_words(_mm256_and_si256(a.low, byte), _mm256_and_si256(a.high, byte));
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
QUIRE_INLINE void _mm512_mask_cvtsepi32_storeu_epi8(void* p, __mmask16 mask, __m512i a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  if (mask == 0xffff)
    _mm_storeu_si128((__m128i*)p, bytes);
  else
    __builtin_memcpy(p, &bytes, __builtin_ctz(~mask));
}

// The upper 16 bits of each lane after rounding to nearest even; NaN stays NaN.
QUIRE_INLINE __m256i round_to_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  const __m256 all = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan);
  return _mm256_srli_epi32(_mm256_castps_si256(all), 16);
}
QUIRE_INLINE __m256i _mm512_cvtneps_pbh(__m512 a) { return pack_words(round_to_bf16(a.low), round_to_bf16(a.high)); }

// Floating point.
QUIRE_INLINE __m512 _mm512_abs_ps(__m512 a) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
template <int kRounding>
QUIRE_INLINE __m512 round_lanes(__m512 a) {
  return {_mm256_round_ps(a.low, kRounding), _mm256_round_ps(a.high, kRounding)};
}
// a * 2^n for an integer n of at most 127; 0 if 2^n is not a normal number.
QUIRE_INLINE __m256 scale_half(__m256 a, __m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  const __m256i power = _mm256_slli_epi32(_mm256_max_epi32(exponent, _mm256_setzero_si256()), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(power));
}
QUIRE_INLINE __m512 _mm512_scalef_ps(__m512 a, __m512 n) {
  return {scale_half(a.low, n.low), scale_half(a.high, n.high)};
}

// Masks.
template <int kOrder>
QUIRE_INLINE __mmask16 compare(__m512 a, __m512 b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, kOrder));
  return low | _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, kOrder)) << 8;
}
QUIRE_INLINE __mmask16 _mm512_cmplt_epi32_mask(__m512i a, __m512i b) {
  const int low = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.low, a.low)));
  return low | _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.high, a.high))) << 8;
}
QUIRE_INLINE __mmask16 _mm512_cmpge_epi32_mask(__m512i a, __m512i b) { return ~_mm512_cmplt_epi32_mask(a, b); }
QUIRE_INLINE __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
  const __m512 lanes = _mm512_castsi512_ps(lanes_of(mask));
  return {_mm256_blendv_ps(a.low, b.low, lanes.low), _mm256_blendv_ps(a.high, b.high, lanes.high)};
}
QUIRE_INLINE __m512 _mm512_mask_add_ps(__m512 source, __mmask16 mask, __m512 a, __m512 b) {
  const __m512 sum = _mm512_add_ps(a, b);
  return mask == 0xffff ? sum : _mm512_mask_blend_ps(mask, source, sum);
}
QUIRE_INLINE __m512 _mm512_mask_max_ps(__m512 source, __mmask16 mask, __m512 a, __m512 b) {
  const __m512 most = _mm512_max_ps(a, b);
  return mask == 0xffff ? most : _mm512_mask_blend_ps(mask, source, most);
}

// Reductions.
QUIRE_INLINE float _mm512_reduce_add_ps(__m512 a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
QUIRE_INLINE float _mm512_reduce_max_ps(__m512 a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
QUIRE_INLINE int32_t _mm512_reduce_add_epi32(__m512i a) {
  const __m256i eight = _mm256_add_epi32(a.low, a.high);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
QUIRE_INLINE int32_t _mm512_reduce_max_epi32(__m512i a) {
  const __m256i eight = _mm256_max_epi32(a.low, a.high);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// Permutations.
template <int kSelected>
QUIRE_INLINE __m512i shuffle_lanes(__m512i a, __m512i b) {
  constexpr int kFirst = (kSelected & 3) | (kSelected >> 2 & 3) << 4;
  constexpr int kSecond = (kSelected >> 4 & 3) | (kSelected >> 6 & 3) << 4;
  return {_mm256_permute2x128_si256(a.low, a.high, kFirst), _mm256_permute2x128_si256(b.low, b.high, kSecond)};
}

// The two tables of truth values in use: a | (b & c), and c ? b : a.
template <int kTable>
QUIRE_INLINE __m256i combine_half(__m256i a, __m256i b, __m256i c) {
  static_assert(kTable == 0xf8 || kTable == 0xd8);
  if constexpr (kTable == 0xf8) return _mm256_or_si256(a, _mm256_and_si256(b, c));
  return _mm256_or_si256(_mm256_and_si256(c, b), _mm256_andnot_si256(c, a));
}
template <int kTable>
QUIRE_INLINE __m512i combine(__m512i a, __m512i b, __m512i c) {
  return {combine_half<kTable>(a.low, b.low, c.low), combine_half<kTable>(a.high, b.high, c.high)};
}

// Indices of float32 lanes: 0 to 15 of a, 16 to 31 of b.
QUIRE_INLINE __m256 select_lanes(__m512 a, __m256i index, __m512 b) {
  const __m256 third = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)), from_b = _mm256_castsi256_ps(_mm256_slli_epi32(index, 27));
  const __m256 of_a = _mm256_blendv_ps(_mm256_permutevar8x32_ps(a.low, index), _mm256_permutevar8x32_ps(a.high, index), third);
  const __m256 of_b = _mm256_blendv_ps(_mm256_permutevar8x32_ps(b.low, index), _mm256_permutevar8x32_ps(b.high, index), third);
  return _mm256_blendv_ps(of_a, of_b, from_b);
}
QUIRE_INLINE __m512 _mm512_permutex2var_ps(__m512 a, __m512i index, __m512 b) {
  return {select_lanes(a, index.low, b), select_lanes(a, index.high, b)};
}

}  // namespace quire
