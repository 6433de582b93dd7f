// SPDX-License-Identifier: Apache-2.0
// GEMM of rows that are quantized to 8 bits at each call with an int8 weight that was packed once into panels.
//
// vpdpbusd multiplies twice as many numbers as vdpbf16ps, and the weight takes half the memory. A panel has 32 output
// columns: for every four inputs, the fours of all columns are adjacent. Behind them follow the 32 float32 scales of
// the columns and 32 int32 offsets: vpdpbusd reads the rows unsigned, so 128 is added to them and the offset, 128 times
// the sum of a column, is subtracted from the result.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <vector>

#include "ops.h"
#include "tile.h"

namespace quire {
namespace {

constexpr int64_t kTail = kColumns * (sizeof(float) + sizeof(int32_t));  // bytes behind the weights of a panel

// Arguments of a tile: up to 8 rows by one panel.
struct Int8Tile {
  const uint8_t* x;  // [rows, k]
  const float* row_scales;
  const int8_t* panel;
  int64_t k;
  bf16* out;  // rows of ldo
  int64_t ldo;
  const bf16* bias;  // of the panel, or null
  bool add;
  int64_t prefetched;  // bytes of the next panel to prefetch in each step; 0: none
  const char* next;
};

// sum += x * weights. With the intrinsic, GCC copies the sums to other registers and to memory.
inline __attribute__((always_inline)) void multiply_add(__m512i& sum, __m512i x, __m512i weights) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weights));
}

template <int R>
void compute_int8(const Int8Tile& t) {
  __m512i sums[R][2];
  each<R>([&](auto r) { sums[r][0] = sums[r][1] = _mm512_setzero_si512(); });
  const char* next = t.next;
  for (int64_t i = 0; i < t.k; i += 4) {
    const __m512i left = _mm512_loadu_si512(t.panel + i * kColumns);
    const __m512i right = _mm512_loadu_si512(t.panel + i * kColumns + 64);
    if (t.prefetched) {
      _mm_prefetch(next, _MM_HINT_T1);
      next += t.prefetched;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t four;
      __builtin_memcpy(&four, t.x + r * t.k + i, 4);
      const __m512i x = _mm512_set1_epi32(four);
      multiply_add(sums[r][0], x, left);
      multiply_add(sums[r][1], x, right);
    }
  }
  const float* scales = (const float*)(t.panel + t.k * kColumns);
  const int32_t* offsets = (const int32_t*)(scales + kColumns);
  each<R>([&](auto r) {
    const __m512 scale = _mm512_set1_ps(t.row_scales[r]);
    each<2>([&](auto half) {
      const int64_t at = half * kLanes;
      const __m512i sum = _mm512_sub_epi32(sums[r][half], _mm512_loadu_si512(offsets + at));
      const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_loadu_ps(scales + at)));
      finish(value, t.out + r * t.ldo + at, t.bias ? t.bias + at : nullptr, t.add);
    });
  });
}

constexpr void (*kComputeInt8[kTileRows + 1])(const Int8Tile&) = {
    nullptr,         compute_int8<1>, compute_int8<2>, compute_int8<3>, compute_int8<4>,
    compute_int8<5>, compute_int8<6>, compute_int8<7>, compute_int8<8>,
};

// Quantize a row symmetrically to [-127, 127], plus 128, and return its scale. k is a multiple of 16.
float quantize_row(const bf16* x, uint8_t* out, int64_t k) {
  __m512 most = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += kLanes) most = _mm512_max_ps(_mm512_abs_ps(load(x + i)), most);
  const float amax = _mm512_reduce_max_ps(most);
  const __m512 factor = _mm512_set1_ps(amax > 0 ? 127.0f / amax : 0.0f);
  for (int64_t i = 0; i < k; i += kLanes) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + i), factor));
    _mm_storeu_si128((__m128i*)(out + i), _mm512_cvtepi32_epi8(_mm512_add_epi32(q, _mm512_set1_epi32(128))));
  }
  return amax / 127.0f;
}

}  // namespace

extern "C" {

// weight [n, k] and the scales [n] of its rows to panels [n / 32, 32 k + 256]. n is a multiple of 32, k of 16.
void quire_pack_int8(const int8_t* weight, const float* scales, int8_t* packed, int64_t n, int64_t k) {
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < n / kColumns; p++) {
    int8_t* const panel = packed + p * (k * kColumns + kTail);
    float* const tail = (float*)(panel + k * kColumns);
    int32_t* const offsets = (int32_t*)(tail + kColumns);
    for (int64_t c = 0; c < kColumns; c++) {
      const int8_t* const row = weight + (p * kColumns + c) * k;
      int32_t sum = 0;
      for (int64_t i = 0; i < k; i++) {
        panel[(i / 4 * kColumns + c) * 4 + i % 4] = row[i];
        sum += row[i];
      }
      tail[c] = scales[p * kColumns + c];
      offsets[c] = 128 * sum;
    }
  }
}

// out [m, n] = (add ? out : 0) + x [m, k] W^T + bias; x has rows of ldx.
void quire_linear_int8(const bf16* x, int64_t ldx, const int8_t* packed, const bf16* bias, bf16* out, int64_t m,
                       int64_t n, int64_t k, int64_t add) {
  static thread_local std::vector<uint8_t> quantized_rows;
  static thread_local std::vector<float> scales_of_rows;
  if ((int64_t)quantized_rows.size() < m * k) quantized_rows.resize(m * k);
  if ((int64_t)scales_of_rows.size() < m) scales_of_rows.resize(m);
  uint8_t* const rows = quantized_rows.data();
  float* const scales = scales_of_rows.data();
  const int64_t panels = n / kColumns, panel_bytes = k * kColumns + kTail;
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < m; r++) scales[r] = quantize_row(x + r * ldx, rows + r * k, k);
    // Threads divide the panels and not the rows, so weights are read from memory once.
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
    for (int64_t m0 = 0; m0 < m; m0 += kBlockRows) {
      const int64_t count = std::min(kBlockRows, m - m0), tiles = (count + kTileRows - 1) / kTileRows;
      for (int64_t p = begin; p < end; p++) {
        const int8_t* const panel = packed + p * panel_bytes;
        const int64_t share = panel_bytes / tiles;
        for (int64_t tile = 0; tile < tiles; tile++) {
          const int64_t r0 = m0 + count * tile / tiles, r1 = m0 + count * (tile + 1) / tiles;
          kComputeInt8[r1 - r0]({
              rows + r0 * k,
              scales + r0,
              panel,
              k,
              out + r0 * n + p * kColumns,
              n,
              bias ? bias + p * kColumns : nullptr,
              add != 0,
              // With a single tile the hardware prefetcher is faster; see tile.h.
              p + 1 < end && tiles > 1 ? share / (k / 4) : 0,
              (const char*)(panel + panel_bytes) + tile * share,
          });
        }
      }
    }
  }
}

}  // extern "C"
}  // namespace quire
