// Row numbers of keys that lie close together, by direct mapping: a page for each aligned range of
// 2048 keys, found by a small hash table of pages. A full page takes 4 bytes a key and needs no
// comparison, so ids counted from somewhere are found at the speed of an array.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "keymap/arena.h"
#include "recsdk/types.h"
#include "util/hash.h"

namespace recsdk::internal {

/// Not thread-safe by itself: any number of readers or one writer.
class DensePages {
 public:
  static constexpr int kPageBits = 11;
  static constexpr std::uint32_t kPageKeys = 1U << kPageBits;
  static constexpr std::uint32_t kNoRow = 0xFFFFFFFFU;  // no row has this number

  struct Page {
    std::uint32_t rows[kPageKeys];  // kNoRow where the key is not there
  };

  /// The range that a key belongs to.
  static std::uint64_t id_of(Key key) { return static_cast<std::uint64_t>(key) >> kPageBits; }
  /// The ranges before and after one; the last key of all, -1, is followed by 0.
  static std::uint64_t before(std::uint64_t id) { return (id - 1) & kIds; }
  static std::uint64_t after(std::uint64_t id) { return (id + 1) & kIds; }
  static std::uint32_t slot_of(Key key) {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(key) & (kPageKeys - 1));
  }
  /// Key number `slot` of a range.
  static Key key_of(std::uint64_t id, std::uint32_t slot) {
    return static_cast<Key>(id << kPageBits | slot);
  }

  bool empty() const noexcept { return num_pages_ == 0; }
  std::int64_t size() const noexcept { return num_keys_; }
  std::int64_t num_pages() const noexcept { return num_pages_; }
  std::int64_t bytes() const noexcept;

  /// The page of a range, or null.
  const Page* find(std::uint64_t id) const {
    if (entries_.empty()) return nullptr;
    return entries_[place_of(id)].page;
  }
  /// Number of keys in the page of a range; 0 without a page.
  std::uint32_t count(std::uint64_t id) const;

  /// Makes an empty page for a range that has none. Throws Error(kOutOfMemory), std::bad_alloc;
  /// then nothing has changed.
  void add(std::uint64_t id);

  /// Sets the row of a key whose range has a page, and which is not there.
  void insert(Key key, std::uint32_t row) noexcept;
  /// Takes a key out; returns its row number if it was there. An empty page goes too.
  std::optional<std::uint32_t> erase(Key key) noexcept;
  void clear() noexcept;
  void swap(DensePages& other) noexcept;

  /// Calls visit(key, row) for every key.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (const Entry& entry : entries_) {
      if (entry.page == nullptr) continue;
      for (std::uint32_t slot = 0; slot < kPageKeys; ++slot) {
        if (entry.page->rows[slot] != kNoRow) visit(key_of(entry.id, slot), entry.page->rows[slot]);
      }
    }
  }

  /// Throws Error(kInternal) if a count is wrong or a page cannot be reached.
  void check_invariants() const;

 private:
  struct Entry {
    std::uint64_t id = 0;
    Page* page = nullptr;  // null: the entry is free
    std::uint32_t count = 0;
  };

  static constexpr std::uint64_t kIds = ~std::uint64_t{0} >> kPageBits;
  static constexpr std::uint32_t kPageUnits = sizeof(Page) / Arena::kUnit;

  // Where the range's entry is, or the free entry that ends the search for it.
  std::size_t place_of(std::uint64_t id) const {
    const std::size_t mask = entries_.size() - 1;
    std::size_t i = mix64(id) & mask;
    while (entries_[i].page != nullptr && entries_[i].id != id) i = (i + 1) & mask;
    return i;
  }
  void remove(std::size_t place) noexcept;

  std::vector<Entry> entries_;  // a power of two of them, at most half in use
  Arena arena_;
  std::int64_t num_pages_ = 0;
  std::int64_t num_keys_ = 0;
};

}  // namespace recsdk::internal
