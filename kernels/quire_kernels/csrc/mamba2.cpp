// SPDX-License-Identifier: Apache-2.0
// Mamba-2: the update of states by one token, the scan of a prompt, and the gated norm. See mamba2.py.

#include "recurrence.h"

namespace quire {
namespace {

// Registers of a row of the state that are computed together.
constexpr int kColumns = 4;

// Sizes and strides of a layer's inputs. A row of xbc has `heads * head_dim` values, and then B and C of each group.
struct Layer {
  int64_t ldx, ldt, heads, groups, state_dim, head_dim;

  int64_t group_of(int64_t head) const { return head / (heads / groups); }
  const bf16* b(const bf16* row, int64_t group) const { return row + heads * head_dim + group * state_dim; }
  const bf16* c(const bf16* row, int64_t group) const { return b(row, groups + group); }
};

// softplus(dt + bias), limited to [low, high].
inline float step_size(bf16 dt, float bias, float low, float high) {
  const float input = widen_one(dt) + bias;
  return std::min(std::max(input > 20.f ? input : std::log1p(std::exp(input)), low), high);
}

inline void widen_row(const bf16* x, float* out, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 mask = first(size - i);
    store_masked(out + i, load(x + i, mask), mask);
  }
}

// Update N registers of columns of a state [state_dim, ld], and write their outputs. `last`: lanes of the last one.
template <int N, class State>
inline void update(State* state, int64_t ld, const float* b, const float* c, const bf16* x, bf16* out,
                   int64_t state_dim, float decay, float dt, float d, __mmask16 last) {
  const auto mask = [&](int n) { return n == N - 1 ? last : (__mmask16)0xffff; };
  __m512 added[N], read[N];
  for (int n = 0; n < N; n++) {
    const __m512 value = load(x + n * kLanes, mask(n));
    added[n] = _mm512_mul_ps(value, _mm512_set1_ps(dt));
    read[n] = _mm512_mul_ps(value, _mm512_set1_ps(d));
  }
  const __m512 keep = _mm512_set1_ps(decay);
  for (int64_t i = 0; i < state_dim; i++) {
    const __m512 input = _mm512_set1_ps(b[i]), output = _mm512_set1_ps(c[i]);
    for (int n = 0; n < N; n++) {
      State* p = state + i * ld + n * kLanes;
      const __m512 s = _mm512_fmadd_ps(input, added[n], _mm512_mul_ps(load(p, mask(n)), keep));
      store_masked(p, s, mask(n));
      read[n] = _mm512_fmadd_ps(s, output, read[n]);
    }
  }
  for (int n = 0; n < N; n++) store(out + n * kLanes, read[n], mask(n));
}

template <class State>
inline void update_all(const Layer& s, const bf16* xbc, const bf16* dt, const float* a_log, const float* dt_bias,
                       const float* d, float low, float high, State* states, const Decodes& decodes, bf16* out) {
  const int64_t matrix = s.state_dim * s.head_dim, dim = s.state_dim;
#pragma omp parallel if (decodes.count * s.heads * matrix > kParallel)
  {
    std::vector<float> inputs;   // B and C of each token
    std::vector<State> drafted;  // the state of a head after drafts
    int64_t known = -1;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < decodes.count * s.heads; item++) {
      const int64_t i = item / s.heads, h = item % s.heads, group = s.group_of(h), length = decodes.lengths[i];
      const bf16* rows = xbc + decodes.tokens[i] * s.ldx;
      if (known != i * s.groups + group) {
        inputs.resize(2 * length * dim);
        for (int64_t j = 0; j < length; j++) {
          widen_row(s.b(rows + j * s.ldx, group), &inputs[2 * j * dim], dim);
          widen_row(s.c(rows + j * s.ldx, group), &inputs[(2 * j + 1) * dim], dim);
        }
        known = i * s.groups + group;
      }
      State* state = states + (decodes.rows[i] * s.heads + h) * matrix;
      for (int64_t j = 0; j < length; j++) {
        if (j == decodes.kept[i]) {
          drafted.assign(state, state + matrix);
          state = drafted.data();
        }
        const int64_t t = decodes.tokens[i] + j;
        const float step = step_size(dt[t * s.ldt + h], dt_bias[h], low, high);
        const float decay = std::exp(-std::exp(a_log[h]) * step);
        const float *b = &inputs[2 * j * dim], *c = b + dim;
        const bf16* x = rows + j * s.ldx + h * s.head_dim;
        bf16* y = out + (t * s.heads + h) * s.head_dim;
        int64_t p = 0;
        for (; p + kColumns * kLanes <= s.head_dim; p += kColumns * kLanes)
          update<kColumns>(state + p, s.head_dim, b, c, x + p, y + p, dim, decay, step, d[h], 0xffff);
        for (; p < s.head_dim; p += kLanes)
          update<1>(state + p, s.head_dim, b, c, x + p, y + p, dim, decay, step, d[h], first(s.head_dim - p));
      }
    }
  }
}

// Memory of a thread for a chunk.
struct Chunk {
  explicit Chunk(const Layer& s)
      : b(kChunk * s.state_dim), c(kChunk * s.state_dim), columns(s.state_dim * kChunk), products(kChunk * kChunk),
        scores(kChunk * kChunk), values(kChunk * s.head_dim), out(kChunk * s.head_dim) {}
  std::vector<float> b, c;      // [tokens, state_dim]
  std::vector<float> columns;   // b transposed, [state_dim, kChunk]
  std::vector<float> products;  // c b^T, which all heads of a group share
  std::vector<float> scores;    // products with the decays of a head
  std::vector<float> values, out;
};

// Prepare what the heads of a group share.
inline void prepare(const Layer& s, const bf16* xbc, int64_t count, int64_t group, Chunk& w) {
  const int64_t dim = s.state_dim, padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t t = 0; t < count; t++) {
    widen_row(s.b(xbc + t * s.ldx, group), &w.b[t * dim], dim);
    widen_row(s.c(xbc + t * s.ldx, group), &w.c[t * dim], dim);
    for (int64_t i = 0; i < dim; i++) w.columns[i * kChunk + t] = w.b[t * dim + i];
  }
  for (int64_t i = 0; i < dim; i++) std::fill(&w.columns[i * kChunk] + count, &w.columns[i * kChunk] + padded, 0.f);
  multiply(w.products.data(), kChunk, w.c.data(), dim, 1, w.columns.data(), kChunk, count, padded, dim, 0, 1);
}

// Compute `count` tokens of one head from its state.
inline void scan(const Layer& s, const bf16* xbc, const bf16* dt, float a_log, float dt_bias, float d, float low,
                 float high, float* state, bf16* out, int64_t count, int64_t head, Chunk& w) {
  const int64_t width = s.head_dim, dim = s.state_dim, padded = (count + kLanes - 1) / kLanes * kLanes;
  const bf16* x = xbc + head * width;
  alignas(64) float total[kChunk] = {};  // logarithm of the decay since the start of the chunk, divided by log(2)
  for (int64_t t = 0; t < count; t++) {
    const float step = step_size(dt[t * s.ldt + head], dt_bias, low, high);
    total[t] = (t ? total[t - 1] : 0.f) - std::exp(a_log) * step * 1.44269504f;
    for (int64_t p = 0; p < width; p += kLanes)
      _mm512_storeu_ps(&w.values[t * width + p], _mm512_mul_ps(load(x + t * s.ldx + p), _mm512_set1_ps(step)));
  }
  for (int64_t i = 0; i < count; i++)
    for (int64_t j = 0; j < padded; j += kLanes) {
      const __m512 decay = exp2(_mm512_min_ps(_mm512_sub_ps(_mm512_set1_ps(total[i]), _mm512_load_ps(total + j)),
                                              _mm512_setzero_ps()));
      const __m512 score = _mm512_mul_ps(_mm512_loadu_ps(&w.products[i * kChunk + j]), decay);
      float* scores = &w.scores[i * kChunk + j];
      _mm512_storeu_ps(scores, score);
      std::fill(scores + std::clamp<int64_t>(i + 1 - j, 0, kLanes), scores + kLanes, 0.f);  // later tokens
    }
  multiply(w.out.data(), width, w.c.data(), dim, 1, state, width, count, width, dim, 0, 1);
  for (int64_t i = 0; i < count; i++)
    for (int64_t p = 0; p < width; p += kLanes) {
      float* y = &w.out[i * width + p];
      const __m512 skipped = _mm512_mul_ps(load(x + i * s.ldx + p), _mm512_set1_ps(d));
      _mm512_storeu_ps(y, _mm512_fmadd_ps(_mm512_loadu_ps(y), _mm512_set1_ps(std::exp2(total[i])), skipped));
    }
  multiply(w.out.data(), width, w.scores.data(), kChunk, 1, w.values.data(), width, count, width, count, 1, 1);
  for (int64_t i = 0; i < count; i++)
    for (int64_t p = 0; p < width; p += kLanes)
      store(out + (i * s.heads + head) * width + p, _mm512_loadu_ps(&w.out[i * width + p]));
  for (int64_t j = 0; j < count; j++) {
    const __m512 remaining = _mm512_set1_ps(std::exp2(total[count - 1] - total[j]));
    for (int64_t p = 0; p < width; p += kLanes) {
      float* v = &w.values[j * width + p];
      _mm512_storeu_ps(v, _mm512_mul_ps(_mm512_loadu_ps(v), remaining));
    }
  }
  multiply(state, width, w.b.data(), 1, dim, w.values.data(), width, dim, width, count, std::exp2(total[count - 1]), 1);
}

}  // namespace

extern "C" {

// Update the state of each sequence by its tokens, and read it after each of them. tokens, rows, lengths and kept
// [count]: see Decodes. Tokens are rows of xbc, dt and out. states [.., heads, state_dim, head_dim], bf16 or float.
void quire_mamba2_update(const bf16* xbc, int64_t ldx, const bf16* dt, int64_t ldt, const float* a_log,
                         const float* dt_bias, const float* d, float low, float high, void* states, int64_t is_bf16,
                         const int64_t* tokens, const int64_t* rows, const int64_t* lengths, const int64_t* kept,
                         bf16* out, int64_t count, int64_t heads, int64_t groups, int64_t state_dim,
                         int64_t head_dim) {
  const Layer s{ldx, ldt, heads, groups, state_dim, head_dim};
  const Decodes decodes{tokens, rows, lengths, kept, count};
  if (is_bf16)
    update_all(s, xbc, dt, a_log, dt_bias, d, low, high, (bf16*)states, decodes, out);
  else
    update_all(s, xbc, dt, a_log, dt_bias, d, low, high, (float*)states, decodes, out);
}

// Compute the tokens [start, end) of one sequence from its state, and update the state. head_dim must be a multiple of
// 16. xbc, dt and out as above; state [heads, state_dim, head_dim].
void quire_mamba2_scan(const bf16* xbc, int64_t ldx, const bf16* dt, int64_t ldt, const float* a_log,
                       const float* dt_bias, const float* d, float low, float high, float* state, bf16* out,
                       int64_t start, int64_t end, int64_t heads, int64_t groups, int64_t state_dim,
                       int64_t head_dim) {
  const Layer s{ldx, ldt, heads, groups, state_dim, head_dim};
#pragma omp parallel if ((end - start) * heads * state_dim > kParallel)
  {
    Chunk scratch(s);
    for (int64_t t = start; t < end; t += kChunk) {
      const int64_t count = std::min(kChunk, end - t);
      int64_t known = -1;
      // A thread computes the same heads of every chunk.
#pragma omp for schedule(static) nowait
      for (int64_t h = 0; h < heads; h++) {
        if (known != s.group_of(h)) prepare(s, xbc + t * ldx, count, known = s.group_of(h), scratch);
        scan(s, xbc + t * ldx, dt + t * ldt, a_log[h], dt_bias[h], d[h], low, high, state + h * state_dim * head_dim,
             out + t * heads * head_dim, count, h, scratch);
      }
    }
  }
}

// The norm of each group of x and the gate; see gated_group_norm. x and out [tokens, groups * size]; gate has rows of
// ldg; without a weight, there is no norm.
void quire_gated_group_norm(const bf16* x, const bf16* gate, int64_t ldg, const bf16* weight, bf16* out,
                            int64_t tokens, int64_t groups, int64_t size, float eps, int64_t gates_first) {
#pragma omp parallel for schedule(static) if (tokens * groups * size > kParallel)
  for (int64_t r = 0; r < tokens * groups; r++) {
    const int64_t offset = r % groups * size;
    const bf16 *row = x + r * size, *gates = gate + r / groups * ldg + offset;
    const auto input = [&](int64_t i, __mmask16 mask) {
      const __m512 v = load(row + i, mask);
      return gates_first ? _mm512_mul_ps(v, silu(load(gates + i, mask))) : v;
    };
    __m512 scale = _mm512_set1_ps(1.f);
    if (weight) {
      __m512 squares = _mm512_setzero_ps();
      for (int64_t i = 0; i < size; i += kLanes) {
        const __m512 v = input(i, first(size - i));
        squares = _mm512_fmadd_ps(v, v, squares);
      }
      scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / size + eps));
    }
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 mask = first(size - i);
      __m512 v = _mm512_mul_ps(input(i, mask), scale);
      if (weight) v = _mm512_mul_ps(v, load(weight + offset + i, mask));
      if (!gates_first) v = _mm512_mul_ps(v, silu(load(gates + i, mask)));
      store(out + r * size + i, v, mask);
    }
  }
}

}  // extern "C"
}  // namespace quire
