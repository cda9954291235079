// What a Table promises, in the plainest code: a std::unordered_map of rows and a list of batches.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "recsdk/table.h"
#include "support/room_model.h"

namespace recsdk::test {

/// Throws std::logic_error, which ends a test or a fuzzer's run, if a claim does not hold.
inline void require(bool holds, const char* claim) {
  if (!holds) throw std::logic_error(std::string("does not hold: ") + claim);
}

/// The first value of a row that the tables of these tests make: few bits, so that sums are exact.
inline float initial_weight(Key key, std::int64_t column) {
  const std::uint64_t mixed = static_cast<std::uint64_t>(key) * 0x9E3779B97F4A7C15U >> 59;
  return static_cast<float>(mixed) * 0.25F - 4.0F + static_cast<float>(column);
}

/// A batch in flight, as the model sees it.
struct ModelBatch {
  std::optional<std::int64_t> step;
  bool is_open = true;
  std::array<std::uint64_t, kNumOutcomes> outcomes{};
};
using ModelBatchPtr = std::shared_ptr<ModelBatch>;

struct ModelRow {
  std::vector<float> weights;
  std::vector<float> state;
  std::optional<RowNumber> number;  // learned from the first answer of the table
  ModelBatchPtr hidden_by;          // null: readers see the row
};

/// A row that left while batches were in flight, which may still use it.
struct KeptRow {
  RowNumber number;
  std::vector<float> weights;
  std::vector<ModelBatchPtr> users;

  bool is_in_use() const {
    return std::any_of(users.begin(), users.end(),
                       [](const ModelBatchPtr& batch) { return batch->is_open; });
  }
};

class TableModel {
 public:
  explicit TableModel(const TableConfig& config) : config_(config) {}

  // Batches.

  ModelBatchPtr open(std::optional<std::int64_t> step) {
    auto batch = std::make_shared<ModelBatch>();
    batch->step = step;
    batches_.push_back(batch);
    if (step) steps_.push_back(batch);
    return batch;
  }

  void close(ModelBatch& batch) {
    batch.is_open = false;
    std::erase_if(batches_, [](const ModelBatchPtr& b) { return !b->is_open; });
    while (!steps_.empty() && !steps_.front()->is_open) {
      for (auto& [key, row] : rows) {
        if (row.hidden_by == steps_.front()) row.hidden_by = nullptr;
      }
      for (std::size_t o = 0; o < kNumOutcomes; ++o) outcomes[o] += steps_.front()->outcomes[o];
      steps_.pop_front();
    }
  }

  bool has_open_steps() const { return !steps_.empty(); }

  // Calls; each returns what becomes of the keys.

  std::vector<Outcome> insert(std::span<const Key> keys, const ModelBatchPtr& batch) {
    const bool is_hidden = batch != nullptr && batch->step.has_value();
    std::vector<Outcome> result;
    const auto refused = refused_keys(keys, rows, config_.max_rows);
    for (const Key key : keys) {
      result.push_back(refused.contains(key) ? Outcome::kRefused
                                             : insert_one(key, is_hidden ? batch : nullptr));
    }
    count(result, is_hidden ? batch->outcomes : outcomes);
    return result;
  }

  std::vector<Outcome> find(std::span<const Key> keys, const ModelBatchPtr& batch = nullptr) {
    const bool sees_hidden = batch != nullptr && batch->step.has_value();
    std::vector<Outcome> result;
    for (const Key key : keys) {
      const auto it = rows.find(key);
      const bool is_found = it != rows.end() && (sees_hidden || it->second.hidden_by == nullptr);
      result.push_back(is_found ? Outcome::kFound : Outcome::kMissing);
    }
    count(result, sees_hidden ? batch->outcomes : outcomes);
    return result;
  }

  std::vector<Outcome> upsert(std::span<const Key> keys, const float* values, const float* state) {
    const std::vector<Outcome> result = insert(keys, nullptr);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (!has_row(result[i])) continue;
      ModelRow& row = rows.at(keys[i]);
      row.weights.assign(values + i * dim(), values + (i + 1) * dim());
      if (state == nullptr) {
        row.state = fresh_state();
      } else {
        row.state.assign(state + i * state_width(), state + (i + 1) * state_width());
      }
    }
    return result;
  }

  std::vector<Outcome> erase(std::span<const Key> keys) {
    std::vector<Outcome> result;
    for (const Key key : keys) {
      const auto it = rows.find(key);
      result.push_back(it == rows.end() ? Outcome::kMissing : Outcome::kFound);
      if (it == rows.end()) continue;
      if (!batches_.empty()) {
        kept.push_back({it->second.number.value(), it->second.weights, batches_});
      }
      rows.erase(it);
      ++erased;
    }
    count(result, outcomes);
    return result;
  }

  void clear() {
    for (const auto& [key, row] : rows) {
      if (!batches_.empty()) kept.push_back({row.number.value(), row.weights, batches_});
    }
    erased += rows.size();
    rows.clear();
  }

  /// One update with gradients (N, D), added up per key; those of keys without a row are left out.
  void update(std::span<const Key> keys, std::span<const Outcome> found, const float* gradients) {
    std::unordered_map<Key, std::vector<float>> sums;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (!has_row(found[i])) continue;
      std::vector<float>& sum = sums.try_emplace(keys[i], dim(), 0.0F).first->second;
      for (std::size_t c = 0; c < dim(); ++c) sum[c] += gradients[i * dim() + c];
    }
    for (const auto& [key, sum] : sums) update_row(rows.at(key), sum);
    ++updates;
  }

  // What readers see.

  /// Weights are equal but for the order of additions and roundings of an optimizer.
  static bool is_near(float a, float b) { return std::abs(a - b) <= 1e-3F * (1.0F + std::abs(b)); }

  std::int64_t num_visible() const {
    return std::count_if(rows.begin(), rows.end(),
                         [](const auto& entry) { return entry.second.hidden_by == nullptr; });
  }

  float default_value() const { return config_.default_row.value; }
  std::size_t dim() const { return static_cast<std::size_t>(config_.dim); }
  std::size_t state_width() const { return has_state() ? dim() : 0; }

  std::unordered_map<Key, ModelRow> rows;
  std::vector<KeptRow> kept;
  std::array<std::uint64_t, kNumOutcomes> outcomes{};
  std::uint64_t erased = 0;
  std::uint64_t updates = 0;

 private:
  bool has_state() const { return config_.optimizer.kind == OptimizerKind::kAdagrad; }
  std::vector<float> fresh_state() const {
    return std::vector<float>(state_width(), config_.optimizer.initial_accumulator_value);
  }

  static void count(std::span<const Outcome> result,
                    std::array<std::uint64_t, kNumOutcomes>& counts) {
    for (const Outcome outcome : result) ++counts[static_cast<std::size_t>(outcome)];
  }

  Outcome insert_one(Key key, const ModelBatchPtr& hidden_by) {
    if (rows.contains(key)) return Outcome::kFound;
    ModelRow& row = rows[key];
    for (std::int64_t c = 0; c < config_.dim; ++c) row.weights.push_back(initial_weight(key, c));
    row.state = fresh_state();
    row.hidden_by = hidden_by;
    return Outcome::kInserted;
  }

  void update_row(ModelRow& row, std::span<const float> gradient) const {
    const OptimizerConfig& o = config_.optimizer;
    for (std::size_t c = 0; c < dim(); ++c) {
      float scale = 1.0F;
      if (has_state()) {
        row.state[c] += gradient[c] * gradient[c];
        scale = 1.0F / (std::sqrt(row.state[c]) + o.eps);
      }
      row.weights[c] -= o.learning_rate * gradient[c] * scale;
    }
  }

  TableConfig config_;
  std::vector<ModelBatchPtr> batches_;  // open ones
  std::deque<ModelBatchPtr> steps_;     // with a step, until visible
};

}  // namespace recsdk::test
