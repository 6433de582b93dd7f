// SPDX-License-Identifier: Apache-2.0
// Compiled kernels that other compiled kernels call, and their argument types. See the definitions for descriptions.
#pragma once

#include "bf16.h"

namespace quire {

// Matrices A and B of a slot; a row of `entries` in lora_slots.py.
struct Entry {
  int64_t a, b;  // offsets in elements from the slot's start
  int64_t rank;  // 0: the adapter does not change the slice
  int64_t transform;  // offset of scales and addends [2, outputs] of the base product; 0: none
};

inline int64_t pairs_of(int64_t rank) { return (rank + 1) / 2; }

extern "C" {

// The adapters of a linear, or of one projection of all experts; `_Linear` of lora_slots.py.
struct QuireLoraLinear {
  const bf16* pages;     // of all slots
  const Entry* entries;  // [num_slots, num_slices], rows of `ld_entries`
  int64_t ld_entries;
  int64_t num_slices;
  const int64_t* ends;  // for each slice, the index after its last panel
  int64_t in_features;
  int64_t max_rank;             // even
  const QuireLoraLinear* next;  // computed after this one, or null
};

// Adapter slots of the rows of a batch; `_Rows` of lora.py.
struct QuireLoraRows {
  const int64_t* tiles;  // [num_tiles, 3]: slot, first row, end; at most 8 rows
  int64_t num_tiles;
  const int64_t* slots;  // of each row; -1: none
};

// A weight of 4 or 8 bits in panels of codes.cpp; `_Weight` of quantized_linear.py.
struct QuireWeight {
  const void* panels;
  const bf16* table;  // values of the codes: 16, or 128 to which the highest bit of a code adds a sign
  int64_t bits;       // of a code: 4 or 8
  int64_t group;      // inputs that have a common scale; the last group can be smaller
  int64_t scale_bytes;  // 2: float16; 4: float32
  int64_t zero_bytes;   // of each group and column: 1: a zero point; 4: a float32 number that is subtracted after the
                        // multiplication by the scale; 0: the zero point is 8
  int64_t int8_inputs;  // 1: inputs are quantized to 8 bits, see int4.cpp
};

void quire_linear(const bf16* x, int64_t ldx, const bf16* packed, const bf16* bias, bf16* out, int64_t m, int64_t n,
                  int64_t k, int64_t add);
// The adapters of `rows` can transform the products of these three. What quire_adapted_linear then reads is prefetched.
// `adapters` null: there are none.
void quire_linear_int8(const bf16* x, int64_t ldx, const uint8_t* packed, const bf16* bias, bf16* out, int64_t m,
                       int64_t n, int64_t k, int64_t add, const QuireLoraLinear* adapters = nullptr,
                       const QuireLoraRows* rows = nullptr);
void quire_linear_codes(const bf16* x, int64_t ldx, const QuireWeight* weight, const bf16* bias, bf16* out, int64_t m,
                        int64_t n, int64_t k, int64_t add, const QuireLoraLinear* adapters = nullptr,
                        const QuireLoraRows* rows = nullptr);
void quire_linear_int4(const bf16* x, int64_t ldx, const QuireWeight* weight, const bf16* bias, bf16* out, int64_t m,
                       int64_t n, int64_t k, int64_t add, const QuireLoraLinear* adapters,
                       const QuireLoraRows* rows);
void quire_shrink(const bf16* x, int64_t ldx, const bf16* a, int64_t rank, int64_t in, bf16* out, int64_t rows);
void quire_adapted_linear(const bf16* x, int64_t ldx, const bf16* packed, const bf16* bias, bf16* out, int64_t m,
                          int64_t n, int64_t k, int64_t add, const QuireLoraLinear* linear, const QuireLoraRows* rows);
void quire_rms_norm(const bf16* x, int64_t ldx, const bf16* weight, bf16* out, int64_t rows, int64_t size, float eps);
void quire_norm_heads(bf16* qkv, int64_t ldq, const bf16* query_weight, const bf16* key_weight, int64_t tokens,
                      int64_t heads, int64_t kv_heads, int64_t head_dim, float eps);
void quire_silu_mul(const bf16* gate_up, bf16* out, int64_t rows, int64_t size);
void quire_rotate_write(bf16* qkv, int64_t ldq, const bf16* cos, const bf16* sin, void* keys, void* values,
                        const int64_t* addresses, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                        int64_t rotary_dim, int64_t is_int8);
void quire_attention(const bf16* queries, int64_t ldq, const void* keys, const void* values, const int64_t* tables,
                     int64_t max_blocks, const int32_t* starts, const int32_t* contexts, bf16* out, int64_t spans,
                     int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, float scale,
                     int64_t window, float softcap, const bf16* sinks, int64_t is_int8);

}  // extern "C"
}  // namespace quire
