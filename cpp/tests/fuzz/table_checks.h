// Compares what a table shows as a whole with the model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "fuzz/table_model.h"
#include "recsdk/table.h"

namespace recsdk::test {

inline void require_row(const TableModel& model, Key key, Outcome outcome, const float* values) {
  const ModelRow* row = has_row(outcome) ? &model.rows.at(key) : nullptr;
  for (std::size_t c = 0; c < model.dim(); ++c) {
    const float wanted = row == nullptr ? model.default_value() : row->weights[c];
    require(TableModel::is_near(values[c], wanted), "the vector is the model's");
  }
}

inline void check_stats(const Table& table, const TableModel& model) {
  const TableStats stats = table.stats();
  require(stats.num_rows == model.num_visible(), "stats: num_rows");
  require(stats.num_rows + stats.num_rows_in_flight == std::ssize(model.rows),
          "stats: num_rows_in_flight");
  require(std::equal(model.outcomes.begin(), model.outcomes.end(), stats.outcomes),
          "stats: outcomes");
  require(stats.erased == model.erased, "stats: erased");
  require(stats.updates == model.updates, "stats: updates");
}

inline void check_row_owners(const TableModel& model) {
  std::set<RowNumber> taken;
  for (const auto& [key, row] : model.rows) {
    require(taken.insert(row.number.value()).second, "no two keys share a row");
  }
}

/// Batches still read the rows that left while they were in flight.
inline void check_kept_rows(const Table& table, const TableModel& model) {
  for (const KeptRow& kept : model.kept) {
    const Outcome outcome = Outcome::kFound;
    std::vector<float> out(model.dim());
    PoolBlock block{.bags = {}, .out = out.data(), .stride = std::ssize(out)};
    block.bags.rows = {&kept.number, 1};
    block.bags.outcomes = {&outcome, 1};
    table.pool({&block, 1});
    for (std::size_t c = 0; c < out.size(); ++c) {
      require(TableModel::is_near(out[c], kept.weights[c]), "a row in use keeps its values");
    }
  }
}

inline void check_export(const Table& table, const TableModel& model, std::int64_t capacity) {
  std::vector<Key> keys(static_cast<std::size_t>(capacity));
  std::vector<float> weights(keys.size() * model.dim());
  std::vector<float> state(keys.size() * model.state_width());
  const ExportBuffer buffer{
      .capacity = capacity, .keys = keys.data(), .weights = weights.data(), .state = state.data()};
  RowNumber begin = 0;
  RowNumber last = -1;
  std::int64_t total = 0;
  for (std::int64_t n = capacity; n == capacity; total += n) {
    n = table.export_rows(begin, buffer);
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      const ModelRow& row = model.rows.at(keys[i]);
      require(row.hidden_by == nullptr, "only visible rows are exported");
      require(row.number.value() > last, "rows are exported in their order");
      last = row.number.value();
      require_row(model, keys[i], Outcome::kFound, weights.data() + i * model.dim());
      for (std::size_t c = 0; c < row.state.size(); ++c) {
        require(TableModel::is_near(state[i * row.state.size() + c], row.state[c]),
                "the state is the model's");
      }
    }
  }
  require(total == model.num_visible(), "every visible row is exported");
}

}  // namespace recsdk::test
