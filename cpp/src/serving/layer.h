// What is put in front of the files of a table: rows that replace those behind, and keys that left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "recsdk/types.h"
#include "serving/frozen_file.h"

namespace recsdk::internal {

/// Records in ascending order of hash and their index, as in a frozen file, but in memory.
class Image {
 public:
  Image() = default;
  /// Copies records of different keys that are in this order. Throws std::bad_alloc.
  Image(std::span<const std::byte* const> records, std::int64_t record_bytes,
        std::uint64_t hash_seed);
  ~Image();
  Image(Image&& other) noexcept;
  Image& operator=(Image&& other) noexcept;
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  bool is_empty() const { return view_.num_rows == 0; }
  const FrozenView& view() const { return view_; }
  const std::byte* record(std::int64_t number) const {
    return view_.records + number * view_.record_bytes;
  }
  std::int64_t num_bytes() const { return static_cast<std::int64_t>(size_); }

 private:
  void* memory_ = nullptr;
  std::size_t size_ = 0;
  FrozenView view_;
};

/// No key is in both.
struct Layer {
  Image rows;
  Image erased;  // records of a key only

  std::int64_t num_bytes() const { return rows.num_bytes() + erased.num_bytes(); }
};

inline Key key_of_record(const std::byte* record) {
  Key key = 0;
  std::memcpy(&key, record, sizeof(key));
  return key;
}

/// The two layers as one, which is as good as both. `is_needed(key)` tells of a key that left
/// whether something behind both has it. Both are of one seed.
template <class IsNeeded>
Layer merged(const Layer& newer, const Layer& older, const IsNeeded& is_needed);

/// The next of a layer's keys in ascending order of hash.
class LayerCursor {
 public:
  explicit LayerCursor(const Layer& layer) : layer_(layer) { find(); }
  bool is_done() const { return record_ == nullptr; }
  std::uint64_t hash() const { return hash_; }
  const std::byte* record() const { return record_; }
  bool is_erased() const { return is_erased_; }
  void advance() {
    ++(is_erased_ ? erased_ : row_);
    find();
  }

 private:
  void find();

  const Layer& layer_;
  std::int64_t row_ = 0;
  std::int64_t erased_ = 0;
  const std::byte* record_ = nullptr;
  std::uint64_t hash_ = 0;
  bool is_erased_ = false;
};

template <class IsNeeded>
Layer merged(const Layer& newer, const Layer& older, const IsNeeded& is_needed) {
  std::vector<const std::byte*> rows;
  std::vector<const std::byte*> erased;
  LayerCursor a(newer);
  LayerCursor b(older);
  while (!a.is_done() || !b.is_done()) {
    const bool takes_newer = b.is_done() || (!a.is_done() && a.hash() <= b.hash());
    const bool is_in_both = !a.is_done() && !b.is_done() && a.hash() == b.hash();
    LayerCursor& from = takes_newer ? a : b;
    if (!from.is_erased()) {
      rows.push_back(from.record());
    } else if (is_needed(key_of_record(from.record()))) {
      erased.push_back(from.record());
    }
    from.advance();
    if (is_in_both) b.advance();
  }
  const FrozenView& like = newer.rows.view();
  return {Image(rows, like.record_bytes, like.hash_seed), Image(erased, kKeyBytes, like.hash_seed)};
}

}  // namespace recsdk::internal
