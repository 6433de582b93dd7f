// SPDX-License-Identifier: Apache-2.0
// What processors with AVX-512 but without AVX-512 BF16 lack, under the instruction's name in our namespace; see avx2.h.
#pragma once

#include <immintrin.h>

namespace quire {

// The upper 16 bits of each lane after rounding to nearest even; NaN stays NaN.
inline __m256i _mm512_cvtneps_pbh(__m512 a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  const __m512i all = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(all, 16));
}

}  // namespace quire
