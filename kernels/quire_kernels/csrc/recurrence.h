// SPDX-License-Identifier: Apache-2.0
// Helpers of the kernels that update states: see gated_delta.cpp and mamba2.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops.h"

namespace quire {

// The tokens of a step by which states are updated one after the other; see StateBatch.
struct Decodes {
  const int64_t *tokens, *rows;    // first token and row of the state of each span
  const int64_t *lengths, *kept;   // number of tokens, and after how many of them the state is kept
  int64_t count;
};

// Minimum elements per thread: with fewer, a second thread costs more than it saves.
constexpr int64_t kParallel = 1 << 13;

inline void store_masked(float* p, __m512 v, __mmask16 mask) {
  if (mask == 0xffff) return _mm512_storeu_ps(p, v);
  alignas(64) float all[kLanes];
  _mm512_store_ps(all, v);
  std::copy(all, all + __builtin_ctz(~(uint32_t)mask), p);
}

inline void store_masked(bf16* p, __m512 v, __mmask16 mask) { store(p, v, mask); }

// Tokens of a prompt that are computed together.
constexpr int64_t kChunk = 64;
// Rows and registers of a tile of a matrix product.
constexpr int kTileRows = 4, kTile = kAvx512 ? 4 : 1;

// A tile of c [4 or fewer, 16 * N] = scale * c + sign * a @ b. a: element (i, k) is at a[i * lda + k * step].
template <int R, int N>
inline void multiply_tile(float* c, int64_t ldc, const float* a, int64_t lda, int64_t step, const float* b, int64_t ldb,
                          int64_t depth, float scale, float sign) {
  __m512 sums[R][N];
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) sums[r][n] = _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; k++) {
    __m512 columns[N];
    for (int n = 0; n < N; n++) columns[n] = _mm512_loadu_ps(b + k * ldb + n * kLanes);
    for (int r = 0; r < R; r++) {
      const __m512 x = _mm512_set1_ps(a[r * lda + k * step]);
      for (int n = 0; n < N; n++) sums[r][n] = _mm512_fmadd_ps(x, columns[n], sums[r][n]);
    }
  }
  const __m512 factor = _mm512_set1_ps(sign), keep = _mm512_set1_ps(scale);
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) {
      float* p = c + r * ldc + n * kLanes;
      const __m512 old = scale == 0 ? _mm512_setzero_ps() : _mm512_mul_ps(_mm512_loadu_ps(p), keep);
      _mm512_storeu_ps(p, _mm512_fmadd_ps(sums[r][n], factor, old));
    }
}

// c [rows, columns] = scale * c + sign * a @ b; columns is a multiple of 16.
inline void multiply(float* c, int64_t ldc, const float* a, int64_t lda, int64_t step, const float* b, int64_t ldb,
                     int64_t rows, int64_t columns, int64_t depth, float scale, float sign) {
  for (int64_t j = 0; j < columns;) {
    const bool is_wide = columns - j >= kTile * kLanes;
    for (int64_t i = 0; i < rows;) {
      float* tile = c + i * ldc + j;
      const float *left = a + i * lda, *right = b + j;
      if (rows - i >= kTileRows) {
        if (is_wide)
          multiply_tile<kTileRows, kTile>(tile, ldc, left, lda, step, right, ldb, depth, scale, sign);
        else
          multiply_tile<kTileRows, 1>(tile, ldc, left, lda, step, right, ldb, depth, scale, sign);
        i += kTileRows;
      } else {
        if (is_wide)
          multiply_tile<1, kTile>(tile, ldc, left, lda, step, right, ldb, depth, scale, sign);
        else
          multiply_tile<1, 1>(tile, ldc, left, lda, step, right, ldb, depth, scale, sign);
        i++;
      }
    }
    j += is_wide ? kTile * kLanes : kLanes;
  }
}

inline float widen_one(bf16 value) {
  const uint32_t bits = (uint32_t)value << 16;
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}

}  // namespace quire
