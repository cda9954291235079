#include "checkpoint/staged_rows.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "embedding/row_values.h"
#include "util/thread_pool.h"

namespace recsdk::internal {
namespace {

constexpr std::int64_t kCopyGrain = 1024;
constexpr std::size_t kAhead = 16;

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
  void copy(std::size_t from, std::uint32_t to, std::size_t count) const {
    std::memcpy(field_address(records, field, to), source + from * bytes, count * bytes);
  }

  /// Rows at positions (n,) of the block to rows (n,).
  void copy_all(std::span<const std::uint32_t> from, std::span<const std::uint32_t> to) const {
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
    : table(target), index(target.hash_seed), rows(target.layout) {}

void StagedRows::begin_save() {
  is_first_ = rows.end() == 0;
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

// All rows there are were brought by the first save; those of later ones are marked.
bool StagedRows::is_of_save(std::uint32_t row) const {
  return is_first_ || (row < in_save_->num_words() * kWordRows && in_save_->test(row));
}

// Gives the selected keys rows.
void StagedRows::place(const RowBlock& block, const std::string& source) {
  const auto n = static_cast<std::int64_t>(selected_.size());
  rows.prepare_allocate(n);
  rows.populate_next(n - rows.num_free(), table.max_threads());
  if (!is_first_) in_save_->grow(rows.end() + n);
  numbers_.resize(selected_.size());
  for (std::size_t j = 0; j < selected_.size(); ++j) {
    if (j + kAhead < selected_.size()) index.prefetch(block.keys[selected_[j + kAhead]]);
    const Key key = block.keys[selected_[j]];
    const std::uint32_t next = rows.next_to_allocate();
    numbers_[j] = index.find_or_insert(key, next);
    if (numbers_[j] == next) {
      rows.allocate(key, RowState::kVisible);
    } else if (is_of_save(numbers_[j])) {
      throw_twice(table, source, key, "a second time");
    }
    if (!is_first_) in_save_->set(numbers_[j]);
  }
  index.adapt(n);
  // Only now: the first keys have shown whether they are dense.
  if (expected_ > 0) index.grow_for(std::exchange(expected_, 0));
}

void StagedRows::copy(const RowBlock& block, bool drop_state) {
  const RowAddresses records = rows.records();
  const std::vector<RowField>& fields = table.layout.fields;
  const auto copy_rows = [&](std::int64_t begin, std::int64_t end) {
    const auto first = static_cast<std::size_t>(begin);
    const auto count = static_cast<std::size_t>(end - begin);
    const std::span<const std::uint32_t> to = std::span(numbers_).subspan(first, count);
    for (std::size_t f = 0; f < (drop_state ? 1 : fields.size()); ++f) {
      const auto bytes = static_cast<std::size_t>(file_field(fields[f]).row_bytes());
      const FieldCopy field{fields[f], bytes, block.fields[f], records};
      field.copy_all(std::span(selected_).subspan(first, count), to);
    }
    if (!drop_state) return;
    for (const std::uint32_t row : to) reset_state(table.layout, records, row);
  };
  parallel_for(static_cast<std::int64_t>(numbers_.size()), kCopyGrain, table.max_threads(),
               copy_rows);
}

void StagedRows::add_rows(const RowBlock& block, const std::string& source,
                          const RestoreOptions& options) {
  select(block, options);
  place(block, source);
  copy(block, options.drop_state);
}

void StagedRows::erase(const RowBlock& block, const std::string& source,
                       const RestoreOptions& options) {
  select(block, options);
  rows.prepare_free(static_cast<std::int64_t>(selected_.size()));
  for (const std::uint32_t i : selected_) {
    const Key key = block.keys[i];
    const auto row = index.erase(key);
    if (!row) continue;
    if (is_of_save(*row)) throw_twice(table, source, key, "both as a row and as erased");
    rows.free(*row, 0);
  }
  rows.release_before(1);
}

}  // namespace recsdk::internal
