#include "table/default_reader.h"

#include <cstdint>
#include <numeric>

#include "rows/row_values.h"
#include "util/thread_pool.h"

namespace recsdk::internal {
namespace {

constexpr std::int64_t kRowGrain = 1024;  // rows a piece of a parallel initialization
constexpr std::int64_t kStep = 16;        // bytes in which records are read

}  // namespace

DefaultReader::DefaultReader(const Table::Impl& table, std::span<const RowNumber> rows,
                             std::span<const Outcome> outcomes)
    : given_(rows.data()), defaults_{.value = table.config.default_row.value} {
  if (table.shared) {
    defaults_.has_rows = true;
    defaults_.rows = table.shared->records();
  } else if (table.config.default_row.kind == DefaultKind::kInitialRow) {
    make_initial(table, rows, outcomes);
  }
}

// The index gives the key itself in place of a row number.
void DefaultReader::make_initial(const Table::Impl& table, std::span<const RowNumber> rows,
                                 std::span<const Outcome> outcomes) {
  std::vector<Key> keys;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!has_row(outcomes[i])) keys.push_back(rows[i]);
  }
  if (keys.empty()) return;
  made_.assign(rows.begin(), rows.end());
  RowNumber next = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!has_row(outcomes[i])) made_[i] = next++;
  }
  const TableConfig& config = table.config;
  const std::int64_t stride =
      (config.dim * bytes_of(config.weight_dtype) + kStep - 1) / kStep * kStep;
  memory_.resize(next * stride);
  slab_ = memory_.data();
  defaults_.has_rows = true;
  defaults_.rows = {&slab_, 32, 0xFFFF'FFFF, stride, 0, 0};
  if (config.initializer.kind == InitializerKind::kCustom) return call_custom(table, keys);
  std::vector<std::uint32_t> numbers(keys.size());
  std::iota(numbers.begin(), numbers.end(), 0U);
  parallel_for(next, kRowGrain, table.index.max_threads(),
               [&](std::int64_t begin, std::int64_t end) {
                 kernels().initialize({&config.initializer, config.seed, table.table_hash,
                                       config.dim, keys.data() + begin, end - begin, defaults_.rows,
                                       config.weight_dtype, numbers.data() + begin, nullptr});
               });
}

// It must not call the table, whose rows are locked.
void DefaultReader::call_custom(const Table::Impl& table, const std::vector<Key>& keys) {
  const auto dim = static_cast<std::size_t>(table.config.dim);
  std::vector<float> weights(keys.size() * dim);
  {
    const FairMutex::CallbackScope of_index(table.index.mutex);
    const FairMutex::CallbackScope of_rows(table.rows_mutex);
    table.config.initializer.callback(keys, weights.data());
  }
  for (std::size_t i = 0; i < keys.size(); ++i)
    write_weights(table.layout, defaults_.rows, static_cast<std::int64_t>(i),
                  weights.data() + i * dim);
}

}  // namespace recsdk::internal
