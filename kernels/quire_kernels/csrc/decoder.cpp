// SPDX-License-Identifier: Apache-2.0
// All decoder layers of a step in one call: the compiled kernels in the order in which Python would call them.
//
// The result is bitwise the same. The call saves 9 calls from Python per layer, and memory: layers share a workspace,
// and a long prompt passes through a layer in chunks.

#include <algorithm>
#include <vector>

#include "adapters.h"
#include "ops.h"
#include "tile.h"

namespace quire {

extern "C" {

// A linear and its adapters; `_Product` of fused_decoder.py.
struct QuireProduct {
  const void* packed;  // bf16, panels of int8.cpp, or a QuireWeight
  const bf16* bias;    // or null
  int64_t outputs;
  int64_t format;                   // what `packed` is: 0, 1 or 2
  const QuireLoraLinear* adapters;  // or null
};

// `_Layer` of fused_decoder.py.
struct QuireLayer {
  const bf16* attention_norm;
  QuireProduct qkv, output;
  const bf16 *query_norm, *key_norm;  // [head_dim], or null
  const bf16* mlp_norm;
  QuireProduct gate_up, down;
  int64_t window;  // 0: none
};

// `_Layers` of fused_decoder.py.
struct QuireLayers {
  const QuireLayer* layers;
  int64_t num_layers, hidden, heads, kv_heads, head_dim;
  float eps, scale, softcap;  // softcap 0: none
};

// `_Step` of fused_decoder.py: arguments that are the same for all layers.
struct QuireStep {
  int64_t tokens;
  const bf16 *cos, *sin;
  int64_t rotary_dim;
  const int64_t *addresses, *tables;
  int64_t max_blocks;
  const int32_t *starts, *contexts;
  int64_t spans, block_size;
  const QuireLoraRows* rows;  // null: no token has an adapter
  int64_t is_int8;            // see quire_attention
};

}  // extern "C"

namespace {

// Rows that pass through a layer together: their intermediate results stay in the L2 cache.
struct Part {
  int64_t begin, count;
  std::vector<int64_t> tiles;  // adapter tiles, with row numbers relative to the chunk
  QuireLoraRows rows;
};

std::vector<Part> parts_of(const QuireStep& s) {
  std::vector<Part> parts;
  for (int64_t begin = 0; begin < s.tokens; begin += kBlockRows) {
    const int64_t end = std::min(begin + kBlockRows, s.tokens);
    parts.push_back({begin, end - begin, {}, {}});
    Part& part = parts.back();
    for (int64_t i = 0; s.rows && i < s.rows->num_tiles; i++) {
      const int64_t* tile = s.rows->tiles + 3 * i;
      const int64_t from = std::max(tile[1], begin), to = std::min(tile[2], end);
      if (from < to) part.tiles.insert(part.tiles.end(), {tile[0], from - begin, to - begin});
    }
    if (s.rows) part.rows = {part.tiles.data(), (int64_t)part.tiles.size() / 3, s.rows->slots + begin};
  }
  return parts;
}

// out = (add ? out : 0) + x W^T + bias + LoRA deltas.
void multiply(const QuireProduct& p, const Part& part, const bf16* x, int64_t inputs, bf16* out, bool add) {
  const QuireLoraRows* const rows = &part.rows;
  const Changes changes(p.adapters, rows);
  const bf16* packed = p.format ? nullptr : (const bf16*)p.packed;
  const bf16* bias = p.format ? nullptr : p.bias;
  if (p.format == 1)
    quire_linear_int8(x, inputs, (const uint8_t*)p.packed, p.bias, out, part.count, p.outputs, inputs, add, p.adapters,
                      rows);
  else if (p.format == 2)
    quire_linear_codes(x, inputs, (const QuireWeight*)p.packed, p.bias, out, part.count, p.outputs, inputs, add,
                       p.adapters, rows);
  add |= p.format != 0;
  if (changes.adds || (packed && changes.transforms))
    quire_adapted_linear(x, inputs, packed, bias, out, part.count, p.outputs, inputs, add, p.adapters, rows);
  else if (packed)
    quire_linear(x, inputs, packed, bias, out, part.count, p.outputs, inputs, add);
}

}  // namespace

extern "C" {

// hidden [tokens, hidden], in place. caches: keys and values of each layer. workspace: qkv and attention output of all
// tokens; then, for the rows of a chunk, the widest input of a linear and the output of gate_up.
void quire_decode(bf16* hidden, const QuireLayers* all, const QuireStep* step, void* const* caches, bf16* workspace) {
  const QuireLayers& a = *all;
  const QuireStep& s = *step;
  const std::vector<Part> parts = parts_of(s);
  const int64_t width = a.heads * a.head_dim;
  for (int64_t i = 0; i < a.num_layers; i++) {
    const QuireLayer& l = a.layers[i];
    const int64_t gated = l.gate_up.outputs / 2, ldq = l.qkv.outputs;
    void *keys = caches[2 * i], *values = caches[2 * i + 1];
    bf16* const qkv = workspace;
    bf16* const attended = qkv + s.tokens * ldq;
    bf16* const input = attended + s.tokens * width;
    bf16* const gate_up = input + parts[0].count * std::max(a.hidden, gated);
    for (const Part& part : parts) {
      const int64_t at = part.begin;
      quire_rms_norm(hidden + at * a.hidden, a.hidden, l.attention_norm, input, part.count, a.hidden, a.eps);
      multiply(l.qkv, part, input, a.hidden, qkv + at * ldq, false);
      if (l.query_norm)
        quire_norm_heads(qkv + at * ldq, ldq, l.query_norm, l.key_norm, part.count, a.heads, a.kv_heads, a.head_dim,
                         a.eps);
      quire_rotate_write(qkv + at * ldq, ldq, s.cos + at * s.rotary_dim, s.sin + at * s.rotary_dim, keys, values,
                         s.addresses + at, part.count, a.heads, a.kv_heads, a.head_dim, s.rotary_dim, s.is_int8);
    }
    quire_attention(qkv, ldq, keys, values, s.tables, s.max_blocks, s.starts, s.contexts, attended, s.spans, a.heads,
                    a.kv_heads, a.head_dim, s.block_size, a.scale, l.window, a.softcap, nullptr, s.is_int8);
    for (const Part& part : parts) {
      bf16* const rows = hidden + part.begin * a.hidden;
      multiply(l.output, part, attended + part.begin * width, width, rows, true);
      quire_rms_norm(rows, a.hidden, l.mlp_norm, input, part.count, a.hidden, a.eps);
      multiply(l.gate_up, part, input, a.hidden, gate_up, false);
      quire_silu_mul(gate_up, input, part.count, gated);
      multiply(l.down, part, input, gated, rows, true);
    }
  }
}

}  // extern "C"
}  // namespace quire
