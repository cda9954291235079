// How a SegmentedHash grows: steps of its segments, splits, the directory.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "keymap/segmented_hash.h"
#include "recsdk/error.h"
#include "util/prefetch.h"

namespace recsdk::internal {
namespace {

// Units of a half of a split segment, at least.
constexpr std::uint32_t kHalfUnits = 4;
constexpr std::uint32_t kMaxUnits = 65535;  // what a directory entry can say

// A small table: its memory does not matter, so it takes larger steps and leaves more slots free,
// which makes it faster.
constexpr std::int64_t kSmallTable = 1 << 18;  // keys

// How full a new segment is at most: below any limit, with some room to grow; and how full it may
// be if that makes a free run of memory just long enough.
constexpr std::uint32_t kRoomyPercent = 66;
constexpr std::uint32_t kTightPercent = 72;
constexpr std::uint32_t kRoomySmallPercent = 55;

// Keys of a segment when it splits, at the least and about.
constexpr std::int64_t kKeysAtSplit = 1600;

// The next size of a segment, in units: by small steps, which keep the slots well used. They are
// between a fifth and two fifths and differ from segment to segment: with equal ones all
// segments would have few sizes, and the memory held would go up and down with the table's size.
std::uint32_t next_size(std::uint32_t units, std::uint32_t serial, std::int64_t num_keys) {
  if (units < kHalfUnits) return units * 2;
  if (num_keys < kSmallTable) return units + units / 2;
  return units + 1 + (units * (12 + serial * 5 % 16)) / 64;
}

// The number-th point of a sequence that fills [0, count) evenly: multiples of an irrational
// number, which `factor` is 2^32 times.
std::uint32_t spread(std::uint32_t number, std::uint32_t factor, std::uint32_t count) {
  return static_cast<std::uint32_t>((std::uint64_t{number * factor} * count) >> 32);
}

// The share of slots at which a segment grows or splits: 0.78 to 0.88, or 0.58 to 0.68 in a small
// table.
std::uint32_t limit_of(std::uint32_t slots, std::uint32_t serial, std::int64_t num_keys) {
  constexpr std::uint32_t kGolden = 2654435769U;  // 2^32 over the golden ratio
  const std::uint32_t of_4096 = num_keys < kSmallTable ? 2376 + spread(serial, kGolden, 410)
                                                       : 3195 + spread(serial, kGolden, 410);
  return static_cast<std::uint32_t>((std::uint64_t{slots} * of_4096) >> 12);
}

// The size at which a segment splits: evenly spread over one doubling, so that at any time
// segments of many sizes are about.
std::uint32_t split_units_of(std::uint32_t serial) {
  constexpr std::uint32_t kSmallest = 7;
  constexpr std::uint32_t kRootOfTwo = 1779033704U;  // 2^32 times its fraction
  return kSmallest + spread(serial, kRootOfTwo, kLargestSplit - kSmallest + 1);
}

// The depth at which each segment has at most so many of so many uniform keys.
int depth_for(std::int64_t num_keys, std::int64_t most) {
  int depth = 0;
  while ((num_keys >> depth) > most && depth < kMaxDepth) ++depth;
  return depth;
}

[[noreturn, gnu::cold]] void throw_flooded(std::uint32_t num_units) {
  throw Error(ErrorCode::kCapacity,
              "one index segment would need " +
                  std::to_string(std::uint64_t{num_units} * Arena::kUnit) +
                  " bytes for keys that collide under this hash_seed; make the table with another "
                  "hash_seed");
}

[[noreturn, gnu::cold]] void broken(const std::string& what) {
  throw Error(ErrorCode::kInternal, "index invariant broken: " + what);
}

}  // namespace

// Leaves the key's segment with a free slot.
void SegmentedHash::make_room(HashParts p) {
  if (directory_.empty()) {
    directory_.reserve(1);
    directory_.push_back(Entry(make_segment(1, 1, 0, 0)));
    depth_ = 0;
  }
  for (;;) {
    Segment* segment = entry(p).segment();
    if (segment->num_keys >= segment->limit) {
      const bool may_split = segment->depth < most_depth();
      const bool splits = may_split && segment->num_units >= segment->split_units;
      const std::uint32_t num_keys = splits ? segment->num_keys / 2 : segment->num_keys;
      const std::uint32_t serial = std::atomic_ref(next_serial_).load(std::memory_order_relaxed);
      const std::uint32_t num_units = splits ? units_for(num_keys, kHalfUnits, kRoomyPercent)
                                             : next_size(segment->num_units, serial, size_);
      if (join_free_runs(least_units(num_keys, num_units), splits ? 2 : 1))
        segment = entry(p).segment();
      splits ? split(segment) : rebuild(segment, num_units);
    } else if (is_stale(*segment)) {
      rebuild(segment, units_for(segment->num_keys, 1, kRoomyPercent));
    } else {
      return;
    }
  }
}

// The least depth at which a map of as many uniform keys would be. Much deeper segments come from
// colliding keys: those grow instead of splitting, so that the directory stays in proportion.
int SegmentedHash::expected_depth() const {
  return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(size_) /
                                         (buckets_of(kLargestSplit) * kBucketSlots * 4 / 5)));
}

// Up to which depth segments split.
int SegmentedHash::most_depth() const {
  const int most = std::min(kMaxDepth, expected_depth() + 2);
  return shared_arena_ == nullptr ? most : std::min(most, depth_);
}

// The smallest size, in units, that `num_keys` fill to `percent` or less.
std::uint32_t SegmentedHash::units_for(std::uint32_t num_keys, std::uint32_t at_least,
                                       std::uint32_t percent) {
  const std::uint64_t slots = (std::uint64_t{num_keys} * 100 + percent - 1) / percent;
  const std::uint64_t buckets = (slots + kBucketSlots - 1) / kBucketSlots;
  constexpr std::uint64_t kOfAUnit = Arena::kUnit / sizeof(Bucket);
  constexpr std::uint64_t kOfHeader = sizeof(Segment) / sizeof(Bucket);
  const std::uint64_t units = (buckets + kOfHeader + kOfAUnit - 1) / kOfAUnit;
  return std::max(at_least, static_cast<std::uint32_t>(units));
}

// How many units will do for a segment of so many keys, for which `num_units` are better.
std::uint32_t SegmentedHash::least_units(std::uint32_t num_keys, std::uint32_t num_units) const {
  if (size_ < kSmallTable || num_units <= kHalfUnits) return num_units;
  return units_for(num_keys, kHalfUnits, kTightPercent);
}

// On about `num_units` units, but not on less than `at_least`.
SegmentedHash::Segment* SegmentedHash::make_segment(std::uint32_t num_units, std::uint32_t at_least,
                                                    int depth, std::uint64_t prefix) {
  if (num_units > kMaxUnits) throw_flooded(num_units);
  const std::uint32_t less = num_units - std::min(num_units, at_least);
  std::byte* const block = shared_arena_ == nullptr ? arena_.allocate(num_units, less)
                                                    : shared_arena_->allocate(num_units, less);
  std::memset(block, 0, num_units * Arena::kUnit);
  auto* const segment = reinterpret_cast<Segment*>(block);
  const std::uint32_t serial =
      std::atomic_ref(next_serial_).fetch_add(1, std::memory_order_relaxed);
  segment->num_units = num_units;
  segment->depth = depth;
  segment->prefix = prefix;
  segment->limit = limit_of(segment->num_slots(), serial, size_);
  segment->split_units = split_units_of(serial);
  return segment;
}

// Before new memory is taken for so many segments: moves others that lie between two free runs, so
// that those become one that is long enough, where such are found soon. False if nothing has moved.
bool SegmentedHash::join_free_runs(std::uint32_t num_units, std::uint32_t count) noexcept {
  if (size_ < kSmallTable || has_others_segments_ || shared_arena_ != nullptr) return false;
  const auto units_of = [](const std::byte* block) {
    return reinterpret_cast<const Segment*>(block)->num_units;
  };
  bool has_moved = false;
  for (std::uint32_t i = 0; i < count && !arena_.has_runs(num_units, count); ++i) {
    std::byte* const block = arena_.find_between_runs(num_units, units_of);
    if (block == nullptr) break;
    set_entries(reinterpret_cast<Segment*>(arena_.move_down(block, units_of(block))));
    has_moved = true;
  }
  return has_moved;
}

void SegmentedHash::free_segment(Segment* segment) noexcept {
  auto* const block = reinterpret_cast<std::byte*>(segment);
  if (shared_arena_ == nullptr) {
    arena_.free(block, segment->num_units);
  } else {
    shared_arena_->free(block, segment->num_units);
  }
}

void SegmentedHash::set_entries(Segment* segment) noexcept {
  const std::size_t width = std::size_t{1} << (depth_ - segment->depth);
  std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(segment->prefix * width), width,
              Entry(segment));
}

// Copies the keys of a segment to new ones: those whose bit `depth` of the hash is 0 to the first,
// the others to the second (both may be the same). Home buckets are filled without a branch that
// depends on a key, their headers counting meanwhile; the few keys that find theirs full follow.
void SegmentedHash::move_keys(const Segment& from, Segment* const (&to)[2], int depth) const {
  struct Late {
    const Bucket* bucket;
    std::uint32_t slots;  // a bit for each of its keys that has found no place
  };
  constexpr std::uint32_t kMost = 512;
  constexpr std::ptrdiff_t kAhead = 8;
  Late late[kMost + 1];
  std::uint32_t num_late = 0;
  Bucket nowhere;
  const auto target = [&](HashParts p) { return to[p.prefix(depth) & 1U]; };
  const auto put_late = [&](const Bucket& bucket, std::uint32_t slots) {
    for (; slots != 0; slots &= slots - 1) {
      const auto s = static_cast<std::uint32_t>(std::countr_zero(slots));
      const HashParts p = parts(bucket.keys[s]);
      put(*target(p), p, bucket.keys[s], bucket.words[s]);
    }
  };
  const Bucket* bucket = from.buckets();
  const Bucket* const end = bucket + from.num_buckets();
  for (; bucket != end && num_late < kMost; ++bucket) {
    if (end - bucket > kAhead) prefetch_line(bucket + kAhead);
    Bucket* homes[kBucketSlots];
    for (std::uint32_t s = 0; s < kBucketSlots; ++s) {
      const HashParts p = parts(bucket->keys[s]);
      Segment* const segment = target(p);
      homes[s] = segment->buckets() + p.bucket_in(segment->num_buckets());
    }
    std::uint32_t placed = 0;
    for (std::uint32_t s = 0; s < kBucketSlots; ++s) {
      std::uint32_t& home_count = homes[s]->words[kBucketSlots];
      const std::uint32_t count = home_count;
      const auto is_key = static_cast<std::uint32_t>(bucket->occupancy() >> s & 1U);
      const std::uint32_t fits = is_key & static_cast<std::uint32_t>(count < kBucketSlots);
      Bucket* const place = fits != 0 ? homes[s] : &nowhere;
      const std::uint32_t slot = count & (0U - fits);
      place->keys[slot] = bucket->keys[s];
      place->words[slot] = bucket->words[s];
      home_count = count + fits;
      placed |= fits << s;
    }
    late[num_late] = {bucket, bucket->occupancy() & ~placed};
    num_late += static_cast<std::uint32_t>(late[num_late].slots != 0);
  }
  for (Segment* segment : std::span(to).first(to[0] == to[1] ? 1 : 2)) {
    for (std::uint32_t i = 0; i < segment->num_buckets(); ++i) {
      std::uint32_t& header = segment->buckets()[i].words[kBucketSlots];
      segment->num_keys += header;
      header = (1U << header) - 1;
    }
  }
  for (std::uint32_t i = 0; i < num_late; ++i) put_late(*late[i].bucket, late[i].slots);
  for (; bucket != end; ++bucket) put_late(*bucket, bucket->occupancy());
}

void SegmentedHash::rebuild(Segment* segment, std::uint32_t num_units) {
  Segment* const rebuilt = make_segment(num_units, least_units(segment->num_keys, num_units),
                                        segment->depth, segment->prefix);
  move_keys(*segment, {rebuilt, rebuilt}, 0);
  set_entries(rebuilt);
  free_segment(segment);
}

void SegmentedHash::double_directory() {
  std::vector<Entry> doubled(directory_.size() * 2);
  for (std::size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
  directory_.swap(doubled);
  ++depth_;
}

void SegmentedHash::split(Segment* segment) {
  if (segment->depth == depth_) double_directory();
  const int depth = segment->depth + 1;
  std::uint32_t num_high = 0;
  for (std::uint32_t b = 0; b < segment->num_buckets(); ++b) {
    const Bucket& bucket = segment->buckets()[b];
    for (std::uint32_t s = 0; s < kBucketSlots; ++s) {
      num_high += static_cast<std::uint32_t>(parts(bucket.keys[s]).prefix(depth) & 1U) &
                  (bucket.occupancy() >> s);
    }
  }
  const auto make_half = [&](std::uint32_t num_keys, std::uint64_t bit) {
    const std::uint32_t num_units = units_for(num_keys, kHalfUnits, kRoomyPercent);
    return make_segment(num_units, least_units(num_keys, num_units), depth,
                        segment->prefix * 2 + bit);
  };
  Segment* const low = make_half(segment->num_keys - num_high, 0);
  Segment* high = nullptr;
  try {
    high = make_half(num_high, 1);
  } catch (...) {
    free_segment(low);
    throw;
  }
  move_keys(*segment, {low, high}, depth);
  set_entries(low);
  set_entries(high);
  free_segment(segment);
  std::atomic_ref(splits_).fetch_add(1, std::memory_order_relaxed);
}

// A segment of less depth than this covers the starts of two shards.
int SegmentedHash::shard_bits(int most) const noexcept {
  if (directory_.empty()) return 0;
  const int tried = std::min(most, depth_);
  int bits = tried;
  for (std::size_t shard = 0; shard < std::size_t{1} << tried; ++shard)
    bits = std::min(bits, directory_[shard << (depth_ - tried)].segment()->depth);
  return bits;
}

// The directory gets the length that splits of as many uniform keys lead to. Segments that would
// need a longer one grow instead, and split later.
void SegmentedHash::begin_sharing(std::int64_t num_new) {
  auto shared = std::make_unique<SharedArena>(arena_);
  const std::int64_t old_size = std::exchange(size_, size_ + num_new);
  try {
    while (depth_ < std::min(kMaxDepth, expected_depth() + 1)) double_directory();
  } catch (...) {
    size_ = old_size;
    throw;
  }
  size_before_sharing_ = old_size;
  shared_arena_ = std::move(shared);
}

void SegmentedHash::end_sharing(std::int64_t num_done) noexcept {
  shared_arena_.reset();
  size_ = size_before_sharing_ + num_done;
}

// Equal segments for so many uniform keys. In a large table they are as large as they get, for
// their size is in whole units.
SegmentedHash::Shape SegmentedHash::shape_for(std::int64_t num_keys) {
  const bool is_small = num_keys < kSmallTable;
  const int depth = depth_for(num_keys, is_small ? kKeysAtSplit : 2 * kKeysAtSplit);
  const std::int64_t keys_each = (num_keys + (std::int64_t{1} << depth) - 1) >> depth;
  const std::uint32_t percent = is_small ? kRoomySmallPercent : kRoomyPercent;
  return {depth, units_for(static_cast<std::uint32_t>(keys_each), kHalfUnits, percent)};
}

// There is no key yet.
void SegmentedHash::make_directory(Shape shape, std::int64_t num_keys) {
  size_ = num_keys;  // how full segments get depends on it
  depth_ = shape.depth;
  directory_.reserve(std::size_t{1} << depth_);
  while (directory_.size() < directory_.capacity()) {
    directory_.emplace_back(
        make_segment(shape.num_units, shape.num_units, depth_, directory_.size()));
  }
  size_ = 0;
}

// Whether it is much smaller than with so many keys.
bool SegmentedHash::is_far_below(std::int64_t num_keys) const {
  return depth_for(num_keys, kKeysAtSplit) > depth_ + 1;
}

void SegmentedHash::grow_for(std::int64_t num_keys) {
  if (!is_far_below(num_keys)) return;
  const Shape shape = shape_for(num_keys);
  SegmentedHash grown(0);
  grown.hash_ = hash_;
  if (arena_.bytes_free() < shape.bytes()) {
    move_all(grown, shape, num_keys);
  } else {  // memory has been reserved: it is to be used, not given back
    grown.arena_.swap(arena_);
    grown.has_others_segments_ = true;
    try {
      move_all(grown, shape, num_keys);
    } catch (...) {
      grown.free_segments(grown.arena_);
      arena_.swap(grown.arena_);
      throw;
    }
    free_segments(grown.arena_);
    grown.has_others_segments_ = false;
  }
  grown.splits_ += splits_;
  swap(grown);
}

void SegmentedHash::move_all(SegmentedHash& to, Shape shape, std::int64_t num_keys) const {
  to.make_directory(shape, num_keys);
  for_each([&](Key key, std::uint32_t row) { to.find_or_insert(key, row); });
}

// Leaves the directory empty.
void SegmentedHash::free_segments(Arena& of) noexcept {
  for (std::size_t i = 0; i < directory_.size();) {
    Segment* const segment = directory_[i].segment();
    i += std::size_t{1} << (depth_ - segment->depth);
    of.free(reinterpret_cast<std::byte*>(segment), segment->num_units);
  }
  directory_.clear();
}

void SegmentedHash::expect(std::int64_t num_new) {
  constexpr std::int64_t kMostTimes = 16;  // its size: the estimate may be wrong
  const std::int64_t total = std::min({size_ + num_new, size_ * kMostTimes, kSmallTable - 1});
  if (total >= 2 * size_) grow_for(total);
}

void SegmentedHash::clear() noexcept {
  directory_.clear();
  directory_.shrink_to_fit();
  arena_.clear();
  depth_ = 0;
  size_ = 0;
}

void SegmentedHash::swap(SegmentedHash& other) noexcept {
  std::swap(hash_, other.hash_);
  arena_.swap(other.arena_);
  directory_.swap(other.directory_);
  std::swap(depth_, other.depth_);
  std::swap(size_, other.size_);
  std::swap(next_serial_, other.next_serial_);
  std::swap(splits_, other.splits_);
}

void SegmentedHash::reserve(std::int64_t num_keys) {
  if (num_keys <= size_) return;
  // Beside the shape, memory for the few segments that get more keys than others.
  const std::size_t bytes = shape_for(num_keys).bytes();
  const std::size_t wanted = bytes + bytes / 64;
  // What segments hold already counts, unless they are to be replaced.
  const std::size_t held = is_far_below(num_keys) ? 0 : arena_.bytes_given();
  if (wanted > held) arena_.reserve(wanted - held);
}

void SegmentedHash::check_invariants() const {
  std::int64_t total = 0;
  for (std::size_t i = 0; i < directory_.size(); ++i) {
    const Entry e = directory_[i];
    if (e.num_units() != e.segment()->num_units) broken("a directory entry's size is stale");
    if (i >> (depth_ - e.segment()->depth) != e.segment()->prefix)
      broken("a directory entry points to another prefix");
  }
  for_each_segment([&](const Segment& segment) {
    check_segment(segment);
    total += segment.num_keys;
  });
  if (total != size_) broken("the count of keys is wrong");
}

void SegmentedHash::check_segment(const Segment& segment) const {
  std::uint32_t num_keys = 0;
  std::uint32_t num_overflowed = 0;
  std::uint32_t displacement = 0;
  for (std::uint32_t b = 0; b < segment.num_buckets(); ++b) {
    const Bucket& bucket = segment.buckets()[b];
    num_keys += static_cast<std::uint32_t>(std::popcount(bucket.occupancy()));
    for (std::uint32_t mask = bucket.occupancy(); mask != 0; mask &= mask - 1) {
      const auto s = static_cast<std::uint32_t>(std::countr_zero(mask));
      const HashParts p = parts(bucket.keys[s]);
      const auto place = locate(entry(p), p, bucket.keys[s]);
      if (!place || place->bucket != &bucket || place->slot != s)
        broken("key " + std::to_string(bucket.keys[s]) + " cannot be reached, or is there twice");
      num_overflowed += static_cast<std::uint32_t>(place->distance > 0);
      displacement += place->distance;
    }
  }
  if (num_keys != segment.num_keys) broken("a segment's count of keys is wrong");
  if (num_overflowed != segment.num_overflowed || displacement != segment.displacement)
    broken("a segment's count of overflowed keys is wrong");
  // limit_of leaves far more. So a key is put before the last bucket of its way.
  if (segment.num_slots() - segment.num_keys < kBucketSlots)
    broken("a segment has not as many free slots as a bucket");
}

}  // namespace recsdk::internal
