// SPDX-License-Identifier: Apache-2.0
// A linear with the LoRA adapters of its tokens: shrink in tiles of one adapter's rows, then the base GEMM with the
// expand of each row in the same registers.
//
// The sum of base and delta is rounded once. Each output is written once, by one thread, in a fixed order: nothing is
// cleared, and a token's result does not depend on the rest of the batch. Matrices have their adapter's LoRA rank. With
// several adapters and few tokens of each, the matrices are read once and hardly reused, so memory is the bottleneck.
// The base GEMM leaves memory idle: while it runs, B of the next panel and A of the next linear are prefetched.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "adapters.h"
#include "ops.h"
#include "tile.h"

namespace quire {
namespace {

using Linear = QuireLoraLinear;
using Rows = QuireLoraRows;

constexpr int64_t kMostSlices = 3;  // slices that are shrunk at once: q, k and v
constexpr int64_t kMaxTiles = kWidenedRows / kTileRows;

// Arguments of one shrink: rows of x, and matrices A [in / 2, rank, 2] of one LoRA rank, up to 16 ranks of each.
struct Shrinking {
  const bf16* x;
  int64_t ldx;
  const bf16* a[kMostSlices];
  int64_t rank, first_rank, pairs;
  bf16* out[kMostSlices];  // rows of ldo
  int64_t ldo;
};

// Shrink R rows with S matrices: x is read once for all of them. A single matrix has two sums per row, because the
// latency of vdpbf16ps is longer than its issue interval.
template <int R, int S>
void shrink(const Shrinking& t) {
  constexpr int kSums = S == 1 ? 2 : 1;
  const int64_t num = std::min<int64_t>(kLanes, t.rank - t.first_rank);
  const __mmask16 mask = first(num), stored = first(2 * pairs_of(num));
  __m512 sums[R][S][kSums];
  each<R * S * kSums>([&](auto i) { sums[i / (S * kSums)][i / kSums % S][i % kSums] = _mm512_setzero_ps(); });
  const auto product = [&](int64_t i, auto sum) __attribute__((always_inline)) {
    const int64_t at = 2 * (i * t.rank + t.first_rank);
    __m512bh a[S];
    each<S>([&](auto s) { a[s] = (__m512bh)_mm512_maskz_loadu_epi32(mask, t.a[s] + at); });
    each<R>([&](auto r) {
      const __m512bh x = pair(t.x + r * t.ldx + 2 * i);
      each<S>([&](auto s) { sums[r][s][sum] = _mm512_dpbf16_ps(sums[r][s][sum], x, a[s]); });
    });
  };
  int64_t i = 0;
  for (; i + kSums <= t.pairs; i += kSums) each<kSums>([&](auto sum) { product(i + sum, sum); });
  if (i < t.pairs) product(i, std::integral_constant<int, 0>());
  each<R>([&](auto r) {
    each<S>([&](auto s) {
      __m512 sum = sums[r][s][0];
      if constexpr (kSums == 2) sum = _mm512_add_ps(sum, sums[r][s][1]);
      store(t.out[s] + r * t.ldo + t.first_rank, sum, stored);
    });
  });
}

using Shrink = void (*)(const Shrinking&);
template <int S>
constexpr Shrink kShrinkRows[kTileRows + 1] = {nullptr,      shrink<1, S>, shrink<2, S>, shrink<3, S>, shrink<4, S>,
                                               shrink<5, S>, shrink<6, S>, shrink<7, S>, shrink<8, S>};
constexpr const Shrink* kShrink[kMostSlices + 1] = {nullptr, kShrinkRows<1>, kShrinkRows<2>, kShrinkRows<3>};

// Panels of the matrices B that the rows of a block need for one panel of outputs. They are prefetched one panel ahead,
// each with the tile that contains the first row of its slot.
class Coming {
 public:
  Coming(const Rows& rows, int64_t m0, int64_t count, int64_t tiles) {
    for (int64_t tile = 0, n = 0; tile < tiles; tile++) {
      first_[tile] = n;
      for (int64_t r = m0 + count * tile / tiles; r < m0 + count * (tile + 1) / tiles; r++) {
        if (rows.slots[r] >= 0 && (r == m0 || rows.slots[r - 1] != rows.slots[r])) slots_[n++] = rows.slots[r];
      }
      slots_[n++] = -1;  // of A
      first_[tile + 1] = n;
    }
    num_ = first_[tiles];
  }

  // Advance to a panel of a linear, or to none.
  void go(const Linear* linear, int64_t panel) {
    if (linear && linear == linear_ && panel == panel_ + 1 && panel < slice_end_) {
      for (int64_t i = 0; i < num_; i++) runs_[i].from += runs_[i].lines * kLine;
    } else {
      find(linear, panel);
    }
    linear_ = linear;
    panel_ = panel;
  }

  // Cache lines of a tile, followed by other cache lines.
  int64_t of(int64_t tile, const Run& also, const Run** runs) {
    const int64_t last = first_[tile + 1] - 1;
    runs_[last] = also;
    *runs = runs_ + first_[tile];
    return last + 1 - first_[tile];
  }

 private:
  void find(const Linear* linear, int64_t panel) {
    int64_t slice = 0;
    while (linear && panel >= linear->ends[slice]) slice++;
    const int64_t at = linear ? panel - (slice ? linear->ends[slice - 1] : 0) : 0;
    slice_end_ = linear ? linear->ends[slice] : 0;
    for (int64_t i = 0; i < num_; i++) {
      runs_[i] = {nullptr, 0};
      if (!linear || slots_[i] < 0) continue;
      const Entry& e = entry(*linear, slots_[i], slice);
      const int64_t size = pairs_of(e.rank) * 2 * kColumns;
      runs_[i] = {(const char*)(linear->pages + e.b + at * size), size * (int64_t)sizeof(bf16) / kLine};
    }
  }

  int64_t slots_[kWidenedRows + kMaxTiles], first_[kMaxTiles + 1], num_;
  Run runs_[kWidenedRows + kMaxTiles];
  const Linear* linear_ = nullptr;
  int64_t panel_ = 0, slice_end_ = 0;
};

}  // namespace

extern "C" {

// Pack row-major A [rank, in] and B [out, rank] to A [in / 2, rank, 2] and B [out / 32, pairs of ranks, 32, 2].
void quire_pack_adapter(const bf16* a, const bf16* b, bf16* packed_a, bf16* packed_b, int64_t rank, int64_t in,
                        int64_t out) {
  for (int64_t i = 0; i < in / 2; i++)
    for (int64_t r = 0; r < rank; r++) __builtin_memcpy(packed_a + 2 * (i * rank + r), a + r * in + 2 * i, 4);
  for (int64_t p = 0; p < out / kColumns; p++)
    for (int64_t i = 0; i < pairs_of(rank); i++)
      for (int64_t c = 0; c < kColumns; c++)
        for (int64_t e = 0; e < 2; e++) {
          const int64_t r = 2 * i + e;
          *packed_b++ = r < rank ? b[(p * kColumns + c) * rank + r] : 0;
        }
}

// out [rows, 2 * pairs of ranks] = x A^T with A [in / 2, rank, 2]; x has rows of ldx; at most 8 rows.
void quire_shrink(const bf16* x, int64_t ldx, const bf16* a, int64_t rank, int64_t in, bf16* out, int64_t rows) {
  // With one row, the loads of A would wait for memory one after the other.
  for (const char *line = (const char*)a, *stop = (const char*)(a + rank * in); line < stop; line += kLine)
    _mm_prefetch(line, _MM_HINT_T1);
  Shrinking t = {x, ldx, {a}, rank, 0, in / 2, {out}, 2 * pairs_of(rank)};
  for (; t.first_rank < rank; t.first_rank += kLanes) kShrink[1][rows](t);
}

// Add B A[token] to the rows of out [tokens, width]: pages contain A [vocab, rank] and B [rank, width]. `entries` has rows
// of ld_entries; `of_rows` are the slots of the rows, -1: none.
void quire_lora_embedding(bf16* out, const int64_t* ids, const bf16* pages, const Entry* entries, int64_t ld_entries,
                          const int64_t* of_rows, int64_t tokens, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    if (of_rows[t] < 0) continue;
    const Entry& e = entries[of_rows[t] * ld_entries];
    const bf16 *a = pages + e.a + ids[t] * e.rank, *b = pages + e.b;
    for (int64_t i = 0; e.rank && i < width; i += kLanes) {
      const __mmask16 mask = first(width - i);
      __m512 sum = _mm512_setzero_ps();
      for (int64_t r = 0; r < e.rank; r++)
        sum = _mm512_fmadd_ps(widen(_mm256_set1_epi16((short)a[r])), load(b + r * width + i, mask), sum);
      store(out + t * width + i, _mm512_add_ps(load(out + t * width + i, mask), sum), mask);
    }
  }
}

// out [m, n] = (add ? out : 0) + x [m, k] W^T + bias + each row's B (A x); x has rows of ldx. The row's adapter can
// transform x W^T. `packed` null: no base GEMM.
void quire_adapted_linear(const bf16* x, int64_t ldx, const bf16* packed, const bf16* bias, bf16* out, int64_t m,
                          int64_t n, int64_t k, int64_t add, const QuireLoraLinear* linear, const QuireLoraRows* rows) {
  const Linear& l = *linear;
  const int64_t panels = n / kColumns, pairs = packed ? k / 2 : 0, lds = l.num_slices * l.max_rank;
  static thread_local std::vector<bf16> scratch;
  if ((int64_t)scratch.size() < m * lds) scratch.resize(m * lds);
  bf16* const shrunk = scratch.data();
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t first_tile = rows->num_tiles * thread / threads;
    const int64_t last_tile = rows->num_tiles * (thread + 1) / threads;
    for (int64_t tile = first_tile; tile < last_tile; tile++) {
      const int64_t slot = rows->tiles[3 * tile], row = rows->tiles[3 * tile + 1], end = rows->tiles[3 * tile + 2];
      Shrinking t = {x + row * ldx, ldx, {}, 0, 0, k / 2, {}, lds};
      for (int64_t s = 0, num = 0; s < l.num_slices; s += num) {
        t.rank = entry(l, slot, s).rank;
        for (num = 0; num < kMostSlices && s + num < l.num_slices && entry(l, slot, s + num).rank == t.rank; num++) {
          t.a[num] = l.pages + entry(l, slot, s + num).a;
          t.out[num] = shrunk + row * lds + (s + num) * l.max_rank;
        }
        for (t.first_rank = 0; t.first_rank < t.rank; t.first_rank += kLanes) kShrink[num][end - row](t);
      }
    }
    // Threads divide the panels and not the rows, so weights are read from memory once.
    const int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
    int64_t num_tiles = 0;
    for (int64_t m0 = 0; m0 < m; m0 += kWidenedRows) {
      num_tiles += (end - begin) * ((std::min(kWidenedRows, m - m0) + kTileRows - 1) / kTileRows);
    }
    LinesOfA ahead(l.next, rows, first_tile, last_tile);
    const int64_t share_ahead = num_tiles ? (ahead.count() + num_tiles - 1) / num_tiles : 0;
#pragma omp barrier
    Delta deltas[kWidenedRows];
    for (int64_t m0 = 0; m0 < m; m0 += kWidenedRows) {
      const int64_t count = std::min(kWidenedRows, m - m0), tiles = (count + kTileRows - 1) / kTileRows;
      const TileInputs inputs = widen_rows(x + m0 * ldx, ldx, count, 2 * pairs);
      int64_t slice = 0, slice_end = -1;
      Coming coming(*rows, m0, count, tiles);
      for (int64_t p = begin; p < end; p++) {
        if (p + 1 < end) {
          coming.go(linear, p + 1);
        } else if (m0 + count < m) {
          coming.go(nullptr, 0);
        } else {
          coming.go(l.next, l.next ? l.next->ends[l.next->num_slices - 1] * thread / threads : 0);
        }
        if (p >= slice_end) {
          while (p >= l.ends[slice]) slice++;
          slice_end = l.ends[slice];
          const int64_t panel = p - (slice ? l.ends[slice - 1] : 0);
          for (int64_t r = 0; r < count; r++) {
            const int64_t slot = rows->slots[m0 + r];
            const Entry e = slot < 0 ? Entry{0, 0, 0, 0} : entry(l, slot, slice);
            const int64_t rank_pairs = pairs_of(e.rank);
            const bf16* b = slot < 0 ? nullptr : l.pages + e.b + panel * rank_pairs * 2 * kColumns;
            const bf16* scale = e.transform && packed ? l.pages + e.transform + panel * kColumns : nullptr;
            const int64_t width = (slice_end - (slice ? l.ends[slice - 1] : 0)) * kColumns;
            deltas[r] = {shrunk + (m0 + r) * lds + slice * l.max_rank, b, rank_pairs, {scale, scale ? scale + width : nullptr}};
          }
        } else {
          for (int64_t r = 0; r < count; r++) {
            deltas[r].panel += deltas[r].pairs * 2 * kColumns;
            Transform& t = deltas[r].transform;
            if (t.scale) t.scale += kColumns, t.addend += kColumns, t.prefetch();
          }
        }
        const bf16* panel = packed + p * k * kColumns;
        const int64_t share = k * kColumns * (int64_t)sizeof(bf16) / tiles;
        for (int64_t tile = 0; tile < tiles; tile++) {
          const int64_t r0 = count * tile / tiles, r1 = count * (tile + 1) / tiles;
          const Run* runs;
          const int64_t num_runs = coming.of(tile, ahead.take(std::min(share_ahead, pairs)), &runs);
          kCompute<true>[r1 - r0]({
              inputs.x + r0 * inputs.ldx,
              inputs.ldx,
              panel,
              pairs,
              out + (m0 + r0) * n + p * kColumns,
              n,
              bias ? bias + p * kColumns : nullptr,
              add != 0,
              (const char*)(panel + k * kColumns) + tile * share,
              pairs && p + 1 < end && (tiles > 1 || !kHasBf16) ? share / pairs : 0,
              tiles > kFewTiles,
              deltas + r0,
              runs,
              num_runs,
          });
        }
      }
    }
  }
}

}  // extern "C"
}  // namespace quire
