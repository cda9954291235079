#include "index/sharded_insertion.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "util/thread_pool.h"

namespace recsdk::internal {
namespace {

// So many that threads that get slow cores find enough to share, if there are keys for them.
std::int64_t chunk_keys_for(std::size_t num_keys) {
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(num_keys / 64), 1024, 8192);
}

}  // namespace

ShardedInsertion::ShardedInsertion(KeyMap& map, RowNumbers& numbers, std::span<const Key> keys,
                                   RowNumber* rows, Outcome* outcomes, int shard_bits,
                                   int max_threads)
    : map_(map),
      numbers_(numbers),
      keys_(keys),
      rows_(rows),
      outcomes_(outcomes),
      shard_bits_(shard_bits),
      max_threads_(max_threads),
      chunk_keys_(chunk_keys_for(keys.size())),
      num_chunks_((static_cast<std::int64_t>(keys.size()) + chunk_keys_ - 1) / chunk_keys_),
      num_shards_(std::size_t{1} << shard_bits),
      begins_(static_cast<std::size_t>(num_chunks_) * num_shards_),
      num_distinct_in_(num_shards_) {
  find();
}

template <typename Body>
void ShardedInsertion::for_chunks(const Body& body) const {
  parallel_for(num_chunks_, 1, max_threads_, [&](std::int64_t chunk, std::int64_t end) {
    for (; chunk < end; ++chunk) body(chunk);
  });
}

template <typename Body>
void ShardedInsertion::for_shards(const Body& body) const {
  parallel_for(static_cast<std::int64_t>(num_shards_), 1, max_threads_,
               [&](std::int64_t shard, std::int64_t end) {
                 for (; shard < end; ++shard) body(static_cast<std::size_t>(shard));
               });
}

std::span<const Key> ShardedInsertion::keys_of(std::int64_t chunk) const {
  const std::int64_t begin = chunk * chunk_keys_;
  const std::int64_t count = std::min(chunk_keys_, static_cast<std::int64_t>(keys_.size()) - begin);
  return keys_.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
}

std::size_t ShardedInsertion::shard_of(Key key) const {
  return static_cast<std::size_t>(HashParts{map_.hash(key)}.prefix(shard_bits_));
}

std::size_t ShardedInsertion::cell(std::int64_t chunk, std::size_t shard) const {
  return static_cast<std::size_t>(chunk) * num_shards_ + shard;
}

std::int64_t ShardedInsertion::shard_end(std::size_t shard) const {
  return shard + 1 == num_shards_ ? num_missing_ : std::int64_t{begins_[shard + 1]};
}

// Counts the missing keys of each chunk and shard.
void ShardedInsertion::find() {
  for_chunks([&](std::int64_t chunk) {
    const std::span<const Key> keys = keys_of(chunk);
    Outcome* const outcomes = outcomes_ + chunk * chunk_keys_;
    map_.find(keys, rows_ + chunk * chunk_keys_, outcomes);
    std::uint32_t* const counts = begins_.data() + cell(chunk, 0);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (outcomes[i] == Outcome::kMissing) ++counts[shard_of(keys[i])];
    }
  });
  num_missing_ = std::accumulate(begins_.begin(), begins_.end(), std::int64_t{0});
}

void ShardedInsertion::add_up() {
  std::vector<std::uint32_t> next(num_shards_);
  for (std::int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
    for (std::size_t shard = 0; shard < num_shards_; ++shard)
      next[shard] += begins_[cell(chunk, shard)];
  }
  std::exclusive_scan(next.begin(), next.end(), next.begin(), std::uint32_t{0});
  for (std::int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
    for (std::size_t shard = 0; shard < num_shards_; ++shard) {
      std::uint32_t& begin = begins_[cell(chunk, shard)];
      next[shard] += std::exchange(begin, next[shard]);
    }
  }
}

void ShardedInsertion::deal() {
  for_chunks([&](std::int64_t chunk) {
    const std::span<const Key> keys = keys_of(chunk);
    const Outcome* const outcomes = outcomes_ + chunk * chunk_keys_;
    std::vector<std::uint32_t> next(num_shards_);
    std::copy_n(begins_.data() + cell(chunk, 0), num_shards_, next.begin());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (outcomes[i] == Outcome::kMissing) dealt_[next[shard_of(keys[i])]++] = keys[i];
    }
  });
}

std::int64_t ShardedInsertion::tell_apart() {
  const auto count = static_cast<std::size_t>(num_missing_);
  dealt_ = std::make_unique_for_overwrite<Key[]>(count);
  firsts_ = std::make_unique_for_overwrite<std::uint32_t[]>(count);
  rows_of_dealt_ = std::make_unique_for_overwrite<std::uint32_t[]>(count);
  first_begins_.resize(begins_.size());
  add_up();
  deal();
  for_shards([&](std::size_t shard) {
    std::vector<std::uint32_t> slots;
    tell_apart(shard, slots);
  });
  num_distinct_ =
      std::accumulate(num_distinct_in_.begin(), num_distinct_in_.end(), std::int64_t{0});
  return num_distinct_;
}

// By a hash table of the shard's keys, for which there is room in a cache. The map is not touched.
void ShardedInsertion::tell_apart(std::size_t shard, std::vector<std::uint32_t>& slots) {
  const std::uint32_t begin = begins_[shard];
  const auto end = static_cast<std::uint32_t>(shard_end(shard));
  slots.assign(std::bit_ceil(std::size_t{end - begin} * 2 + 1), kNoRow);
  const std::size_t mask = slots.size() - 1;
  std::uint32_t next = begin;  // place of the next first key
  std::uint32_t k = begin;
  for (std::int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
    first_begins_[cell(chunk, shard)] = next;
    const std::uint32_t chunk_end =
        chunk + 1 == num_chunks_ ? end : begins_[cell(chunk + 1, shard)];
    for (; k < chunk_end; ++k) {
      const Key key = dealt_[k];
      std::size_t slot = map_.hash(key) & mask;
      while (slots[slot] != kNoRow && dealt_[slots[slot]] != key) slot = (slot + 1) & mask;
      if (slots[slot] == kNoRow) {
        slots[slot] = next;
        dealt_[next++] = key;
      }
      firsts_[k] = slots[slot];
    }
  }
  num_distinct_in_[shard] = next - begin;
}

void ShardedInsertion::insert(RowState state, std::span<std::uint32_t> new_rows) {
  numbers_.populate(static_cast<std::int64_t>(new_rows.size()), max_threads_);
  for_chunks([&](std::int64_t chunk) { give_rows(chunk, new_rows); });
  insert_shards();
  numbers_.allocate_all(new_rows, state);
  if (num_distinct_ < num_missing_)
    for_chunks([&](std::int64_t chunk) { answer_duplicates(chunk); });
}

void ShardedInsertion::give_rows(std::int64_t chunk, std::span<std::uint32_t> new_rows) {
  const std::span<const Key> keys = keys_of(chunk);
  RowNumber* const rows = rows_ + chunk * chunk_keys_;
  Outcome* const outcomes = outcomes_ + chunk * chunk_keys_;
  std::vector<std::uint32_t> next(num_shards_);
  std::vector<std::uint32_t> next_first(num_shards_);
  std::copy_n(begins_.data() + cell(chunk, 0), num_shards_, next.begin());
  std::copy_n(first_begins_.data() + cell(chunk, 0), num_shards_, next_first.begin());
  // As many first keys lie before this chunk.
  std::size_t rank = 0;
  for (std::size_t shard = 0; shard < num_shards_; ++shard)
    rank += next_first[shard] - begins_[shard];
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] != Outcome::kMissing) continue;
    const std::size_t shard = shard_of(keys[i]);
    const std::uint32_t first = firsts_[next[shard]++];
    if (first != next_first[shard]) continue;  // answered later
    ++next_first[shard];
    outcomes[i] = Outcome::kInserted;
    const std::uint32_t row = numbers_.to_allocate(static_cast<std::int64_t>(rank));
    rows_of_dealt_[first] = row;
    rows[i] = row;
    numbers_.set_key(row, keys[i]);
    new_rows[rank++] = row;
  }
}

void ShardedInsertion::insert_shards() {
  std::vector<std::size_t> num_done(num_shards_);
  map_.begin_sharing(num_distinct_);
  const auto all_done = [&] {
    return static_cast<std::int64_t>(
        std::accumulate(num_done.begin(), num_done.end(), std::size_t{0}));
  };
  try {
    for_shards([&](std::size_t shard) {
      const Key* const keys = dealt_.get() + begins_[shard];
      const std::uint32_t* const rows = rows_of_dealt_.get() + begins_[shard];
      map_.insert_absent({keys, static_cast<std::size_t>(num_distinct_in_[shard])}, rows,
                         num_done[shard]);
    });
  } catch (...) {
    map_.end_sharing(all_done());
    for (std::size_t shard = 0; shard < num_shards_; ++shard) {
      for (std::size_t j = 0; j < num_done[shard]; ++j) map_.erase(dealt_[begins_[shard] + j]);
    }
    throw;
  }
  map_.end_sharing(all_done());
}

// Allocates nothing: the keys are there by now.
void ShardedInsertion::answer_duplicates(std::int64_t chunk) noexcept {
  const std::span<const Key> keys = keys_of(chunk);
  RowNumber* const rows = rows_ + chunk * chunk_keys_;
  Outcome* const outcomes = outcomes_ + chunk * chunk_keys_;
  std::uint32_t* const next = begins_.data() + cell(chunk, 0);  // nobody needs them any more
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kFound) continue;
    const std::uint32_t k = next[shard_of(keys[i])]++;
    if (outcomes[i] != Outcome::kMissing) continue;
    outcomes[i] = Outcome::kFound;
    rows[i] = rows_of_dealt_[firsts_[k]];
  }
}

}  // namespace recsdk::internal
