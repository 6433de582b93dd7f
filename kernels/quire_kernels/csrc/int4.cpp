// SPDX-License-Identifier: Apache-2.0
// GEMM of rows that are quantized to 8 bits at each call with a weight of 4 bits in panels of codes.cpp.
//
// A line of a panel contains four inputs of 32 columns. Its lower nibbles are the fours of columns 0 to 15 as vpdpbusd
// reads them, its upper nibbles those of columns 16 to 31, with the second and third input exchanged. So 128 weights
// take two masks, a shift and two multiplications, instead of the eleven instructions of a product in bfloat16.
//
// The inputs of each group of the weight have a scale. A code q stands for scale * (q - zero).

#include <omp.h>

#include <algorithm>
#include <vector>

#include "adapters.h"
#include "ops.h"
#include "tile.h"

namespace quire {
namespace {

struct Group {
  float scale, sum;  // of the quantized inputs
};

struct Int4Tile {
  const int8_t* x;      // [rows, k]
  const Group* groups;  // [rows, groups]
  const uint8_t* panel;
  int64_t k;
  bf16* out;  // rows of ldo
  int64_t ldo;
  const bf16* bias;  // of the panel, or null
  bool add;
  int64_t stride;  // bytes of `next` to prefetch for each line; 0: none
  const char* next;
  const Transform* transforms;  // of the rows, or null
  Run ahead;                    // lines to prefetch for the adapters

  // Arguments of part `number`, from `row` on.
  Int4Tile part(int64_t row, int64_t number, int64_t parts, int64_t num_groups) const {
    Int4Tile part = *this;
    part.x += row * k;
    part.groups += row * num_groups;
    part.out += row * ldo;
    if (transforms) part.transforms += row;
    if (number) part.ahead = {nullptr, 0};
    part.stride /= parts;
    part.next += number * (k / 4) * part.stride;
    return part;
  }
};

#ifdef __AVX512VNNI__

// Add the products of a line's nibbles and four inputs.
inline __attribute__((always_inline)) void multiply_nibbles(__m512i& sums, __m512i weights, __m512i x) {
  multiply_add(sums, weights, x);
}

#else

// vpmaddubsw adds two products of a nibble and 8 bits exactly. Eight lines add at most 8 * 2 * 15 * 127 = 30,480, so a
// register of columns and a row take one product and one addition of words; vpmaddwd widens the words once in 8 lines.
constexpr int64_t kInputsOfWords = 32;

// Add the products of a line's nibbles and four inputs.
inline __attribute__((always_inline)) void multiply_nibbles(__m512i& sums, __m512i weights, __m512i x) {
  sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16(weights, x));
}

inline __attribute__((always_inline)) void add_words(__m512i& sums, __m512i words) {
  sums = _mm512_add_epi32(sums, _mm512_madd_epi16(words, _mm512_set1_epi16(1)));
}

#endif

// Columns of H halves of the panel from half kFirst on.
template <int R, int kFirst = 0, int H = 2>
void compute_int4(const Int4Tile& t, const QuireWeight& w) {
  float totals[R][H * kLanes] = {};
  const __m512i nibble = _mm512_set1_epi8(15);
  const uint8_t* at = t.panel;
  const char* next = t.next;
  const int64_t groups = t.k / w.group;
  for (int64_t group = 0, i = 0; group < groups; group++) {
    if (t.ahead.lines) prefetch_part(t.ahead, group, groups);
    __m512i sums[R][H];
    const auto multiply = [&](int64_t end, __m512i(&sums)[R][H]) __attribute__((always_inline)) {
      each<R>([&](auto r) __attribute__((always_inline)) { sums[r][0] = sums[r][H - 1] = _mm512_setzero_si512(); });
      for (; i < end; i += 4, at += kLine) {
        const __m512i line = _mm512_loadu_si512(at);
        const __m512i left = _mm512_and_si512(kFirst ? _mm512_srli_epi16(line, 4) : line, nibble);
        const __m512i right = _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble);
        if (t.stride) {
          _mm_prefetch(next, _MM_HINT_T1);
          next += t.stride;
        }
        each<R>([&](auto r) __attribute__((always_inline)) {
          int32_t four;
          __builtin_memcpy(&four, t.x + r * t.k + i, 4);
          const __m512i x = _mm512_set1_epi32(four);
          multiply_nibbles(sums[r][0], left, x);
          if constexpr (H == 2) multiply_nibbles(sums[r][1], right, x);
        });
      }
    };
#ifdef __AVX512VNNI__
    multiply(i + w.group, sums);
#else
    each<R>([&](auto r) __attribute__((always_inline)) { sums[r][0] = sums[r][H - 1] = _mm512_setzero_si512(); });
    for (const int64_t end = i + w.group; i < end;) {
      __m512i words[R][H];
      multiply(std::min(i + kInputsOfWords, end), words);
      each<R>([&](auto r) __attribute__((always_inline)) {
        each<H>([&](auto h) __attribute__((always_inline)) { add_words(sums[r][h], words[r][h]); });
      });
    }
#endif
    each<H>([&](auto h) __attribute__((always_inline)) {
      const int64_t half = kFirst + h;
      const __m512 scales = w.scale_bytes == 2
                                ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(at + half * 32)))
                                : _mm512_loadu_ps((const float*)(at + half * 64));
      const __m128i* const zeros_at = (const __m128i*)(at + kColumns * w.scale_bytes + half * kLanes);
      const __m512 zeros = w.zero_bytes ? _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(zeros_at)))
                                       : _mm512_set1_ps(8.f);
      each<R>([&](auto r) __attribute__((always_inline)) {
        const Group& g = t.groups[r * groups + group];
        const __m512 sum = _mm512_fnmadd_ps(zeros, _mm512_set1_ps(g.sum), _mm512_cvtepi32_ps(sums[r][h]));
        float* const total = totals[r] + h * kLanes;
        const __m512 factor = _mm512_mul_ps(scales, _mm512_set1_ps(g.scale));
        _mm512_storeu_ps(total, _mm512_fmadd_ps(sum, factor, _mm512_loadu_ps(total)));
      });
    });
    at += kColumns * (w.scale_bytes + w.zero_bytes);
  }
  each<R>([&](auto r) __attribute__((always_inline)) {
    each<H>([&](auto h) __attribute__((always_inline)) {
      const int64_t c = (kFirst + h) * kLanes;
      const __m512 value = _mm512_loadu_ps(totals[r] + h * kLanes);
      finish(t.transforms ? t.transforms[r](value, c) : value, t.out + r * t.ldo + c, t.bias ? t.bias + c : nullptr,
             t.add);
    });
  });
}

template <int R>
void compute_int4_parts(const Int4Tile& t, const QuireWeight& w) {
  each_part<R>([&](auto part) {
    compute_int4<part.kRows, part.kFirst, part.kHalves>(t.part(part.kRow, part.kNumber, kParts<R>, t.k / w.group), w);
  });
}

template <int R>
constexpr auto kTile = kParts<R> == 1 ? compute_int4<R> : compute_int4_parts<R>;

constexpr void (*kComputeInt4[kTileRows + 1])(const Int4Tile&, const QuireWeight&) = {
    nullptr, kTile<1>, kTile<2>, kTile<3>, kTile<4>, kTile<5>, kTile<6>, kTile<7>, kTile<8>,
};

// Quantize the groups of a row symmetrically to [-127, 127], and exchange the second and third of each four inputs.
// A group is a multiple of 16.
void quantize_row(const bf16* x, int8_t* out, Group* groups, int64_t k, int64_t size) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  for (int64_t begin = 0; begin < k; begin += size, groups++) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t i = begin; i < begin + size; i += kLanes) most = _mm512_max_ps(_mm512_abs_ps(load(x + i)), most);
    const float amax = _mm512_reduce_max_ps(most);
    const __m512 factor = _mm512_set1_ps(amax > 0 ? 127.0f / amax : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = begin; i < begin + size; i += kLanes) {
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + i), factor));
      sum = _mm512_add_epi32(sum, q);
      _mm_storeu_si128((__m128i*)(out + i), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(q), order));
    }
    *groups = {amax / 127.0f, (float)_mm512_reduce_add_epi32(sum)};
  }
}

// Rows of a call, in memory that a thread keeps.
struct Quantized {
  std::vector<int8_t> rows;
  std::vector<Group> groups;
};

Quantized* quantized(int64_t m, int64_t k, int64_t groups) {
  static thread_local Quantized scratch;
  if ((int64_t)scratch.rows.size() < m * k) scratch.rows.resize(m * k);
  if ((int64_t)scratch.groups.size() < m * groups) scratch.groups.resize(m * groups);
  return &scratch;
}

}  // namespace

extern "C" {

// out [m, n] = (add ? out : 0) + x [m, k] W^T + bias; x has rows of ldx. The rows' adapters can transform x W^T,
// and what they read afterwards is prefetched. k is a multiple of the group.
void quire_linear_int4(const bf16* x, int64_t ldx, const QuireWeight* weight, const bf16* bias, bf16* out, int64_t m,
                       int64_t n, int64_t k, int64_t add, const QuireLoraLinear* adapters,
                       const QuireLoraRows* of_rows) {
  const QuireWeight& w = *weight;
  const int64_t panels = n / kColumns, num = k / w.group;
  const int64_t bytes = kColumns * k / 2 + num * kColumns * (w.scale_bytes + w.zero_bytes);
  // Each thread quantizes few rows itself: the threads then need not wait for each other.
  const bool shared = m > kTileRows;
  Quantized* const all = shared ? quantized(m, k, num) : nullptr;
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    Quantized* const q = shared ? all : quantized(m, k, num);
    int8_t* const rows = q->rows.data();
    Group* const groups = q->groups.data();
    const int64_t first_row = shared ? m * thread / threads : 0, last_row = shared ? m * (thread + 1) / threads : m;
    for (int64_t r = first_row; r < last_row; r++) quantize_row(x + r * ldx, rows + r * k, groups + r * num, k, w.group);
    if (shared) {
#pragma omp barrier
    }
    const int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
    PanelTransforms transforms(adapters, of_rows);
    LinesToCome lines(adapters, of_rows, thread, threads, begin, end, tiles_of(m) * (end - begin));
    for (int64_t m0 = 0; m0 < m; m0 += kBlockRows) {
      const int64_t count = std::min(kBlockRows, m - m0), tiles = (count + kTileRows - 1) / kTileRows;
      for (int64_t p = begin; p < end; p++) {
        const uint8_t* const panel = (const uint8_t*)w.panels + p * bytes;
        const int64_t share = bytes / tiles;
        for (int64_t tile = 0; tile < tiles; tile++) {
          const int64_t r0 = m0 + count * tile / tiles, r1 = m0 + count * (tile + 1) / tiles;
          const Int4Tile t = {
              rows + r0 * k,
              groups + r0 * num,
              panel,
              k,
              out + r0 * n + p * kColumns,
              n,
              bias ? bias + p * kColumns : nullptr,
              add != 0,
              p + 1 < end && prefetches(tiles) ? share / (k / 4) : 0,
              (const char*)(panel + bytes) + tile * share,
              transforms.of(p, r0, r1),
              lines.take(),
          };
          kComputeInt4[r1 - r0](t, w);
        }
      }
    }
  }
}

}  // extern "C"
}  // namespace quire
