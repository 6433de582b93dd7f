// SPDX-License-Identifier: Apache-2.0
// Attention over the paged KV cache with an online softmax, for prompts and for decoding.
//
// The work of one KV head is a tile of rows (a row is one query head of one token) against chunks of 64 keys. Keys of a
// chunk are transposed once: a register holds 16 of them, and pairs of the query are broadcast. Values are interleaved
// by pairs of keys, and pairs of probabilities are broadcast. Both products are vdpbf16ps with float32 sums. Keys and
// values are read in place through the block table, without a gather.
//
// Source of the online softmax: Dao et al., FlashAttention, 2022.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "ops.h"

namespace quire {
namespace {

constexpr int64_t kChunk = 64;
// Keys that are prefetched at once: 384 KiB for the 135M Llama, which fit into an L2 cache.
constexpr int64_t kTouched = 8 * kChunk;
constexpr int64_t kFetchedByTile = 12, kFetchedByPair = 4;
constexpr int64_t kMaxRows = 96;
// The scratch of heads of up to 256 elements is smaller, so that more of it stays in the caches: prompts with heads of
// 64 to 256 take 4 to 8 % less time than with the scratch for 512. The rows of latent attention have up to 576.
constexpr int64_t kSmallHeadDim = 256, kMaxHeadDim = 576;
constexpr float kLowest = -1e30f;

struct Shape {
  const bf16* queries;  // [tokens, heads, head_dim], tokens of ldq
  int64_t ldq;
  const char *keys, *values;  // [blocks, block_size, kv_heads], heads of head_bytes
  const int64_t* tables;      // [spans, max_blocks]
  int64_t max_blocks;
  const int32_t *starts, *contexts;  // [spans + 1], [spans]
  bf16* out;                         // [tokens, heads, head_dim]
  int64_t heads, kv_heads, head_dim, block_size;
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none
  const bf16* sinks;     // [heads], or null
  bool is_int8;          // keys and values: int8 codes, and behind those of a head their float32 scale
  int64_t head_bytes;
};

// 16 x 16 transpose of 32-bit lanes.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Keys of one span and head that a chunk, or a part of it, reads: [from, to), at most up to the end of the context.
struct Keys {
  const int64_t* table;
  int64_t head, from, to;
};

// Call `use(offset)` for each key in order, with its offset in the cache.
template <typename Use>
inline void each_key(const Shape& s, const Keys& k, Use use) {
  const int64_t row = s.kv_heads * s.head_bytes;
  const int64_t* block = k.table + k.from / s.block_size;
  int64_t within = k.from % s.block_size;
  for (int64_t key = k.from; key < k.to; block++, within = 0) {
    int64_t offset = (*block * s.block_size + within) * row + k.head * s.head_bytes;
    for (; within < s.block_size && key < k.to; within++, key++, offset += row) use(offset);
  }
}

// Read keys and values of all heads once, in memory order. The heads of a key are adjacent, and computing head by head
// skips over the other heads, which defeats the hardware prefetcher. 64 sequences of 40 to 320 tokens, 3
// KV heads of 64, two Zen 5 cores: 0.53 ms instead of 0.95 ms, and 0.64 ms with software prefetches between the
// products.
void touch(const Shape& s, const Keys& k) {
  const int64_t row = s.kv_heads * s.head_bytes;
  __m512i all = _mm512_setzero_si512();
  for (const char* cache : {s.keys, s.values})
    for (int64_t key = k.from; key < k.to;) {
      const int64_t within = key % s.block_size, count = std::min(s.block_size - within, k.to - key);
      const char* begin = cache + (k.table[key / s.block_size] * s.block_size + within) * row;
      for (const char* line = begin; line + 64 <= begin + count * row; line += 64)
        all = _mm512_or_si512(all, _mm512_loadu_si512(line));
      key += count;
    }
  // Keeps the compiler from removing the loads.
#if defined __AVX512F__
  asm volatile("" : : "v"(all));
#elif defined __aarch64__
  const __m256i half = _mm256_or_si256(all.low, all.high);
  asm volatile("" : : "w"(half.low), "w"(half.high));
#else
  asm volatile("" : : "x"(_mm256_or_si256(all.low, all.high)));
#endif
}

// First keys and values, of all heads, of the thread's next item: prefetched while it computes this one, a few cache
// lines at a time, because a core keeps no more in flight. 30 layers for 64 sequences of 72 tokens, otherwise as above:
// 7.3 ms instead of 9.8 ms; 5.2 ms if everything is in the caches.
class Fetch {
 public:
  Fetch(const Shape& s, const Keys& k) : s_(s), k_(k), key_(k.from), cache_(s.keys) { go(); }

  inline void lines(int64_t count) {
    for (; count > 0 && at_ < stop_; count--) {
      _mm_prefetch(at_, _MM_HINT_T1);
      at_ += 64;
      if (at_ >= stop_) go();
    }
  }

 private:
  // Advance to the next block.
  void go() {
    if (key_ >= k_.to && cache_ == s_.keys) {
      cache_ = s_.values;
      key_ = k_.from;
    }
    if (key_ >= k_.to) {
      at_ = stop_ = nullptr;
      return;
    }
    const int64_t row = s_.kv_heads * s_.head_bytes, within = key_ % s_.block_size;
    const int64_t count = std::min(s_.block_size - within, k_.to - key_);
    at_ = cache_ + (k_.table[key_ / s_.block_size] * s_.block_size + within) * row;
    stop_ = at_ + count * row;
    key_ += count;
  }

  const Shape& s_;
  const Keys k_;
  int64_t key_;
  const char* cache_;
  const char *at_ = nullptr, *stop_ = nullptr;
};

// Workspace of a thread: 8 + 8 KiB of a chunk for a head_dim of 64, 24 + 24 + 12 KiB of scores, sums and
// probabilities.
template <int64_t kHeadDim>
struct alignas(64) Scratch {
  bf16 keys[kChunk / kLanes][kHeadDim / 2][kLanes][2];
  bf16 values[kChunk / 2][kHeadDim][2];
  float scores[kMaxRows][kChunk];
  bf16 probs[kMaxRows][kChunk];
  float sums[kMaxRows][kHeadDim];
  float highest[kMaxRows], total[kMaxRows];
  const bf16 *queries[kMaxRows], *key_rows[kChunk], *value_rows[kChunk];
  // Only for int8: codes as bf16, which represents them exactly, and scales. The last row may write 48 elements more.
  alignas(64) bf16 key_codes[kChunk * kHeadDim + 64], value_codes[kChunk * kHeadDim + 64];
  float key_scales[kChunk], value_scales[kChunk];
};

#ifdef __AVX512VBMI__

// Magnitudes 0 to 127 as bf16, in two bytes.
struct alignas(64) Magnitudes {
  uint8_t low[128], high[128];

  Magnitudes() {
    for (int i = 0; i < 128; i++) {
      const float x = i;
      uint32_t bits;
      __builtin_memcpy(&bits, &x, sizeof bits);
      low[i] = bits >> 16, high[i] = bits >> 24;
    }
  }
};
const Magnitudes kMagnitudes;

// The table in registers.
struct Table {
  const __m512i low[2] = {_mm512_load_si512(kMagnitudes.low), _mm512_load_si512(kMagnitudes.low + 64)};
  const __m512i high[2] = {_mm512_load_si512(kMagnitudes.high), _mm512_load_si512(kMagnitudes.high + 64)};
};

// Convert the codes of a head to bf16 and return their scale.
inline float expand(const Table& table, const char* row, int64_t head_dim, bf16* out) {
  // The unpack instructions split the codes of a register; this order restores that of the dimensions.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t d = 0; d < head_dim; d += 64) {
    const __mmask64 mask = head_dim - d >= 64 ? ~0ull : (1ull << (head_dim - d)) - 1;
    const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(mask, row + d));
    const __m512i magnitude = _mm512_abs_epi8(codes);
    const __m512i a = _mm512_permutex2var_epi8(table.low[0], magnitude, table.low[1]);
    const __m512i b = _mm512_permutex2var_epi8(table.high[0], magnitude, table.high[1]);
    const __m512i c = _mm512_ternarylogic_epi32(b, codes, _mm512_set1_epi8((char)0x80), 0xf8);  // b | codes & sign
    _mm512_storeu_si512(out + d, _mm512_unpacklo_epi8(a, c));
    if (head_dim - d > 32) _mm512_storeu_si512(out + d + 32, _mm512_unpackhi_epi8(a, c));
  }
  float scale;
  __builtin_memcpy(&scale, row + head_dim, sizeof scale);
  return scale;
}

#else

struct Table {};

inline float expand(const Table&, const char* row, int64_t head_dim, bf16* out) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const __m128i codes = _mm_loadu_si128((const __m128i*)(row + d));
    store(out + d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)));
  }
  float scale;
  __builtin_memcpy(&scale, row + head_dim, sizeof scale);
  return scale;
}

#endif

// Find the rows of a chunk; missing rows repeat the last one.
template <typename W>
void find_rows(const Shape& s, W& w, const Keys& k) {
  int64_t count = 0;
  if (s.is_int8) {
    const Table table;
    each_key(s, k, [&](int64_t offset) {
      bf16 *key = w.key_codes + count * s.head_dim, *value = w.value_codes + count * s.head_dim;
      w.key_scales[count] = expand(table, s.keys + offset, s.head_dim, key);
      w.value_scales[count] = expand(table, s.values + offset, s.head_dim, value);
      w.key_rows[count] = key;
      w.value_rows[count++] = value;
    });
  } else {
    each_key(s, k, [&](int64_t offset) {
      w.key_rows[count] = (const bf16*)(s.keys + offset);
      w.value_rows[count++] = (const bf16*)(s.values + offset);
    });
  }
  for (; count < kChunk; count++) {
    w.key_scales[count] = w.key_scales[count - 1];
    w.value_scales[count] = w.value_scales[count - 1];
    w.key_rows[count] = w.key_rows[count - 1];
    w.value_rows[count] = w.value_rows[count - 1];
  }
}

template <typename W>
void transpose_keys(const Shape& s, W& w, int64_t tiles, Fetch& fetch) {
  const int64_t pairs = s.head_dim / 2;
  for (int64_t tile = 0; tile < tiles; tile++)
    for (int64_t p = 0; p < pairs; p += kLanes) {
      fetch.lines(kFetchedByTile);
      const __mmask16 mask = first(pairs - p);
      __m512i r[16];
      for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, w.key_rows[tile * kLanes + i] + 2 * p);
      transpose(r);
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, pairs - p); i++) _mm512_store_si512(w.keys[tile][p + i], r[i]);
    }
}

// Interleave the values of two keys. The unpack instructions split the 32 dimensions of a register, the low halves of
// its four lanes first; `natural` restores the order at the end.
template <typename W>
void interleave_values(const Shape& s, W& w, int64_t pairs, Fetch& fetch) {
  for (int64_t j = 0; j < pairs; j++) {
    fetch.lines(kFetchedByPair);
    const bf16 *even = w.value_rows[2 * j], *odd = w.value_rows[2 * j + 1];
    int64_t d = 0;
    for (; d + 2 * kLanes <= s.head_dim; d += 2 * kLanes) {
      const __m512i a = _mm512_loadu_si512(even + d), b = _mm512_loadu_si512(odd + d);
      _mm512_store_si512(w.values[j][d], _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(w.values[j][d + kLanes], _mm512_unpackhi_epi16(a, b));
    }
    if (d < s.head_dim) {
      const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(even + d)));
      const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(odd + d)));
      _mm512_store_si512(w.values[j][d], _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
  }
}

// Scale one row of sums and store it in the order of dimensions.
void natural(const Shape& s, const float* sums, float scale, bf16* out) {
  const __m512 by = _mm512_set1_ps(scale);
  int64_t d = 0;
  for (; d + 2 * kLanes <= s.head_dim; d += 2 * kLanes) {
    const __m512 low = _mm512_mul_ps(_mm512_load_ps(sums + d), by);
    const __m512 high = _mm512_mul_ps(_mm512_load_ps(sums + d + kLanes), by);
    // Lanes of four: low 0, high 0, low 1, high 1, and so on.
    const __m512i first_half = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second_half = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    store(out + d, _mm512_permutex2var_ps(low, first_half, high));
    store(out + d + kLanes, _mm512_permutex2var_ps(low, second_half, high));
  }
  if (d < s.head_dim) store(out + d, _mm512_mul_ps(_mm512_load_ps(sums + d), by));
}

// Scores of R rows and T tiles of 16 keys: R x T sums, enough to hide the latency of vdpbf16ps.
template <int R, int T, typename W>
void score(const Shape& s, W& w, int64_t row, int64_t tile) {
  __m512 sums[R][T];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) sums[r][t] = _mm512_setzero_ps();
  for (int64_t p = 0; p < s.head_dim / 2; p++) {
    __m512bh keys[T];
    for (int t = 0; t < T; t++) keys[t] = (__m512bh)_mm512_load_si512(w.keys[tile + t][p]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m512bh query = pair(w.queries[row + r] + 2 * p);
      for (int t = 0; t < T; t++) sums[r][t] = _mm512_dpbf16_ps(sums[r][t], query, keys[t]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) _mm512_store_ps(&w.scores[row + r][(tile + t) * kLanes], sums[r][t]);
}

template <int R, typename W>
void score_rows(const Shape& s, W& w, int64_t row, int64_t tiles) {
  int64_t tile = 0;
  for (; tile + 2 <= tiles; tile += 2) score<R, 2>(s, w, row, tile);
  if (tile < tiles) score<R, 1>(s, w, row, tile);
}

// Add probs x values to R rows of sums, C registers of head_dim at a time.
template <int R, int C, typename W>
void weigh(W& w, int64_t row, int64_t column, int64_t pairs) {
  __m512 sums[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sums[r][c] = _mm512_load_ps(&w.sums[row + r][column + c * kLanes]);
  for (int64_t j = 0; j < pairs; j++) {
    __m512bh values[C];
    for (int c = 0; c < C; c++) values[c] = (__m512bh)_mm512_load_si512(w.values[j][column + c * kLanes]);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const __m512bh probs = pair(&w.probs[row + r][2 * j]);
      for (int c = 0; c < C; c++) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], probs, values[c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) _mm512_store_ps(&w.sums[row + r][column + c * kLanes], sums[r][c]);
}

template <int R, typename W>
void weigh_rows(const Shape& s, W& w, int64_t row, int64_t pairs) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= s.head_dim; column += 4 * kLanes) weigh<R, 4>(w, row, column, pairs);
  for (; column < s.head_dim; column += kLanes) weigh<R, 1>(w, row, column, pairs);
}

// 2^x for x <= 0, to 3e-6 of the value, far less than the rounding of a probability to bf16. Polynomial: minimax of 2^f,
// f in [-0.5, 0.5]. x = -inf only if Masked.
template <bool Masked>
inline __m512 probability(__m512 x) {
  if (Masked) x = _mm512_max_ps(x, _mm512_set1_ps(-200.f));
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(9.5701000e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5917860e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4024745e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9312181e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9999926e-1f));
  return _mm512_scalef_ps(p, n);
}

// Convert the scores of one row to probabilities in bf16, and rescale earlier sums to the new maximum. Masked: only
// keys [low, high) of the chunk are visible; otherwise all of them.
template <bool Masked, typename W>
void soften(const Shape& s, W& w, int64_t row, int64_t tiles, int64_t low, int64_t high) {
  // The exponent of a score is its product with `scale`, which is applied after the subtraction of the maximum.
  const __m512 scale = _mm512_set1_ps(s.softcap > 0 ? 1.f : s.scale * kLog2E);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512 x[kChunk / kLanes], best = _mm512_set1_ps(w.highest[row]);
  for (int64_t t = 0; t < tiles; t++) {
    x[t] = _mm512_load_ps(&w.scores[row][t * kLanes]);
    if (s.is_int8) x[t] = _mm512_mul_ps(x[t], _mm512_loadu_ps(w.key_scales + t * kLanes));
    if (s.softcap > 0) {
      x[t] = tanh(_mm512_mul_ps(x[t], _mm512_set1_ps(s.scale / s.softcap)));
      x[t] = _mm512_mul_ps(x[t], _mm512_set1_ps(s.softcap * kLog2E));
    }
    if (Masked) {
      const __m512i key = _mm512_add_epi32(_mm512_set1_epi32((int)(t * kLanes)), lanes);
      const __mmask16 seen = _mm512_cmplt_epi32_mask(key, _mm512_set1_epi32((int)high)) &
                             _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32((int)low));
      x[t] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), x[t]);
    }
    best = _mm512_max_ps(best, x[t]);
  }
  const float highest = _mm512_reduce_max_ps(best);
  const __m512 top = _mm512_mul_ps(_mm512_set1_ps(highest), scale);
  __m512 total = _mm512_setzero_ps();
  for (int64_t t = 0; t < tiles; t++) {
    __m512 p = probability<Masked>(_mm512_fmsub_ps(x[t], scale, top));
    total = _mm512_add_ps(total, p);
    if (s.is_int8) p = _mm512_mul_ps(p, _mm512_loadu_ps(w.value_scales + t * kLanes));
    store(&w.probs[row][t * kLanes], p);
  }
  if (highest != w.highest[row]) {
    const __m512 shrink = exp2(_mm512_mul_ps(_mm512_set1_ps(w.highest[row] - highest), scale));
    w.highest[row] = highest;
    w.total[row] *= _mm512_cvtss_f32(shrink);
    for (int64_t d = 0; d < s.head_dim; d += kLanes)
      _mm512_store_ps(&w.sums[row][d], _mm512_mul_ps(_mm512_load_ps(&w.sums[row][d]), shrink));
  }
  w.total[row] += _mm512_reduce_add_ps(total);
}

// Tokens [begin, end) of a span, and KV heads [head, last) with their query heads: at most kMaxRows rows.
struct Item {
  int64_t span, head, last, begin, end;
};

// Keys of the item's first head that its rows attend to, and keys before them to the start of a register. A key has the
// same lane and the same chunk for each item that reads it, so that sums do not depend on how a prompt is divided: chunks
// end at multiples of kChunk keys, and masked keys add 0.
Keys seen(const Shape& s, const Item& i) {
  // Position of token t: t + shift.
  const int64_t shift = s.contexts[i.span] - s.starts[i.span + 1];
  const int64_t from = s.window ? std::max<int64_t>(0, i.begin + shift - s.window + 1) : 0;
  return {s.tables + i.span * s.max_blocks, i.head, from - from % kLanes, i.end + shift};
}

// Process one chunk of keys for the rows of one KV head, the first of which is `row`.
template <typename W>
void compute_chunk(const Shape& s, W& w, const Item& item, int64_t row, const Keys& k, Fetch& fetch) {
  const int64_t group = s.heads / s.kv_heads, end = row + (item.end - item.begin) * group;
  const int64_t tiles = (k.to - k.from + kLanes - 1) / kLanes, pairs = tiles * kLanes / 2;
  find_rows(s, w, k);
  transpose_keys(s, w, tiles, fetch);
  for (int64_t r = row; r < end;) {
    if (end - r >= 8) score_rows<8>(s, w, r, tiles), r += 8;
    else if (end - r >= 4) score_rows<4>(s, w, r, tiles), r += 4;
    else if (end - r == 3) score_rows<3>(s, w, r, tiles), r += 3;
    else score_rows<1>(s, w, r, tiles), r += 1;
  }
  const int64_t shift = s.contexts[item.span] - s.starts[item.span + 1] + item.begin;
  for (int64_t r = row; r < end; r++) {
    const int64_t position = (r - row) / group + shift;
    const int64_t low = s.window ? std::clamp<int64_t>(position - s.window + 1 - k.from, 0, kChunk) : 0;
    const int64_t high = std::min(position + 1, k.to) - k.from;
    if (low == 0 && high >= tiles * kLanes)
      soften<false>(s, w, r, tiles, low, high);
    else
      soften<true>(s, w, r, tiles, low, high);
  }
  interleave_values(s, w, pairs, fetch);
  for (int64_t r = row; r < end;) {
    if (end - r >= 4) weigh_rows<4>(s, w, r, pairs), r += 4;
    else if (end - r == 3) weigh_rows<3>(s, w, r, pairs), r += 3;
    else weigh_rows<1>(s, w, r, pairs), r += 1;
  }
}

template <typename W>
void attend(const Shape& s, W& w, const Item& item, Fetch& fetch) {
  const int64_t group = s.heads / s.kv_heads, per_head = (item.end - item.begin) * group;
  const int64_t num_rows = per_head * (item.last - item.head);
  bf16* outs[kMaxRows];
  for (int64_t r = 0; r < num_rows; r++) {
    const int64_t token = item.begin + r % per_head / group, head = (item.head + r / per_head) * group + r % group;
    w.queries[r] = s.queries + token * s.ldq + head * s.head_dim;
    outs[r] = s.out + (token * s.heads + head) * s.head_dim;
    // A sink is a score without a value, scaled already.
    const float unit = s.softcap > 0 ? kLog2E : 1.f / s.scale;
    w.highest[r] = s.sinks ? _mm512_cvtss_f32(widen(_mm256_set1_epi16((short)s.sinks[head]))) * unit : kLowest;
    w.total[r] = s.sinks ? 1 : 0;
    for (int64_t d = 0; d < s.head_dim; d += kLanes) _mm512_store_ps(&w.sums[r][d], _mm512_setzero_ps());
  }
  const Keys all = seen(s, item);
  for (int64_t from = all.from, end; from < all.to; from = end) {
    end = (from / kChunk + 1) * kChunk;
    Keys k = {all.table, all.head, from, std::min(end, all.to)};
    if (item.last - item.head > 1 && (from == all.from || from % kTouched == 0))
      touch(s, {all.table, all.head, from, std::min((from / kTouched + 1) * kTouched, all.to)});
    for (int64_t h = 0; h < item.last - item.head; h++, k.head++) compute_chunk(s, w, item, h * per_head, k, fetch);
  }
  for (int64_t r = 0; r < num_rows; r++) natural(s, w.sums[r], 1.f / w.total[r], outs[r]);
}

// Compute all items. W: a scratch whose heads are large enough.
template <typename W>
void attend_all(const Shape& s, const std::vector<Item>& work) {
  const int64_t size = work.size();
  std::atomic<int64_t> taken{0};
#pragma omp parallel
  {
    static thread_local W scratch;
    // Take one item ahead, to know which keys to prefetch.
    for (int64_t i = taken++, next; i < size; i = next) {
      next = taken++;
      Keys keys = {nullptr, 0, 0, 0};
      if (next < size) keys = seen(s, work[next]);
      keys.to = std::min(keys.from + kTouched, keys.to);
      Fetch fetch(s, keys);
      attend(s, scratch, work[i], fetch);
    }
  }
}

}  // namespace

extern "C" {

// See quire_kernels.attention.paged_attention. head_dim is a multiple of 16, at most 576; heads / kv_heads at most 48.
void quire_attention(const bf16* queries, int64_t ldq, const void* keys, const void* values, const int64_t* tables,
                     int64_t max_blocks, const int32_t* starts, const int32_t* contexts, bf16* out, int64_t spans,
                     int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, float scale,
                     int64_t window, float softcap, const bf16* sinks, int64_t is_int8) {
  const int64_t head_bytes = is_int8 ? head_dim + sizeof(float) : head_dim * sizeof(bf16);
  const Shape s = {queries,    ldq,      (const char*)keys, (const char*)values,
                   tables,     max_blocks, starts,          contexts,
                   out,        heads,    kv_heads,          head_dim,
                   block_size, scale,    softcap,           window,
                   sinks,      is_int8 != 0, head_bytes};
  const int64_t group = heads / kv_heads, step = std::max<int64_t>(1, kMaxRows / group);
  // The last tiles of a prompt are first, because they have the most keys.
  std::vector<Item> work;
  for (int64_t span = spans - 1; span >= 0; span--) {
    for (int64_t end = starts[span + 1]; end > starts[span]; end -= step) {
      const int64_t begin = std::max<int64_t>(end - step, starts[span]);
      // The heads of a key are adjacent in memory: one thread computes as many as fit, unless there are few items.
      const int64_t fit = std::max<int64_t>(1, kMaxRows / ((end - begin) * group));
      const int64_t take = spans >= 4 * omp_get_max_threads() ? fit : 1;
      for (int64_t head = 0; head < kv_heads; head += take)
        work.push_back({span, head, std::min(head + take, kv_heads), begin, end});
    }
  }
  if (head_dim <= kSmallHeadDim)
    attend_all<Scratch<kSmallHeadDim>>(s, work);
  else
    attend_all<Scratch<kMaxHeadDim>>(s, work);
}

}  // extern "C"
}  // namespace quire
