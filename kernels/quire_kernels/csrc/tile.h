// SPDX-License-Identifier: Apache-2.0
// A GEMM tile: up to 8 rows by one panel of 32 columns, in 16 registers, plus the LoRA deltas of its rows.
//
// A pair of inputs costs 2 loads of weights, 8 broadcasts and 16 vdpbf16ps, so the multiplications are the bottleneck.
// While a tile is computed, the data of the next one is prefetched from memory.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "bf16.h"

namespace quire {

constexpr int64_t kColumns = 32;
constexpr int64_t kTileRows = 8;
constexpr int64_t kLine = 64;  // bytes of a cache line
// Rows whose sums fit into the registers. AVX2 has half as many registers, of half the size: 8 contain the sums of 4 rows
// and 16 columns, and the others the weights and the inputs. A larger tile is computed in parts.
constexpr int kRegisterRows = kAvx512 ? kTileRows : 4;
// Halves of a panel that R rows are multiplied with together. Few rows need both: with few sums, the latency of an
// addition would be the bottleneck.
template <int R>
constexpr int kHalves = kAvx512 || R <= 2 ? 2 : 1;
// Parts in which R rows by a panel are computed.
template <int R>
constexpr int kParts = R > kRegisterRows ? kParts<(R + 1) / 2> + kParts<R / 2> : 2 / kHalves<R>;
// Rows whose inputs stay in the L2 cache while all panels are multiplied.
constexpr int64_t kBlockRows = 240;

// Inputs as tiles read them, and weights of a pair of inputs and 16 columns. Without AVX-512 BF16, inputs are float32
// numbers, which a broadcast reads without a vector unit. With bfloat16 inputs, each row of each tile took two more
// instructions beside four multiplications.
#ifdef __AVX512BF16__

using TileInput = bf16;
using Weights = __m512bh;
constexpr int64_t kWidenedRows = kBlockRows;  // of a block

inline Weights as_weights(__m512i pairs) { return (__m512bh)pairs; }
inline Weights load_inputs(const TileInput* x) { return pair(x); }
inline __attribute__((always_inline)) void multiply(__m512& sums, Weights x, Weights weights) {
  sums = _mm512_dpbf16_ps(sums, x, weights);
}

#else

using TileInput = float;
using Weights = Pairs;
constexpr int64_t kWidenedRows = kBlockRows / 2;  // have twice as many bytes

inline __attribute__((always_inline)) Weights as_weights(__m512i pairs) { return split_pairs(pairs); }
inline __attribute__((always_inline)) Weights load_inputs(const TileInput* x) {
  return {_mm512_set1_ps(x[0]), _mm512_set1_ps(x[1])};
}
inline __attribute__((always_inline)) void multiply(__m512& sums, const Weights& x, const Weights& weights) {
  sums = multiply_pairs(sums, x, weights);
}

#endif

// Rows of inputs for tiles.
struct TileInputs {
  const TileInput* x;
  int64_t ldx;
};

// The inputs x [rows, k], rows of ldx; even k. Valid until the thread's next call.
inline TileInputs widen_rows(const bf16* x, int64_t ldx, int64_t rows, int64_t k) {
#ifdef __AVX512BF16__
  return {x, ldx};
#else
  // A thread widens all rows itself: it need not wait for others, and each of its panels takes longer than this.
  static thread_local std::vector<float> widened;
  // With one more line in a row, the rows of a tile are in different sets of the L1 cache if k is a power of two.
  const int64_t ld = (k + kLanes - 1) / kLanes * kLanes + kLanes;
  if ((int64_t)widened.size() < rows * ld) widened.resize(rows * ld);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < k; i += kLanes) _mm512_storeu_ps(&widened[r * ld + i], load(x + r * ldx + i, first(k - i)));
  return {widened.data(), ld};
#endif
}

// Tiles of a panel, of the rows of all blocks.
inline int64_t tiles_of(int64_t rows) {
  return rows / kBlockRows * (kBlockRows / kTileRows) + (rows % kBlockRows + kTileRows - 1) / kTileRows;
}

// Up to this many tiles, loading a panel takes about as long as computing them, so it is prefetched to L2 only: in L1
// it would evict the panel in use. 16 tokens, 120 linears of a 135M Llama, two Zen 5 cores: 8.6 ms instead of 10.3 ms;
// 24 tokens take 13.2 ms instead of 12.5 ms. With a single tile the hardware prefetcher is faster: 6.7 ms, not 8.3 ms.
// Without AVX-512 BF16, a tile takes longer, and a single one prefetches, too: for 64 tokens and 16 experts, one thread of a
// Xeon with 512 bits takes 18.5 ms instead of 24.4 ms.
constexpr int64_t kFewTiles = 2;

// What a row's base product p becomes in a panel: p + p * scale + addend.
struct Transform {
  const bf16 *scale, *addend;  // [32]; null: p stays

  inline __attribute__((always_inline)) __m512 operator()(__m512 p, int64_t at) const {
    return scale ? _mm512_add_ps(_mm512_fmadd_ps(p, load(scale + at), p), load(addend + at)) : p;
  }

  // Load what the tile needs at its end, while it is computed.
  inline void prefetch() const {
    _mm_prefetch((const char*)scale, _MM_HINT_T0);
    _mm_prefetch((const char*)addend, _MM_HINT_T0);
  }
};

// LoRA delta of a row: its shrunk input times a panel of B.
struct Delta {
  const bf16* shrunk;  // [2 * pairs]
  const bf16* panel;   // [pairs, 32, 2]; the next panel follows it
  int64_t pairs;       // pairs of LoRA ranks; 0: the row has no adapter here
  Transform transform;
};

// Consecutive cache lines to prefetch.
struct Run {
  const char* from;
  int64_t lines;
};

struct Tile {
  const TileInput* x;  // [rows, 2 * pairs], rows of ldx
  int64_t ldx;
  const bf16* panel;
  int64_t pairs;
  bf16* out;  // [rows, columns], rows of ldo
  int64_t ldo;
  const bf16* bias;  // of the panel, or null
  bool add;          // add to out instead of overwriting it
  const char* next;  // what to prefetch, in steps of `stride` bytes a pair; stride 0: nothing
  int64_t stride;
  bool near;  // prefetch to L1, else to L2
  const Delta* deltas = nullptr;  // one for each row
  const Run* runs = nullptr;      // further cache lines to prefetch, one per pair: more than a core keeps in
  int64_t num_runs = 0;           // flight would delay the products
};

inline void finish(__m512 v, bf16* out, const bf16* bias, bool add) {
  if (bias) v = _mm512_add_ps(v, load(bias));
  if (add) v = _mm512_add_ps(v, load(out));
  store(out, v);
}

// Call `function` with the constants 0 to N - 1. A loop that the compiler does not unroll would keep the array of sums,
// which it indexes, in memory.
template <int N, int I = 0, typename F>
inline __attribute__((always_inline)) void each(F&& function) {
  if constexpr (I < N) {
    function(std::integral_constant<int, I>());
    each<N, I + 1>(function);
  }
}

// Part of a tile whose sums fit into the registers: R rows from row I on, and H halves of the panel from kHalf on.
template <int R, int I, int kHalf, int H, int N>
struct TilePart {
  static constexpr int kRows = R, kRow = I, kFirst = kHalf, kHalves = H, kNumber = N;
};

// Call `function` with each TilePart of a tile of R rows.
template <int R, int I = 0, int N = 0, typename F>
inline __attribute__((always_inline)) void each_part(F&& function) {
  if constexpr (R > kRegisterRows) {
    constexpr int kUpper = (R + 1) / 2;
    each_part<kUpper, I, N>(function);
    each_part<R - kUpper, I + kUpper, N + kParts<kUpper>>(function);
  } else {
    constexpr int H = kHalves<R>;
    each<2 / H>([&](auto n) __attribute__((always_inline)) { function(TilePart<R, I, n * H, H, N + n>()); });
  }
}

// Whether tiles prefetch the next panel of codes of 4 or 8 bits. With a single tile and AVX-512 BF16, the hardware
// prefetcher is faster: see kFewTiles. For 1 to 4 rows on one thread of a Xeon, products with prefetches take this part of
// the time: int8 0.45 to 0.8 with AVX2, 0.40 to 0.84 with AVX-512, and 0.53 to 1.1 with VNNI; int4 0.67 to 0.8.
inline bool prefetches(int64_t tiles) { return tiles > 1 || !kHasBf16; }

// Add the deltas of rows I to I + N - 1; rows of one adapter together, so that its panel is loaded once.
template <int I, int N, int R>
inline __attribute__((always_inline)) void add_deltas(const Delta* deltas, __m512 (&sums)[R][2]) {
  bool together = true;
  for (int r = I + 1; r < I + N; r++) together &= deltas[r].panel == deltas[I].panel;
  if (N == 1 || together) {
    const bf16* panel = deltas[I].panel;
    const int64_t pairs = deltas[I].pairs;
    for (int64_t i = 0; i < pairs; i++, panel += 2 * kColumns) {
      const __m512bh left = (__m512bh)_mm512_loadu_si512(panel);
      const __m512bh right = (__m512bh)_mm512_loadu_si512(panel + kColumns);
      each<N>([&](auto n) {
        const __m512bh x = pair(deltas[I + n].shrunk + 2 * i);
        sums[I + n][0] = _mm512_dpbf16_ps(sums[I + n][0], x, left);
        sums[I + n][1] = _mm512_dpbf16_ps(sums[I + n][1], x, right);
      });
    }
  } else if constexpr (N > 1) {
    add_deltas<I, N / 2>(deltas, sums);
    add_deltas<I + N / 2, N - N / 2>(deltas, sums);
  }
}

template <int R, bool kAdapted>
void compute(const Tile& t) {
  __m512 sums[R][2];
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  const char* ahead = t.next;
  int64_t i = 0;
  const auto product = [&]() __attribute__((always_inline)) {
    const Weights left = as_weights(_mm512_loadu_si512(t.panel + i * 2 * kColumns));
    const Weights right = as_weights(_mm512_loadu_si512(t.panel + i * 2 * kColumns + kColumns));
    if (t.stride) {
      if (t.near) {
        _mm_prefetch(ahead, _MM_HINT_T0);
      } else {
        _mm_prefetch(ahead, _MM_HINT_T1);
        if (!kHasBf16 && t.stride > kLine) _mm_prefetch(ahead + kLine, _MM_HINT_T1);
      }
      ahead += t.stride;
    }
    each<R>([&](auto r) __attribute__((always_inline)) {
      const Weights x = load_inputs(t.x + r * t.ldx + 2 * i);
      multiply(sums[r][0], x, left);
      multiply(sums[r][1], x, right);
    });
  };
  if constexpr (kAdapted) {
    for (const Run *run = t.runs, *last = run + t.num_runs; run < last; run++) {
      const char* line = run->from;
      for (const int64_t stop = std::min(i + run->lines, t.pairs); i < stop; i++, line += kLine) {
        _mm_prefetch(line, _MM_HINT_T1);
        product();
      }
    }
  }
  for (; i < t.pairs; i++) product();
  if constexpr (kAdapted) {
    each<R>([&](auto r) {
      each<2>([&](auto half) { sums[r][half] = t.deltas[r].transform(sums[r][half], half * kLanes); });
    });
    add_deltas<0, R>(t.deltas, sums);
  }
  each<R>([&](auto r) {
    bf16* out = t.out + r * t.ldo;
    finish(sums[r][0], out, t.bias, t.add);
    finish(sums[r][1], out + kLanes, t.bias ? t.bias + kLanes : nullptr, t.add);
  });
}

using Compute = void (*)(const Tile&);
template <bool kAdapted>
constexpr Compute kCompute[kTileRows + 1] = {
    nullptr,
    compute<1, kAdapted>,
    compute<2, kAdapted>,
    compute<3, kAdapted>,
    compute<4, kAdapted>,
    compute<5, kAdapted>,
    compute<6, kAdapted>,
    compute<7, kAdapted>,
    compute<8, kAdapted>,
};

// Columns of panels [begin, end) of out [m, ldo] = (add ? out : 0) + x [m, k] W^T + bias; x has rows of ldx. With
// kAdapted, `deltas` of the rows, which start at panel 0, are added; `packed` null: only they.
template <bool kAdapted = false>
inline void multiply_panels(const bf16* x, int64_t ldx, const bf16* packed, const bf16* bias, bf16* out, int64_t ldo,
                            int64_t m, int64_t k, int64_t begin, int64_t end, bool add, const Delta* deltas = nullptr) {
  const int64_t pairs = packed ? k / 2 : 0;
  for (int64_t m0 = 0; m0 < m; m0 += kWidenedRows) {
    const int64_t rows = std::min(kWidenedRows, m - m0), tiles = (rows + kTileRows - 1) / kTileRows;
    const TileInputs inputs = widen_rows(x + m0 * ldx, ldx, rows, 2 * pairs);
    for (int64_t p = begin; p < end; p++) {
      const bf16* panel = packed ? packed + p * k * kColumns : nullptr;
      const int64_t share = k * kColumns * (int64_t)sizeof(bf16) / tiles;
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t r0 = rows * tile / tiles, r1 = rows * (tile + 1) / tiles;
        Tile t = {
            inputs.x + r0 * inputs.ldx,
            inputs.ldx,
            panel,
            pairs,
            out + (m0 + r0) * ldo + p * kColumns,
            ldo,
            bias ? bias + p * kColumns : nullptr,
            add,
            (const char*)(panel + k * kColumns) + tile * share,
            pairs && p + 1 < end && (tiles > 1 || !kHasBf16) ? share / pairs : 0,
            tiles > kFewTiles,
        };
        if constexpr (kAdapted) {
          Delta at[kTileRows];
          Run runs[kTileRows];
          int64_t num_runs = 0;
          for (int64_t r = 0; r < r1 - r0; r++) {
            const Delta& d = deltas[m0 + r0 + r];
            const int64_t size = d.pairs * 2 * kColumns;
            at[r] = {d.shrunk, d.panel + p * size, d.pairs, {}};
            if (size && p + 1 < end && (r == 0 || d.panel != deltas[m0 + r0 + r - 1].panel))
              runs[num_runs++] = {(const char*)(at[r].panel + size), size * (int64_t)sizeof(bf16) / kLine};
          }
          t.deltas = at;
          t.runs = runs;
          t.num_runs = num_runs;
          kCompute<true>[r1 - r0](t);
        } else {
          kCompute<false>[r1 - r0](t);
        }
      }
    }
  }
}

}  // namespace quire
