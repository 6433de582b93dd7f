// SPDX-License-Identifier: Apache-2.0
// What the rows of a batch need from their adapters in one linear: transforms of the base product, and the cache lines
// of their matrices.
#pragma once

#include <algorithm>

#include "ops.h"
#include "tile.h"

namespace quire {

inline const Entry& entry(const QuireLoraLinear& l, int64_t slot, int64_t slice) {
  return l.entries[slot * l.ld_entries + slice];
}

// What the adapters of these rows do to this linear: add deltas, transform base products.
struct Changes {
  bool adds = false, transforms = false;

  Changes(const QuireLoraLinear* linear, const QuireLoraRows* rows) {
    for (int64_t tile = 0; linear && tile < rows->num_tiles; tile++)
      for (int64_t slice = 0; slice < linear->num_slices; slice++) {
        const Entry& e = entry(*linear, rows->tiles[3 * tile], slice);
        adds |= e.rank != 0;
        transforms |= e.transform != 0;
      }
  }
};

// Transforms of the rows of a linear, for one panel of outputs after the other.
class PanelTransforms {
 public:
  PanelTransforms(const QuireLoraLinear* linear, const QuireLoraRows* rows)
      : linear_(Changes(linear, rows).transforms ? linear : nullptr), rows_(rows) {}

  // Transforms of rows [begin, end), at most 8, of a panel. Null if no row has one. Valid until the next call.
  const Transform* of(int64_t panel, int64_t begin, int64_t end) {
    if (!linear_) return nullptr;
    int64_t slice = 0;
    while (panel >= linear_->ends[slice]) slice++;
    const int64_t start = slice ? linear_->ends[slice - 1] : 0, width = (linear_->ends[slice] - start) * kColumns;
    bool has_any = false;
    for (int64_t r = begin; r < end; r++) {
      const int64_t slot = rows_->slots[r], at = slot < 0 ? 0 : entry(*linear_, slot, slice).transform;
      const bf16* const scale = at ? linear_->pages + at + (panel - start) * kColumns : nullptr;
      transforms_[r - begin] = {scale, at ? scale + width : nullptr};
      if (at) transforms_[r - begin].prefetch(), has_any = true;
    }
    return has_any ? transforms_ : nullptr;
  }

 private:
  const QuireLoraLinear* linear_;
  const QuireLoraRows* rows_;
  Transform transforms_[kTileRows];
};

// Cache lines of the matrices A that a thread's tiles of a linear read, in order.
class LinesOfA {
 public:
  LinesOfA(const QuireLoraLinear* linear, const QuireLoraRows* rows, int64_t begin, int64_t end)
      : linear_(linear), rows_(rows), tile_(begin), end_(end) {
    if (linear_) find();
  }

  int64_t count() const {
    int64_t lines = 0;
    for (LinesOfA walk = *this; walk.at_; walk.step()) lines += (walk.stop_ - walk.at_ + kLine - 1) / kLine;
    return lines;
  }

  // The next lines, up to `wanted` of one matrix.
  Run take(int64_t wanted) {
    if (!at_ || !wanted) return {at_, 0};
    const Run taken = {at_, std::min(wanted, (stop_ - at_ + kLine - 1) / kLine)};
    at_ += taken.lines * kLine;
    if (at_ >= stop_) step();
    return taken;
  }

 private:
  // Advance to the next matrix.
  void step() {
    slice_++;
    find();
  }

  void find() {
    for (; tile_ < end_; tile_++, slice_ = 0) {
      const int64_t slot = rows_->tiles[3 * tile_];
      if (slice_ == 0 && tile_ && rows_->tiles[3 * (tile_ - 1)] == slot) continue;
      for (; slice_ < linear_->num_slices; slice_++) {
        const Entry& e = entry(*linear_, slot, slice_);
        if (!e.rank) continue;
        at_ = (const char*)(linear_->pages + e.a);
        stop_ = at_ + e.rank * linear_->in_features * (int64_t)sizeof(bf16);
        return;
      }
    }
    at_ = nullptr;
  }

  const QuireLoraLinear* linear_;
  const QuireLoraRows* rows_;
  int64_t tile_, end_, slice_ = 0;
  const char *at_ = nullptr, *stop_ = nullptr;
};

// Cache lines of the matrices A and B that a thread reads after the base product, for it to prefetch them during the
// product: each tile of the product gets an equal share. The base product of many rows leaves memory idle.
class LinesToCome {
 public:
  // The thread computes `num_tiles` tiles of the base product, in panels [begin, end).
  LinesToCome(const QuireLoraLinear* linear, const QuireLoraRows* rows, int64_t thread, int64_t threads, int64_t begin,
              int64_t end, int64_t num_tiles)
      : linear_(Changes(linear, rows).adds && num_tiles ? linear : nullptr),
        rows_(rows),
        a_(linear_, rows, linear_ ? rows->num_tiles * thread / threads : 0,
           linear_ ? rows->num_tiles * (thread + 1) / threads : 0),
        begin_(begin),
        end_(end) {
    if (!linear_) return;
    find();
    int64_t lines = a_.count();
    for (LinesToCome walk = *this; walk.b_.lines; walk.step()) lines += walk.b_.lines;
    share_ = (lines + num_tiles - 1) / num_tiles;
  }

  // The lines that the next tile prefetches: a part of one matrix.
  Run take() {
    if (!linear_) return {nullptr, 0};
    if (const Run lines = a_.take(share_); lines.lines) return lines;
    const Run lines = {b_.from, std::min(share_, b_.lines)};
    b_ = {b_.from + lines.lines * kLine, b_.lines - lines.lines};
    if (lines.lines && !b_.lines) step();
    return lines;
  }

 private:
  void step() {
    tile_++;
    find();
  }

  // Find the panels of B of the next slot, then those of the next slice.
  void find() {
    b_ = {nullptr, 0};
    for (; slice_ < linear_->num_slices; slice_++, tile_ = 0) {
      const int64_t start = slice_ ? linear_->ends[slice_ - 1] : 0;
      const int64_t from = std::max(begin_, start), to = std::min(end_, linear_->ends[slice_]);
      for (; from < to && tile_ < rows_->num_tiles; tile_++) {
        const int64_t slot = rows_->tiles[3 * tile_];
        const Entry& e = entry(*linear_, slot, slice_);
        if (!e.rank || (tile_ && rows_->tiles[3 * (tile_ - 1)] == slot)) continue;
        const int64_t size = pairs_of(e.rank) * 2 * kColumns;
        b_ = {(const char*)(linear_->pages + e.b + (from - start) * size),
              (to - from) * size * (int64_t)sizeof(bf16) / kLine};
        return;
      }
    }
  }

  const QuireLoraLinear* linear_;
  const QuireLoraRows* rows_;
  LinesOfA a_;
  int64_t begin_, end_, slice_ = 0, tile_ = 0, share_ = 0;
  Run b_ = {nullptr, 0};
};

// Prefetch the lines of a part of `parts` equal parts to L2.
inline __attribute__((always_inline)) void prefetch_part(const Run& lines, int64_t part, int64_t parts) {
  const char* const last = lines.from + lines.lines * (part + 1) / parts * kLine;
  for (const char* line = lines.from + lines.lines * part / parts * kLine; line < last; line += kLine)
    _mm_prefetch(line, _MM_HINT_T1);
}

}  // namespace quire
