// Replays bytes as calls of a Table, and compares each answer with a plain model.
//
// Two tables take every call, with another hash seed and number of threads: no answer may depend on
// those. The same function serves a fuzzer (table_fuzzer.cc) and a unit test over seeded bytes
// (table_model_test.cc).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fuzz/byte_reader.h"
#include "fuzz/table_checks.h"
#include "fuzz/table_model.h"
#include "recsdk/table.h"

namespace recsdk::test {

/// The keys most likely to be mistaken for something else come first.
inline Key key_of(std::int64_t n) {
  constexpr std::array kEdges = {Key{0},
                                 Key{-1},
                                 std::numeric_limits<Key>::min(),
                                 std::numeric_limits<Key>::max(),
                                 Key{1},
                                 std::numeric_limits<Key>::min() + 1,
                                 Key{1} << 32,
                                 -(Key{1} << 32)};
  if (n < std::ssize(kEdges)) return kEdges[static_cast<std::size_t>(n)];
  return static_cast<Key>(static_cast<std::uint64_t>(n) * 0xD1342543DE82EF95U);
}

class TableReplay {
 public:
  explicit TableReplay(ByteReader input)
      : input_(input), config_(draw_config()), model_(config_), tables_{make(1, 11), make(3, 99)} {}

  void run() {
    while (!input_.is_done()) {
      step();
      check_sizes();
    }
    check_everything();
    while (!batches_.empty()) release_batch(0);
    check_everything();
  }

 private:
  struct Batch {
    ModelBatchPtr model;
    std::array<Lease, 2> leases;
  };
  struct Answer {
    std::vector<RowNumber> rows;
    std::vector<Outcome> outcomes;
    std::vector<float> values;

    bool operator==(const Answer&) const = default;
  };

  // Making the tables.

  TableConfig draw_config() {
    TableConfig config;
    config.dim = std::array{1, 3, 4, 17}[static_cast<std::size_t>(input_.below(4))];
    config.default_row.value = 0.5F;
    config.optimizer = input_.flag() ? OptimizerConfig::adagrad(0.5F) : OptimizerConfig::sgd(0.5F);
    constexpr std::array kLimits = {0, 1, 7, 60, 1000};
    const std::int64_t limit = input_.below(12);
    if (limit < std::ssize(kLimits)) config.max_rows = kLimits[static_cast<std::size_t>(limit)];
    config.initializer =
        InitializerConfig::custom([dim = config.dim](std::span<const Key> keys, float* values) {
          for (const Key key : keys) {
            for (std::int64_t c = 0; c < dim; ++c) *values++ = initial_weight(key, c);
          }
        });
    return config;
  }

  Table make(int num_threads, std::uint64_t hash_seed) const {
    TableConfig config = config_;
    config.num_threads = num_threads;
    config.hash_seed = hash_seed;
    return Table(config);
  }

  // Drawing arguments.

  std::vector<Key> draw_keys() {
    const std::int64_t num_keys = input_.below(24);
    std::vector<Key> keys;
    for (std::int64_t i = 0; i < num_keys; ++i) keys.push_back(key_of(input_.below(256)));
    return keys;
  }

  /// Enough keys for segments to split.
  std::vector<Key> draw_many_keys() {
    const std::int64_t first = input_.below(4096);
    const std::int64_t num_keys = input_.below(1024);
    std::vector<Key> keys;
    for (std::int64_t i = 0; i < num_keys; ++i) keys.push_back(key_of(first + i));
    return keys;
  }

  std::vector<float> draw_floats(std::size_t size) {
    std::vector<float> values(size);
    for (float& value : values) value = static_cast<float>(input_.below(5)) - 2.0F;
    return values;
  }

  /// The batch that inserts next: the latest with a step if there are any, else any or none.
  Batch* draw_batch() {
    if (batches_.empty() || input_.below(8) == 0) return nullptr;
    for (std::size_t i = batches_.size(); i-- > 0;) {
      if (batches_[i].model->step) return &batches_[i];
    }
    return &batches_[static_cast<std::size_t>(input_.below(std::ssize(batches_)))];
  }

  // Calling both tables.

  static const Lease* lease_of(Batch* batch, std::size_t t) {
    return batch == nullptr ? nullptr : &batch->leases[t];
  }
  static bool has_step(const Batch* batch) {
    return batch != nullptr && batch->model->step.has_value();
  }

  /// call(table, t) on both; with `is_busy` it must be refused.
  template <typename Call>
  void call_both(bool is_busy, const Call& call) {
    for (std::size_t t = 0; t < 2; ++t) {
      bool was_busy = false;
      try {
        call(tables_[t], t);
      } catch (const Error& error) {
        require(error.code() == ErrorCode::kBusy, "the only error is kBusy");
        was_busy = true;
      }
      require(was_busy == is_busy, "a call is busy if and only if steps are in flight");
    }
  }

  Answer ask_map(std::span<const Key> keys, bool insert, Batch* batch) {
    std::array<Answer, 2> answers;
    call_both(false, [&](Table& table, std::size_t t) {
      Answer& a = answers[t];
      a.rows.resize(keys.size());
      a.outcomes.resize(keys.size());
      table.map(keys, a.rows, a.outcomes, {.insert = insert, .lease = lease_of(batch, t)});
      for (std::size_t i = 0; i < keys.size(); ++i) {
        if (!has_row(a.outcomes[i])) a.rows[i] = 0;  // unspecified
      }
    });
    require(answers[0] == answers[1], "row numbers depend on no hash seed");
    return answers[0];
  }

  // Comparing with the model.

  void require_rows(std::span<const Key> keys, const Answer& answer) const {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      require_row(model_, keys[i], answer.outcomes[i], answer.values.data() + i * model_.dim());
    }
  }

  /// A key's row number never changes, and none that a batch may use is given to another key.
  void learn_row_numbers(std::span<const Key> keys, const Answer& answer) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (!has_row(answer.outcomes[i])) continue;
      ModelRow& row = model_.rows.at(keys[i]);
      if (row.number) {
        require(*row.number == answer.rows[i], "a row number is stable");
        continue;
      }
      row.number = answer.rows[i];
      for (const KeptRow& kept : model_.kept) {
        require(kept.number != *row.number || !kept.is_in_use(), "a row in use is not given away");
      }
    }
  }

  // Operations.

  void step() {
    using Operation = void (TableReplay::*)();
    static constexpr std::array<Operation, 16> kOperations = {
        &TableReplay::find_or_insert,  &TableReplay::map_inserting,
        &TableReplay::map_finding,     &TableReplay::lookup,
        &TableReplay::upsert,          &TableReplay::erase,
        &TableReplay::apply_gradients, &TableReplay::train,
        &TableReplay::train,           &TableReplay::open_batch,
        &TableReplay::open_batch,      &TableReplay::close_batch,
        &TableReplay::close_batch,     &TableReplay::insert_or_erase_many,
        &TableReplay::rarely,          &TableReplay::check_everything};
    (this->*kOperations[static_cast<std::size_t>(input_.below(16))])();
  }

  void find_or_insert() {
    const std::vector<Key> keys = draw_keys();
    Batch* const batch = draw_batch();
    const bool is_busy = model_.has_open_steps() && !has_step(batch);
    std::array<Answer, 2> answers;
    call_both(is_busy, [&](Table& table, std::size_t t) {
      answers[t].outcomes.resize(keys.size());
      answers[t].values.resize(keys.size() * model_.dim());
      table.find_or_insert(keys, answers[t].values.data(), answers[t].outcomes, lease_of(batch, t));
    });
    if (is_busy) return;
    require(answers[0] == answers[1], "find_or_insert depends on no hash seed");
    const auto wanted = model_.insert(keys, batch == nullptr ? nullptr : batch->model);
    require(answers[0].outcomes == wanted, "outcomes of find_or_insert");
    require_rows(keys, answers[0]);
    find(keys, batch);  // to learn row numbers
  }

  void map_inserting() { insert(draw_keys(), draw_batch()); }

  void insert(const std::vector<Key>& keys, Batch* batch) {
    if (model_.has_open_steps() && !has_step(batch)) {
      std::vector<RowNumber> rows(keys.size());
      std::vector<Outcome> outcomes(keys.size());
      call_both(true, [&](Table& table, std::size_t) {
        table.map(keys, rows, outcomes, {.insert = true});
      });
      return;
    }
    const Answer answer = ask_map(keys, true, batch);
    const auto wanted = model_.insert(keys, batch == nullptr ? nullptr : batch->model);
    require(answer.outcomes == wanted, "outcomes of map with insertion");
    learn_row_numbers(keys, answer);
  }

  void map_finding() { find(draw_keys(), draw_batch()); }

  Answer find(const std::vector<Key>& keys, Batch* batch) {
    const Answer answer = ask_map(keys, false, batch);
    require(answer.outcomes == model_.find(keys, batch == nullptr ? nullptr : batch->model),
            "outcomes of map");
    learn_row_numbers(keys, answer);
    return answer;
  }

  void lookup() { look_up(draw_keys()); }

  void look_up(const std::vector<Key>& keys) {
    std::array<Answer, 2> answers;
    call_both(false, [&](Table& table, std::size_t t) {
      answers[t].outcomes.resize(keys.size());
      answers[t].values.resize(keys.size() * model_.dim());
      table.lookup(keys, answers[t].values.data(), answers[t].outcomes);
    });
    require(answers[0] == answers[1], "lookup depends on no hash seed");
    require(answers[0].outcomes == model_.find(keys), "outcomes of lookup");
    require_rows(keys, answers[0]);
  }

  void upsert() {
    const std::vector<Key> keys = draw_keys();
    const std::vector<float> values = draw_floats(keys.size() * model_.dim());
    const std::vector<float> drawn = draw_floats(keys.size() * model_.state_width());
    std::vector<float> state;
    for (const float x : drawn) state.push_back(std::abs(x));
    const float* const given = input_.flag() ? state.data() : nullptr;
    std::vector<Outcome> outcomes(keys.size());
    call_both(model_.has_open_steps(), [&](Table& table, std::size_t) {
      table.upsert(keys, values.data(), given, outcomes);
    });
    if (model_.has_open_steps()) return;
    require(outcomes == model_.upsert(keys, values.data(), given), "outcomes of upsert");
    find(keys, nullptr);
  }

  void erase() { erase_keys(draw_keys()); }

  void erase_keys(const std::vector<Key>& keys) {
    std::vector<Outcome> outcomes(keys.size());
    call_both(model_.has_open_steps(),
              [&](Table& table, std::size_t) { table.erase(keys, outcomes); });
    if (model_.has_open_steps()) return;
    require(outcomes == model_.erase(keys), "outcomes of erase");
  }

  void apply_gradients() {
    const std::vector<Key> keys = draw_keys();
    const std::vector<float> gradients = draw_floats(keys.size() * model_.dim());
    std::vector<Outcome> outcomes(keys.size());
    call_both(false, [&](Table& table, std::size_t) {
      table.apply_gradients(keys, gradients.data(), outcomes);
    });
    require(outcomes == model_.find(keys), "outcomes of apply_gradients");
    model_.update(keys, outcomes, gradients.data());
  }

  /// A step as a model makes it: map the batch, pool its bags, update with their gradients.
  void train() {
    const std::vector<Key> keys = draw_keys();
    Batch* const batch = draw_batch();
    if (model_.has_open_steps() && !has_step(batch)) return;
    insert(keys, batch);
    const Answer mapped = find(keys, batch);
    std::vector<std::int64_t> offsets = {0};
    while (offsets.back() < std::ssize(keys)) {
      offsets.push_back(std::min(offsets.back() + input_.below(5), std::ssize(keys)));
      if (offsets.size() > 2 * keys.size()) offsets.back() = std::ssize(keys);
    }
    const Bags bags{.rows = mapped.rows,
                    .outcomes = mapped.outcomes,
                    .offsets = offsets,
                    .weights = {},
                    .pooling = input_.flag() ? Pooling::kMean : Pooling::kSum};
    pool(keys, bags);
    if (input_.flag()) update(keys, bags);
  }

  void pool(const std::vector<Key>& keys, const Bags& bags) {
    const std::size_t num_bags = static_cast<std::size_t>(bags.num_bags());
    std::array<std::vector<float>, 2> out;
    call_both(false, [&](Table& table, std::size_t t) {
      out[t].resize(num_bags * model_.dim());
      const PoolBlock block{.bags = bags, .out = out[t].data(), .stride = config_.dim};
      table.pool({&block, 1});
    });
    require(out[0] == out[1], "pooling depends on no hash seed");
    for (std::size_t b = 0; b < num_bags; ++b) {
      const std::vector<float> wanted = pooled(keys, bags, b);
      for (std::size_t c = 0; c < model_.dim(); ++c) {
        require(TableModel::is_near(out[0][b * model_.dim() + c], wanted[c]),
                "the pooled vector is the model's");
      }
    }
  }

  std::vector<float> pooled(const std::vector<Key>& keys, const Bags& bags, std::size_t bag) const {
    std::vector<float> sum(model_.dim(), 0.0F);
    const auto begin = static_cast<std::size_t>(bags.offsets[bag]);
    const auto end = static_cast<std::size_t>(bags.offsets[bag + 1]);
    for (std::size_t i = begin; i < end; ++i) {
      for (std::size_t c = 0; c < model_.dim(); ++c) {
        sum[c] +=
            has_row(bags.outcomes[i]) ? model_.rows.at(keys[i]).weights[c] : model_.default_value();
      }
    }
    const bool divides = bags.pooling == Pooling::kMean && end > begin;
    for (float& x : sum) x /= divides ? static_cast<float>(end - begin) : 1.0F;
    return sum;
  }

  void update(const std::vector<Key>& keys, const Bags& bags) {
    const std::vector<float> grad =
        draw_floats(static_cast<std::size_t>(bags.num_bags()) * model_.dim());
    call_both(false, [&](Table& table, std::size_t) {
      const GradBlock block{
          .bags = bags, .grad = grad.data(), .stride = config_.dim, .weights_grad = nullptr};
      table.update({&block, 1});
    });
    std::vector<float> per_key;  // (N, D)
    for (std::size_t b = 0; b + 1 < bags.offsets.size(); ++b) {
      const auto size = static_cast<float>(bags.offsets[b + 1] - bags.offsets[b]);
      for (std::int64_t i = bags.offsets[b]; i < bags.offsets[b + 1]; ++i) {
        for (std::size_t c = 0; c < model_.dim(); ++c) {
          per_key.push_back(grad[b * model_.dim() + c] /
                            (bags.pooling == Pooling::kMean ? size : 1.0F));
        }
      }
    }
    model_.update(keys, bags.outcomes, per_key.data());
  }

  void open_batch() {
    if (batches_.size() >= 6) return;
    std::optional<std::int64_t> step;
    if (input_.below(4) != 0) step = last_step_ + input_.below(3);
    Batch batch;
    batch.model = model_.open(step);
    call_both(false, [&](Table& table, std::size_t t) { batch.leases[t] = table.lease(step); });
    batches_.push_back(std::move(batch));
    last_step_ = step.value_or(last_step_);
  }

  void close_batch() {
    if (!batches_.empty())
      release_batch(static_cast<std::size_t>(input_.below(std::ssize(batches_))));
  }

  void release_batch(std::size_t i) {
    for (Lease& lease : batches_[i].leases) lease.release();
    model_.close(*batches_[i].model);
    batches_.erase(batches_.begin() + static_cast<std::ptrdiff_t>(i));
    std::erase_if(model_.kept, [](const KeptRow& kept) { return !kept.is_in_use(); });
  }

  void insert_or_erase_many() {
    const std::vector<Key> keys = draw_many_keys();
    const std::int64_t what = input_.below(4);
    if (what > 0) insert(keys, draw_batch());
    if (what < 2) erase_keys(keys);
  }

  void rarely() {
    switch (input_.below(4)) {
      case 0:
        call_both(model_.has_open_steps(), [](Table& table, std::size_t) { table.clear(); });
        if (!model_.has_open_steps()) model_.clear();
        return;
      case 1: {
        const std::int64_t num_rows = input_.below(5000);
        call_both(false, [&](Table& table, std::size_t) { table.reserve(num_rows); });
        return;
      }
      default:
        return take_a_step_back();
    }
  }

  void take_a_step_back() {
    if (last_step_ == 0) return;
    for (Table& table : tables_) {
      bool is_refused = false;
      try {
        table.lease(last_step_ - 1);
      } catch (const std::invalid_argument&) {
        is_refused = true;
      }
      require(is_refused, "steps ascend");
    }
  }

  // Whole-table checks.

  void check_sizes() const {
    for (const Table& table : tables_) {
      require(table.size() == model_.num_visible(), "size counts the visible rows");
      table.check_invariants();
    }
  }

  void check_everything() {
    check_row_owners(model_);
    for (const Table& table : tables_) {
      check_stats(table, model_);
      check_kept_rows(table, model_);
      check_export(table, model_, 1 + input_.below(50));
    }
    std::vector<Key> keys;
    for (const auto& [key, row] : model_.rows) keys.push_back(key);
    look_up(keys);
  }

  ByteReader input_;
  TableConfig config_;
  TableModel model_;
  std::array<Table, 2> tables_;
  std::vector<Batch> batches_;
  std::int64_t last_step_ = 0;
};

/// Throws if a table and the model disagree.
inline void run_operations(const std::uint8_t* data, std::size_t size) {
  TableReplay(ByteReader(data, size)).run();
}

}  // namespace recsdk::test
