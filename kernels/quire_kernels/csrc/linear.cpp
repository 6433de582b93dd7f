// SPDX-License-Identifier: Apache-2.0
// GEMM of bfloat16 rows with a weight that was packed once into panels.
//
// A panel has 32 output columns: for every pair of inputs, the pairs of all columns are adjacent, as vdpbf16ps reads
// them; tile.h multiplies them. While the tiles of a panel are computed, each prefetches a part of the next panel.

#include <omp.h>

#include <algorithm>

#include "ops.h"
#include "tile.h"

namespace quire {

extern "C" {

// weight [n, k] to packed [n / 32, k / 2, 32, 2].
void quire_pack(const bf16* weight, bf16* packed, int64_t n, int64_t k) {
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < n / kColumns; p++)
    for (int64_t i = 0; i < k / 2; i++)
      for (int64_t c = 0; c < kColumns; c++)
        for (int64_t e = 0; e < 2; e++) {
          packed[((p * (k / 2) + i) * kColumns + c) * 2 + e] = weight[(p * kColumns + c) * k + 2 * i + e];
        }
}

// Unpack rows `ids` of a packed weight to [num_ids, k].
void quire_unpack_rows(const bf16* packed, const int64_t* ids, bf16* out, int64_t num_ids, int64_t k) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < num_ids; t++) {
    const bf16* from = packed + (ids[t] / kColumns) * k * kColumns + (ids[t] % kColumns) * 2;
    for (int64_t i = 0; i < k / 2; i++) __builtin_memcpy(out + t * k + 2 * i, from + i * 2 * kColumns, 4);
  }
}

// out [m, n] = (add ? out : 0) + x [m, k] W^T + bias; x has rows of ldx.
void quire_linear(const bf16* x, int64_t ldx, const bf16* packed, const bf16* bias, bf16* out, int64_t m, int64_t n,
                  int64_t k, int64_t add) {
  const int64_t panels = n / kColumns;
#pragma omp parallel
  {
    // Threads divide the panels and not the rows, so weights are read from memory once.
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    multiply_panels(x, ldx, packed, bias, out, n, m, k, panels * thread / threads, panels * (thread + 1) / threads,
                    add);
  }
}

}  // extern "C"
}  // namespace quire
