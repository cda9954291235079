// How keys come in: the rows that they get. What an inserting call is as a whole is in
// inserting_call.cc.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "index/index_impl.h"
#include "index/sharded_insertion.h"
#include "util/prefetch.h"

namespace recsdk {

using internal::Capacity;
using internal::Insertion;
using internal::kItemsAhead;
using internal::RowState;
using internal::ShardedInsertion;

namespace {

constexpr std::size_t kInsertGrain = 4096;  // keys that are found, then inserted, at a time

[[noreturn, gnu::cold]] void throw_full_group(const std::string& title, const Capacity& capacity,
                                              const Capacity::FullGroup& full) {
  const std::string quota = std::to_string(full.quota);
  const bool is_whole = capacity.num_groups() == 1;
  const std::string group = "in group " + std::to_string(full.group) + " of its " +
                            std::to_string(capacity.num_groups()) + " groups of keys ";
  throw Error(ErrorCode::kCapacity,
              title + " is full: " + (is_whole ? "" : group) + std::to_string(full.used) + " of " +
                  quota + " rows are used" +
                  (full.used < full.quota ? ", and more new keys come than are left" : "") +
                  "; raise max_rows, erase keys, " +
                  (is_whole ? "" : "set fewer eviction_groups, ") + "or set on_full to refuse");
}

}  // namespace

void Index::Impl::throw_full(const Capacity::FullGroup& full) const {
  throw_full_group(title, *capacity, full);
}

void NewRows::copy_keys(std::int64_t begin, std::span<Key> keys) const noexcept {
  const auto rows = rows_.subspan(static_cast<std::size_t>(begin), keys.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kItemsAhead < rows.size()) numbers_.prefetch_key(rows[i + kItemsAhead]);
    keys[i] = numbers_.key(rows[i]);
  }
}

void Index::Impl::prepare(RowNumber end, std::span<const std::uint32_t> reused) {
  if (tracker != nullptr) tracker->grow(end);
  let_measure(end);
  if (maker == nullptr) return;
  const internal::FairMutex::CallbackScope scope(mutex);
  maker->prepare(end, reused);
}

void Index::Impl::prepare_missing(std::int64_t count) {
  const std::span<const std::uint32_t> reused = numbers.reusable(count);
  prepare(numbers.end() + count - static_cast<std::int64_t>(reused.size()), reused);
}

// Finds keys and gives rows to those that have none, in input order. May throw half-way:
// `insertion` says what was done.
void Index::Impl::find_or_insert(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                 RowState state, Insertion& insertion) {
  insertion.old_end = numbers.end();
  if (evictor) {
    measure(insertion);
    take_expired(keys, insertion);
  }
  if (admission && !insertion.admits_all) {
    insert_admitted(keys, rows_out, outcomes, state, insertion);
  } else {
    insert_into_room(keys, rows_out, outcomes, state, insertion);
  }
}

// For keys that are to get a row if they find room.
void Index::Impl::insert_into_room(std::span<const Key> keys, RowNumber* rows_out,
                                   Outcome* outcomes, RowState state, Insertion& insertion) {
  if (key_map.size() == 0) is_mostly_new = true;
  const bool fits = !capacity || capacity->has_room_for(keys.size()) ||
                    (is_mostly_new && capacity->has_room_for(keys));
  if (fits) {
    insert_fitting(keys, rows_out, outcomes, state, insertion);
  } else if (evictor) {
    insert_evicting(keys, rows_out, outcomes, state, insertion);
  } else {
    insert_limited(keys, rows_out, outcomes, state, insertion);
  }
}

// The call decides as a whole who finds no room; the others are inserted.
void Index::Impl::insert_limited(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                 RowState state, Insertion& insertion) {
  find(keys, rows_out, outcomes);
  const auto num_missing = std::count(outcomes, outcomes + keys.size(), Outcome::kMissing);
  if (!capacity->has_room_for(static_cast<std::size_t>(num_missing))) {
    const std::optional<Capacity::FullGroup> full = capacity->refuse(keys, outcomes);
    if (full && config.on_full == OnFull::kRaise) throw_full(*full);
  }
  insert_found(keys, rows_out, outcomes, state, insertion);
}

// Gives rows to the keys that are left kMissing, on one thread or all.
void Index::Impl::insert_found(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                               RowState state, Insertion& insertion) {
  const auto num_missing =
      static_cast<std::size_t>(std::count(outcomes, outcomes + keys.size(), Outcome::kMissing));
  is_mostly_new = 2 * num_missing >= keys.size();
  if (shard_bits_for(num_missing) == 0)
    return insert_missing(keys, rows_out, outcomes, state, insertion);
  insert_alone(keys, num_missing, rows_out, outcomes, state, insertion);
}

// The keys left kMissing are inserted as a batch of their own, by all threads.
void Index::Impl::insert_alone(std::span<const Key> keys, std::size_t num_missing,
                               RowNumber* rows_out, Outcome* outcomes, RowState state,
                               Insertion& insertion) {
  std::vector<std::size_t> places;
  std::vector<Key> missing;
  places.reserve(num_missing);
  missing.reserve(num_missing);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] != Outcome::kMissing) continue;
    places.push_back(i);
    missing.push_back(keys[i]);
  }
  std::vector<RowNumber> rows(num_missing);
  std::vector<Outcome> kinds(num_missing);
  const bool was_mostly_new = std::exchange(is_mostly_new, true);
  insert_fitting(missing, rows.data(), kinds.data(), state, insertion);
  is_mostly_new = was_mostly_new;
  for (std::size_t j = 0; j < num_missing; ++j) {
    rows_out[places[j]] = rows[j];
    outcomes[places[j]] = kinds[j];
  }
}

// For keys that find room, however many of them are new.
void Index::Impl::insert_fitting(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                 RowState state, Insertion& insertion) {
  for (std::size_t begin = 0; begin < keys.size();) {
    const std::size_t left = keys.size() - begin;
    const int shard_bits = shard_bits_for(left);
    const std::size_t piece = std::min(piece_of(shard_bits), left);
    const std::size_t old_count = insertion.rows.size();
    const auto part = keys.subspan(begin, piece);
    if (shard_bits > 0) {
      insert_sharded(part, rows_out + begin, outcomes + begin, state, insertion, shard_bits);
    } else if (!is_mostly_new ||
               !insert_new(part, rows_out + begin, outcomes + begin, state, insertion)) {
      find(part, rows_out + begin, outcomes + begin);
      insert_missing(part, rows_out + begin, outcomes + begin, state, insertion);
    }
    begin += piece;
    const std::size_t num_new = insertion.rows.size() - old_count;
    is_mostly_new = 2 * num_new >= piece;
    if (is_mostly_new)
      key_map.expect(static_cast<std::int64_t>(num_new * (keys.size() - begin) / piece));
  }
}

// More than 0 if all threads are to insert the next of so many keys: into as many shards, by bits.
int Index::Impl::shard_bits_for(std::size_t num_keys) const {
  constexpr std::size_t kKeysOfAShard = 2048;
  if (max_threads() == 1 || num_keys < ShardedInsertion::kFewestKeys) return 0;
  const std::size_t piece = std::min(num_keys, ShardedInsertion::kMostKeys);
  const auto wanted = static_cast<int>(std::bit_width(piece / (2 * kKeysOfAShard)));
  const int bits = key_map.shard_bits(std::max(wanted, ShardedInsertion::kFewestShardBits));
  return bits < ShardedInsertion::kFewestShardBits ? 0 : bits;
}

// How many keys are found, then inserted, at a time.
std::size_t Index::Impl::piece_of(int shard_bits) const {
  constexpr std::size_t kGrownGrain = std::size_t{1} << 18;  // the table may be large enough then
  if (shard_bits > 0 && !is_mostly_new) return ShardedInsertion::kMostKeys;
  // New ones take memory beside the map, which is to stay in caches.
  if (shard_bits > 0) return ShardedInsertion::kMostKeys / 4;
  // One thread inserts piece by piece, while the buckets that it has looked at are in its cache.
  if (max_threads() == 1 || is_mostly_new) return kInsertGrain;
  return key_map.can_insert() ? kGrownGrain : std::numeric_limits<std::size_t>::max();
}

// As find and insert_missing, on all threads.
void Index::Impl::insert_sharded(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                 RowState state, Insertion& insertion, int shard_bits) {
  ShardedInsertion sharded(key_map, numbers, keys, rows_out, outcomes, shard_bits, max_threads());
  if (sharded.num_missing() < static_cast<std::int64_t>(ShardedInsertion::kFewestKeys / 4))
    return insert_missing(keys, rows_out, outcomes, state, insertion);
  const std::int64_t num_distinct = sharded.tell_apart();
  const std::size_t old_count = insertion.rows.size();
  insertion.make_room(static_cast<std::size_t>(num_distinct));
  numbers.prepare_allocate(num_distinct);
  prepare_missing(num_distinct);
  insertion.rows.resize(old_count + static_cast<std::size_t>(num_distinct));
  try {
    sharded.insert(state, std::span(insertion.rows).subspan(old_count));
  } catch (...) {
    insertion.rows.resize(old_count);
    throw;
  }
}

// Inserts keys most of which have no row yet, without looking for them first. False if that cannot
// be done.
bool Index::Impl::insert_new(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                             RowState state, Insertion& insertion) {
  const auto count = static_cast<std::int64_t>(keys.size());
  if (!key_map.can_insert() || count > numbers.num_left()) return false;
  insertion.make_room(keys.size());
  numbers.prepare_allocate(count);
  prepare_missing(count);
  std::vector<std::uint32_t> next(keys.size());
  for (std::int64_t i = 0; i < count; ++i)
    next[static_cast<std::size_t>(i)] = numbers.to_allocate(i);
  std::size_t num_done = 0;
  const auto give_rows = [&] {
    const auto num_new = std::count(outcomes, outcomes + num_done, Outcome::kInserted);
    const auto rows = std::span(next).first(static_cast<std::size_t>(num_new));
    numbers.allocate_all(rows, keys, outcomes, state);
    insertion.rows.insert(insertion.rows.end(), rows.begin(), rows.end());
  };
  try {
    key_map.insert(keys, next.data(), rows_out, outcomes, num_done);
  } catch (...) {
    give_rows();  // for undo
    throw;
  }
  give_rows();
  return true;
}

// Gives rows to the keys that find has left kMissing.
void Index::Impl::insert_missing(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                 RowState state, Insertion& insertion) {
  std::int64_t num_missing = std::count(outcomes, outcomes + keys.size(), Outcome::kMissing);
  if (num_missing == 0) return;
  // Its maker may have no more rows than that, and some of these keys may be duplicates.
  if (capacity && !evictor)
    num_missing = std::min(num_missing, capacity->max_rows() - key_map.size());
  insertion.make_room(static_cast<std::size_t>(num_missing));
  numbers.prepare_allocate(num_missing);
  prepare_missing(num_missing);

  constexpr std::int64_t kChunk = 1024;
  std::array<std::uint16_t, kChunk> missing;
  for (std::size_t begin = 0; begin < keys.size(); begin += kChunk) {
    const std::size_t end = std::min(keys.size(), begin + kChunk);
    std::size_t count = 0;
    for (std::size_t i = begin; i < end; ++i) {
      missing[count] = static_cast<std::uint16_t>(i - begin);
      count += static_cast<std::size_t>(outcomes[i] == Outcome::kMissing);
    }
    insert_chunk(keys.data() + begin, {missing.data(), count}, rows_out + begin, outcomes + begin,
                 state, insertion);
  }
}

void Index::Impl::insert_chunk(const Key* keys, std::span<const std::uint16_t> missing,
                               RowNumber* rows_out, Outcome* outcomes, RowState state,
                               Insertion& insertion) {
  for (std::size_t j = 0; j < std::min(kItemsAhead, missing.size()); ++j) {
    key_map.prefetch(keys[missing[j]]);
    numbers.prefetch_to_allocate(j);
  }
  for (std::size_t j = 0; j < missing.size(); ++j) {
    if (j + kItemsAhead < missing.size()) {
      key_map.prefetch(keys[missing[j + kItemsAhead]]);
      numbers.prefetch_to_allocate(kItemsAhead);
    }
    const std::size_t i = missing[j];
    // The key may have been inserted by this very call.
    const std::uint32_t next = numbers.next_to_allocate();
    const std::uint32_t row = key_map.find_or_insert(keys[i], next);
    rows_out[i] = row;
    outcomes[i] = row == next ? Outcome::kInserted : Outcome::kFound;
    if (row == next) insertion.rows.push_back(numbers.allocate(keys[i], state));
  }
}

}  // namespace recsdk
