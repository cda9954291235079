// Growing arrays that never move, in slabs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "util/memory.h"

namespace recsdk::internal {

/// The index holds 32-bit row numbers, one of which stands for none.
inline constexpr std::int64_t kMaxRows = (std::int64_t{1} << 32) - 1;

/// A growing array of records of equal size and the scalars of each, in slabs of a power of two of
/// records. The first records and the first scalars of large slabs are on small pages, right before
/// a huge one: a small array costs little, and hardly any of a large one is there.
/// Growing never moves a record, and may run beside access to records already there.
class Slabs {
 public:
  Slabs(std::int64_t stride, std::int64_t scalar_stride, std::int64_t slab_bytes);

  /// Makes records [0, count) addressable. Throws Error(kOutOfMemory), std::bad_alloc.
  void grow(std::int64_t count);
  /// Backs records [begin, end) with memory now.
  void populate(std::int64_t begin, std::int64_t end) const noexcept;

  /// The same on several threads, a huge page at a time. Without it, threads that write side by
  /// side would each clear the page on which they meet.
  void populate_pages(std::int64_t begin, std::int64_t end, int max_threads) const;

  /// In a large array of which `count` records are used: backs the next huge page with memory, once
  /// half of the one before is used. False if there is nothing to do.
  bool populate_ahead(std::int64_t count) noexcept;

  RowAddresses addresses() const noexcept {
    return {reinterpret_cast<std::byte* const*>(directory_.data()),
            shift_,
            (std::int64_t{1} << shift_) - 1,
            stride_,
            scalar_stride_,
            scalars_begin_};
  }
  template <typename T>
  T* at(std::int64_t i) const noexcept {
    return reinterpret_cast<T*>(addresses().record(i));
  }
  /// Bytes of a record and its scalars.
  std::int64_t row_bytes() const noexcept { return stride_ + scalar_stride_; }

 private:
  /// Of a slab's pages.
  struct Bytes {
    std::size_t begin;
    std::size_t end;
  };

  Pages make_first() const;
  /// Backs what of records [begin, end) and of their scalars lies in these bytes of a slab.
  void populate_part(std::int64_t slab, std::int64_t begin, std::int64_t end,
                     const Bytes& part) const noexcept;
  /// Bytes of a slab's pages before its first record.
  std::size_t lead_of(std::size_t slab) const noexcept { return slab == 0 ? first_lead_ : 0; }
  /// From the first record on.
  std::size_t slab_bytes() const noexcept {
    return static_cast<std::size_t>(scalars_begin_ + (scalar_stride_ << shift_));
  }

  std::int64_t stride_;
  std::int64_t scalar_stride_;
  int shift_;
  std::size_t first_lead_;
  std::int64_t scalars_begin_;  // bytes from a slab's first record on
  Pages directory_;             // of slab addresses, as long as row numbers go; never moves
  std::vector<Pages> slabs_;
  std::int64_t populated_ = 0;  // records that populate_ahead has backed, or begun the slab of
};

}  // namespace recsdk::internal
