#include "checkpoint/staged_rows.h"

#include <algorithm>
#include <cstring>

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

[[noreturn, gnu::cold]] void throw_twice(const Table::Impl& table, const RowFileReader& file,
                                         Key key, const char* how) {
  throw Error(ErrorCode::kCheckpoint, table.title() + ": '" + file.name() + "' has key " +
                                          std::to_string(key) + " " + how +
                                          "; the checkpoint is damaged: load another one");
}

}  // namespace

StagedRows::StagedRows(const Table::Impl& target)
    : table(target), index(target.hash_seed), rows(target.layout) {}

void StagedRows::begin_save() { in_save_.emplace(); }

void StagedRows::select(const RowBlock& block, const RestoreOptions& options) {
  selected_.clear();
  selected_.reserve(block.keys.size());
  for (std::size_t i = 0; i < block.keys.size(); ++i) {
    if (is_kept(block.keys[i], options)) selected_.push_back(static_cast<std::uint32_t>(i));
  }
}

std::uint32_t StagedRows::row_of(Key key) {
  if (const auto row = index.find_or_insert(key, rows.next_to_allocate())) return *row;
  return rows.allocate(key, RowState::kVisible);
}

// Gives the selected keys rows.
void StagedRows::place(const RowBlock& block, const RowFileReader& file) {
  const auto n = static_cast<std::int64_t>(selected_.size());
  rows.prepare_allocate(n);
  in_save_->grow(rows.end() + n);
  numbers_.resize(selected_.size());
  for (std::size_t j = 0; j < selected_.size(); ++j) {
    if (j + kAhead < selected_.size()) index.prefetch(block.keys[selected_[j + kAhead]]);
    const Key key = block.keys[selected_[j]];
    numbers_[j] = row_of(key);
    if (in_save_->test(numbers_[j])) throw_twice(table, file, key, "a second time");
    in_save_->set(numbers_[j]);
  }
  index.adapt(n);
}

void StagedRows::copy(const RowBlock& block, const RowFileHeader& header, bool drop_state) {
  const RowAddresses records = rows.records();
  const std::size_t num_fields = drop_state ? 1 : table.layout.fields.size();
  const auto copy_row = [&](std::size_t j) {
    for (std::size_t f = 0; f < num_fields; ++f) {
      const auto bytes = static_cast<std::size_t>(header.fields[f].row_bytes());
      std::memcpy(field_address(records, table.layout.fields[f], numbers_[j]),
                  block.fields[f] + selected_[j] * bytes, bytes);
    }
    if (drop_state) reset_state(table.layout, records, numbers_[j]);
  };
  parallel_for(static_cast<std::int64_t>(numbers_.size()), kCopyGrain, table.max_threads(),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t j = begin; j < end; ++j) copy_row(static_cast<std::size_t>(j));
               });
}

void StagedRows::add_rows(const RowBlock& block, const RowFileReader& file,
                          const RestoreOptions& options) {
  select(block, options);
  place(block, file);
  copy(block, file.header(), options.drop_state);
}

void StagedRows::erase(const RowBlock& block, const RowFileReader& file,
                       const RestoreOptions& options) {
  select(block, options);
  rows.prepare_free(static_cast<std::int64_t>(selected_.size()));
  for (const std::uint32_t i : selected_) {
    const Key key = block.keys[i];
    const auto row = index.erase(key);
    if (!row) continue;
    if (in_save_->num_words() * kWordRows > *row && in_save_->test(*row))
      throw_twice(table, file, key, "both as a row and as erased");
    rows.free(*row, 0);
  }
  rows.release_before(1);
}

}  // namespace recsdk::internal
