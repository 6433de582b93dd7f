// SPDX-License-Identifier: Apache-2.0
// All decoder layers of a step in one call: the compiled forms in the order in which the layers' Python calls them.
//
// What is computed is the same, to the last bit. What is saved is the way from one to the next, 9 times a layer, and
// memory: what a layer writes for itself lies where the one before had it.

#include <algorithm>

#include "ops.h"

namespace quire {

extern "C" {

// A linear, with the adapters that may change it; `_Product` of decoder.py.
struct QuireProduct {
  const bf16* packed;
  const bf16* bias;  // or null
  int64_t outputs;
  const QuireLoraLinear* adapters;  // or null
};

// `_Layer` of decoder.py.
struct QuireLayer {
  const bf16* attention_norm;
  QuireProduct qkv, output;
  const bf16* mlp_norm;
  QuireProduct gate_up, down;
  int64_t window;  // 0: none
};

// `_Layers` of decoder.py.
struct QuireLayers {
  const QuireLayer* layers;
  int64_t num_layers, hidden, heads, kv_heads, head_dim;
  float eps, scale, softcap;  // softcap 0: none
};

// `_Step` of decoder.py: what is the same for all layers.
struct QuireStep {
  int64_t tokens;
  const bf16 *cos, *sin;
  int64_t rotary_dim;
  const int64_t *addresses, *tables;
  int64_t max_blocks;
  const int32_t *starts, *contexts;
  int64_t spans, block_size;
  const QuireLoraRows* rows;  // null: no token has an adapter
};

}  // extern "C"

namespace {

// Whether an adapter of the step changes this linear.
bool changed(const QuireLoraLinear* l, const QuireLoraRows* rows) {
  if (!l || !rows) return false;
  for (int64_t tile = 0; tile < rows->num_tiles; tile++)
    for (int64_t slice = 0; slice < l->num_slices; slice++)
      if (l->entries[rows->tiles[3 * tile] * l->ld_entries + slice].rank) return true;
  return false;
}

// out = (add ? out : 0) + x W^T + bias, and what adapters add.
void multiply(const QuireProduct& p, const bf16* x, int64_t inputs, bf16* out, bool add, const QuireStep& s) {
  if (changed(p.adapters, s.rows))
    quire_adapted_linear(x, inputs, p.packed, p.bias, out, s.tokens, p.outputs, inputs, add, p.adapters, s.rows);
  else
    quire_linear(x, inputs, p.packed, p.bias, out, s.tokens, p.outputs, inputs, add);
}

}  // namespace

extern "C" {

// hidden [tokens, hidden], in place. caches: keys and values of each layer. workspace: [tokens, widest input of a
// linear, and outputs of qkv or gate_up].
void quire_decode(bf16* hidden, const QuireLayers* all, const QuireStep* step, bf16* const* caches, bf16* workspace) {
  const QuireLayers& a = *all;
  const QuireStep& s = *step;
  const int64_t attended = a.heads * a.head_dim;
  for (int64_t i = 0; i < a.num_layers; i++) {
    const QuireLayer& l = a.layers[i];
    const int64_t gated = l.gate_up.outputs / 2, ldq = l.qkv.outputs;
    bf16 *keys = caches[2 * i], *values = caches[2 * i + 1];
    // The input of a linear, and what the one before it gave; their places are as wide as the widest.
    bf16* const input = workspace;
    bf16* const wide = workspace + s.tokens * std::max({a.hidden, attended, gated});
    quire_rms_norm(hidden, a.hidden, l.attention_norm, input, s.tokens, a.hidden, a.eps);
    multiply(l.qkv, input, a.hidden, wide, false, s);
    quire_rotate_write(wide, ldq, s.cos, s.sin, keys, values, s.addresses, s.tokens, a.heads, a.kv_heads, a.head_dim,
                       s.rotary_dim);
    quire_attention(wide, ldq, keys, values, s.tables, s.max_blocks, s.starts, s.contexts, input, s.spans, a.heads,
                    a.kv_heads, a.head_dim, s.block_size, a.scale, l.window, a.softcap);
    multiply(l.output, input, attended, hidden, true, s);
    quire_rms_norm(hidden, a.hidden, l.mlp_norm, input, s.tokens, a.hidden, a.eps);
    multiply(l.gate_up, input, a.hidden, wide, false, s);
    quire_silu_mul(wide, input, s.tokens, gated);
    multiply(l.down, input, gated, hidden, true, s);
  }
}

}  // extern "C"
}  // namespace quire
