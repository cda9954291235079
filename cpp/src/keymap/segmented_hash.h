// A hash map from 64-bit keys to 32-bit row numbers that grows piece by piece.
//
// An extendible directory of segments. The top bits of a key's hash choose the segment, other bits
// its bucket. A full segment grows in small steps, then splits in two, so no operation ever
// rehashes more than one segment. How full a segment may get and at which size it splits differ
// from segment to segment, so that segments filled by a uniform hash do not all grow in the same
// batch, and what some leave behind is of use to others.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "keymap/arena.h"
#include "keymap/bucket.h"
#include "keymap/shared_arena.h"
#include "recsdk/types.h"
#include "util/hash.h"

namespace recsdk::internal {

struct SegmentStats {
  std::int64_t bytes = 0;
  std::int64_t slots = 0;
  std::int64_t segments = 0;
  std::int64_t crowded = 0;  // segments of keys that collide
  std::int64_t directory = 0;
  std::int64_t overflowed = 0;
  std::int64_t probes = 0;  // buckets looked at when every key is looked up once
  std::uint64_t splits = 0;
};

/// Not thread-safe by itself: any number of readers or one writer, or several writers between
/// begin_sharing and end_sharing.
class SegmentedHash {
 public:
  explicit SegmentedHash(std::uint64_t seed) : hash_(seed) {}
  SegmentedHash(const SegmentedHash&) = delete;
  SegmentedHash& operator=(const SegmentedHash&) = delete;

  /// Finds keys (N,): writes row numbers and kFound or kMissing; a missing key's row number is 0.
  void find(std::span<const Key> keys, RowNumber* rows, Outcome* outcomes) const;

  std::optional<std::uint32_t> find_one(Key key) const;

  /// Fetches what find_one, find_or_insert and erase of this key will touch.
  void prefetch(Key key) const;

  /// The key's row number if it is there; else inserts it with `row`, which is returned. Throws
  /// Error(kOutOfMemory), std::bad_alloc or Error(kCapacity); then nothing has changed for readers.
  std::uint32_t find_or_insert(Key key, std::uint32_t row);

  /// The same for keys (N,) in order: writes row numbers and kFound or kInserted, new keys get the
  /// rows from `next_row` (N,) on, which no key has. For keys that are mostly new; find is faster
  /// for others. Throws as find_or_insert; `num_done` says how many keys are done, then as well.
  void insert(std::span<const Key> keys, const std::uint32_t* next_row, RowNumber* rows,
              Outcome* outcomes, std::size_t& num_done);

  /// Keys of different shards lie in different segments: how many of the top bits of the hash, up
  /// to `most`, tell shards apart. 0 before the first key.
  int shard_bits(int most) const noexcept;
  std::uint64_t hash(Key key) const { return hash_(key); }
  /// Up to end_sharing, threads may call insert_absent at the same time, each for keys of shards of
  /// its own, and nothing else; `num_new` keys in all. Throws as find_or_insert.
  void begin_sharing(std::int64_t num_new);
  /// Inserts keys (N,) that are distinct and not there. Throws as find_or_insert; `num_done` says
  /// how many are done, then as well.
  void insert_absent(std::span<const Key> keys, const std::uint32_t* rows, std::size_t& num_done);
  /// `num_done` keys were inserted.
  void end_sharing(std::int64_t num_done) noexcept;

  /// Takes the key out; returns its row number. Allocates nothing.
  std::optional<std::uint32_t> erase(Key key) noexcept;

  /// Empties it and frees its memory.
  void clear() noexcept;

  /// Exchanges contents, the hash included.
  void swap(SegmentedHash& other) noexcept;

  /// Readies memory for `num_keys` keys in all; grow_for then takes it.
  void reserve(std::int64_t num_keys);

  /// Takes at once the shape that it would grow into with `num_keys` keys in all, and the memory
  /// for them. Does nothing if it is not much smaller than that. Moves all keys, so call it early.
  /// Throws as find_or_insert.
  void grow_for(std::int64_t num_keys);

  /// Backs with memory a huge page that will be needed soon. False if there is none.
  bool populate_ahead() noexcept { return arena_.populate_ahead(); }

  /// Call it amid the insertion of many keys, of which about `num_new` are still to come: a small
  /// table then takes the shape for them, rather than move its keys several times on the way.
  /// Throws as find_or_insert.
  void expect(std::int64_t num_new);

  /// Up to `capacity` keys of one segment, and where to go on: a different segment each time, all
  /// of them in turn.
  std::int64_t sample(std::uint64_t& cursor, Key* keys, std::int64_t capacity) const;

  std::int64_t size() const noexcept { return size_; }
  SegmentStats stats() const;

  /// Calls visit(key, row) for every key, in no particular order.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for_each_segment([&](const Segment& segment) {
      for (std::uint32_t b = 0; b < segment.num_buckets(); ++b) {
        const Bucket& bucket = segment.buckets()[b];
        for (std::uint32_t s = 0; s < kBucketSlots; ++s) {
          if ((bucket.occupancy() >> s & 1U) != 0) visit(bucket.keys[s], bucket.words[s]);
        }
      }
    });
  }

  /// Throws Error(kInternal) if a key cannot be reached or a count is wrong.
  void check_invariants() const;

 private:
  // Lies before its buckets, in a pair of lines of its own.
  struct alignas(128) Segment {
    std::uint32_t num_units;  // of memory, this header included
    std::uint32_t num_keys;
    std::uint32_t limit;           // keys at which it grows or splits
    std::uint32_t split_units;     // size from which it splits rather than grows
    std::uint32_t num_erased;      // since it was built: their Bloom bits are stale
    std::uint32_t num_overflowed;  // keys outside their home bucket
    std::uint32_t displacement;    // sum over keys of the buckets passed on the way to them
    int depth;
    std::uint64_t prefix;  // the top `depth` bits that all its hashes share

    std::uint32_t num_buckets() const { return buckets_of(num_units); }
    std::uint32_t num_slots() const { return num_buckets() * kBucketSlots; }
    Bucket* buckets() { return reinterpret_cast<Bucket*>(this + 1); }
    const Bucket* buckets() const { return reinterpret_cast<const Bucket*>(this + 1); }
  };

  // A directory entry: the segment's address and, in the 16 bits that addresses leave free, its
  // size in units, so that a find touches nothing of the segment but the bucket.
  class Entry {
   public:
    Entry() = default;
    explicit Entry(Segment* segment)
        : bits_(reinterpret_cast<std::uint64_t>(segment) | std::uint64_t{segment->num_units}
                                                               << 48) {}
    Segment* segment() const {
      return reinterpret_cast<Segment*>(bits_ & ((std::uint64_t{1} << 48) - 1));
    }
    std::uint32_t num_units() const { return static_cast<std::uint32_t>(bits_ >> 48); }
    std::uint32_t num_buckets() const { return buckets_of(num_units()); }

   private:
    std::uint64_t bits_ = 0;
  };

  struct Place {
    Bucket* bucket;
    std::uint32_t slot;
    std::uint32_t distance;  // buckets passed on the way
  };

  // Equal segments.
  struct Shape {
    int depth;
    std::uint32_t num_units;  // of each
    std::size_t bytes() const { return (std::size_t{num_units} << depth) * Arena::kUnit; }
  };

  static constexpr std::uint32_t buckets_of(std::uint32_t num_units) {
    return num_units * static_cast<std::uint32_t>(Arena::kUnit / sizeof(Bucket)) -
           static_cast<std::uint32_t>(sizeof(Segment) / sizeof(Bucket));
  }

  HashParts parts(Key key) const { return HashParts{hash_(key)}; }
  Entry entry(HashParts p) const { return directory_[p.prefix(depth_)]; }
  void prefetch(HashParts p) const;
  struct Block;
  struct Pending;
  class Window;
  static std::uint32_t compare_homes(const Block& block, const Key* keys, RowNumber* rows,
                                     Outcome* outcomes);
  void find_chunk(const Key* keys, std::int64_t count, RowNumber* rows, Outcome* outcomes) const;
  void find_further(const Pending& now, std::uint32_t distance, const Key* keys, RowNumber* rows,
                    Outcome* outcomes, Pending& later) const;
  static std::optional<Place> locate(Entry entry, HashParts p, Key key);
  static void put(Segment& segment, HashParts p, Key key, std::uint32_t row);
  static bool put_at_once(Segment& segment, Bucket& home, HashParts p, Key key, std::uint32_t row);
  // Whether so many keys have left that its Bloom bits, or its memory, are no longer worth keeping.
  static bool is_stale(const Segment& segment) {
    const std::uint32_t slots = segment.num_slots();
    return segment.num_erased > slots ||
           (segment.num_erased > slots / 2 && segment.num_keys < slots / 4);
  }
  void make_room(HashParts p);
  int most_depth() const;
  void double_directory();
  std::uint32_t least_units(std::uint32_t num_keys, std::uint32_t num_units) const;
  Segment* make_segment(std::uint32_t num_units, std::uint32_t at_least, int depth,
                        std::uint64_t prefix);
  bool join_free_runs(std::uint32_t num_units, std::uint32_t count) noexcept;
  void free_segment(Segment* segment) noexcept;
  void set_entries(Segment* segment) noexcept;
  void move_keys(const Segment& from, Segment* const (&halves)[2], int depth) const;
  void rebuild(Segment* segment, std::uint32_t num_units);
  void split(Segment* segment);
  static Shape shape_for(std::int64_t num_keys);
  bool is_far_below(std::int64_t num_keys) const;
  void make_directory(Shape shape, std::int64_t num_keys);
  void move_all(SegmentedHash& to, Shape shape, std::int64_t num_keys) const;
  void free_segments(Arena& of) noexcept;
  int expected_depth() const;
  static std::uint32_t units_for(std::uint32_t num_keys, std::uint32_t at_least,
                                 std::uint32_t percent);
  void check_segment(const Segment& segment) const;

  template <typename Visit>
  void for_each_segment(const Visit& visit) const {
    for (std::size_t i = 0; i < directory_.size();) {
      const Segment* const segment = directory_[i].segment();
      visit(*segment);
      i += std::size_t{1} << (depth_ - segment->depth);
    }
  }

  SeededHash hash_;
  Arena arena_;
  std::vector<Entry> directory_;  // 2^depth_ entries, or none before the first key
  int depth_ = 0;
  std::int64_t size_ = 0;
  std::uint32_t next_serial_ = 0;
  std::uint64_t splits_ = 0;
  bool has_others_segments_ = false;  // in the arena
  // While threads insert at the same time: serials and splits are counted by atomic additions, the
  // directory stays as long as it is, and size_ is what it will be in the end.
  std::unique_ptr<SharedArena> shared_arena_;
  std::int64_t size_before_sharing_ = 0;
};

}  // namespace recsdk::internal
