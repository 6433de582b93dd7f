// SPDX-License-Identifier: Apache-2.0
// Mixture of experts: rows sorted by expert, two GEMMs per expert with weights in panels (see tile.h), and the weighted
// sum of each token's experts.
//
// A step of 64 tokens gives each of 16 experts about 8 rows, so reading the weights takes as long as multiplying them.
// Each thread therefore reads its part of every expert's weights once and in memory order. Weights of 4 and 8 bits are
// multiplied by codes.cpp, int4.cpp and int8.cpp, one expert after the other.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "ops.h"
#include "tile.h"

namespace quire {
namespace {

enum Activation : int64_t { kSilu = 0, kSwiGLU = 1, kRelu2 = 2 };

// out [rows, inner] = silu(gate) * up for columns [begin, end); gate and up are the halves of a row of gate_up.
void silu_mul(const bf16* gate_up, bf16* out, int64_t rows, int64_t inner, int64_t begin, int64_t end) {
  for (int64_t r = 0; r < rows; r++) {
    const bf16* gate = gate_up + r * 2 * inner;
    for (int64_t i = begin; i < end; i += kLanes)
      store(out + r * inner + i, _mm512_mul_ps(silu(load(gate + i)), load(gate + inner + i)));
  }
}

// out [rows, inner] = max(up, 0)^2 for columns [begin, end); there is no gate.
void relu2(const bf16* up, bf16* out, int64_t rows, int64_t inner, int64_t begin, int64_t end) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = begin; i < end; i += kLanes) {
      const __m512 positive = _mm512_max_ps(load(up + r * inner + i), _mm512_setzero_ps());
      store(out + r * inner + i, _mm512_mul_ps(positive, positive));
    }
}

// out = gate * sigmoid(alpha * gate) * (up + 1), both clamped; gate and up are neighbours in a row of gate_up.
void swiglu(const bf16* gate_up, bf16* out, int64_t rows, int64_t inner, int64_t begin, int64_t end, float alpha,
            float limit) {
  const __m512 one = _mm512_set1_ps(1.f), top = _mm512_set1_ps(limit), by = _mm512_set1_ps(alpha);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = begin; i < end; i += kLanes) {
      const __m512i both = _mm512_loadu_si512(gate_up + r * 2 * inner + 2 * i);
      const __m512 gate = _mm512_min_ps(_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), top);
      __m512 up = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
      up = _mm512_max_ps(_mm512_min_ps(up, top), _mm512_sub_ps(_mm512_setzero_ps(), top));
      // x * sigmoid(alpha * x) is silu(alpha * x) / alpha.
      const __m512 glu = _mm512_div_ps(silu(_mm512_mul_ps(gate, by)), by);
      store(out + r * inner + i, _mm512_mul_ps(_mm512_add_ps(up, one), glu));
    }
}

// Rows [first, end) of one expert and one adapter slot; at most 8.
struct SlotTile {
  int64_t expert, slot, first, end;
};

// Pairs (token, choice) in the order of their experts, and of the adapter slots of their tokens, from ids [pairs].
struct Sorted {
  std::vector<int64_t> starts;     // [experts + 1]
  std::vector<int64_t> tokens;     // of each row
  std::vector<int64_t> positions;  // row of each pair
  std::vector<SlotTile> tiles;     // of all rows with adapters

  // `slots` of the tokens from -1 to num_slots - 1; null: all are -1.
  void sort(const int64_t* ids, const int64_t* slots, int64_t pairs, int64_t top_k, int64_t experts, int64_t num_slots) {
    const int64_t groups = slots ? num_slots + 1 : 1;
    const auto group = [&](int64_t i) { return ids[i] * groups + (slots ? slots[i / top_k] + 1 : 0); };
    std::vector<int64_t> next(experts * groups + 1, 0);
    tokens.resize(pairs);
    positions.resize(pairs);
    for (int64_t i = 0; i < pairs; i++) next[group(i) + 1]++;
    for (int64_t g = 0; g < experts * groups; g++) next[g + 1] += next[g];
    starts.resize(experts + 1);
    tiles.clear();
    for (int64_t e = 0; e <= experts; e++) {
      starts[e] = next[e * groups];
      for (int64_t slot = 0; e < experts && slot + 1 < groups; slot++)
        for (int64_t row = next[e * groups + slot + 1], end = next[e * groups + slot + 2]; row < end; row += kTileRows)
          tiles.push_back({e, slot, row, std::min(row + kTileRows, end)});
    }
    for (int64_t i = 0; i < pairs; i++) {
      positions[i] = next[group(i)]++;
      tokens[positions[i]] = i / top_k;
    }
  }
};

// LoRA deltas of the rows of one projection.
class RowDeltas {
 public:
  // Prepare for `rows`; adapters null: there are no deltas.
  void reset(const QuireLoraLinear* adapters, int64_t rows) {
    adapters_ = adapters;
    if (!adapters) return;
    deltas_.assign(rows, Delta{});
    shrunk_.resize(std::max<size_t>(shrunk_.size(), rows * adapters->max_rank));
  }

  // Shrink the inputs x of a tile's rows.
  void shrink(const SlotTile& tile, const bf16* x) {
    const QuireLoraLinear& l = *adapters_;
    const Entry& e = l.entries[tile.slot * l.ld_entries];
    if (!e.rank) return;
    const int64_t pairs = pairs_of(e.rank), width = l.ends[0] * kColumns;
    bf16* const out = shrunk_.data() + tile.first * l.max_rank;
    quire_shrink(x + tile.first * l.in_features, l.in_features, l.pages + e.a + tile.expert * aligned(e.rank * l.in_features),
                 e.rank, l.in_features, out, tile.end - tile.first);
    for (int64_t r = tile.first; r < tile.end; r++)
      deltas_[r] = {out + (r - tile.first) * 2 * pairs, l.pages + e.b + tile.expert * aligned(2 * pairs * width), pairs,
                    nullptr, nullptr};
  }

  // See multiply_panels; the rows begin at `first`. `packed` null: only the deltas are added to out.
  void multiply(int64_t first, const bf16* x, const bf16* packed, const bf16* bias, bf16* out, int64_t ldo, int64_t rows,
                int64_t k, int64_t begin, int64_t end) const {
    if (adapters_)
      multiply_panels<true>(x, k, packed, bias, out, ldo, rows, k, begin, end, !packed, deltas_.data() + first);
    else
      multiply_panels(x, k, packed, bias, out, ldo, rows, k, begin, end, false);
  }

  explicit operator bool() const { return adapters_; }

 private:
  // Matrices begin at multiples of 32 elements; ALIGNMENT of lora_slots.py.
  static int64_t aligned(int64_t elements) { return (elements + 31) / 32 * 32; }

  const QuireLoraLinear* adapters_ = nullptr;
  std::vector<Delta> deltas_;
  std::vector<bf16> shrunk_;  // for each row, as many numbers as its adapter's LoRA rank; tiles start at row * max_rank
};

// Columns [from, to) of a token: out = (add ? out : 0) + sum over its experts of weights * outputs.
void sum_choices(const bf16* outputs, const int64_t* positions, const float* weights, int64_t top_k, bf16* out,
                 int64_t hidden, int64_t from, int64_t to, bool add) {
  for (int64_t i = from; i < to; i += kLanes) {
    __m512 sum = add ? load(out + i) : _mm512_setzero_ps();
    for (int64_t k = 0; k < top_k; k++)
      sum = _mm512_fmadd_ps(load(outputs + positions[k] * hidden + i), _mm512_set1_ps(weights[k]), sum);
    store(out + i, sum);
  }
}

// Weights of all experts below each other, in panels; `_ExpertStack` of experts.py.
struct Stack {
  const uint8_t* panels;
  const QuireWeight* codes;  // describes panels of codes.cpp, or null
  int64_t bytes;             // of an expert
  int64_t is_int8;           // 1: panels of int8.cpp

  bool is_quantized() const { return codes || is_int8; }
  const bf16* expert(int64_t e) const { return (const bf16*)(panels + e * bytes); }

  // out [rows, n] = x [rows, k] W^T + bias with the weights of expert e, which are quantized. All threads take part.
  void multiply(int64_t e, const bf16* x, const bf16* bias, bf16* out, int64_t rows, int64_t n, int64_t k) const {
    if (is_int8) return quire_linear_int8(x, k, panels + e * bytes, bias, out, rows, n, k, 0);
    QuireWeight weight = *codes;
    weight.panels = panels + e * bytes;
    quire_linear_codes(x, k, &weight, bias, out, rows, n, k, 0);
  }
};

}  // namespace

extern "C" {

// Experts of a layer; `_Experts` of experts.py.
struct QuireExperts {
  Stack gate_up, down;                   // [experts, width, hidden], [experts, hidden, inner]
  const bf16 *gate_up_bias, *down_bias;  // [experts, width], [experts, hidden], or null
  int64_t experts, hidden, inner, activation;
  float alpha, limit;

  // Outputs of gate and up together.
  int64_t width() const { return activation == kRelu2 ? inner : 2 * inner; }
};

// Adapters of the tokens; `_ExpertAdapters` of experts.py.
struct QuireExpertAdapters {
  const QuireLoraLinear *gate_up, *down;
  const int64_t* slots;  // of each token; -1: none
  int64_t num_slots;
};

// out [tokens, hidden] = (add ? out : 0) + sum over top_k of weights * expert(x), at most `chunk` tokens at a time.
// x has rows of ldx; ids, weights [tokens, top_k]. workspace: chunk * top_k rows of 2 * hidden + 3 * inner. Each token's
// adapter changes the projections of its experts; adapters null: no token has one.
void quire_experts(const bf16* x, int64_t ldx, const int64_t* ids, const float* weights, const QuireExperts* all,
                   const QuireExpertAdapters* adapters, bf16* out, int64_t tokens, int64_t top_k, int64_t chunk,
                   int64_t add, bf16* workspace) {
  static thread_local Sorted sorted_rows;
  static thread_local RowDeltas gate_up_rows, down_rows;
  const QuireExperts& a = *all;
  const int64_t hidden = a.hidden, inner = a.inner, width = a.width();
  for (int64_t t0 = 0; t0 < tokens; t0 += chunk) {
    const int64_t count = std::min(chunk, tokens - t0), pairs = count * top_k;
    Sorted& s = sorted_rows;
    RowDeltas &gate_up_deltas = gate_up_rows, &down_deltas = down_rows;
    s.sort(ids + t0 * top_k, adapters ? adapters->slots + t0 : nullptr, pairs, top_k, a.experts,
           adapters ? adapters->num_slots : 0);
    gate_up_deltas.reset(adapters ? adapters->gate_up : nullptr, pairs);
    down_deltas.reset(adapters ? adapters->down : nullptr, pairs);
    const int64_t num_tiles = s.tiles.size();
    bf16* const inputs = workspace;                      // [pairs, hidden]
    bf16* const gate_up = inputs + pairs * hidden;       // [pairs, width]
    bf16* const gated = gate_up + pairs * width;         // [pairs, inner]
    bf16* const outputs = gated + pairs * inner;         // [pairs, hidden]
    // Part of a thread of something; threads divide the panels of each expert and not its rows, so weights are read
    // from memory once.
    const auto part = [](int64_t size, int64_t i) { return size * i / omp_get_num_threads(); };
    // Add the deltas to products of quantized weights.
    const auto add_deltas = [&](RowDeltas& deltas, const bf16* input, int64_t k, bf16* product, int64_t n) {
      if (!deltas) return;
#pragma omp parallel
      {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_tiles; i++) deltas.shrink(s.tiles[i], input);
        const int64_t thread = omp_get_thread_num(), panels = n / kColumns;
        deltas.multiply(0, input, nullptr, nullptr, product, n, pairs, k, part(panels, thread), part(panels, thread + 1));
      }
    };
    if (a.gate_up.is_quantized()) {
#pragma omp parallel for schedule(static)
      for (int64_t r = 0; r < pairs; r++) {
        const bf16* row = x + (t0 + s.tokens[r]) * ldx;
        std::copy(row, row + hidden, inputs + r * hidden);
      }
      for (int64_t e = 0; e < a.experts; e++)
        if (const int64_t first_row = s.starts[e], rows = s.starts[e + 1] - first_row; rows)
          a.gate_up.multiply(e, inputs + first_row * hidden, a.gate_up_bias ? a.gate_up_bias + e * width : nullptr,
                             gate_up + first_row * width, rows, width, hidden);
      add_deltas(gate_up_deltas, inputs, hidden, gate_up, width);
#pragma omp parallel for schedule(static)
      for (int64_t r = 0; r < pairs; r++) {
        if (a.activation == kSwiGLU)
          swiglu(gate_up + r * width, gated + r * inner, 1, inner, 0, inner, a.alpha, a.limit);
        else if (a.activation == kRelu2)
          relu2(gate_up + r * width, gated + r * inner, 1, inner, 0, inner);
        else
          silu_mul(gate_up + r * width, gated + r * inner, 1, inner, 0, inner);
      }
      for (int64_t e = 0; e < a.experts; e++)
        if (const int64_t first_row = s.starts[e], rows = s.starts[e + 1] - first_row; rows)
          a.down.multiply(e, gated + first_row * inner, a.down_bias ? a.down_bias + e * hidden : nullptr,
                          outputs + first_row * hidden, rows, hidden, inner);
      add_deltas(down_deltas, gated, inner, outputs, hidden);
#pragma omp parallel for schedule(static)
      for (int64_t t = 0; t < count; t++)
        sum_choices(outputs, &s.positions[t * top_k], weights + (t0 + t) * top_k, top_k, out + (t0 + t) * hidden,
                    hidden, 0, hidden, add);
      continue;
    }
#pragma omp parallel
    {
      const int64_t thread = omp_get_thread_num();
      const int64_t begin = part(inner / kColumns, thread), end = part(inner / kColumns, thread + 1);
#pragma omp for schedule(static)
      for (int64_t r = 0; r < pairs; r++) {
        const bf16* row = x + (t0 + s.tokens[r]) * ldx;
        std::copy(row, row + hidden, inputs + r * hidden);
      }
      if (gate_up_deltas) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_tiles; i++) gate_up_deltas.shrink(s.tiles[i], inputs);
      }
      for (int64_t e = 0; e < a.experts; e++) {
        const int64_t first_row = s.starts[e], rows = s.starts[e + 1] - first_row;
        if (!rows) continue;
        const bf16* const input = inputs + first_row * hidden;
        const bf16* const packed = a.gate_up.expert(e);
        const bf16* const bias = a.gate_up_bias ? a.gate_up_bias + e * width : nullptr;
        bf16* const product = gate_up + first_row * width;
        bf16* const result = gated + first_row * inner;
        const auto multiply = [&](int64_t from, int64_t to) {
          gate_up_deltas.multiply(first_row, input, packed, bias, product, width, rows, hidden, from, to);
        };
        if (a.activation == kSwiGLU) {
          multiply(2 * begin, 2 * end);
          swiglu(product, result, rows, inner, begin * kColumns, end * kColumns, a.alpha, a.limit);
        } else if (a.activation == kRelu2) {
          multiply(begin, end);
          relu2(product, result, rows, inner, begin * kColumns, end * kColumns);
        } else {
          const int64_t up = inner / kColumns;
          multiply(begin, end);
          multiply(up + begin, up + end);
          silu_mul(product, result, rows, inner, begin * kColumns, end * kColumns);
        }
      }
#pragma omp barrier
      if (down_deltas) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_tiles; i++) down_deltas.shrink(s.tiles[i], gated);
      }
      const int64_t from = part(hidden / kColumns, thread), to = part(hidden / kColumns, thread + 1);
      for (int64_t e = 0; e < a.experts; e++) {
        const int64_t first_row = s.starts[e], rows = s.starts[e + 1] - first_row;
        if (!rows) continue;
        down_deltas.multiply(first_row, gated + first_row * inner, a.down.expert(e),
                             a.down_bias ? a.down_bias + e * hidden : nullptr, outputs + first_row * hidden, hidden, rows,
                             inner, from, to);
      }
      // A thread sums the columns that it has computed.
      for (int64_t t = 0; t < count; t++)
        sum_choices(outputs, &s.positions[t * top_k], weights + (t0 + t) * top_k, top_k, out + (t0 + t) * hidden,
                    hidden, from * kColumns, to * kColumns, add);
    }
  }
}

}  // extern "C"
}  // namespace quire
