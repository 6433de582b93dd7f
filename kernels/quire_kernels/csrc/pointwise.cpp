// SPDX-License-Identifier: Apache-2.0
// Operations between GEMMs, each in one pass over its rows, in float32.

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops.h"

namespace quire {
namespace {

// Minimum elements per thread: with fewer, a second thread costs more than it saves.
constexpr int64_t kParallel = 1 << 13;

// Rotate a head of `dim` elements by the angles of its token, in place; sines have their first half negated.
inline void rotate(const bf16* x, const bf16* cos, const bf16* sin, bf16* out, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const __mmask16 mask = first(half - i);
    const __m512 a = load(x + i, mask), b = load(x + half + i, mask);
    const __m512 left = _mm512_fmadd_ps(a, load(cos + i, mask), _mm512_mul_ps(b, load(sin + i, mask)));
    const __m512 right =
        _mm512_fmadd_ps(b, load(cos + half + i, mask), _mm512_mul_ps(a, load(sin + half + i, mask)));
    store(out + i, left, mask);
    store(out + half + i, right, mask);
  }
}

// out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
inline void normalise(const bf16* x, const bf16* weight, bf16* out, int64_t size, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 v = load(x + i, first(size - i));
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / size + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 mask = first(size - i);
    const __m512 v = _mm512_mul_ps(load(x + i, mask), scale);
    store(out + i, _mm512_mul_ps(v, load(weight + i, mask)), mask);
  }
}

// Tokens whose weights are added up before the sum is compared with the threshold.
constexpr int64_t kSampledTokens = 512;

// Sum of the weights 2^(scale * (x - top)) of tokens [begin, end).
template <typename T>
inline float sum_weights(const T* row, int64_t begin, int64_t end, __m512 scale, __m512 top) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = begin; i < end; i += kLanes) {
    const __mmask16 mask = first(end - i);
    const __m512 weight = exp2(_mm512_mul_ps(_mm512_sub_ps(load(row + i, mask), top), scale));
    sum = _mm512_mask_add_ps(sum, mask, sum, weight);
  }
  return _mm512_reduce_add_ps(sum);
}

// The first token at which the sum of the weights so far exceeds the uniform's share of their total.
template <typename T>
int64_t sample_row(const T* row, int64_t size, float temperature, float uniform) {
  __m512 best = _mm512_set1_ps(-INFINITY);
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 mask = first(size - i);
    best = _mm512_mask_max_ps(best, mask, best, load(row + i, mask));
  }
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(best));
  if (temperature <= 0) {
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 mask = first(size - i);
      if (const __mmask16 hit = _mm512_mask_cmp_ps_mask(mask, load(row + i, mask), top, _CMP_EQ_OQ))
        return i + __builtin_ctz(hit);
    }
    return 0;
  }
  const __m512 scale = _mm512_set1_ps(kLog2E / temperature);
  thread_local std::vector<float> sums;
  sums.clear();
  double total = 0;
  for (int64_t begin = 0; begin < size; begin += kSampledTokens) {
    sums.push_back(sum_weights(row, begin, std::min(begin + kSampledTokens, size), scale, top));
    total += sums.back();
  }
  const double threshold = uniform * total;
  double before = 0;
  size_t block = 0;
  while (block + 1 < sums.size() && before + sums[block] <= threshold) before += sums[block++];
  // Rounding can leave the threshold above the last sum; then the last token with a weight is selected.
  int64_t last = 0;
  const int64_t begin = block * kSampledTokens, end = std::min(begin + kSampledTokens, size);
  for (int64_t i = begin; i < end; i += kLanes) {
    const __mmask16 mask = first(end - i);
    alignas(64) float weights[kLanes];
    _mm512_store_ps(weights, exp2(_mm512_mul_ps(_mm512_sub_ps(load(row + i, mask), top), scale)));
    for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, end - i); lane++) {
      if (weights[lane] <= 0) continue;
      last = i + lane;
      before += weights[lane];
      if (before > threshold) return last;
    }
  }
  return last;
}

}  // namespace

extern "C" {

// Normalise each row of x; x has rows of ldx, out has rows of size.
void quire_rms_norm(const bf16* x, int64_t ldx, const bf16* weight, bf16* out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows * size > kParallel)
  for (int64_t r = 0; r < rows; r++) normalise(x + r * ldx, weight, out + r * size, size, eps);
}

// Normalise each head of queries and keys in place. qkv [tokens, heads + 2 * kv_heads, head_dim] with rows of ldq.
void quire_norm_heads(bf16* qkv, int64_t ldq, const bf16* query_weight, const bf16* key_weight, int64_t tokens,
                      int64_t heads, int64_t kv_heads, int64_t head_dim, float eps) {
#pragma omp parallel for schedule(static) if (tokens * (heads + kv_heads) * head_dim > kParallel)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      bf16* head = qkv + t * ldq + h * head_dim;
      normalise(head, h < heads ? query_weight : key_weight, head, head_dim, eps);
    }
}

// out [rows, size] = gelu(gate) * up of gate_up [rows, 2 * size], with the approximation of gelu by tanh.
void quire_gelu_tanh_mul(const bf16* gate_up, bf16* out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > kParallel)
  for (int64_t r = 0; r < rows; r++) {
    const bf16* gate = gate_up + r * 2 * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 mask = first(size - i);
      const __m512 left = gelu_tanh(load(gate + i, mask));
      store(out + r * size + i, _mm512_mul_ps(left, load(gate + size + i, mask)), mask);
    }
  }
}

// x = cap tanh(x / cap), in place; x has rows of ldx.
void quire_softcap(bf16* x, int64_t ldx, int64_t rows, int64_t size, float cap) {
  const __m512 by = _mm512_set1_ps(cap), inverse = _mm512_set1_ps(1.f / cap);
#pragma omp parallel for schedule(static) if (rows * size > kParallel)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 mask = first(size - i);
      bf16* at = x + r * ldx + i;
      store(at, _mm512_mul_ps(tanh(_mm512_mul_ps(load(at, mask), inverse)), by), mask);
    }
}

// out [rows, size] = silu(gate) * up of gate_up [rows, 2 * size].
void quire_silu_mul(const bf16* gate_up, bf16* out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > kParallel)
  for (int64_t r = 0; r < rows; r++) {
    const bf16* gate = gate_up + r * 2 * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 mask = first(size - i);
      store(out + r * size + i, _mm512_mul_ps(silu(load(gate + i, mask)), load(gate + size + i, mask)), mask);
    }
  }
}

}  // extern "C"

namespace {

// Store a head as int8 codes and their scale: `quantize_rows` of kv_cache_layout.py.
void quantise(const bf16* x, int64_t size, char* out) {
  // The largest magnitude, as an integer: NaN is above infinity.
  __m512i most = _mm512_setzero_si512();
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512i v = _mm512_castps_si512(load(x + i, first(size - i)));
    most = _mm512_max_epi32(most, _mm512_and_si512(v, magnitude));
  }
  const int32_t bits = _mm512_reduce_max_epi32(most);
  float largest;
  __builtin_memcpy(&largest, &bits, sizeof largest);
  const __m512 factor = _mm512_set1_ps(largest == 0 ? 0.f : 127.f / largest);
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 mask = first(size - i);
    const __m512i codes = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + i, mask), factor));
    _mm512_mask_cvtsepi32_storeu_epi8(out + i, mask, codes);
  }
  const float scale = largest * (float)(1 / 127.);
  __builtin_memcpy(out + size, &scale, sizeof scale);
}

}  // namespace

extern "C" {

// Rotate queries in place, write rotated keys to the cache, and copy values there.
// qkv [tokens, heads + 2 * kv_heads, head_dim] with rows of ldq; cos, sin [tokens, rotary_dim];
// keys, values: a layer's cache, rows of kv_heads * head_dim at `addresses`: bf16, or int8 codes with a float32 scale
// behind each head, whose head_dim is at most 256.
void quire_rotate_write(bf16* qkv, int64_t ldq, const bf16* cos, const bf16* sin, void* keys, void* values,
                        const int64_t* addresses, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                        int64_t rotary_dim, int64_t is_int8) {
  const int64_t width = kv_heads * head_dim;
#pragma omp parallel for schedule(static) if (tokens * (heads + kv_heads) * head_dim > kParallel)
  for (int64_t t = 0; t < tokens; t++) {
    bf16* row = qkv + t * ldq;
    const bf16 *c = cos + t * rotary_dim, *s = sin + t * rotary_dim;
    for (int64_t h = 0; h < heads; h++) rotate(row + h * head_dim, c, s, row + h * head_dim, rotary_dim);
    row += heads * head_dim;
    if (is_int8) {
      const int64_t size = head_dim + sizeof(float), at = addresses[t] * kv_heads * size;
      for (int64_t h = 0; h < kv_heads; h++) {
        bf16* head = row + h * head_dim;
        rotate(head, c, s, head, rotary_dim);
        quantise(head, head_dim, (char*)keys + at + h * size);
        quantise(head + width, head_dim, (char*)values + at + h * size);
      }
      continue;
    }
    bf16* key = (bf16*)keys + addresses[t] * width;
    for (int64_t h = 0; h < kv_heads; h++) {
      rotate(row + h * head_dim, c, s, key + h * head_dim, rotary_dim);
      std::copy(row + h * head_dim + rotary_dim, row + (h + 1) * head_dim, key + h * head_dim + rotary_dim);
    }
    std::copy(row + width, row + 2 * width, (bf16*)values + addresses[t] * width);
  }
}

// Logarithm of the sum of e^x over each row of x, which has rows of ldx.
void quire_logsumexp(const float* x, int64_t ldx, float* out, int64_t rows, int64_t size) {
  const __m512 scale = _mm512_set1_ps(kLog2E);
#pragma omp parallel for schedule(static) if (rows * size > kParallel)
  for (int64_t r = 0; r < rows; r++) {
    const float* row = x + r * ldx;
    __m512 best = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 mask = first(size - i);
      best = _mm512_mask_max_ps(best, mask, best, load(row + i, mask));
    }
    const float top = _mm512_reduce_max_ps(best);
    double total = 0;
    for (int64_t i = 0; i < size; i += kSampledTokens)
      total += sum_weights(row, i, std::min(i + kSampledTokens, size), scale, _mm512_set1_ps(top));
    out[r] = top + (float)std::log(total);
  }
}

// Set the elements of the given rows of x to -inf where their bit is 0. bits: a row of 32-bit words for each row.
void quire_apply_bitmask(bf16* x, int64_t ldx, const uint32_t* bits, int64_t ldb, const int64_t* indices, int64_t rows,
                         int64_t size) {
  const __m512i lowest = _mm512_set1_epi16(static_cast<int16_t>(0xff80));
#pragma omp parallel for schedule(static) if (rows * size > kParallel)
  for (int64_t r = 0; r < rows; r++) {
    bf16* row = x + indices[r] * ldx;
    const uint32_t* words = bits + r * ldb;
    for (int64_t i = 0; i < size; i += 32) {
      const uint32_t present = size - i < 32 ? (1u << (size - i)) - 1 : ~0u;
      const __mmask32 forbidden = ~words[i / 32] & present;
      if (forbidden) _mm512_mask_storeu_epi16(row + i, forbidden, lowest);
    }
  }
}

// Index of each row's first largest element; a NaN counts as the largest. x has rows of ldx.
void quire_argmax(const bf16* x, int64_t ldx, int64_t* out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > kParallel)
  for (int64_t r = 0; r < rows; r++) {
    const bf16* row = x + r * ldx;
    __m512 best = _mm512_set1_ps(-INFINITY);
    __mmask16 nan = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 mask = first(size - i);
      const __m512 v = load(row + i, mask);
      nan |= _mm512_mask_cmp_ps_mask(mask, v, v, _CMP_UNORD_Q);
      best = _mm512_mask_max_ps(best, mask, best, v);
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(best));
    out[r] = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
      const __m512 v = load(row + i, first(size - i));
      const __mmask16 hit = nan ? _mm512_mask_cmp_ps_mask(first(size - i), v, v, _CMP_UNORD_Q)
                                : _mm512_mask_cmp_ps_mask(first(size - i), v, top, _CMP_EQ_OQ);
      if (hit) {
        out[r] = i + __builtin_ctz(hit);
        break;
      }
    }
  }
}

// A token per row, by inverse transform sampling: see quire_kernels.sampling.sample. Temperature 0 selects the first
// largest logit. logits: bf16, or float32 if is_float; rows of `ld`.
void quire_sample(const void* logits, int64_t is_float, int64_t ld, const float* temperatures, const float* uniforms,
                  int64_t* out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > kParallel)
  for (int64_t r = 0; r < rows; r++)
    out[r] = is_float ? sample_row((const float*)logits + r * ld, size, temperatures[r], uniforms[r])
                      : sample_row((const bf16*)logits + r * ld, size, temperatures[r], uniforms[r]);
}

}  // extern "C"
}  // namespace quire
