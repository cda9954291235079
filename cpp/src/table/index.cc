#include "table/index.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "recsdk/error.h"

namespace recsdk::internal {
namespace {

// Sizes of segments in units of 4 KiB: 1, 2, 4, 5, 6, 7, then a split into two of 4. Small steps
// keep three quarters of the slots used, and a segment of 28 KiB is rebuilt in some ten
// microseconds. Only segments of colliding keys get larger.
constexpr std::uint32_t kUsualUnits = 4;
constexpr std::uint32_t kSplitUnits = 7;
constexpr std::uint32_t kMaxUnits = 65535;  // what a directory entry can say

std::uint32_t next_size(std::uint32_t units) {
  if (units < kUsualUnits) return units * 2;
  if (units <= kSplitUnits) return units + 1;
  // 8 -> 12 -> 16 -> 24 -> 32: by half, then to the next power of two.
  return std::has_single_bit(units) ? units / 2 * 3 : units / 3 * 4;
}

// The share of slots at which a segment grows or splits: spread over 0.72 to 0.88 by its serial
// number, along a sequence that fills the interval evenly (multiples of the golden ratio).
std::uint32_t limit_of(std::uint32_t slots, std::uint32_t serial) {
  const std::uint32_t spread = serial * 2654435769U;
  return static_cast<std::uint32_t>(
      (std::uint64_t{slots} * (2949U + (std::uint64_t{spread} * 655U >> 32))) >> 12);
}

// Keys that are hashed and fetched ahead of the block that is compared.
constexpr std::int64_t kBlock = 16;
constexpr std::int64_t kChunk = 1024;  // keys whose overflow probes are resolved together

[[noreturn, gnu::cold]] void throw_flooded(std::uint32_t num_keys) {
  throw Error(ErrorCode::kCapacity,
              "one index segment holds " + std::to_string(num_keys) +
                  " keys that collide under this hash_seed; make the table with another hash_seed");
}

[[noreturn, gnu::cold]] void broken(const std::string& what) {
  throw Error(ErrorCode::kInternal, "index invariant broken: " + what);
}

}  // namespace

void Index::find(std::span<const Key> keys, RowNumber* rows, Outcome* outcomes) const {
  const auto count = static_cast<std::int64_t>(keys.size());
  if (directory_.empty()) {
    std::fill_n(rows, count, RowNumber{0});
    std::fill_n(outcomes, count, Outcome::kMissing);
    return;
  }
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    find_chunk(keys.data() + begin, std::min(kChunk, count - begin), rows + begin,
               outcomes + begin);
  }
}

// Hashes up to kBlock keys and fetches their home buckets.
struct Index::Block {
  const Bucket* buckets[kBlock];
  std::uint32_t bloom_bits[kBlock];
  std::int64_t count = 0;

  void stage(const Index& index, const Key* keys, std::int64_t num_keys) {
    count = num_keys;
    for (std::int64_t i = 0; i < num_keys; ++i) {
      const HashParts p = index.parts(keys[i]);
      const Entry e = index.entry(p);
      buckets[i] = e.segment()->buckets() + p.bucket_in(e.num_buckets());
      bloom_bits[i] = p.bloom_bit();
      __builtin_prefetch(buckets[i]);
    }
  }
};

// First pass: home buckets only, without branches on the outcome; while one block of keys is
// compared the buckets of the next are on their way. Second pass: the keys that may lie further.
void Index::find_chunk(const Key* keys, std::int64_t count, RowNumber* rows,
                       Outcome* outcomes) const {
  std::uint16_t pending[kChunk];
  std::int64_t num_pending = 0;
  const auto compare = [&](const Block& block, std::int64_t first) {
    for (std::int64_t j = 0; j < block.count; ++j) {
      const std::int64_t i = first + j;
      const Bucket& bucket = *block.buckets[j];
      const std::uint32_t match = bucket.match(keys[i]);
      const std::uint32_t row = bucket.words[std::countr_zero(match | 32U)];
      const bool found = match != 0;
      rows[i] = found ? RowNumber{row} : RowNumber{0};
      outcomes[i] = found ? Outcome::kFound : Outcome::kMissing;
      pending[num_pending] = static_cast<std::uint16_t>(i);
      num_pending += static_cast<std::int64_t>(!found && bucket.has_passed(block.bloom_bits[j]));
    }
  };
  Block blocks[2];
  blocks[0].stage(*this, keys, std::min(kBlock, count));
  for (std::int64_t first = 0, turn = 0; first < count; first += kBlock, turn ^= 1) {
    const std::int64_t next = first + kBlock;
    if (next < count) blocks[turn ^ 1].stage(*this, keys + next, std::min(kBlock, count - next));
    compare(blocks[turn], first);
  }
  for (std::int64_t j = 0; j < num_pending; ++j) {
    const std::int64_t i = pending[j];
    const HashParts p = parts(keys[i]);
    if (const auto place = locate(entry(p), p, keys[i])) {
      rows[i] = place->bucket->words[place->slot];
      outcomes[i] = Outcome::kFound;
    }
  }
}

std::optional<Index::Place> Index::locate(Entry entry, HashParts p, Key key) {
  const std::uint32_t num_buckets = entry.num_buckets();
  const std::uint32_t home = p.bucket_in(num_buckets);
  for (std::uint32_t i = 0; i < num_buckets; ++i) {
    Bucket& bucket = entry.segment()->buckets()[probe_bucket(home, i, num_buckets)];
    const std::uint32_t match = bucket.match(key);
    if (match != 0) return Place{&bucket, static_cast<std::uint32_t>(std::countr_zero(match))};
    if (!bucket.has_passed(p.bloom_bit())) return std::nullopt;
  }
  return std::nullopt;
}

std::optional<std::uint32_t> Index::find_one(Key key) const {
  if (directory_.empty()) return std::nullopt;
  const HashParts p = parts(key);
  const auto place = locate(entry(p), p, key);
  if (!place) return std::nullopt;
  return place->bucket->words[place->slot];
}

void Index::prefetch(Key key) const {
  if (directory_.empty()) return;
  const HashParts p = parts(key);
  const Entry e = entry(p);
  __builtin_prefetch(e.segment(), 1);
  __builtin_prefetch(e.segment()->buckets() + p.bucket_in(e.num_buckets()), 1);
}

void Index::put(Segment& segment, HashParts p, Key key, std::uint32_t row) {
  const std::uint32_t num_buckets = segment.num_buckets();
  const std::uint32_t home = p.bucket_in(num_buckets);
  for (std::uint32_t i = 0;; ++i) {
    Bucket& bucket = segment.buckets()[probe_bucket(home, i, num_buckets)];
    if (!bucket.is_full()) {
      bucket.put(key, row);
      ++segment.num_keys;
      segment.num_overflowed += static_cast<std::uint32_t>(i > 0);
      return;
    }
    bucket.mark_passed(p.bloom_bit());
  }
}

void Index::insert(Key key, std::uint32_t row) {
  const HashParts p = parts(key);
  make_room(p);
  put(*entry(p).segment(), p, key, row);
  ++size_;
}

std::optional<std::uint32_t> Index::erase(Key key) noexcept {
  if (directory_.empty()) return std::nullopt;
  const HashParts p = parts(key);
  const Entry e = entry(p);
  const auto place = locate(e, p, key);
  if (!place) return std::nullopt;
  place->bucket->remove(place->slot);
  const Bucket* const home = e.segment()->buckets() + p.bucket_in(e.num_buckets());
  e.segment()->num_overflowed -= static_cast<std::uint32_t>(place->bucket != home);
  --e.segment()->num_keys;
  ++e.segment()->num_erased;
  --size_;
  return place->bucket->words[place->slot];
}

// Leaves the key's segment with a free slot.
void Index::make_room(HashParts p) {
  if (directory_.empty()) {
    directory_.reserve(1);
    directory_.push_back(Entry(make_segment(1, 0, 0)));
    depth_ = 0;
  }
  for (;;) {
    Segment* const segment = entry(p).segment();
    if (segment->num_keys >= segment->limit) {
      const bool may_split = segment->depth < std::min(kMaxDepth, expected_depth() + 2);
      if (segment->num_units < kSplitUnits || !may_split) {
        rebuild(segment, next_size(segment->num_units));
      } else {
        split(segment);
      }
    } else if (segment->num_erased > segment->num_slots()) {
      rebuild(segment, units_for(segment->num_keys, 1));
    } else {
      return;
    }
  }
}

// The depth at which as many uniform keys would stand. Segments much deeper come from colliding
// keys: those grow instead, so that the directory stays in proportion to the keys.
int Index::expected_depth() const {
  return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(size_) /
                                         (buckets_of(kUsualUnits) * kBucketSlots / 2)));
}

// The smallest size that holds `num_keys` below its lowest limit with some room to grow.
std::uint32_t Index::units_for(std::uint32_t num_keys, std::uint32_t at_least) {
  std::uint32_t units = at_least;
  while (std::uint64_t{num_keys} * 10 > std::uint64_t{buckets_of(units)} * kBucketSlots * 7)
    units = next_size(units);
  return units;
}

Index::Segment* Index::make_segment(std::uint32_t num_units, int depth, std::uint64_t prefix) {
  std::byte* const block = arena_.allocate(num_units);
  std::memset(block, 0, num_units * Arena::kUnit);
  auto* const segment = reinterpret_cast<Segment*>(block);
  segment->num_units = num_units;
  segment->depth = depth;
  segment->prefix = prefix;
  segment->serial = next_serial_++;
  segment->limit = limit_of(segment->num_slots(), segment->serial);
  return segment;
}

void Index::free_segment(Segment* segment) noexcept {
  arena_.free(reinterpret_cast<std::byte*>(segment), segment->num_units);
}

void Index::set_entries(Segment* segment) noexcept {
  const std::size_t width = std::size_t{1} << (depth_ - segment->depth);
  std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(segment->prefix * width), width,
              Entry(segment));
}

void Index::rebuild(Segment* segment, std::uint32_t num_units) {
  if (num_units > kMaxUnits) throw_flooded(segment->num_keys);
  Segment* const grown = make_segment(num_units, segment->depth, segment->prefix);
  for (std::uint32_t b = 0; b < segment->num_buckets(); ++b) {
    const Bucket& bucket = segment->buckets()[b];
    for (std::uint32_t mask = bucket.occupancy(); mask != 0; mask &= mask - 1) {
      const auto s = static_cast<std::uint32_t>(std::countr_zero(mask));
      put(*grown, parts(bucket.keys[s]), bucket.keys[s], bucket.words[s]);
    }
  }
  set_entries(grown);
  free_segment(segment);
}

void Index::split(Segment* segment) {
  if (segment->depth == depth_) {
    std::vector<Entry> doubled(directory_.size() * 2);
    for (std::size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
    directory_.swap(doubled);
    ++depth_;
  }
  const int depth = segment->depth + 1;
  std::uint32_t counts[2] = {0, 0};
  const auto side_of = [depth](HashParts p) { return p.prefix(depth) & 1U; };
  const auto for_each_key = [&](const auto& visit) {
    for (std::uint32_t b = 0; b < segment->num_buckets(); ++b) {
      const Bucket& bucket = segment->buckets()[b];
      for (std::uint32_t mask = bucket.occupancy(); mask != 0; mask &= mask - 1) {
        const auto s = static_cast<std::uint32_t>(std::countr_zero(mask));
        visit(parts(bucket.keys[s]), bucket.keys[s], bucket.words[s]);
      }
    }
  };
  for_each_key([&](HashParts p, Key, std::uint32_t) { ++counts[side_of(p)]; });
  Segment* halves[2];
  halves[0] = make_segment(units_for(counts[0], kUsualUnits), depth, segment->prefix * 2);
  try {
    halves[1] = make_segment(units_for(counts[1], kUsualUnits), depth, segment->prefix * 2 + 1);
  } catch (...) {
    free_segment(halves[0]);
    throw;
  }
  for_each_key(
      [&](HashParts p, Key key, std::uint32_t row) { put(*halves[side_of(p)], p, key, row); });
  set_entries(halves[0]);
  set_entries(halves[1]);
  free_segment(segment);
  ++splits_;
}

void Index::clear() noexcept {
  directory_.clear();
  directory_.shrink_to_fit();
  arena_.clear();
  depth_ = 0;
  size_ = 0;
}

void Index::reserve(std::int64_t num_keys) {
  const std::int64_t more = num_keys - size_;
  if (more > 0) arena_.reserve(static_cast<std::size_t>(more) * 20);
}

IndexStats Index::stats() const {
  IndexStats stats;
  stats.bytes =
      static_cast<std::int64_t>(arena_.bytes_held() + directory_.capacity() * sizeof(Entry));
  stats.directory = static_cast<std::int64_t>(directory_.size());
  stats.splits = splits_;
  for_each_segment([&](const Segment& segment) {
    ++stats.segments;
    stats.slots += segment.num_slots();
    stats.overflowed += segment.num_overflowed;
  });
  return stats;
}

void Index::check_invariants() const {
  std::int64_t total = 0;
  for (std::size_t i = 0; i < directory_.size(); ++i) {
    const Entry e = directory_[i];
    if (e.num_units() != e.segment()->num_units) broken("a directory entry's size is stale");
    if (i >> (depth_ - e.segment()->depth) != e.segment()->prefix)
      broken("a directory entry points to another prefix");
  }
  for_each_segment([&](const Segment& segment) {
    std::uint32_t num_keys = 0;
    std::uint32_t num_overflowed = 0;
    for (std::uint32_t b = 0; b < segment.num_buckets(); ++b) {
      const Bucket& bucket = segment.buckets()[b];
      num_keys += static_cast<std::uint32_t>(std::popcount(bucket.occupancy()));
      for (std::uint32_t mask = bucket.occupancy(); mask != 0; mask &= mask - 1) {
        const auto s = static_cast<std::uint32_t>(std::countr_zero(mask));
        const HashParts p = parts(bucket.keys[s]);
        const auto place = locate(entry(p), p, bucket.keys[s]);
        if (!place || place->bucket != &bucket || place->slot != s) {
          broken("key " + std::to_string(bucket.keys[s]) + " cannot be reached, or is there twice");
        }
        num_overflowed += static_cast<std::uint32_t>(p.bucket_in(segment.num_buckets()) != b);
      }
    }
    if (num_keys != segment.num_keys) broken("a segment's count of keys is wrong");
    if (num_overflowed != segment.num_overflowed)
      broken("a segment's count of overflowed keys is wrong");
    if (segment.num_keys >= segment.num_slots()) broken("a segment has no free slot");
    total += num_keys;
  });
  if (total != size_) broken("the count of keys is wrong");
}

}  // namespace recsdk::internal
