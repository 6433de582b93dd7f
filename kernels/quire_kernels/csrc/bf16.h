// SPDX-License-Identifier: Apache-2.0
// bfloat16 in registers of 512 bits: helpers of all compiled kernels.
//
// An AVX-512 build has such registers. In an AVX2 build, avx2.h makes each of two registers.
#pragma once

#include <immintrin.h>
#ifndef __AVX512F__
#include "avx2.h"
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

// sums + the products of the four unsigned bytes of weights and the four signed bytes of x in each lane of 32 bits.
inline __attribute__((always_inline)) void multiply_add(__m512i& sums, __m512i weights, __m512i x) {
#ifdef __AVX512F__
  // With the intrinsic, GCC copies the sums to other registers and to memory.
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(x));
#else
  sums = {multiply_fours(sums.low, weights.low, x.low), multiply_fours(sums.high, weights.high, x.high)};
#endif
}

constexpr float kLog2E = 1.44269504f;

inline __m512 silu(__m512 x) {
  // x / (1 + e^-x), with e^-|x| so that nothing overflows.
  const __m512 e = exp2(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-kLog2E)));
  const __m512 one = _mm512_set1_ps(1.f);
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 numerator = _mm512_mask_blend_ps(negative, one, e);
  return _mm512_mul_ps(x, _mm512_div_ps(numerator, _mm512_add_ps(one, e)));
}

}  // namespace quire
