#include "table/segmented_hash.h"

#include <algorithm>
#include <bit>

namespace recsdk::internal {
namespace {

// Keys that are hashed and fetched ahead of the block that is compared.
constexpr std::int64_t kBlock = 16;
constexpr std::int64_t kChunk = 1024;  // keys whose overflow probes are resolved together

}  // namespace

void SegmentedHash::find(std::span<const Key> keys, RowNumber* rows, Outcome* outcomes) const {
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
struct SegmentedHash::Block {
  const Bucket* buckets[kBlock];
  HashParts parts[kBlock];
  std::int64_t count = 0;

  void stage(const SegmentedHash& table, const Key* keys, std::int64_t num_keys) {
    count = num_keys;
    for (std::int64_t i = 0; i < num_keys; ++i) {
      const HashParts p = table.parts(keys[i]);
      const Entry e = table.entry(p);
      parts[i] = p;
      buckets[i] = e.segment()->buckets() + p.bucket_in(e.num_buckets());
      __builtin_prefetch(buckets[i]);
    }
  }
};

// Keys that are not in the buckets looked at so far, and may lie further.
struct SegmentedHash::Pending {
  const Bucket* next[kChunk];  // the bucket to be looked at, which is on its way
  std::uint16_t i[kChunk];
  std::int64_t count = 0;
};

// Compares a key with a bucket without a branch on the outcome. Writes its result, and appends it
// to `pending` if it may lie further, in `next`.
void SegmentedHash::compare(const Bucket& bucket, HashParts p, const Bucket* next, Key key,
                            std::int64_t i, RowNumber* rows, Outcome* outcomes, Pending& pending) {
  const std::uint32_t match = bucket.match(key);
  const std::uint32_t row = bucket.words[std::countr_zero(match | 32U)];
  const auto missing = static_cast<std::uint32_t>(match == 0);
  rows[i] = row & (missing - 1);
  outcomes[i] = static_cast<Outcome>(missing * static_cast<std::uint32_t>(Outcome::kMissing));
  const bool goes_on =
      (missing & static_cast<std::uint32_t>(bucket.has_passed(p.bloom_bit()))) != 0;
  __builtin_prefetch(goes_on ? next : &bucket);
  pending.next[pending.count] = next;
  pending.i[pending.count] = static_cast<std::uint16_t>(i);
  pending.count += static_cast<std::int64_t>(goes_on);
}

// First pass: home buckets; while one block of keys is compared the buckets of the next are on
// their way. Later passes: for the keys that go on, the next bucket of each, all of them fetched in
// the pass before. One key after the other would wait for memory at each step.
void SegmentedHash::find_chunk(const Key* keys, std::int64_t count, RowNumber* rows,
                               Outcome* outcomes) const {
  Pending pending[2];
  Block blocks[2];
  blocks[0].stage(*this, keys, std::min(kBlock, count));
  for (std::int64_t first = 0, turn = 0; first < count; first += kBlock, turn ^= 1) {
    const std::int64_t following = first + kBlock;
    if (following < count)
      blocks[turn ^ 1].stage(*this, keys + following, std::min(kBlock, count - following));
    const Block& block = blocks[turn];
    for (std::int64_t j = 0; j < block.count; ++j) {
      compare(*block.buckets[j], block.parts[j], buddy_of(block.buckets[j]), keys[first + j],
              first + j, rows, outcomes, pending[0]);
    }
  }
  std::uint32_t distance = 1;  // of the buckets that are compared now
  for (int turn = 0; pending[turn].count > 0; turn ^= 1, ++distance) {
    const Pending& now = pending[turn];
    Pending& later = pending[turn ^ 1];
    later.count = 0;
    for (std::int64_t j = 0; j < now.count; ++j) {
      const std::int64_t i = now.i[j];
      const HashParts p = parts(keys[i]);
      const Entry e = entry(p);
      const std::uint32_t num_buckets = e.num_buckets();
      if (distance == num_buckets) continue;  // it has been around the whole segment
      const Bucket* const next = e.segment()->buckets() +
                                 probe_bucket(p.bucket_in(num_buckets), distance + 1, num_buckets);
      compare(*now.next[j], p, next, keys[i], i, rows, outcomes, later);
    }
  }
}

std::optional<SegmentedHash::Place> SegmentedHash::locate(Entry entry, HashParts p, Key key) {
  const std::uint32_t num_buckets = entry.num_buckets();
  const std::uint32_t home = p.bucket_in(num_buckets);
  for (std::uint32_t i = 0; i < num_buckets; ++i) {
    Bucket& bucket = entry.segment()->buckets()[probe_bucket(home, i, num_buckets)];
    const std::uint32_t match = bucket.match(key);
    if (match != 0) {
      return Place{&bucket, static_cast<std::uint32_t>(std::countr_zero(match)), i};
    }
    if (!bucket.has_passed(p.bloom_bit())) return std::nullopt;
  }
  return std::nullopt;
}

std::optional<std::uint32_t> SegmentedHash::find_one(Key key) const {
  if (directory_.empty()) return std::nullopt;
  const HashParts p = parts(key);
  const auto place = locate(entry(p), p, key);
  if (!place) return std::nullopt;
  return place->bucket->words[place->slot];
}

void SegmentedHash::prefetch(Key key) const {
  if (!directory_.empty()) prefetch(parts(key));
}

void SegmentedHash::prefetch(HashParts p) const {
  const Entry e = entry(p);
  __builtin_prefetch(e.segment(), 1);
  const Bucket* const home = e.segment()->buckets() + p.bucket_in(e.num_buckets());
  __builtin_prefetch(home, 1);
  __builtin_prefetch(buddy_of(home), 1);
}

void SegmentedHash::put(Segment& segment, HashParts p, Key key, std::uint32_t row) {
  const std::uint32_t num_buckets = segment.num_buckets();
  const std::uint32_t home = p.bucket_in(num_buckets);
  for (std::uint32_t i = 0;; ++i) {
    Bucket& bucket = segment.buckets()[probe_bucket(home, i, num_buckets)];
    if (!bucket.is_full()) {
      bucket.put(key, row);
      ++segment.num_keys;
      segment.num_overflowed += static_cast<std::uint32_t>(i > 0);
      segment.displacement += i;
      return;
    }
    bucket.mark_passed(p.bloom_bit());
  }
}

std::uint32_t SegmentedHash::find_or_insert(Key key, std::uint32_t row) {
  const HashParts p = parts(key);
  if (!directory_.empty()) {
    if (const auto place = locate(entry(p), p, key)) return place->bucket->words[place->slot];
  }
  make_room(p);
  put(*entry(p).segment(), p, key, row);
  ++size_;
  return row;
}

// Puts a key that is not there into its home bucket or its buddy, without a branch on which of
// them. False if that is not all there is to do: both are full, or the segment needs room.
bool SegmentedHash::put_at_once(Segment& segment, Bucket& home, HashParts p, Key key,
                                std::uint32_t row) {
  const std::uint32_t passes = static_cast<std::uint32_t>(home.is_full());
  Bucket& bucket = passes != 0 ? *buddy_of(&home) : home;
  // Erased keys may ask for a rebuild.
  if (segment.num_keys >= segment.limit || segment.num_erased != 0 || bucket.is_full())
    return false;
  home.mark_passed(p.bloom_bit() & (0U - passes));
  bucket.put(key, row);
  ++segment.num_keys;
  segment.num_overflowed += passes;
  segment.displacement += passes;
  return true;
}

void SegmentedHash::insert(std::span<const Key> keys, std::uint32_t next_row, RowNumber* rows,
                           Outcome* outcomes, std::size_t& num_done) {
  constexpr std::size_t kAhead = 16;
  HashParts ahead[kAhead];
  const auto stage = [&](std::size_t i) {
    ahead[i % kAhead] = parts(keys[i]);
    prefetch(ahead[i % kAhead]);
  };
  if (keys.empty()) return;
  if (directory_.empty()) make_room(parts(keys[0]));
  for (std::size_t i = 0; i < std::min(kAhead, keys.size()); ++i) stage(i);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const HashParts p = ahead[i % kAhead];
    if (i + kAhead < keys.size()) stage(i + kAhead);
    const Entry e = entry(p);  // the segment may have moved since
    Bucket& home = e.segment()->buckets()[p.bucket_in(e.num_buckets())];
    const std::uint32_t match = home.match(keys[i]);
    std::uint32_t row = next_row;
    if (match != 0) {
      row = home.words[std::countr_zero(match)];
    } else if (!home.has_passed(p.bloom_bit()) &&
               put_at_once(*e.segment(), home, p, keys[i], row)) {
      ++size_;
    } else {
      row = find_or_insert(keys[i], row);
    }
    rows[i] = row;
    outcomes[i] = row == next_row ? Outcome::kInserted : Outcome::kFound;
    next_row += static_cast<std::uint32_t>(row == next_row);
    num_done = i + 1;
  }
}

std::optional<std::uint32_t> SegmentedHash::erase(Key key) noexcept {
  if (directory_.empty()) return std::nullopt;
  const HashParts p = parts(key);
  const Entry e = entry(p);
  const auto place = locate(e, p, key);
  if (!place) return std::nullopt;
  place->bucket->remove(place->slot);
  Segment& segment = *e.segment();
  segment.num_overflowed -= static_cast<std::uint32_t>(place->distance > 0);
  segment.displacement -= place->distance;
  --segment.num_keys;
  ++segment.num_erased;
  --size_;
  return place->bucket->words[place->slot];
}

std::int64_t SegmentedHash::sample(std::uint64_t& cursor, Key* keys, std::int64_t capacity) const {
  if (directory_.empty()) return 0;
  const std::size_t i = static_cast<std::size_t>(cursor % directory_.size());
  const Segment& segment = *directory_[i].segment();
  const std::uint64_t width = std::uint64_t{1} << (depth_ - segment.depth);
  cursor = (i / width + 1) * width;
  std::int64_t count = 0;
  const std::uint32_t step =
      std::max<std::uint32_t>(segment.num_buckets() / static_cast<std::uint32_t>(capacity), 1);
  for (std::uint32_t b = 0; b < segment.num_buckets() && count < capacity; b += step) {
    const Bucket& bucket = segment.buckets()[b];
    if (bucket.occupancy() != 0) keys[count++] = bucket.keys[std::countr_zero(bucket.occupancy())];
  }
  return count;
}

SegmentStats SegmentedHash::stats() const {
  SegmentStats stats;
  stats.bytes =
      static_cast<std::int64_t>(arena_.bytes_held() + directory_.capacity() * sizeof(Entry));
  stats.directory = static_cast<std::int64_t>(directory_.size());
  stats.splits = splits_;
  stats.probes = size_;
  for_each_segment([&](const Segment& segment) {
    ++stats.segments;
    stats.crowded += static_cast<std::int64_t>(segment.num_units >= 2 * kLargestSplit);
    stats.slots += segment.num_slots();
    stats.overflowed += segment.num_overflowed;
    stats.probes += segment.displacement;
  });
  return stats;
}

}  // namespace recsdk::internal
