// SPDX-License-Identifier: Apache-2.0
// GEMM of bfloat16 rows with a weight of 4 or 8 bits that was packed once into panels.
//
// A code is an index into a table of bfloat16 values, which a permutation of a register looks up: two instructions for
// 32 weights of 4 bits, five for 64 weights of 8 bits. They overlap with vdpbf16ps, of which a Zen 5 core starts one
// each cycle. The sum of a group of inputs is exact to float32 and is multiplied by the group's scale.
//
// One row is bound by memory: two Zen 5 cores read 30 GB/s, that is 16 cycles of a core per cache line. A line contains
// 128 weights of 4 bits, which take about 12 cycles. 64 rows are bound by vdpbf16ps: 512 cycles for the same line.
//
// A panel has 32 output columns. A group of it has the codes, 32 scales (float16 or float32), and optionally 32 zero
// points of one byte. 8 bits: for each pair of inputs, a line that two interleavings turn into the pairs of columns 0
// to 15 and 16 to 31, as in linear.cpp. 4 bits: for each four inputs, a line of words with these nibbles, lowest first:
// first pair of columns 0 to 15, of 16 to 31, second pair of 0 to 15, of 16 to 31.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "adapters.h"
#include "ops.h"
#include "tile.h"

namespace quire {
namespace {

// From this many tiles on, a panel is expanded to bfloat16 in the L2 cache first: one expansion instead of one a tile.
// With AVX2, a panel of 8 bits is expanded if a tile has several parts with the same columns.
constexpr int64_t kExpandedTiles = 3;

// Position of the code of 8 bits of column c and input e of a pair within its line.
int64_t position(int64_t c, int64_t e) {
  if (!kHasBf16) return c / kLanes * 2 * kLanes + e * kLanes + c % kLanes;
  const int64_t word = c % kLanes * 2 + e;
  return word / 8 * 16 + c / kLanes * 8 + word % 8;
}

// Whether codes of 8 bits are e4m3, and not integers: code 1 is not 1.
bool is_float(const QuireWeight& w) { return w.table[1] != 0x3f80; }

// A code of 8 bits as `Bytes` reads it.
uint8_t packed_code(uint8_t code, const QuireWeight& w) {
  if (kHasBf16 || is_float(w)) return code;
  return code & 0x80 ? -(code & 0x7f) : code;
}

struct CodeTile {
  const bf16* x;  // [rows, k], rows of ldx
  int64_t ldx;
  const float* sums;  // [rows, groups]: sums of the inputs of each group; used if there are zero points
  const uint8_t* panel;
  int64_t k;
  bf16* out;  // rows of ldo
  int64_t ldo;
  const bf16* bias;  // of the panel, or null
  bool add;
  int64_t stride;  // bytes of `next` to prefetch for each pair of inputs; 0: none
  const char* next;
  const Transform* transforms;  // of the rows, or null
  Run ahead;                    // lines to prefetch for the adapters

  // Arguments of part `number`, from `row` on.
  CodeTile part(int64_t row, int64_t number, int64_t parts, int64_t num_groups) const {
    CodeTile part = *this;
    part.x += row * ldx;
    if (sums) part.sums += row * num_groups;
    part.out += row * ldo;
    if (transforms) part.transforms += row;
    if (number) part.ahead = {nullptr, 0};
    part.stride /= parts;
    part.next += number * (k / 2) * part.stride;
    return part;
  }
};

int64_t num_groups(const QuireWeight& w, int64_t k) { return (k + w.group - 1) / w.group; }

// Scales and zero points behind the codes of a group.
struct PackedScales {
  static inline __m512 scales(const uint8_t* at, int64_t half, const QuireWeight& w) {
    return w.scale_bytes == 2 ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(at + half * 32)))
                              : _mm512_loadu_ps((const float*)(at + half * 64));
  }

  // What to subtract for each unit of the sum of the inputs: the table of codes with zero points is centred on 8.
  static inline __m512 shifts(const uint8_t* at, int64_t half, const QuireWeight& w, __m512 scales) {
    if (w.zero_bytes == 4) return _mm512_loadu_ps((const float*)(at + kColumns * w.scale_bytes + half * kLine));
    const __m128i zeros = _mm_loadu_si128((const __m128i*)(at + kColumns * w.scale_bytes + half * kLanes));
    const __m512i offsets = _mm512_sub_epi32(_mm512_cvtepu8_epi32(zeros), _mm512_set1_epi32(8));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(offsets), scales);
  }

  static int64_t bytes(const QuireWeight& w) { return kColumns * (w.scale_bytes + w.zero_bytes); }
};

// The pairs that `as_weights` has split; all weights are exact in bfloat16.
#ifdef __AVX512BF16__
inline __m512i as_pairs(Weights weights) { return (__m512i)weights; }
#else
inline __m512i as_pairs(const Weights& weights) {
  return _mm512_or_si512(_mm512_castps_si512(weights.odd), _mm512_srli_epi32(_mm512_castps_si512(weights.even), 16));
}
#endif

#ifdef __AVX512F__

// Table lookups of 4 bits.
struct Nibbles : PackedScales {
  static constexpr int64_t kInputs = 4, kBytes = kLine;
  __m512i table;

  // vpermw reads 5 bits of each word. The fifth belongs to another code, so the table contains its values twice.
  explicit Nibbles(const bf16* values) : table(_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)values))) {}

  // Weights of pair `kPair` of the inputs at `at`, columns 0 to 15 and 16 to 31.
  template <int kPair>
  inline __attribute__((always_inline)) void load(const uint8_t* at, Weights& left, Weights& right) const {
    const __m512i line = _mm512_loadu_si512(at);
    left = as_weights(_mm512_permutexvar_epi16(kPair ? _mm512_srli_epi16(line, 8) : line, table));
    right = as_weights(_mm512_permutexvar_epi16(_mm512_srli_epi16(line, kPair ? 12 : 4), table));
  }
};

#else

// Table lookups of 4 bits. A shuffle of bytes looks up one byte of the values of two pairs, which are neighbours.
struct Nibbles : PackedScales {
  static constexpr int64_t kInputs = 4, kBytes = kLine;
  __m256i lows, highs;  // bytes of the values

  explicit Nibbles(const bf16* values) {
    uint8_t bytes[2][16];
    for (int i = 0; i < 16; i++) bytes[0][i] = values[i] & 255, bytes[1][i] = values[i] >> 8;
    lows = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes[0]));
    highs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes[1]));
  }

  template <int kPair>
  inline __attribute__((always_inline)) __m256i look_up(__m256i line) const {
    const __m256i codes = _mm256_and_si256(line, _mm256_set1_epi8(15)), low = _mm256_set1_epi16(255);
    const __m256i a = _mm256_shuffle_epi8(lows, codes), b = _mm256_shuffle_epi8(highs, codes);
    return kPair ? _mm256_or_si256(_mm256_srli_epi16(a, 8), _mm256_andnot_si256(low, b))
                 : _mm256_or_si256(_mm256_and_si256(low, a), _mm256_slli_epi16(b, 8));
  }

  template <int kPair>
  inline __attribute__((always_inline)) void load(const uint8_t* at, Weights& left, Weights& right) const {
    const __m512i line = _mm512_loadu_si512(at);
    left = as_weights({look_up<kPair>(line.low), look_up<kPair>(line.high)});
    right = as_weights({look_up<kPair>(_mm256_srli_epi16(line.low, 4)), look_up<kPair>(_mm256_srli_epi16(line.high, 4))});
  }
};

#endif

#ifdef __AVX512BF16__

// Table lookups of 8 bits: a sign and an index of 7 bits.
struct Bytes : PackedScales {
  static constexpr int64_t kInputs = 2, kBytes = kLine;
  __m512i low[2], high[2];

  explicit Bytes(const bf16* values) {
    alignas(64) uint8_t halves[2][128];
    for (int i = 0; i < 128; i++) halves[0][i] = values[i] & 255, halves[1][i] = values[i] >> 8;
    for (int i = 0; i < 2; i++) {
      low[i] = _mm512_load_si512(halves[0] + 64 * i);
      high[i] = _mm512_load_si512(halves[1] + 64 * i);
    }
  }

  template <int>
  inline __attribute__((always_inline)) void load(const uint8_t* at, Weights& left, Weights& right) const {
    const __m512i line = _mm512_loadu_si512(at);
    const __m512i lows = _mm512_permutex2var_epi8(low[0], line, low[1]);
    const __m512i magnitudes = _mm512_permutex2var_epi8(high[0], line, high[1]);
    // 0xf8: magnitudes | (line & 0x80).
    const __m512i highs = _mm512_ternarylogic_epi32(magnitudes, line, _mm512_set1_epi8((char)0x80), 0xf8);
    left = as_weights(_mm512_unpacklo_epi8(lows, highs));
    right = as_weights(_mm512_unpackhi_epi8(lows, highs));
  }
};

#else

// Codes of 8 bits: integers in two's complement, or e4m3. A line has the codes of columns 0 to 15 and the first input of
// a pair, then those of the second input, and then the same for columns 16 to 31.
template <bool kFloat>
struct Bytes : PackedScales {
  static constexpr int64_t kInputs = 2, kBytes = kLine;

  explicit Bytes(const bf16*) {}

  static inline __attribute__((always_inline)) __m512 convert(const uint8_t* at) {
    const __m128i codes = _mm_loadu_si128((const __m128i*)at);
    if constexpr (kFloat) {
      // With its sign moved by one bit, a code is a float16 number, 2^8 times too small, also if it is subnormal.
      const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
      return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((int16_t)0xbf80)));
    } else {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    }
  }

  template <int>
  inline __attribute__((always_inline)) void load(const uint8_t* at, Weights& left, Weights& right) const {
    left = {convert(at), convert(at + 16)};
    right = {convert(at + 32), convert(at + 48)};
  }

  static inline __m512 scales(const uint8_t* at, int64_t half, const QuireWeight& w) {
    const __m512 scales = PackedScales::scales(at, half, w);
    return kFloat ? _mm512_mul_ps(scales, _mm512_set1_ps(256.f)) : scales;
  }
};

#endif

// A panel after `expand`: bfloat16, float32 scales and float32 shifts.
struct Expanded {
  static constexpr int64_t kInputs = 2, kBytes = 2 * kLine;

  explicit Expanded(const bf16*) {}

  template <int>
  inline __attribute__((always_inline)) void load(const uint8_t* at, Weights& left, Weights& right) const {
    left = as_weights(_mm512_loadu_si512(at));
    right = as_weights(_mm512_loadu_si512(at + kLine));
  }

  static inline __m512 scales(const uint8_t* at, int64_t half, const QuireWeight&) {
    return _mm512_loadu_ps((const float*)(at + half * kLine));
  }

  static inline __m512 shifts(const uint8_t* at, int64_t half, const QuireWeight&, __m512) {
    return _mm512_loadu_ps((const float*)(at + (2 + half) * kLine));
  }

  static int64_t bytes(const QuireWeight&) { return 4 * kLine; }
};

int64_t expanded_bytes(const QuireWeight& w, int64_t k) {
  return k / 2 * Expanded::kBytes + num_groups(w, k) * Expanded::bytes(w);
}

template <typename Codes>
void expand(const uint8_t* at, uint8_t* out, int64_t k, const QuireWeight& w) {
  const Codes codes(w.table);
  for (int64_t group = 0, groups = num_groups(w, k); group < groups; group++) {
    for (int64_t i = group * w.group, end = std::min(i + w.group, k); i < end; i += Codes::kInputs) {
      each<Codes::kInputs / 2>([&](auto p) __attribute__((always_inline)) {
        Weights left, right;
        codes.template load<p>(at, left, right);
        _mm512_storeu_si512(out, as_pairs(left));
        _mm512_storeu_si512(out + kLine, as_pairs(right));
        out += Expanded::kBytes;
      });
      at += Codes::kBytes;
    }
    for (int64_t half = 0; half < 2; half++) {
      const __m512 scales = Codes::scales(at, half, w);
      _mm512_storeu_ps((float*)(out + half * kLine), scales);
      if (w.zero_bytes) _mm512_storeu_ps((float*)(out + (2 + half) * kLine), Codes::shifts(at, half, w, scales));
    }
    at += Codes::bytes(w);
    out += Expanded::bytes(w);
  }
}

// Columns of H halves of the panel from half kFirst on. A row's result does not depend on R or on the layout: each column
// is summed in the order of the inputs.
template <int R, typename Codes, int kFirst = 0, int H = 2>
void compute_codes(const CodeTile& t, const QuireWeight& w) {
  const Codes codes(w.table);
  // Kept in memory: they are used once a group.
  float totals[R][H * kLanes] = {};
  const uint8_t* at = t.panel;
  const char* next = t.next;
  const bf16* x = t.x;
  const int64_t groups = num_groups(w, t.k);
  for (int64_t group = 0; group < groups; group++) {
    if (t.ahead.lines) prefetch_part(t.ahead, group, groups);
    const bf16* const end = t.x + std::min((group + 1) * w.group, t.k);
    __m512 sums[R][H];
    each<R>([&](auto r) __attribute__((always_inline)) { sums[r][0] = sums[r][H - 1] = _mm512_setzero_ps(); });
    for (; x < end; x += Codes::kInputs, at += Codes::kBytes) {
      each<Codes::kInputs / 2>([&](auto p) __attribute__((always_inline)) {
        Weights left, right;
        codes.template load<p>(at, left, right);
        if (t.stride) {
          _mm_prefetch(next, _MM_HINT_T1);
          next += t.stride;
        }
        each<R>([&](auto r) __attribute__((always_inline)) {
          const Weights inputs = as_weights((__m512i)pair(x + r * t.ldx + 2 * p));
          multiply(sums[r][0], inputs, kFirst ? right : left);
          if constexpr (H == 2) multiply(sums[r][1], inputs, right);
        });
      });
    }
    each<H>([&](auto half) __attribute__((always_inline)) {
      const __m512 scales = Codes::scales(at, kFirst + half, w);
      if (w.zero_bytes) {
        const __m512 shifts = Codes::shifts(at, kFirst + half, w, scales);
        each<R>([&](auto r) __attribute__((always_inline)) {
          sums[r][half] = _mm512_mul_ps(sums[r][half], scales);
          const __m512 sum = _mm512_set1_ps(t.sums[r * groups + group]);
          sums[r][half] = _mm512_fnmadd_ps(sum, shifts, sums[r][half]);
        });
      } else {
        each<R>([&](auto r) __attribute__((always_inline)) { sums[r][half] = _mm512_mul_ps(sums[r][half], scales); });
      }
      each<R>([&](auto r) __attribute__((always_inline)) {
        float* const total = totals[r] + half * kLanes;
        _mm512_storeu_ps(total, _mm512_add_ps(sums[r][half], _mm512_loadu_ps(total)));
      });
    });
    at += Codes::bytes(w);
  }
  each<R>([&](auto r) __attribute__((always_inline)) {
    each<H>([&](auto half) __attribute__((always_inline)) {
      const int64_t column = (kFirst + half) * kLanes;
      const __m512 value = _mm512_loadu_ps(totals[r] + half * kLanes);
      finish(t.transforms ? t.transforms[r](value, column) : value, t.out + r * t.ldo + column,
             t.bias ? t.bias + column : nullptr, t.add);
    });
  });
}

template <int R, typename Codes>
void compute_codes_parts(const CodeTile& t, const QuireWeight& w) {
  each_part<R>([&](auto part) {
    const CodeTile arguments = t.part(part.kRow, part.kNumber, kParts<R>, num_groups(w, t.k));
    compute_codes<part.kRows, Codes, part.kFirst, part.kHalves>(arguments, w);
  });
}

// In parts, the tables of 4 bits would be looked up again for each part.
template <int R, typename Codes>
constexpr auto kTile =
    kParts<R> == 1 || Codes::kInputs == 4 ? compute_codes<R, Codes> : compute_codes_parts<R, Codes>;

using ComputeCodes = void (*)(const CodeTile&, const QuireWeight&);
template <typename Codes>
constexpr ComputeCodes kComputeCodes[kTileRows + 1] = {
    nullptr,
    kTile<1, Codes>,
    kTile<2, Codes>,
    kTile<3, Codes>,
    kTile<4, Codes>,
    kTile<5, Codes>,
    kTile<6, Codes>,
    kTile<7, Codes>,
    kTile<8, Codes>,
};

int64_t panel_bytes(const QuireWeight& w, int64_t k) {
  return kColumns * k * w.bits / 8 + num_groups(w, k) * PackedScales::bytes(w);
}

// Sums of the groups of rows [begin, end) of x.
void sum_groups(const bf16* x, int64_t ldx, const QuireWeight& w, int64_t k, int64_t begin, int64_t end, float* sums) {
  const int64_t groups = num_groups(w, k);
  for (int64_t r = begin; r < end; r++) {
    for (int64_t group = 0; group < groups; group++) {
      __m512 sum = _mm512_setzero_ps();
      const int64_t last = std::min((group + 1) * w.group, k);
      for (int64_t i = group * w.group; i < last; i += kLanes)
        sum = _mm512_add_ps(sum, load(x + r * ldx + i, first(last - i)));
      sums[r * groups + group] = _mm512_reduce_add_ps(sum);
    }
  }
}

float* floats(int64_t size) {
  static thread_local std::vector<float> scratch;
  if ((int64_t)scratch.size() < size) scratch.resize(size);
  return scratch.data();
}

}  // namespace

extern "C" {

// codes [n, k], scales [n, groups] (float16 or float32) and zeros [n, groups] (uint8 or float32) to the panels of
// `weight`. n is a multiple of 32; k and the group of 4.
void quire_pack_codes(const uint8_t* codes, const uint8_t* scales, const uint8_t* zeros, const QuireWeight* weight,
                      int64_t n, int64_t k) {
  const QuireWeight& w = *weight;
  const int64_t groups = num_groups(w, k), bytes = panel_bytes(w, k);
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < n / kColumns; p++) {
    uint8_t* at = (uint8_t*)w.panels + p * bytes;
    for (int64_t group = 0; group < groups; group++) {
      const int64_t begin = group * w.group, end = std::min(begin + w.group, k);
      for (int64_t i = begin; i < end; i += w.bits == 4 ? 4 : 2, at += kLine) {
        for (int64_t c = 0; c < kColumns; c++) {
          const uint8_t* const row = codes + (p * kColumns + c) * k + i;
          for (int64_t e = 0; e < 2; e++) {
            if (w.bits == 8) {
              at[position(c, e)] = packed_code(row[e], w);
            } else {
              uint8_t* const word = at + (c % kLanes * 2 + e) * 2;
              const int shift = c / kLanes * 4;
              for (int64_t pair = 0; pair < 2; pair++) {
                word[pair] = (word[pair] & (15 << (4 - shift))) | row[2 * pair + e] << shift;
              }
            }
          }
        }
      }
      for (int64_t c = 0; c < kColumns; c++) {
        const int64_t from = (p * kColumns + c) * groups + group;
        __builtin_memcpy(at + c * w.scale_bytes, scales + from * w.scale_bytes, w.scale_bytes);
        if (!kHasBf16 && w.bits == 8 && is_float(w)) {
          // Without the table there is no NaN. A scale that is NaN has the same result: a column of NaN.
          const uint8_t* const row = codes + (p * kColumns + c) * k;
          const bool has_nan = std::any_of(row + begin, row + end, [](uint8_t code) { return (code & 0x7f) == 0x7f; });
          if (has_nan) std::fill_n(at + c * w.scale_bytes, w.scale_bytes, 0xff);
        }
        __builtin_memcpy(at + kColumns * w.scale_bytes + c * w.zero_bytes, zeros + from * w.zero_bytes, w.zero_bytes);
      }
      at += PackedScales::bytes(w);
    }
  }
}

// out [m, n] = (add ? out : 0) + x [m, k] W^T + bias; x has rows of ldx. The rows' adapters can transform x W^T,
// and what they read afterwards is prefetched.
void quire_linear_codes(const bf16* x, int64_t ldx, const QuireWeight* weight, const bf16* bias, bf16* out, int64_t m,
                        int64_t n, int64_t k, int64_t add, const QuireLoraLinear* adapters,
                        const QuireLoraRows* of_rows) {
  const QuireWeight& w = *weight;
  if (w.int8_inputs) return quire_linear_int4(x, ldx, weight, bias, out, m, n, k, add, adapters, of_rows);
  const int64_t panels = n / kColumns, bytes = panel_bytes(w, k), groups = num_groups(w, k);
#ifdef __AVX512BF16__
  const ComputeCodes* const direct = w.bits == 4 ? kComputeCodes<Nibbles> : kComputeCodes<Bytes>;
  const auto expand_panel = w.bits == 4 ? expand<Nibbles> : expand<Bytes>;
#else
  const ComputeCodes* const direct = w.bits == 4 ? kComputeCodes<Nibbles>
                                     : is_float(w) ? kComputeCodes<Bytes<true>> : kComputeCodes<Bytes<false>>;
  const auto expand_panel = w.bits == 4 ? expand<Nibbles> : is_float(w) ? expand<Bytes<true>> : expand<Bytes<false>>;
#endif
  // Of few rows each thread computes the sums: the threads then need not wait for each other.
  const bool shared = m > kTileRows;
  float* const shared_sums = w.zero_bytes && shared ? floats(m * groups) : nullptr;
#pragma omp parallel
  {
    float* sums = shared_sums;
    if (w.zero_bytes && !shared) {
      sums = floats(m * groups);
      sum_groups(x, ldx, w, k, 0, m, sums);
    }
    // Threads divide the panels and not the rows, so weights are read from memory once.
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    if (shared_sums) {
      sum_groups(x, ldx, w, k, m * thread / threads, m * (thread + 1) / threads, sums);
#pragma omp barrier
    }
    static thread_local std::vector<uint8_t> scratch;
    uint8_t* expanded = nullptr;
    const int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
    PanelTransforms transforms(adapters, of_rows);
    LinesToCome lines(adapters, of_rows, thread, threads, begin, end, tiles_of(m) * (end - begin));
    for (int64_t m0 = 0; m0 < m; m0 += kBlockRows) {
      const int64_t count = std::min(kBlockRows, m - m0), tiles = (count + kTileRows - 1) / kTileRows;
      const int64_t share = bytes / tiles;
      const bool expands = tiles >= kExpandedTiles || (!kAvx512 && w.bits == 8 && count > kRegisterRows);
      const ComputeCodes* const compute = expands ? kComputeCodes<Expanded> : direct;
      if (expands) {
        if ((int64_t)scratch.size() < expanded_bytes(w, k) + kLine) scratch.resize(expanded_bytes(w, k) + kLine);
        expanded = scratch.data() + -(uintptr_t)scratch.data() % kLine;
      }
      for (int64_t p = begin; p < end; p++) {
        const uint8_t* const panel = (const uint8_t*)w.panels + p * bytes;
        if (expands) expand_panel(panel, expanded, k, w);
        for (int64_t tile = 0; tile < tiles; tile++) {
          const int64_t r0 = m0 + count * tile / tiles, r1 = m0 + count * (tile + 1) / tiles;
          const CodeTile t = {
              x + r0 * ldx,
              ldx,
              sums + r0 * groups,
              expands ? expanded : panel,
              k,
              out + r0 * n + p * kColumns,
              n,
              bias ? bias + p * kColumns : nullptr,
              add != 0,
              // While a single tile looks up codes of 4 bits, the hardware prefetcher is fast enough.
              p + 1 < end && (tiles > 1 || (w.bits == 8 && prefetches(tiles))) ? share / (k / 2) : 0,
              (const char*)(panel + bytes) + tile * share,
              transforms.of(p, r0, r1),
              lines.take(),
          };
          compute[r1 - r0](t, w);
        }
      }
    }
  }
}

}  // extern "C"
}  // namespace quire
