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
  /// Copies records of different keys that are in this order. Their hashes have the first
  /// `range_bits` bits in common. Throws std::bad_alloc.
  Image(std::span<const std::byte* const> records, std::int64_t record_bytes,
        std::uint64_t hash_seed, int range_bits);
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

/// What a layer has of a range of hashes. No key is in both.
struct Piece {
  Image rows;
  Image erased;  // records of a key only

  std::int64_t num_bytes() const { return rows.num_bytes() + erased.num_bytes(); }
};

/// By range of hashes; null where nothing is.
using Pieces = std::vector<std::shared_ptr<const Piece>>;

/// What all layers of a table have in common.
struct LayerShape {
  std::int64_t record_bytes = 0;
  std::uint64_t hash_seed = 0;
};

/// Pieces of equal ranges of hashes, a power of two, which come and go one by one when layers are
/// merged.
class Layer {
 public:
  Layer(Pieces pieces, const LayerShape& shape);
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  const Pieces& pieces() const { return pieces_; }
  const LayerShape& shape() const { return shape_; }
  int range_bits() const;
  bool is_empty() const { return !has_rows_ && !has_erased_; }
  bool has_rows() const { return has_rows_; }
  bool has_erased() const { return has_erased_; }
  std::int64_t num_bytes() const;
  /// An image for each range.
  std::span<const FrozenView* const> rows() const { return rows_; }
  std::span<const FrozenView* const> erased() const { return erased_; }

 private:
  Pieces pieces_;
  LayerShape shape_;
  FrozenView nothing_;  // in the place of what is empty
  std::vector<const FrozenView*> rows_;
  std::vector<const FrozenView*> erased_;
  bool has_rows_ = false;
  bool has_erased_ = false;
};

inline Key key_of_record(const std::byte* record) {
  Key key = 0;
  std::memcpy(&key, record, sizeof(key));
  return key;
}

/// The first `bits` bits of a hash.
inline std::uint64_t range_of(std::uint64_t hash, int bits) {
  return bits == 0 ? 0 : hash >> (64 - bits);
}

/// Such that a piece has a few megabytes.
int range_bits_for(std::int64_t num_bytes);

/// The next of the keys of some pieces, in ascending order of hash.
class LayerCursor {
 public:
  LayerCursor(Pieces pieces, std::uint64_t hash_seed);
  bool is_done() const { return record_ == nullptr; }
  std::uint64_t hash() const { return hash_; }
  const std::byte* record() const { return record_; }
  bool is_erased() const { return is_erased_; }
  void advance();
  /// Lets go of the pieces [begin, end), which have been passed.
  void release(std::size_t begin, std::size_t end);
  /// Those that were not let go of.
  const Pieces& pieces() const { return pieces_; }

 private:
  void find();
  bool find_in(const Piece& piece);

  Pieces pieces_;
  std::uint64_t hash_seed_;
  std::size_t piece_ = 0;
  std::int64_t row_ = 0;
  std::int64_t erased_ = 0;
  const std::byte* record_ = nullptr;
  std::uint64_t hash_ = 0;
  bool is_erased_ = false;
};

/// What both cursors have in a range of hashes, the newer before the older. `is_needed(key)` tells
/// of a key that left whether something behind both has it.
template <class IsNeeded>
std::shared_ptr<const Piece> merged(LayerCursor& newer, LayerCursor& older, std::uint64_t range,
                                    int range_bits, const LayerShape& shape,
                                    const IsNeeded& is_needed) {
  std::vector<const std::byte*> rows;
  std::vector<const std::byte*> erased;
  const auto is_here = [&](const LayerCursor& cursor) {
    return !cursor.is_done() && range_of(cursor.hash(), range_bits) == range;
  };
  while (is_here(newer) || is_here(older)) {
    const bool takes_newer = !is_here(older) || (is_here(newer) && newer.hash() <= older.hash());
    const bool is_in_both = is_here(newer) && is_here(older) && newer.hash() == older.hash();
    LayerCursor& from = takes_newer ? newer : older;
    if (!from.is_erased()) {
      rows.push_back(from.record());
    } else if (is_needed(key_of_record(from.record()))) {
      erased.push_back(from.record());
    }
    from.advance();
    if (is_in_both) older.advance();
  }
  if (rows.empty() && erased.empty()) return nullptr;
  return std::make_shared<const Piece>(
      Piece{Image(rows, shape.record_bytes, shape.hash_seed, range_bits),
            Image(erased, kKeyBytes, shape.hash_seed, range_bits)});
}

}  // namespace recsdk::internal
