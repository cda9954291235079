#include "keymap/segmented_hash.h"
#include "util/prefetch.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace recsdk::internal {
namespace {

// Keys that are hashed and fetched in a row, and such blocks ahead of the one that is compared.
constexpr std::int64_t kBlock = 16;
constexpr std::int64_t kBlocksAhead = 2;
constexpr std::int64_t kChunk = 1024;  // keys whose overflow probes are resolved together
// Of a table whose buckets, some 13 bytes a key, are in no cache: they are asked for into the
// second level, to which more lines can be on their way than to the first.
constexpr std::int64_t kManyKeys = std::int64_t{1} << 22;

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
    const bool is_far = table.size_ > kManyKeys;
    for (std::int64_t i = 0; i < num_keys; ++i) {
      const HashParts p = table.parts(keys[i]);
      const Entry e = table.entry(p);
      parts[i] = p;
      buckets[i] = e.segment()->buckets() + p.bucket_in(e.num_buckets());
      if (is_far) {
        prefetch_far_line(buckets[i]);
      } else {
        prefetch_line(buckets[i]);
      }
    }
  }
};

// Keys that are not in the buckets looked at so far, and may lie further.
struct SegmentedHash::Pending {
  const Bucket* next[kChunk];  // the bucket to be looked at, which is on its way
  std::uint16_t i[kChunk];
  std::int64_t count = 0;

  // Appends key number `key` if it `goes_on` (1, or else 0) from `bucket` to `then`, without a
  // branch on that.
  void note(std::uint32_t goes_on, const Bucket* bucket, const Bucket* then, std::int64_t key) {
    const auto here = reinterpret_cast<std::uintptr_t>(bucket);
    const auto there = reinterpret_cast<std::uintptr_t>(then);
    const std::uintptr_t fetched = here ^ ((here ^ there) & (std::uintptr_t{0} - goes_on));
    prefetch_line(reinterpret_cast<const void*>(fetched));
    next[count] = then;
    i[count] = static_cast<std::uint16_t>(key);
    count += goes_on;
  }
};

// Compares the keys of a block with their home buckets, without a branch on what is found. Writes
// outcomes, and row numbers of those found. Returns a bit for each key that is not in its bucket,
// the first key's highest: so a comparison and an addition with carry are all that it takes.
std::uint32_t SegmentedHash::compare_homes(const Block& block, const Key* keys, RowNumber* rows,
                                           Outcome* outcomes) {
  static_assert(kBlock % 8 == 0 && kBlock <= 32);
  static_assert(sizeof(Outcome) == 1 && Outcome::kFound == Outcome{0});
  constexpr auto kMissing = static_cast<std::uint64_t>(Outcome::kMissing);
  const std::int64_t count = block.count;
  std::uint32_t missing = 0;
  for (std::int64_t j = 0; j < count; ++j) {
    const Bucket& bucket = *block.buckets[j];
    const std::uint32_t match = bucket.match(keys[j]);
    rows[j] = bucket.words[std::countr_zero(match | 32U)];
    missing = missing * 2 + static_cast<std::uint32_t>(match == 0);
  }
  if (count < kBlock) {
    for (std::int64_t j = 0; j < count; ++j) {
      const std::uint64_t is_missing = missing >> (count - 1 - j) & 1U;
      outcomes[j] = static_cast<Outcome>(is_missing * kMissing);
    }
    return missing;
  }
  for (std::int64_t j = 0; j < kBlock; j += 8) {  // eight bits to eight bytes
    const std::uint64_t bits = missing >> (kBlock - 8 - j) & 0xFFU;
    const std::uint64_t apart = bits * 0x0101010101010101U & 0x0102040810204080U;
    const std::uint64_t ones = (apart + 0x7F7F7F7F7F7F7F7FU) >> 7 & 0x0101010101010101U;
    const std::uint64_t bytes = ones * kMissing;
    std::memcpy(outcomes + j, &bytes, sizeof(bytes));
  }
  return missing;
}

// First pass: home buckets; while one block of keys is compared the buckets of those ahead are on
// their way. Later passes: for the keys that go on, the next bucket of each, all of them fetched in
// the pass before. One key after the other would wait for memory at each step.
void SegmentedHash::find_chunk(const Key* keys, std::int64_t count, RowNumber* rows,
                               Outcome* outcomes) const {
  Pending pending[2];
  Block blocks[kBlocksAhead + 1];
  const auto stage = [&](std::int64_t first, Block& block) {
    if (first < count) block.stage(*this, keys + first, std::min(kBlock, count - first));
  };
  for (std::int64_t b = 0; b < kBlocksAhead; ++b) stage(b * kBlock, blocks[b]);
  for (std::int64_t first = 0, turn = 0; first < count; first += kBlock) {
    const std::int64_t last = turn == 0 ? kBlocksAhead : turn - 1;  // the block done before
    stage(first + kBlocksAhead * kBlock, blocks[last]);
    const Block& block = blocks[turn];
    turn = turn == kBlocksAhead ? 0 : turn + 1;
    std::uint32_t missing = compare_homes(block, keys + first, rows + first, outcomes + first);
    for (; missing != 0; missing &= missing - 1) {
      const std::int64_t j = block.count - 1 - std::countr_zero(missing);
      const Bucket* const home = block.buckets[j];
      rows[first + j] = 0;
      const auto goes_on = static_cast<std::uint32_t>(home->has_passed(block.parts[j].bloom_bit()));
      pending[0].note(goes_on, home, buddy_of(home), first + j);
    }
  }
  for (std::uint32_t distance = 1, turn = 0; pending[turn].count > 0; turn ^= 1, ++distance)
    find_further(pending[turn], distance, keys, rows, outcomes, pending[turn ^ 1]);
}

// Compares keys with the bucket at `distance` from their home, again without a branch on the
// outcome.
void SegmentedHash::find_further(const Pending& now, std::uint32_t distance, const Key* keys,
                                 RowNumber* rows, Outcome* outcomes, Pending& later) const {
  later.count = 0;
  for (std::int64_t j = 0; j < now.count; ++j) {
    const std::int64_t i = now.i[j];
    const HashParts p = parts(keys[i]);
    const Entry e = entry(p);
    const std::uint32_t num_buckets = e.num_buckets();
    // It has been around the whole segment, led by Bloom bits of keys that have left. No key lies
    // even in the last bucket of its way: all others would have to be full (check_segment).
    if (distance == num_buckets) continue;
    const Bucket* const then =
        e.segment()->buckets() + probe_bucket(p.bucket_in(num_buckets), distance + 1, num_buckets);
    const Bucket& bucket = *now.next[j];
    const std::uint32_t match = bucket.match(keys[i]);
    const auto missing = static_cast<std::uint32_t>(match == 0);
    rows[i] = bucket.words[std::countr_zero(match | 32U)] & (missing - 1);
    outcomes[i] = static_cast<Outcome>(missing * static_cast<std::uint32_t>(Outcome::kMissing));
    const auto has_passed = static_cast<std::uint32_t>(bucket.has_passed(p.bloom_bit()));
    later.note(missing & has_passed, &bucket, then, i);
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

void SegmentedHash::prefetch(HashParts p) const {
  const Entry e = entry(p);
  const Bucket* const home = e.segment()->buckets() + p.bucket_in(e.num_buckets());
  prefetch_line(home);
  prefetch_line(buddy_of(home));
  prefetch_line(e.segment());
}

void SegmentedHash::prefetch(Key key) const {
  if (!directory_.empty()) prefetch(parts(key));
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
  if (segment.num_keys >= segment.limit || is_stale(segment) || bucket.is_full()) return false;
  home.mark_passed(p.bloom_bit() & (0U - passes));
  bucket.put(key, row);
  ++segment.num_keys;
  segment.num_overflowed += passes;
  segment.displacement += passes;
  return true;
}

// Keys to be put in, each hashed and its lines asked for 16 keys before its turn.
class SegmentedHash::Window {
 public:
  /// There must be a segment. `keys` are kept as they are given.
  Window(const SegmentedHash& hash, std::span<const Key> keys) : hash_(hash), keys_(keys) {
    for (std::size_t i = 0; i < std::min(kAhead, keys.size()); ++i) stage(i);
  }

  /// The parts of key i. All keys have to be asked for in turn, from 0 on.
  HashParts next(std::size_t i) {
    const HashParts p = ahead_[i % kAhead];
    if (i + kAhead < keys_.size()) stage(i + kAhead);
    return p;
  }

 private:
  static constexpr std::size_t kAhead = 16;

  void stage(std::size_t i) {
    ahead_[i % kAhead] = hash_.parts(keys_[i]);
    hash_.prefetch(ahead_[i % kAhead]);
  }

  const SegmentedHash& hash_;
  const std::span<const Key> keys_;
  HashParts ahead_[kAhead];
};

void SegmentedHash::insert(std::span<const Key> keys, const std::uint32_t* next_row,
                           RowNumber* rows, Outcome* outcomes, std::size_t& num_done) {
  if (keys.empty()) return;
  if (directory_.empty()) make_room(parts(keys[0]));
  Window window(*this, keys);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const HashParts p = window.next(i);
    const Entry e = entry(p);  // the segment may have moved since
    Bucket& home = e.segment()->buckets()[p.bucket_in(e.num_buckets())];
    const std::uint32_t match = home.match(keys[i]);
    std::uint32_t row = *next_row;
    if (match != 0) {
      row = home.words[std::countr_zero(match)];
    } else if (!home.has_passed(p.bloom_bit()) &&
               put_at_once(*e.segment(), home, p, keys[i], row)) {
      ++size_;
    } else {
      row = find_or_insert(keys[i], row);
    }
    rows[i] = row;
    const bool is_new = row == *next_row;
    outcomes[i] = is_new ? Outcome::kInserted : Outcome::kFound;
    next_row += static_cast<std::ptrdiff_t>(is_new);
    num_done = i + 1;
  }
}

void SegmentedHash::insert_absent(std::span<const Key> keys, const std::uint32_t* rows,
                                  std::size_t& num_done) {
  Window window(*this, keys);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const HashParts p = window.next(i);
    const Entry e = entry(p);  // the segment may have moved since
    Bucket& home = e.segment()->buckets()[p.bucket_in(e.num_buckets())];
    if (!put_at_once(*e.segment(), home, p, keys[i], rows[i])) {
      make_room(p);
      put(*entry(p).segment(), p, keys[i], rows[i]);
    }
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
