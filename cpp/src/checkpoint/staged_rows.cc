#include "checkpoint/staged_rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <system_error>
#include <utility>

#include "rows/row_values.h"
#include "util/prefetch.h"
#include "util/thread_pool.h"

namespace recsdk::internal {
namespace {

constexpr std::int64_t kCopyGrain = 1024;
constexpr std::int64_t kMostTimes = 16;  // the rows there are, that the index is grown for

bool is_kept(Key key, const RestoreOptions& options) {
  if (!options.owned.empty() && options.owned[virtual_shard(key)] == 0) return false;
  if (!options.modulo) return true;
  return static_cast<std::uint64_t>(key) % static_cast<std::uint64_t>(options.modulo->world) ==
         static_cast<std::uint64_t>(options.modulo->rank);
}

[[noreturn, gnu::cold]] void throw_twice(const Table::Impl& table, const std::string& source,
                                         Key key, const char* how) {
  throw Error(ErrorCode::kCheckpoint, table.title() + ": '" + source + "' has key " +
                                          std::to_string(key) + " " + how +
                                          "; the checkpoint is damaged: load another one");
}

// One field of the rows of a block, on its way into records.
struct FieldCopy {
  const RowField& field;
  std::size_t bytes;  // of a row
  const std::byte* source;
  RowAddresses records;

  /// Whether the values of consecutive rows of a slab lie side by side.
  bool is_packed() const {
    const bool is_scalar = field.place == FieldPlace::kScalars;
    return static_cast<std::int64_t>(bytes) == (is_scalar ? records.scalar_stride : records.stride);
  }

  /// `count` rows from position `from` in the block to row `to` on.
  void copy(std::size_t from, RowNumber to, std::size_t count) const {
    std::memcpy(field_address(records, field, to), source + from * bytes, count * bytes);
  }

  /// Rows at positions (n,) of the block to rows (n,).
  void copy_all(std::span<const std::uint32_t> from, std::span<const RowNumber> to) const {
    if (!is_packed()) {
      for (std::size_t j = 0; j < from.size(); ++j) copy(from[j], to[j], 1);
      return;
    }
    for (std::size_t begin = 0, end = 0; begin < from.size(); begin = end) {
      for (end = begin + 1; end < from.size() && from[end] == from[end - 1] + 1 &&
                            to[end] == to[end - 1] + 1 && (to[end] & records.mask) != 0;)
        ++end;
      copy(from[begin], to[begin], end - begin);
    }
  }
};

}  // namespace

StagedRows::StagedRows(const Table::Impl& target)
    : table(target),
      key_map(std::make_shared<KeyMap>(target.index.hash_seed)),
      numbers(target.index.evictor ? target.index.evictor->meta().num_words() : 0),
      rows(target.layout) {}

void StagedRows::begin_save() {
  is_first_ = numbers.end() == 0;
  in_save_.emplace();
}

void StagedRows::select(const RowBlock& block, const RestoreOptions& options) {
  selected_.resize(block.keys.size());
  std::size_t count = 0;
  for (std::size_t i = 0; i < block.keys.size(); ++i) {
    selected_[count] = static_cast<std::uint32_t>(i);
    count += static_cast<std::size_t>(is_kept(block.keys[i], options));
  }
  selected_.resize(count);
}

// The first save has brought all rows that are there; rows of later saves are marked.
bool StagedRows::is_of_save(std::uint32_t row) const {
  return is_first_ || (row < in_save_->num_words() * kWordRows && in_save_->test(row));
}

std::span<const Key> StagedRows::selected_keys(const RowBlock& block) {
  if (selected_.size() == block.keys.size()) return block.keys;
  keys_.resize(selected_.size());
  std::transform(selected_.begin(), selected_.end(), keys_.begin(),
                 [&](std::uint32_t i) { return block.keys[i]; });
  return keys_;
}

void StagedRows::add_rows(const RowBlock& block, const std::string& source,
                          const RestoreOptions& options) {
  select(block, options);
  if (append(block, source, options.drop_state)) return;
  settle();
  const auto n = static_cast<std::int64_t>(selected_.size());
  numbers.prepare_allocate(n);
  const RowNumber end_row = numbers.end() + std::max<std::int64_t>(n - numbers.num_free(), 0);
  rows.grow(end_row);
  rows.populate_pages(numbers.end(), end_row, table.index.max_threads());
  place(selected_keys(block), source);
  parallel_for(n, kCopyGrain, table.index.max_threads(), [&](std::int64_t begin, std::int64_t end) {
    copy(block, options.drop_state, begin, end);
  });
  key_map->adapt(n);
  if (const std::int64_t num_keys = keys_to_ready(); num_keys > 0) key_map->grow_for(num_keys);
}

// How many keys to grow the index for now; 0: none. The expected number may be as wrong as a sparse
// file's size, so it counts for at most a few times the rows that are there.
std::int64_t StagedRows::keys_to_ready() {
  if (numbers.end() <= ready_) return 0;
  const std::int64_t num_keys = std::min(expected_, kMostTimes * numbers.end());
  if (num_keys <= ready_) return 0;
  ready_ = num_keys;
  return num_keys;
}

// Gives keys of the first save, which are all new, one row after the other, so that nothing waits
// for the index. False if it cannot.
bool StagedRows::append(const RowBlock& block, const std::string& source, bool drop_state) {
  const auto n = static_cast<std::int64_t>(selected_.size());
  if (!is_first_ || !numbers.prepare_append(n)) return false;
  rows.grow(numbers.end() + n);
  const std::span<const Key> keys = selected_keys(block);
  const RowNumber first = numbers.end();
  numbers_.resize(keys.size());
  std::iota(numbers_.begin(), numbers_.end(), first);
  const std::vector<Outcome> outcomes(keys.size(), Outcome::kInserted);
  numbers.append(keys, outcomes.data(), RowState::kVisible);
  insert_later({{keys.begin(), keys.end()}, first, 0, source});
  const int max_threads = table.index.max_threads();
  rows.populate_pages(first, first + n, max_threads);
  parallel_for(n, kCopyGrain, max_threads,
               [&](std::int64_t begin, std::int64_t end) { copy(block, drop_state, begin, end); });
  return true;
}

// Inserts the first keys at once: they show whether keys are dense, and few keys need no other
// thread.
void StagedRows::insert_later(NewKeys keys) {
  if (keys.first_row == 0 || table.index.max_threads() == 1) {
    insert(keys);
    if (keys.first_row == 0) return;
    if (const std::int64_t num_keys = keys_to_ready(); num_keys > 0) key_map->grow_for(num_keys);
    return;
  }
  keys.expected = keys_to_ready();
  try {
    // Shared: a child of fork, which leaves the queue behind, must not destroy the index either.
    if (!queue_) {
      queue_ = OwnedHere<IndexQueue>(
          std::in_place, [this, kept = key_map](const NewKeys& later) { insert(later); });
    }
  } catch (const std::system_error&) {
    return insert(keys);  // the system gives no thread
  }
  queue_->push(std::move(keys));
}

void StagedRows::insert(const NewKeys& keys) {
  if (keys.expected > 0) key_map->grow_for(keys.expected);
  const std::size_t n = keys.keys.size();
  std::vector<RowNumber> found(n);
  const auto first = static_cast<std::uint32_t>(keys.first_row);
  if (key_map->can_insert()) {
    std::vector<Outcome> outcomes(n);
    std::vector<std::uint32_t> next(n);
    std::iota(next.begin(), next.end(), first);
    std::size_t num_done = 0;
    key_map->insert(keys.keys, next.data(), found.data(), outcomes.data(), num_done);
  } else {
    for (std::size_t j = 0; j < n; ++j) {
      if (j + kItemsAhead < n) key_map->prefetch(keys.keys[j + kItemsAhead]);
      found[j] = key_map->find_or_insert(keys.keys[j], first + static_cast<std::uint32_t>(j));
    }
  }
  for (std::size_t j = 0; j < n; ++j) {
    if (found[j] != keys.first_row + static_cast<RowNumber>(j))
      throw_twice(table, keys.source, keys.keys[j], "a second time");
  }
  key_map->adapt(static_cast<std::int64_t>(n));
}

void StagedRows::settle() {
  if (!queue_) return;
  queue_->drain();
  queue_.reset();
}

// Gives keys rows: those that they have, or new ones.
void StagedRows::place(std::span<const Key> keys, const std::string& source) {
  numbers_.resize(keys.size());
  if (!is_first_) in_save_->grow(numbers.end() + static_cast<std::int64_t>(keys.size()));
  for (std::size_t j = 0; j < keys.size(); ++j) {
    if (j + kItemsAhead < keys.size()) key_map->prefetch(keys[j + kItemsAhead]);
    const std::uint32_t next = numbers.next_to_allocate();
    const std::uint32_t row = key_map->find_or_insert(keys[j], next);
    if (row == next) {
      numbers.allocate(keys[j], RowState::kVisible);
    } else if (is_of_save(row)) {
      throw_twice(table, source, keys[j], "a second time");
    }
    numbers_[j] = row;
    if (!is_first_) in_save_->set(row);
  }
}

// Rows at selected positions [begin, end).
void StagedRows::copy(const RowBlock& block, bool drop_state, std::int64_t begin,
                      std::int64_t end) const {
  const RowAddresses records = rows.records();
  const std::vector<RowField>& fields = table.layout.fields;
  const auto first = static_cast<std::size_t>(begin);
  const auto count = static_cast<std::size_t>(end - begin);
  const std::span<const RowNumber> to = std::span(numbers_).subspan(first, count);
  for (std::size_t f = 0; f < (drop_state ? 1 : fields.size()); ++f) {
    const auto bytes = static_cast<std::size_t>(file_field(fields[f]).row_bytes());
    const FieldCopy field{fields[f], bytes, block.fields[places.fields[f]], records};
    field.copy_all(std::span(selected_).subspan(first, count), to);
  }
  if (table.index.evictor) copy_meta(block, first, to);
  if (!drop_state) return;
  for (const RowNumber row : to) reset_state(table.layout, records, row);
}

// Rows at selected positions from `first` on to rows (n,).
void StagedRows::copy_meta(const RowBlock& block, std::size_t first,
                           std::span<const RowNumber> to) const {
  const RowMeta& meta = table.index.evictor->meta();
  for (std::size_t j = 0; j < to.size(); ++j) {
    std::int64_t* const words = numbers.meta(to[j]);
    meta.begin_unknown(words);
    for (std::size_t w = 0; w < places.meta.size(); ++w) {
      const auto bytes = static_cast<std::size_t>(file_field(meta.kinds()[w]).row_bytes());
      words[w] = 0;
      std::memcpy(&words[w], block.fields[places.meta[w]] + selected_[first + j] * bytes, bytes);
    }
  }
}

void StagedRows::fit() {
  const Index::Impl& index = table.index;
  if (!index.evictor || !index.config.max_rows) return;
  settle();
  const std::int64_t num_groups = index.capacity->num_groups();
  Capacity capacity(*index.config.max_rows, num_groups, index.config.owned_groups);
  capacity.recount(numbers);
  const std::vector<Capacity::Excess> excess = capacity.find_excess(*index.config.max_rows);
  if (excess.empty()) return;
  std::size_t num_victims = 0;
  for (const Capacity::Excess& of_group : excess) num_victims += of_group.count;
  Evictor evictor(*index.config.eviction, num_groups);
  evictor.forget();
  evictor.refresh(numbers, capacity);
  evictor.begin_call(numbers, {}, num_victims, true);
  std::vector<Evictor::Victim> victims;
  for (const Capacity::Excess& of_group : excess)
    evictor.choose(of_group, std::nullopt, numbers, capacity, victims);
  evicted.reserve(evicted.size() + victims.size());
  numbers.prepare_free(static_cast<std::int64_t>(victims.size()));
  for (const Evictor::Victim& victim : victims) {
    evicted.push_back(victim.key);
    key_map->erase(victim.key);
    numbers.free(victim.row, 0);
  }
  numbers.release_before(1);
}

void StagedRows::erase(const RowBlock& block, const std::string& source,
                       const RestoreOptions& options) {
  settle();
  select(block, options);
  numbers.prepare_free(static_cast<std::int64_t>(selected_.size()));
  for (const std::uint32_t i : selected_) {
    const Key key = block.keys[i];
    const auto row = key_map->erase(key);
    if (!row) continue;
    if (is_of_save(*row)) throw_twice(table, source, key, "both as a row and as erased");
    numbers.free(*row, 0);
  }
  numbers.release_before(1);
}

}  // namespace recsdk::internal
