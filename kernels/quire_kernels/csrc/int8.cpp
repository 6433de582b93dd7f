// SPDX-License-Identifier: Apache-2.0
// GEMM of rows that are quantized to 8 bits at each call with an int8 weight that was packed once into panels.
//
// vpdpbusd multiplies twice as many numbers as vdpbf16ps, and the weight takes half the memory. A panel has 32 output
// columns: for every four inputs, the fours of all columns are adjacent. Behind them follow the 32 float32 scales of
// the columns. vpdpbusd reads weights unsigned, so 128 is added to them, and the sum of a group of inputs starts at
// -128 times the sum of the row's group.
//
// Each 64 inputs of a row have a scale. With one scale for a row, outliers before the last linear of an MLP made the
// error of the logits of a small model 1.5 times as large.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "adapters.h"
#include "ops.h"
#include "tile.h"

namespace quire {
namespace {

constexpr int64_t kTail = kColumns * sizeof(float);  // bytes behind the weights of a panel
constexpr int64_t kGroup = 64;                       // inputs of a row that have a scale; the last group can be smaller

int64_t num_groups(int64_t k) { return (k + kGroup - 1) / kGroup; }

// A group of a quantized row.
struct Group {
  float scale;
  int32_t start;  // of its sums
};

// Arguments of a tile: up to 8 rows by one panel.
struct Int8Tile {
  const Input* x;       // [rows, k]
  const Group* groups;  // [rows, groups]
  const uint8_t* panel;
  int64_t k;
  bf16* out;  // rows of ldo
  int64_t ldo;
  const bf16* bias;  // of the panel, or null
  bool add;
  int64_t prefetched;  // bytes of the next panel to prefetch in each step; 0: none
  const char* next;
  const Transform* transforms;  // of the rows, or null
  Run ahead;                    // lines to prefetch for the adapters

  // Arguments of part `number`, from `row` on.
  Int8Tile part(int64_t row, int64_t number, int64_t parts) const {
    Int8Tile part = *this;
    part.x += row * k;
    part.groups += row * num_groups(k);
    part.out += row * ldo;
    if (transforms) part.transforms += row;
    if (number) part.ahead = {nullptr, 0};
    part.prefetched /= parts;
    part.next += number * (k / 4) * part.prefetched;
    return part;
  }
};

template <int R, int kFirst = 0, int H = 2>
void compute_int8(const Int8Tile& t) {
  // Kept in memory: they are used once a group.
  float totals[R][H * kLanes] = {};
  const char* next = t.next;
  const int64_t groups = num_groups(t.k);
  for (int64_t group = 0, i = 0; group < groups; group++) {
    if (t.ahead.lines) prefetch_part(t.ahead, group, groups);
    __m512i sums[R][H];
    each<R>([&](auto r) __attribute__((always_inline)) { sums[r][0] = sums[r][H - 1] = _mm512_set1_epi32(t.groups[r * groups + group].start); });
    for (const int64_t end = std::min(i + kGroup, t.k); i < end; i += 4) {
      const __m512i left = _mm512_loadu_si512(t.panel + i * kColumns + kFirst * 64);
      const __m512i right = _mm512_loadu_si512(t.panel + i * kColumns + 64);
      if (t.prefetched) {
        _mm_prefetch(next, _MM_HINT_T1);
        next += t.prefetched;
      }
      each<R>([&](auto r) __attribute__((always_inline)) {
        const Four x = load_four(t.x + r * t.k + i);
        multiply_add(sums[r][0], left, x);
        if constexpr (H == 2) multiply_add(sums[r][1], right, x);
      });
    }
    each<R>([&](auto r) __attribute__((always_inline)) {
      const __m512 scale = _mm512_set1_ps(t.groups[r * groups + group].scale);
      each<H>([&](auto half) __attribute__((always_inline)) {
        float* const total = totals[r] + half * kLanes;
        _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][half]), scale, _mm512_loadu_ps(total)));
      });
    });
  }
  const float* scales = (const float*)(t.panel + t.k * kColumns);
  each<R>([&](auto r) __attribute__((always_inline)) {
    each<H>([&](auto half) __attribute__((always_inline)) {
      const int64_t at = (kFirst + half) * kLanes;
      const __m512 value = _mm512_mul_ps(_mm512_loadu_ps(totals[r] + half * kLanes), _mm512_loadu_ps(scales + at));
      finish(t.transforms ? t.transforms[r](value, at) : value, t.out + r * t.ldo + at, t.bias ? t.bias + at : nullptr,
             t.add);
    });
  });
}

template <int R>
void compute_int8_parts(const Int8Tile& t) {
  each_part<R>([&](auto part) {
    compute_int8<part.kRows, part.kFirst, part.kHalves>(t.part(part.kRow, part.kNumber, kParts<R>));
  });
}

template <int R>
constexpr auto kTile = kParts<R> == 1 ? compute_int8<R> : compute_int8_parts<R>;

constexpr void (*kComputeInt8[kTileRows + 1])(const Int8Tile&) = {
    nullptr, kTile<1>, kTile<2>, kTile<3>, kTile<4>, kTile<5>, kTile<6>, kTile<7>, kTile<8>,
};

// Quantize the groups of a row symmetrically to [-127, 127]. k is a multiple of 16.
void quantize_row(const bf16* x, Input* out, Group* groups, int64_t k) {
  for (int64_t begin = 0; begin < k; begin += kGroup, groups++) {
    const int64_t end = std::min(begin + kGroup, k);
    __m512 most = _mm512_setzero_ps();
    for (int64_t i = begin; i < end; i += kLanes) most = _mm512_max_ps(_mm512_abs_ps(load(x + i)), most);
    const float amax = _mm512_reduce_max_ps(most);
    const __m512 factor = _mm512_set1_ps(amax > 0 ? 127.0f / amax : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = begin; i < end; i += kLanes) {
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + i), factor));
      sum = _mm512_add_epi32(sum, q);
      store_inputs(out + i, q);
    }
    *groups = {amax / 127.0f, -128 * _mm512_reduce_add_epi32(sum)};
  }
}

// Rows of a call, in memory that a thread keeps.
struct Quantized {
  std::vector<Input> rows;
  std::vector<Group> groups;
};

Quantized* quantized(int64_t m, int64_t k) {
  static thread_local Quantized scratch;
  if ((int64_t)scratch.rows.size() < m * k) scratch.rows.resize(m * k);
  if ((int64_t)scratch.groups.size() < m * num_groups(k)) scratch.groups.resize(m * num_groups(k));
  return &scratch;
}

}  // namespace

extern "C" {

// weight [n, k] and the scales [n] of its rows to panels [n / 32, 32 k + 128]. n is a multiple of 32, k of 16.
void quire_pack_int8(const int8_t* weight, const float* scales, uint8_t* packed, int64_t n, int64_t k) {
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < n / kColumns; p++) {
    uint8_t* const panel = packed + p * (k * kColumns + kTail);
    for (int64_t c = 0; c < kColumns; c++) {
      const int8_t* const row = weight + (p * kColumns + c) * k;
      for (int64_t i = 0; i < k; i++) panel[(i / 4 * kColumns + c) * 4 + i % 4] = row[i] + 128;
      ((float*)(panel + k * kColumns))[c] = scales[p * kColumns + c];
    }
  }
}

// out [m, n] = (add ? out : 0) + x [m, k] W^T + bias; x has rows of ldx. The rows' adapters can transform x W^T,
// and what they read afterwards is prefetched.
void quire_linear_int8(const bf16* x, int64_t ldx, const uint8_t* packed, const bf16* bias, bf16* out, int64_t m,
                       int64_t n, int64_t k, int64_t add, const QuireLoraLinear* adapters,
                       const QuireLoraRows* of_rows) {
  const int64_t panels = n / kColumns, panel_bytes = k * kColumns + kTail, num = num_groups(k);
  // Each thread quantizes few rows itself: the threads then need not wait for each other.
  const bool shared = m > kTileRows;
  Quantized* const all = shared ? quantized(m, k) : nullptr;
#pragma omp parallel
  {
    // Threads divide the panels and not the rows, so weights are read from memory once.
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    Quantized* const q = shared ? all : quantized(m, k);
    Input* const rows = q->rows.data();
    Group* const groups = q->groups.data();
    const int64_t first_row = shared ? m * thread / threads : 0, last_row = shared ? m * (thread + 1) / threads : m;
    for (int64_t r = first_row; r < last_row; r++) quantize_row(x + r * ldx, rows + r * k, groups + r * num, k);
    if (shared) {
#pragma omp barrier
    }
    const int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
    PanelTransforms transforms(adapters, of_rows);
    LinesToCome lines(adapters, of_rows, thread, threads, begin, end, tiles_of(m) * (end - begin));
    for (int64_t m0 = 0; m0 < m; m0 += kBlockRows) {
      const int64_t count = std::min(kBlockRows, m - m0), tiles = (count + kTileRows - 1) / kTileRows;
      for (int64_t p = begin; p < end; p++) {
        const uint8_t* const panel = packed + p * panel_bytes;
        const int64_t share = panel_bytes / tiles;
        for (int64_t tile = 0; tile < tiles; tile++) {
          const int64_t r0 = m0 + count * tile / tiles, r1 = m0 + count * (tile + 1) / tiles;
          kComputeInt8[r1 - r0]({
              rows + r0 * k,
              groups + r0 * num,
              panel,
              k,
              out + r0 * n + p * kColumns,
              n,
              bias ? bias + p * kColumns : nullptr,
              add != 0,
              p + 1 < end && prefetches(tiles) ? share / (k / 4) : 0,
              (const char*)(panel + panel_bytes) + tile * share,
              transforms.of(p, r0, r1),
              lines.take(),
          });
        }
      }
    }
  }
}

}  // extern "C"
}  // namespace quire
