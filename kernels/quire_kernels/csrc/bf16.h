// SPDX-License-Identifier: Apache-2.0
// bfloat16 in registers of 512 bits: helpers of all compiled kernels.
//
// The AVX-512 builds have such registers. In an AVX2 build, avx2.h makes each of two registers, and on ARM64, neon.h
// makes those of two. Builds without AVX-512 BF16 multiply bfloat16 numbers as float32 numbers.
#pragma once

#ifndef __AVX512F__
#include "avx2.h"
#elif defined __AVX512BF16__
#include <immintrin.h>
#else
#include "avx512.h"
#endif

#include <cstdint>

namespace quire {

using bf16 = uint16_t;

constexpr int kLanes = 16;  // float32 lanes of a register

#ifdef __AVX512F__
constexpr bool kAvx512 = true;
#else
constexpr bool kAvx512 = false;  // 16 registers of 256 bits, not 32 of 512 bits
#endif

#ifdef __AVX512BF16__
constexpr bool kHasBf16 = true;
#else
constexpr bool kHasBf16 = false;

// The first and the second numbers of 16 pairs.
struct Pairs {
  __m512 even, odd;
};

inline __attribute__((always_inline)) Pairs split_pairs(__m512i pairs) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)))};
}

// sums + the products of both numbers of each pair. Each of the two products is rounded.
inline __attribute__((always_inline)) __m512 multiply_pairs(__m512 sums, const Pairs& a, const Pairs& b) {
  return _mm512_fmadd_ps(a.odd, b.odd, _mm512_fmadd_ps(a.even, b.even, sums));
}

using __m512bh = __m512i;

inline __attribute__((always_inline)) __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  return multiply_pairs(sums, split_pairs(a), split_pairs(b));
}

#endif

inline __m512 widen(__m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

inline __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

inline __m512 load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }

inline void store(bf16* p, __m512 v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }

// Load the first n of 16 elements; n is at least 1.
inline __mmask16 first(int64_t n) { return n >= kLanes ? 0xffff : (__mmask16)((1u << n) - 1); }

inline __m512 load(const bf16* p, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, p)); }

inline __m512 load(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }

inline void store(bf16* p, __m512 v, __mmask16 mask) { _mm256_mask_storeu_epi16(p, mask, narrow(v)); }

// Broadcast a pair of neighbouring elements to every lane, as vdpbf16ps multiplies them.
inline __m512bh pair(const bf16* p) {
  int32_t both;
  __builtin_memcpy(&both, p, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

// 2^x for x <= 0, to about 2e-7 of the value; 0 for -inf. Polynomial: Taylor series of 2^f, f in [-0.5, 0.5].
inline __m512 exp2(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-200.f));
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.5403530e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, n);
}

// Inputs of 8 bits, as the products of int8 weights read them; four are multiplied at a time.
#ifdef __AVX512VNNI__

using Input = int8_t;
using Four = __m512i;  // in each lane of 32 bits

inline void store_inputs(Input* out, __m512i x) { _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8(x)); }

inline Four load_four(const Input* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

// sums + the products of the four unsigned bytes of weights and the four inputs in each lane of 32 bits.
inline __attribute__((always_inline)) void multiply_add(__m512i& sums, __m512i weights, Four x) {
  // With the intrinsic, GCC copies the sums to other registers and to memory.
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(x));
}

#else

// vpmaddubsw would add two products of 8 bits with saturation, so inputs are words: the first and the third of each
// four, then the second and the fourth. A register of columns and a row take two vpmaddwd and two additions. Splitting
// the weights takes two instructions more for all rows.
using Input = int16_t;

struct Four {
  __m512i even, odd;  // pairs of words in each lane of 32 bits
};

inline void store_inputs(Input* out, __m512i x) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm512_cvtepi32_epi8(x));
  _mm256_storeu_si256((__m256i*)out, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}

inline Four load_four(const Input* p) {
  int32_t even, odd;
  __builtin_memcpy(&even, p, 4);
  __builtin_memcpy(&odd, p + 2, 4);
  return {_mm512_set1_epi32(even), _mm512_set1_epi32(odd)};
}

inline __attribute__((always_inline)) void multiply_add(__m512i& sums, __m512i weights, const Four& x) {
  const __m512i even = _mm512_and_si512(weights, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(weights, 8);
  sums = _mm512_add_epi32(sums, _mm512_madd_epi16(even, x.even));
  sums = _mm512_add_epi32(sums, _mm512_madd_epi16(odd, x.odd));
}

#endif

constexpr float kLog2E = 1.44269504f;

// 1 / (1 + e^-x), with e^-|x| so that nothing overflows.
inline __m512 sigmoid(__m512 x) {
  const __m512 e = exp2(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-kLog2E)));
  const __m512 one = _mm512_set1_ps(1.f);
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_div_ps(_mm512_mask_blend_ps(negative, one, e), _mm512_add_ps(one, e));
}

inline __m512 silu(__m512 x) { return _mm512_mul_ps(x, sigmoid(x)); }

// x (1 + tanh(y)) / 2 = x sigmoid(2 y), with y = sqrt(2 / pi) (x + 0.044715 x^3).
inline __m512 gelu_tanh(__m512 x) {
  const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.f));
  return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.59576912f))));
}

inline __m512 tanh(__m512 x) {
  // (1 - e) / (1 + e) with e = exp(-2|x|), and the sign of x.
  const __m512 one = _mm512_set1_ps(1.f);
  const __m512 e = exp2(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.f * kLog2E)));
  const __m512 t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(t), _mm512_castps_si512(x),
                                                       _mm512_set1_epi32(0x80000000), 0xd8));
}

}  // namespace quire
