// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet and Kimi Delta Attention: the short convolution, the update of states token by token, and the gated
// norm. See gated_delta.py.

#include <algorithm>
#include <cmath>
#include <vector>

#include "recurrence.h"

namespace quire {
namespace {

// Registers of a row of the state that are computed together: with their sums, they must fit into the register file.
constexpr int kColumns = kAvx512 ? 8 : 2;
constexpr float kNormEps = 1e-6f;

// Write x / |x| * scale to `out`.
inline void normalise_head(const bf16* x, float* out, int64_t size, float scale) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 v = load(x + i, first(size - i));
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 factor = _mm512_set1_ps(scale / std::sqrt(_mm512_reduce_add_ps(squares) + kNormEps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 mask = first(size - i);
    store_masked(out + i, _mm512_mul_ps(load(x + i, mask), factor), mask);
  }
}

inline float dot(const float* a, const float* b, int64_t size) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 mask = first(size - i);
    sum = _mm512_fmadd_ps(load(a + i, mask), load(b + i, mask), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

// A token and a head: q, k [key_dim], q k and the learning rate. Either `decay` applies to all rows of the state, or
// `decays` [key_dim] to each of them, and then q and k are already multiplied by them and `written` is k.
struct Token {
  const float *q, *k;
  float qk, beta, decay;
  const float *decays, *written;
};

// Update N registers of columns of a state [key_dim, ld], and write their outputs. `last`: lanes of the last register.
template <int N, bool kByRow, class State>
inline void update(State* state, int64_t ld, const Token& token, const bf16* v, bf16* out, int64_t key_dim,
                   __mmask16 last) {
  const auto mask = [&](int c) { return c == N - 1 ? last : (__mmask16)0xffff; };
  __m512 known[N], read[N];
  for (int c = 0; c < N; c++) known[c] = read[c] = _mm512_setzero_ps();
  for (int64_t i = 0; i < key_dim; i++) {
    const __m512 key = _mm512_set1_ps(token.k[i]), query = _mm512_set1_ps(token.q[i]);
    for (int c = 0; c < N; c++) {
      const __m512 s = load(state + i * ld + c * kLanes, mask(c));
      known[c] = _mm512_fmadd_ps(s, key, known[c]);
      read[c] = _mm512_fmadd_ps(s, query, read[c]);
    }
  }
  const __m512 keep = _mm512_set1_ps(token.decay);
  for (int c = 0; c < N; c++) {
    if (!kByRow) known[c] = _mm512_mul_ps(known[c], keep), read[c] = _mm512_mul_ps(read[c], keep);
    const __m512 error = _mm512_sub_ps(load(v + c * kLanes, mask(c)), known[c]);
    known[c] = _mm512_mul_ps(error, _mm512_set1_ps(token.beta));
    store(out + c * kLanes, _mm512_fmadd_ps(known[c], _mm512_set1_ps(token.qk), read[c]), mask(c));
  }
  for (int64_t i = 0; i < key_dim; i++) {
    const __m512 key = _mm512_set1_ps(kByRow ? token.written[i] : token.k[i]);
    const __m512 factor = kByRow ? _mm512_set1_ps(token.decays[i]) : keep;
    for (int c = 0; c < N; c++) {
      State* p = state + i * ld + c * kLanes;
      const __m512 s = _mm512_mul_ps(load(p, mask(c)), factor);
      store_masked(p, _mm512_fmadd_ps(key, known[c], s), mask(c));
    }
  }
}

// Logarithm of the decay of a token and a head.
inline float log_decay_of(bf16 a, float a_log, float dt_bias) {
  const float input = widen_one(a) + dt_bias;
  return -std::exp(a_log) * (input > 20.f ? input : std::log1p(std::exp(input)));
}

inline float sigmoid_one(bf16 x) { return 1.f / (1.f + std::exp(-widen_one(x))); }

// Sizes and strides of a layer's inputs.
struct Layer {
  int64_t ldq, ldg, key_heads, value_heads, key_dim, value_dim;
};

template <class State>
inline void update_all(const Layer& s, const bf16* qkv, const bf16* a, const bf16* b, const float* a_log,
                       const float* dt_bias, State* states, const Decodes& decodes, bf16* out) {
  const int64_t per_key = s.value_heads / s.key_heads, dk = s.key_dim, dv = s.value_dim, matrix = dk * dv;
#pragma omp parallel if (decodes.count * s.value_heads * matrix > kParallel)
  {
    std::vector<float> keys, dots;
    std::vector<State> drafted;  // the state of a head after drafts
#pragma omp for schedule(static)
    for (int64_t item = 0; item < decodes.count * s.key_heads; item++) {
      const int64_t i = item / s.key_heads, key_head = item % s.key_heads, length = decodes.lengths[i];
      const bf16* x = qkv + decodes.tokens[i] * s.ldq;
      keys.resize(length * 2 * dk);
      dots.resize(length);
      for (int64_t j = 0; j < length; j++) {
        float *q = &keys[2 * j * dk], *k = q + dk;
        normalise_head(x + j * s.ldq + key_head * dk, q, dk, 1.f / std::sqrt((float)dk));
        normalise_head(x + j * s.ldq + (s.key_heads + key_head) * dk, k, dk, 1.f);
        dots[j] = dot(q, k, dk);
      }
      for (int64_t h = key_head * per_key; h < (key_head + 1) * per_key; h++) {
        State* state = states + (decodes.rows[i] * s.value_heads + h) * matrix;
        for (int64_t j = 0; j < length; j++) {
          if (j == decodes.kept[i]) {
            drafted.assign(state, state + matrix);
            state = drafted.data();
          }
          const int64_t t = decodes.tokens[i] + j;
          const float decay = std::exp(log_decay_of(a[t * s.ldg + h], a_log[h], dt_bias[h]));
          const float beta = sigmoid_one(b[t * s.ldg + h]);
          const float* q = &keys[2 * j * dk];
          const Token token{q, q + dk, dots[j], beta, decay, nullptr, nullptr};
          const bf16* v = x + j * s.ldq + 2 * s.key_heads * dk + h * dv;
          bf16* y = out + (t * s.value_heads + h) * dv;
          int64_t c = 0;
          for (; c + kColumns * kLanes <= dv; c += kColumns * kLanes)
            update<kColumns, false>(state + c, dv, token, v + c, y + c, dk, 0xffff);
          for (; c < dv; c += kLanes) update<1, false>(state + c, dv, token, v + c, y + c, dk, first(dv - c));
        }
      }
    }
  }
}

// Kimi Delta Attention for all spans. decays [tokens, heads, key_dim]; each head has its own key.
template <class State>
inline void update_by_row(const Layer& s, const bf16* qkv, const float* decays, const bf16* b, State* states,
                          const Decodes& spans, bf16* out) {
  const int64_t heads = s.value_heads, dk = s.key_dim, dv = s.value_dim, matrix = dk * dv;
#pragma omp parallel
  {
    std::vector<float> keys;
    std::vector<Token> tokens;
    std::vector<State> drafted;  // the state of a head after drafts
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < spans.count * heads; item++) {
      const int64_t i = item / heads, h = item % heads, begin = spans.tokens[i], kept = spans.kept[i];
      keys.resize(spans.lengths[i] * 3 * dk);
      tokens.clear();
      for (int64_t j = 0; j < spans.lengths[i]; j++) {
        const bf16* x = qkv + (begin + j) * s.ldq + h * dk;
        const float* decay = decays + ((begin + j) * heads + h) * dk;
        float *q = &keys[3 * j * dk], *k = q + dk, *written = k + dk;
        normalise_head(x, q, dk, 1.f / std::sqrt((float)dk));
        normalise_head(x + heads * dk, written, dk, 1.f);
        const float qk = dot(q, written, dk), beta = sigmoid_one(b[(begin + j) * s.ldg + h]);
        for (int64_t d = 0; d < dk; d++) q[d] *= decay[d], k[d] = written[d] * decay[d];
        tokens.push_back({q, k, qk, beta, 1.f, decay, written});
      }
      // Columns do not depend on each other. A few of them stay in the nearest cache for all tokens.
      const auto advance = [&](State* state, int64_t from, int64_t to) {
        for (int64_t c = 0; c < dv;) {
          const bool is_wide = c + kColumns * kLanes <= dv;
          for (int64_t j = from; j < to; j++) {
            const bf16* v = qkv + (begin + j) * s.ldq + 2 * heads * dk + h * dv + c;
            bf16* y = out + ((begin + j) * heads + h) * dv + c;
            if (is_wide)
              update<kColumns, true>(state + c, dv, tokens[j], v, y, dk, 0xffff);
            else
              update<1, true>(state + c, dv, tokens[j], v, y, dk, first(dv - c));
          }
          c += is_wide ? kColumns * kLanes : kLanes;
        }
      };
      State* state = states + (spans.rows[i] * heads + h) * matrix;
      advance(state, 0, kept);
      if (kept < spans.lengths[i]) {
        drafted.assign(state, state + matrix);
        advance(drafted.data(), kept, spans.lengths[i]);
      }
    }
  }
}

// Memory of a thread for a chunk.
struct Chunk {
  explicit Chunk(const Layer& s)
      : q(kChunk * s.key_dim), k(kChunk * s.key_dim), keys(s.key_dim * kChunk), delta(kChunk * s.value_dim),
        out(kChunk * s.value_dim), scores(kChunk * kChunk), known(kChunk * kChunk) {}
  std::vector<float> q, k;   // [tokens, key_dim]
  std::vector<float> keys;   // k transposed, [key_dim, kChunk]
  std::vector<float> delta, out;
  std::vector<float> scores;  // q k^T with decays
  std::vector<float> known;   // k k^T with decays and learning rates
};

// Compute `count` tokens of one sequence and head from its state, as in `_scan_chunks`.
inline void scan(const Layer& s, const bf16* qkv, const bf16* a, const bf16* b, float a_log, float dt_bias,
                 float* state, bf16* out, int64_t count, int64_t head, Chunk& w) {
  const int64_t dk = s.key_dim, dv = s.value_dim, key_head = head / (s.value_heads / s.key_heads);
  const bf16* v = qkv + 2 * s.key_heads * dk + head * dv;
  float total[kChunk], beta[kChunk], before[kChunk];
  for (int64_t t = 0; t < count; t++) {
    normalise_head(qkv + t * s.ldq + key_head * dk, w.q.data() + t * dk, dk, 1.f / std::sqrt((float)dk));
    normalise_head(qkv + t * s.ldq + (s.key_heads + key_head) * dk, w.k.data() + t * dk, dk, 1.f);
    for (int64_t i = 0; i < dk; i++) w.keys[i * kChunk + t] = w.k[t * dk + i];
    total[t] = log_decay_of(a[t * s.ldg + head], a_log, dt_bias) + (t ? total[t - 1] : 0.f);
    before[t] = std::exp(total[t]);
    beta[t] = sigmoid_one(b[t * s.ldg + head]);
  }
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 0; i < dk; i++) std::fill(&w.keys[i * kChunk + count], &w.keys[i * kChunk] + padded, 0.f);
  multiply(w.known.data(), kChunk, w.k.data(), dk, 1, w.keys.data(), kChunk, count, padded, dk, 0, 1);
  multiply(w.scores.data(), kChunk, w.q.data(), dk, 1, w.keys.data(), kChunk, count, padded, dk, 0, 1);
  for (int64_t i = 0; i < count; i++) {
    for (int64_t j = 0; j <= i; j++) {
      const float decay = std::exp(total[i] - total[j]);
      w.known[i * kChunk + j] *= decay * beta[i];
      w.scores[i * kChunk + j] *= decay;
    }
    std::fill(&w.scores[i * kChunk + i] + 1, &w.scores[i * kChunk] + padded, 0.f);
  }
  // What the state before the chunk knows and returns.
  multiply(w.delta.data(), dv, w.k.data(), dk, 1, state, dv, count, dv, dk, 0, 1);
  multiply(w.out.data(), dv, w.q.data(), dk, 1, state, dv, count, dv, dk, 0, 1);
  for (int64_t i = 0; i < count; i++)
    for (int64_t c = 0; c < dv; c += kLanes) {
      float* p = &w.delta[i * dv + c];
      const __m512 value = load(v + i * s.ldq + c);
      const __m512 error = _mm512_fnmadd_ps(_mm512_loadu_ps(p), _mm512_set1_ps(before[i]), value);
      _mm512_storeu_ps(p, _mm512_mul_ps(error, _mm512_set1_ps(beta[i])));
      float* y = &w.out[i * dv + c];
      _mm512_storeu_ps(y, _mm512_mul_ps(_mm512_loadu_ps(y), _mm512_set1_ps(before[i])));
    }
  // Each token corrects what the tokens before it have written: first those of earlier blocks, then those of its own.
  for (int64_t first_row = 0; first_row < count; first_row += kLanes) {
    const int64_t end = std::min(first_row + kLanes, count);
    if (first_row)
      multiply(&w.delta[first_row * dv], dv, &w.known[first_row * kChunk], kChunk, 1, w.delta.data(), dv,
               end - first_row, dv, first_row, 1, -1);
    for (int64_t i = first_row + 1; i < end; i++)
      multiply(&w.delta[i * dv], dv, &w.known[i * kChunk + first_row], kChunk, 1, &w.delta[first_row * dv], dv, 1, dv,
               i - first_row, 1, -1);
  }
  multiply(w.out.data(), dv, w.scores.data(), kChunk, 1, w.delta.data(), dv, count, dv, count, 1, 1);
  for (int64_t i = 0; i < count; i++)
    for (int64_t c = 0; c < dv; c += kLanes)
      store(out + i * s.value_heads * dv + c, _mm512_loadu_ps(&w.out[i * dv + c]));
  for (int64_t j = 0; j < count; j++) {
    const __m512 remaining = _mm512_set1_ps(std::exp(total[count - 1] - total[j]));
    for (int64_t c = 0; c < dv; c += kLanes) {
      float* p = &w.delta[j * dv + c];
      _mm512_storeu_ps(p, _mm512_mul_ps(_mm512_loadu_ps(p), remaining));
    }
  }
  multiply(state, dv, w.k.data(), 1, dk, w.delta.data(), dv, dk, dv, count, before[count - 1], 1);
}

}  // namespace

extern "C" {

// The convolution over the last `taps` inputs of each sequence, or silu of it. x has rows of ldx; weight is [taps, size]
// and bias [size] or null.
// starts [spans + 1]: first token of each span. states [.., taps - 1, size]: earlier inputs, oldest first; row rows[s]
// belongs to span s, and gets the last of its first kept[s] inputs.
void quire_short_convolution(const bf16* x, int64_t ldx, const bf16* weight, const bf16* bias, bf16* states,
                             const int64_t* rows, const int64_t* starts, const int64_t* kept, bf16* out, int64_t spans,
                             int64_t size, int64_t taps, int64_t has_silu) {
  const int64_t tokens = starts[spans], earlier = taps - 1;
  const auto span_of = [&](int64_t t) { return std::upper_bound(starts, starts + spans + 1, t) - starts - 1; };
  // The input of the token at `position` of a span; negative positions are in the state.
  const auto input = [&](int64_t s, int64_t position) {
    return position < 0 ? (const bf16*)states + (rows[s] * earlier + earlier + position) * size
                        : x + (starts[s] + position) * ldx;
  };
#pragma omp parallel if (tokens * size > kParallel)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t s = span_of(t), position = t - starts[s];
      for (int64_t i = 0; i < size; i += kLanes) {
        const __mmask16 mask = first(size - i);
        __m512 sum = bias ? load(bias + i, mask) : _mm512_setzero_ps();
        for (int64_t tap = 0; tap < taps; tap++)
          sum = _mm512_fmadd_ps(load(input(s, position - earlier + tap) + i, mask), load(weight + tap * size + i, mask),
                                sum);
        store(out + t * size + i, has_silu ? silu(sum) : sum, mask);
      }
    }
#pragma omp for schedule(static)
    for (int64_t s = 0; s < spans; s++) {
      // In ascending order, an input is read before its place is overwritten.
      for (int64_t j = 0; j < earlier; j++) {
        const bf16* source = input(s, kept[s] - earlier + j);
        bf16* target = states + (rows[s] * earlier + j) * size;
        if (source != target) std::copy(source, source + size, target);
      }
    }
  }
}

// Update the state of each sequence by its tokens, and read it after each of them. tokens, rows, lengths and kept
// [count]: see Decodes. Tokens are rows of qkv, a, b and out. states [.., value_heads, key_dim, value_dim], bf16 or float.
void quire_gated_delta_update(const bf16* qkv, int64_t ldq, const bf16* a, const bf16* b, int64_t ldg,
                              const float* a_log, const float* dt_bias, void* states, int64_t is_bf16,
                              const int64_t* tokens, const int64_t* rows, const int64_t* lengths, const int64_t* kept,
                              bf16* out, int64_t count, int64_t key_heads, int64_t value_heads, int64_t key_dim,
                              int64_t value_dim) {
  const Layer s{ldq, ldg, key_heads, value_heads, key_dim, value_dim};
  const Decodes decodes{tokens, rows, lengths, kept, count};
  if (is_bf16)
    update_all(s, qkv, a, b, a_log, dt_bias, (bf16*)states, decodes, out);
  else
    update_all(s, qkv, a, b, a_log, dt_bias, (float*)states, decodes, out);
}

// Kimi Delta Attention: the same for all spans of a step, prompts included. decays [tokens, heads, key_dim].
void quire_kimi_delta_update(const bf16* qkv, int64_t ldq, const float* decays, const bf16* b, int64_t ldg, void* states,
                             int64_t is_bf16, const int64_t* tokens, const int64_t* rows, const int64_t* lengths,
                             const int64_t* kept, bf16* out, int64_t count, int64_t heads, int64_t key_dim,
                             int64_t value_dim) {
  const Layer s{ldq, ldg, heads, heads, key_dim, value_dim};
  const Decodes spans{tokens, rows, lengths, kept, count};
  if (is_bf16)
    update_by_row(s, qkv, decays, b, (bf16*)states, spans, out);
  else
    update_by_row(s, qkv, decays, b, (float*)states, spans, out);
}

// Compute the tokens [start, end) of one sequence from its state, and update the state. value_dim must be a multiple of
// 16. qkv, a, b and out as above; state [value_heads, key_dim, value_dim].
void quire_gated_delta_scan(const bf16* qkv, int64_t ldq, const bf16* a, const bf16* b, int64_t ldg, const float* a_log,
                            const float* dt_bias, float* state, bf16* out, int64_t start, int64_t end,
                            int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim) {
  const Layer s{ldq, ldg, key_heads, value_heads, key_dim, value_dim};
#pragma omp parallel if ((end - start) * value_heads * key_dim > kParallel)
  {
    Chunk scratch(s);
#pragma omp for schedule(static)
    for (int64_t h = 0; h < value_heads; h++)
      for (int64_t t = start; t < end; t += kChunk)
        scan(s, qkv + t * ldq, a + t * ldg, b + t * ldg, a_log[h], dt_bias[h], state + h * key_dim * value_dim,
             out + (t * value_heads + h) * value_dim, std::min(kChunk, end - t), h, scratch);
  }
}

// x / sqrt(mean(x^2) + eps) * weight * silu(gate), or the sigmoid of gate, for each head. x and out [tokens, heads, dim];
// gate has rows of ldg.
void quire_gated_rms_norm(const bf16* x, const bf16* gate, int64_t ldg, const bf16* weight, bf16* out, int64_t tokens,
                          int64_t heads, int64_t dim, float eps, int64_t is_sigmoid) {
#pragma omp parallel for schedule(static) if (tokens * heads * dim > kParallel)
  for (int64_t r = 0; r < tokens * heads; r++) {
    const bf16* row = x + r * dim;
    const bf16* gates = gate + r / heads * ldg + r % heads * dim;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += kLanes) {
      const __m512 v = load(row + i, first(dim - i));
      squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / dim + eps));
    for (int64_t i = 0; i < dim; i += kLanes) {
      const __mmask16 mask = first(dim - i);
      const __m512 v = _mm512_mul_ps(_mm512_mul_ps(load(row + i, mask), scale), load(weight + i, mask));
      const __m512 g = load(gates + i, mask);
      store(out + r * dim + i, _mm512_mul_ps(v, is_sigmoid ? sigmoid(g) : silu(g)), mask);
    }
  }
}

}  // extern "C"
}  // namespace quire
