// Replays bytes as calls of the C interface, with arguments of every kind: null pointers, negative
// counts, numbers out of range, handles of another table. What is refused says why and has changed
// nothing; what is done, is done on a plain map too. The same body is a unit test and a fuzz
// target.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "fuzz/c_handle.h"
#include "fuzz/odd_arguments.h"
#include "fuzz/table_model.h"
#include "fuzz/table_operations.h"
#include "recsdk/c_api.h"

namespace recsdk::test {

inline void end_index_cut(recsdk_index_cut* cut) { recsdk_index_cut_finish(cut, 0); }

class CApiReplay : OddArguments {
 public:
  CApiReplay(const std::uint8_t* data, std::size_t size) : OddArguments(data, size) {
    for (std::size_t number = 0; number < tables_.size(); ++number) make_table(number);
    make_index();
    make_device_table();
  }

  void run() {
    while (!in_.is_done()) {
      step();
      check();
    }
  }

 private:
  static constexpr int kNumKeys = 24;
  using Keys = std::vector<std::int64_t>;
  using TableHandle = CHandle<recsdk_table, recsdk_table_destroy>;

  // Drawing arguments.

  std::int64_t number() {
    constexpr std::array kOdd = {std::numeric_limits<std::int64_t>::min(),
                                 std::numeric_limits<std::int64_t>::max(),
                                 std::int64_t{-1},
                                 std::int64_t{0},
                                 std::int64_t{1},
                                 std::int64_t{1} << 62};
    const std::int64_t drawn = in_.below(32);
    return drawn < std::ssize(kOdd) ? kOdd[static_cast<std::size_t>(drawn)] : drawn;
  }

  double real() {
    constexpr double kInfinite = std::numeric_limits<double>::infinity();
    constexpr std::array kOdd = {
        -kInfinite, kInfinite, std::numeric_limits<double>::quiet_NaN(), -1.0, 0.0, 1e300, 1e-300};
    const std::int64_t drawn = in_.below(24);
    return drawn < std::ssize(kOdd) ? kOdd[static_cast<std::size_t>(drawn)]
                                    : static_cast<double>(drawn) * 0.125;
  }

  std::int32_t choice(std::int32_t last) {
    return rarely() ? static_cast<std::int32_t>(number())
                    : static_cast<std::int32_t>(in_.below(last + 1));
  }

  Keys draw_keys() {
    Keys keys(static_cast<std::size_t>(in_.below(10)));
    for (std::int64_t& key : keys) key = key_of(in_.below(kNumKeys));
    return keys;
  }

  /// Small whole numbers, so that sums are exact.
  std::vector<float> draw_floats(std::size_t size) {
    std::vector<float> values(size);
    for (float& value : values) value = static_cast<float>(in_.below(5)) - 2.0F;
    return values;
  }

  std::vector<std::int64_t> numbers(std::size_t size) {
    std::vector<std::int64_t> drawn(size);
    for (std::int64_t& each : drawn) each = number();
    return drawn;
  }

  template <typename T>
  T sized() {
    T made{};
    made.struct_size = rarely() ? static_cast<std::size_t>(in_.below(300)) : sizeof(T);
    return made;
  }

  // Answers.

  /// True if the call was done.
  bool is_done(int status) {
    if (status == RECSDK_OK) return true;
    require(status > 0 && status <= RECSDK_ERROR_DEVICE, "a status is one of the enum");
    require(recsdk_last_error_message()[0] != '\0', "a call that fails says why");
    require(status != RECSDK_ERROR_INTERNAL || is_failing_, "no invariant is broken");
    return false;
  }

  void must(int status) { require(is_done(status), "a call that is right is done"); }

  /// A call that is wrong exactly if `is_wrong` has this status.
  bool is_refused(int status, bool is_wrong) {
    const bool done = is_done(status);
    require(!is_wrong || status == RECSDK_ERROR_INVALID_ARGUMENT, "what is wrong is refused");
    return !done;
  }

  // Making what is called.

  static int make_rows(void*, const std::int64_t* keys, std::int64_t count, std::int64_t dim,
                       float* values) {
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t c = 0; c < dim; ++c) *values++ = initial_weight(keys[i], c);
    }
    return 0;
  }

  /// Table 0 is as plain as the map beside it, 1 has rules, 2 shares rows.
  void make_table(std::size_t number) {
    recsdk_initializer_config initializer{};
    initializer.struct_size = sizeof(initializer);
    must(recsdk_initializer_config_init(&initializer));
    initializer.kind = RECSDK_INITIALIZER_CUSTOM;
    initializer.callback = make_rows;
    recsdk_optimizer_config optimizer{};
    optimizer.struct_size = sizeof(optimizer);
    const std::int32_t kind = number == 0 ? RECSDK_OPTIMIZER_SGD : choice_of(7);
    must(recsdk_optimizer_config_init(&optimizer, kind));
    if (number == 0) optimizer.learning_rate = 0.5F;
    recsdk_default_config reads{};
    reads.struct_size = sizeof(reads);
    must(recsdk_default_config_init(&reads));
    reads.value = 0.5F;
    reads.kind = number == 2 ? RECSDK_DEFAULT_SHARED_ROWS : RECSDK_DEFAULT_CONSTANT;
    reads.num_rows = 3;
    recsdk_evict_config eviction{};
    eviction.struct_size = sizeof(eviction);
    must(recsdk_evict_config_init(&eviction));
    eviction.order = choice_of(RECSDK_EVICT_LOW_NORM);
    eviction.has_ttl = in_.flag() ? 1 : 0;
    eviction.ttl = 3;
    recsdk_admit_term term{};
    term.count = 1 + in_.below(2);
    recsdk_admit_config admission{};
    admission.struct_size = sizeof(admission);
    must(recsdk_admit_config_init(&admission));
    admission.rule = &term;
    admission.num_terms = 1;
    recsdk_table_config config{};
    config.struct_size = sizeof(config);
    must(recsdk_table_config_init(&config));
    config.dim = kDims[number];
    config.optimizer = &optimizer;
    config.initializer = &initializer;
    config.default_row = &reads;
    if (number > 0) config.weight_dtype = choice_of(RECSDK_DTYPE_FLOAT16);
    if (number == 1) {
      config.eviction = &eviction;
      config.has_max_rows = 1;
      config.max_rows = 1 + in_.below(kNumKeys);
      if (in_.flag()) config.admission = &admission;
    }
    recsdk_table* made = nullptr;
    must(recsdk_table_create(&config, &made));
    tables_[number].owned.reset(made);
    if (number > 0) return;
    model_.clear();
    mapped_rows_.clear();
    rate_ = 0.5F;
  }

  std::int32_t choice_of(std::int32_t last) {
    return static_cast<std::int32_t>(in_.below(last + 1));
  }

  void make_index() {
    recsdk_index_config config{};
    config.struct_size = sizeof(config);
    must(recsdk_index_config_init(&config));
    config.has_max_rows = in_.flag() ? 1 : 0;
    config.max_rows = 1 + in_.below(kNumKeys);
    recsdk_evict_config eviction{};
    eviction.struct_size = sizeof(eviction);
    must(recsdk_evict_config_init(&eviction));
    eviction.clock = choice_of(RECSDK_EVICT_BY_TIME);
    eviction.has_ttl = 1;
    eviction.ttl = 5;
    if (config.has_max_rows != 0) config.eviction = &eviction;
    recsdk_index* made = nullptr;
    must(recsdk_index_create(&config, &made));
    index_.owned.reset(made);
  }

  void make_device_table() {
    recsdk_table_config config{};
    config.struct_size = sizeof(config);
    must(recsdk_table_config_init(&config));
    config.dim = kDeviceDim;
    recsdk_device_options options{};
    options.struct_size = sizeof(options);
    must(recsdk_device_options_init(&options));
    options.backend = "cpu";
    options.max_device_rows = 16;
    recsdk_device_table* made = nullptr;
    must(recsdk_device_table_create(&config, &options, &made));
    device_.owned.reset(made);
  }

  // Calls.

  void step() {
    at_ = static_cast<std::size_t>(in_.below(4)) % tables_.size();  // table 0 twice as often
    switch (in_.below(24)) {
      case 0:
        return map();
      case 1:
        return map_with();
      case 2:
        return look_up();
      case 3:
        return find_or_insert();
      case 4:
        return upsert();
      case 5:
        return erase();
      case 6:
        return rarely() ? clear() : apply_gradients();
      case 7:
        return apply_gradients();
      case 8:
        return pool();
      case 9:
        return update();
      case 10:
        return norms();
      case 11:
        return leases();
      case 12:
        return settings();
      case 13:
        return export_rows();
      case 14:
        return describe();
      case 15:
        return policies();
      case 16:
        return leavers();
      case 17:
        return cuts();
      case 18:
        return restores();
      case 19:
        return many_tables();
      case 20:
        return index_maps();
      case 21:
        return index_others();
      case 22:
        return device();
      default:
        return odd_configs();
    }
  }

  recsdk_table* table() { return maybe_null(tables_[at_].get()); }
  std::size_t dim() const { return static_cast<std::size_t>(kDims[at_]); }

  /// What calls by keys have in common; wrong is known as it is drawn.
  struct Asked {
    Keys keys;
    recsdk_table* table = nullptr;
    const std::int64_t* first = nullptr;
    std::int64_t count = 0;
    bool is_wrong = false;
  };

  Asked ask() {
    Asked asked;
    asked.keys = draw_keys();
    asked.table = table();
    asked.first = maybe_null(asked.keys.data());
    asked.count = length(asked.keys.size());
    asked.is_wrong = asked.table == nullptr || asked.count != std::ssize(asked.keys) ||
                     (asked.first == nullptr && asked.count > 0);
    return asked;
  }

  template <typename T>
  T* needed(std::vector<T>& array, Asked& asked) {
    T* const given = maybe_null(array.data());
    if (given == nullptr && asked.count > 0) asked.is_wrong = true;
    return given;
  }

  /// The same of rows or outcomes; over the keys they are wrong.
  template <typename T>
  T* needed_apart(std::vector<T>& array, Asked& asked) {
    T* const given = maybe_null(maybe_over(array, asked.keys));
    if (asked.count > 0 && (given == nullptr || is_over(given, asked.keys))) asked.is_wrong = true;
    return given;
  }

  template <typename T, typename Other>
  static bool is_over(const T* given, const std::vector<Other>& other) {
    return !other.empty() && static_cast<const void*>(given) == other.data();
  }

  /// Outcomes that may be left out, and lie over one of two arrays or none.
  template <typename Other>
  std::uint8_t* outcomes_beside(std::vector<std::uint8_t>& outcomes, std::vector<Other>& other,
                                Asked& asked) {
    std::uint8_t* given = maybe_over(outcomes, asked.keys);
    if (rarely()) given = reinterpret_cast<std::uint8_t*>(other.data());
    given = maybe_null(given);
    if (asked.count > 0 && (is_over(given, asked.keys) || is_over(given, other)))
      asked.is_wrong = true;
    return given;
  }

  /// Of any table or of none; tables refuse those of others.
  recsdk_lease* any_lease() {
    if (leases_.empty() || in_.below(3) == 0) return nullptr;
    return leases_[static_cast<std::size_t>(in_.below(std::ssize(leases_)))].get();
  }

  void insert_into_model(const Keys& keys) {
    for (const std::int64_t key : keys) {
      if (model_.contains(key)) continue;
      for (std::int64_t c = 0; c < kDims[0]; ++c) model_[key].push_back(initial_weight(key, c));
    }
  }

  void map() {
    Asked asked = ask();
    std::vector<std::int64_t> rows(asked.keys.size());
    std::vector<std::uint8_t> outcomes(asked.keys.size());
    std::int64_t* const out = needed_apart(rows, asked);
    std::uint8_t* const said = needed_apart(outcomes, asked);
    const bool inserts = in_.flag();
    const int status = recsdk_table_map(asked.table, asked.first, asked.count, inserts ? 1 : 0,
                                        any_lease(), out, said);
    if (is_refused(status, asked.is_wrong)) return;
    if (at_ == 0 && inserts) insert_into_model(asked.keys);
    if (at_ != 0) return;
    mapped_rows_ = std::move(rows);
    mapped_outcomes_ = std::move(outcomes);
  }

  void map_with() {
    Asked asked = ask();
    std::vector<std::int64_t> rows(asked.keys.size());
    std::vector<std::uint8_t> outcomes(asked.keys.size());
    const std::vector<std::int64_t> times = numbers(in_.flag() ? 1 : asked.keys.size());
    std::vector<std::int64_t> counts(asked.keys.size(), 1);
    if (!counts.empty() && rarely()) counts.back() = number();
    const std::vector<float> scores = draw_floats(asked.keys.size());
    recsdk_key_data data{};
    if (in_.flag()) data.times = times.data();
    data.num_times = length(times.size());
    if (in_.flag()) data.counts = counts.data();
    data.num_counts = length(counts.size());
    if (in_.flag()) data.scores = scores.data();
    if (in_.flag()) {
      data.has_now = 1;
      data.now = number();
    }
    std::int64_t* const out = needed_apart(rows, asked);
    std::uint8_t* const said = needed_apart(outcomes, asked);
    const int status = recsdk_table_map_with(asked.table, asked.first, asked.count, any_lease(),
                                             maybe_null(&data), out, said);
    if (!is_refused(status, asked.is_wrong) && at_ == 0) insert_into_model(asked.keys);
  }

  void require_values(const Keys& keys, const std::vector<float>& values) const {
    for (std::size_t i = 0; at_ == 0 && i < keys.size(); ++i) {
      const auto row = model_.find(keys[i]);
      for (std::size_t c = 0; c < dim(); ++c) {
        require(values[i * dim() + c] == (row == model_.end() ? 0.5F : row->second[c]),
                "a row is the map's");
      }
    }
  }

  void look_up() {
    Asked asked = ask();
    std::vector<float> values(asked.keys.size() * dim());
    std::vector<std::uint8_t> outcomes(asked.keys.size());
    float* const out = needed(values, asked);
    std::uint8_t* const said = outcomes_beside(outcomes, values, asked);
    const int status = recsdk_table_lookup(asked.table, asked.first, asked.count, out, said);
    if (!is_refused(status, asked.is_wrong)) require_values(asked.keys, values);
  }

  void find_or_insert() {
    Asked asked = ask();
    std::vector<float> values(asked.keys.size() * dim());
    std::vector<std::uint8_t> outcomes(asked.keys.size());
    float* const out = needed(values, asked);
    std::uint8_t* const said = outcomes_beside(outcomes, values, asked);
    const int status =
        recsdk_table_find_or_insert(asked.table, asked.first, asked.count, any_lease(), out, said);
    if (is_refused(status, asked.is_wrong)) return;
    if (at_ == 0) insert_into_model(asked.keys);
    require_values(asked.keys, values);
  }

  void upsert() {
    Asked asked = ask();
    std::vector<float> values = draw_floats(asked.keys.size() * dim());
    const float* const given = needed(values, asked);
    std::vector<std::uint8_t> outcomes(asked.keys.size());
    std::uint8_t* const said = outcomes_beside(outcomes, values, asked);
    const int status =
        recsdk_table_upsert(asked.table, asked.first, asked.count, given, nullptr, said);
    if (is_refused(status, asked.is_wrong) || at_ != 0) return;
    for (std::size_t i = 0; i < asked.keys.size(); ++i) {
      const auto row = values.begin() + static_cast<std::ptrdiff_t>(i * dim());
      model_[asked.keys[i]].assign(row, row + static_cast<std::ptrdiff_t>(dim()));
    }
  }

  void erase() {
    Asked asked = ask();
    std::vector<std::uint8_t> outcomes(asked.keys.size());
    std::vector<float> nothing;
    std::uint8_t* const said = outcomes_beside(outcomes, nothing, asked);
    const int status = recsdk_table_erase(asked.table, asked.first, asked.count, said);
    if (is_refused(status, asked.is_wrong) || at_ != 0) return;
    for (const std::int64_t key : asked.keys) model_.erase(key);
    mapped_rows_.clear();
  }

  void clear() {
    recsdk_table* const given = table();
    if (is_refused(recsdk_table_clear(given), given == nullptr) || at_ != 0) return;
    model_.clear();
    mapped_rows_.clear();
  }

  void apply_gradients() {
    Asked asked = ask();
    std::vector<float> gradients = draw_floats(asked.keys.size() * dim());
    const float* const given = needed(gradients, asked);
    std::vector<std::uint8_t> outcomes(asked.keys.size());
    std::uint8_t* const said = outcomes_beside(outcomes, gradients, asked);
    const int status =
        recsdk_table_apply_gradients(asked.table, asked.first, asked.count, given, said);
    if (is_refused(status, asked.is_wrong) || at_ != 0) return;
    for (std::size_t i = 0; i < asked.keys.size(); ++i) {
      const auto row = model_.find(asked.keys[i]);
      for (std::size_t c = 0; row != model_.end() && c < dim(); ++c)
        row->second[c] -= rate_ * gradients[i * dim() + c];
    }
  }

  /// What was mapped, or numbers that no call gave.
  recsdk_bags draw_bags() {
    const bool is_mapped = at_ == 0 && in_.below(3) > 0;
    bag_rows_ = is_mapped ? mapped_rows_ : numbers(static_cast<std::size_t>(in_.below(6)));
    bag_outcomes_.resize(bag_rows_.size());
    for (std::uint8_t& outcome : bag_outcomes_)
      outcome = static_cast<std::uint8_t>(rarely() ? in_.byte() : in_.below(4));
    if (is_mapped) bag_outcomes_ = mapped_outcomes_;
    bag_outcomes_.resize(bag_rows_.size());
    const auto count = static_cast<std::int64_t>(bag_rows_.size());
    bag_offsets_ = {0, in_.below(count + 1), count};
    if (rarely()) bag_offsets_[static_cast<std::size_t>(in_.below(3))] = number();
    bag_weights_ = draw_floats(bag_rows_.size());
    recsdk_bags bags{};
    bags.rows = maybe_null(bag_rows_.data());
    bags.outcomes = maybe_null(bag_outcomes_.data());
    bags.num_keys = length(bag_rows_.size());
    const bool has_offsets = in_.flag();
    if (has_offsets) bags.offsets = bag_offsets_.data();
    bags.num_bags = length(has_offsets ? bag_offsets_.size() - 1 : bag_rows_.size());
    if (in_.flag()) bags.weights = bag_weights_.data();
    bags.pooling = choice(RECSDK_POOLING_MEAN);
    bags.reserved = rarely() ? 1 : 0;
    num_bags_ = has_offsets ? bag_offsets_.size() - 1 : bag_rows_.size();
    return bags;
  }

  std::int64_t stride() {
    const auto width = static_cast<std::int64_t>(dim());
    return rarely() ? no_stride(width) : width;
  }

  /// What is written for bags: seldom over one of their arrays, which is refused.
  float* maybe_over_bags(std::vector<float>& array, const recsdk_bags& bags) {
    if (bag_rows_.empty() || !rarely()) return array.data();
    const std::array<void*, 4> all = {
        bag_rows_.data(), bag_outcomes_.data(),
        bags.offsets == nullptr ? nullptr : static_cast<void*>(bag_offsets_.data()),
        bags.weights == nullptr ? nullptr : static_cast<void*>(bag_weights_.data())};
    return static_cast<float*>(all[static_cast<std::size_t>(in_.below(4))]);
  }

  void pool() {
    recsdk_pool_block block{};
    block.bags = draw_bags();
    std::vector<float> out(num_bags_ * dim());
    block.out = maybe_null(maybe_over_bags(out, block.bags));
    block.stride = stride();
    const std::int64_t count = rarely() ? -1 : 1;
    const bool is_over = block.out != nullptr && block.out != out.data();
    const bool is_pooled = is_done(recsdk_table_pool(table(), maybe_null(&block), count));
    require(!is_pooled || !is_over, "vectors lie over nothing that is read");
  }

  void update() {
    recsdk_grad_block block{};
    block.bags = draw_bags();
    const std::vector<float> gradients(num_bags_ * dim(), 0.0F);  // the map need not follow
    std::vector<float> of_weights(bag_rows_.size());
    block.grad = maybe_null(gradients.data());
    block.stride = stride();
    if (in_.flag()) block.weights_grad = maybe_over_bags(of_weights, block.bags);
    is_done(recsdk_table_update(table(), maybe_null(&block), rarely() ? -1 : 1));
  }

  void norms() {
    draw_bags();
    std::vector<float> factors(bag_rows_.size());
    const std::int64_t* const rows = maybe_null(bag_rows_.data());
    const std::uint8_t* const outcomes = maybe_null(bag_outcomes_.data());
    const std::int64_t count = length(bag_rows_.size());
    float* const out = rarely() ? reinterpret_cast<float*>(bag_rows_.data()) : factors.data();
    is_done(
        recsdk_table_norm_factors(table(), rows, outcomes, count, real(), real(), maybe_null(out)));
    if (at_ == 0) return;
    is_done(recsdk_table_limit_norms(table(), rows, outcomes, count, real(), real(), nullptr));
  }

  void leases() {
    if (leases_.size() > 4 || (!leases_.empty() && in_.below(3) == 0)) {
      leases_.erase(leases_.begin() + in_.below(std::ssize(leases_)));
      return;
    }
    recsdk_lease* lease = nullptr;
    const bool has_step = at_ != 0 && in_.flag();
    const std::int64_t step = rarely() && in_.flag() ? number() : ++step_;
    recsdk_table* const given = table();
    const int status = in_.below(8) == 0
                           ? recsdk_index_lease(index_.get(), 0, 0, &lease)
                           : recsdk_table_lease(given, has_step ? 1 : 0, step, maybe_null(&lease));
    require(is_done(status) == (lease != nullptr), "a handle is given if the call is done");
    if (lease != nullptr) leases_.emplace_back();
    if (lease == nullptr) return;
    leases_.back().owned.reset(lease);
    int has = 0;
    std::int64_t found = 0;
    is_done(recsdk_lease_step(maybe_null(lease), maybe_null(&has), maybe_null(&found)));
  }

  void settings() {
    recsdk_table* const given = table();
    float rate = 0.0F;
    if (at_ == 0) {
      const bool is_set = is_done(recsdk_table_set_learning_rate(given, 0.25F));
      if (is_set) rate_ = 0.25F;
    } else {
      is_done(recsdk_table_set_learning_rate(given, static_cast<float>(real())));
      is_done(recsdk_table_set_log_decay(given, real()));
      is_done(recsdk_table_set_update_count(given, static_cast<std::uint64_t>(number())));
    }
    is_done(recsdk_table_learning_rate(given, maybe_null(&rate)));
    constexpr std::array<std::int64_t, 5> kRooms = {
        0, 100, -1, std::numeric_limits<std::int64_t>::max(), std::int64_t{1} << 62};
    is_done(recsdk_table_reserve(given, kRooms[static_cast<std::size_t>(in_.below(5))]));
  }

  void export_rows() {
    const std::int64_t capacity = in_.below(8);
    Keys keys(static_cast<std::size_t>(capacity));
    std::vector<float> weights(keys.size() * dim());
    std::int64_t begin = number();
    std::int64_t count = 0;
    const int status = recsdk_table_export_rows(table(), maybe_null(&begin), length(keys.size()),
                                                maybe_null(keys.data()), maybe_null(weights.data()),
                                                nullptr, maybe_null(&count));
    if (is_done(status)) require(count >= 0 && count <= capacity, "no more than asked for");
  }

  void describe() {
    recsdk_table* const given = table();
    auto layout = sized<recsdk_row_layout>();
    auto field = sized<recsdk_row_field>();
    auto stats = sized<recsdk_stats>();
    std::int64_t bytes = 0;
    is_done(recsdk_table_layout(given, maybe_null(&layout)));
    is_done(recsdk_table_field(given, number(), maybe_null(&field)));
    is_done(recsdk_table_stats(given, maybe_null(&stats)));
    is_done(recsdk_table_memory_bytes(given, maybe_null(&bytes)));
  }

  static int choose(void* chosen, const std::int64_t* keys, const std::int64_t*, std::int64_t count,
                    std::int64_t, std::int64_t, std::uint8_t* leaves) {
    const auto residue = static_cast<std::uint64_t>(*static_cast<std::int64_t*>(chosen));
    for (std::int64_t i = 0; i < count; ++i)
      leaves[i] = (static_cast<std::uint64_t>(keys[i]) ^ residue) % 3 == 0 ? 1 : 0;
    return residue == 7 ? 1 : 0;
  }

  void policies() {
    recsdk_table* const given = table();
    std::int64_t count = 0;
    std::int64_t chosen = in_.below(8);
    is_done(recsdk_table_set_time(given, number()));
    is_done(recsdk_table_would_evict(given, number(), maybe_null(&count)));
    is_done(recsdk_table_evict(given, number(), maybe_null(&count)));
    is_done(recsdk_table_expire(given, in_.flag() ? 1 : 0, maybe_null(&count)));
    is_failing_ = chosen == 7;
    is_done(recsdk_table_evict_where(given, rarely() ? nullptr : choose, &chosen,
                                     in_.flag() ? 1 : 0, maybe_null(&count)));
    is_failing_ = false;
  }

  void leavers() {
    if (leavers_.owned == nullptr || in_.below(6) == 0) {
      auto options = sized<recsdk_leavers_options>();
      is_done(recsdk_leavers_options_init(&options));
      options.max_rows = number();
      if (options.max_rows > 1000) options.max_rows = 4;
      options.block_seconds = rarely() ? real() : 1e-6;
      if (options.block_seconds > 1e-3) options.block_seconds = 1e-3;
      options.on_overflow = choice(RECSDK_OVERFLOW_RAISE);
      recsdk_leavers* opened = nullptr;
      const bool of_index = in_.flag();
      const int status = of_index ? recsdk_index_leavers(index_.get(), &options, &opened)
                                  : recsdk_table_leavers(table(), &options, maybe_null(&opened));
      require(is_done(status) == (opened != nullptr), "a handle is given if the call is done");
      if (opened != nullptr) leavers_dim_ = of_index ? 0 : dim();
      if (opened != nullptr) leavers_.owned.reset(opened);
      return;
    }
    Keys keys(static_cast<std::size_t>(in_.below(5)));
    std::vector<std::uint8_t> causes(keys.size());
    std::vector<float> weights(keys.size() * leavers_dim_);
    std::int64_t count = 0;
    std::uint64_t lost = 0;
    int has_rows = 0;
    recsdk_leavers* const given = maybe_null(leavers_.get());
    is_done(recsdk_leavers_read(given, length(keys.size()), maybe_null(keys.data()),
                                maybe_null(causes.data()), maybe_null(weights.data()), nullptr,
                                maybe_null(&count)));
    Keys rows(keys.size());
    is_done(recsdk_leavers_take(given, length(keys.size()), maybe_null(keys.data()), causes.data(),
                                maybe_null(rows.data()), maybe_null(&count)));
    is_done(recsdk_leavers_free_rows(given, number()));
    is_done(recsdk_leavers_num_ended(given, maybe_null(&lost)));
    is_done(recsdk_leavers_size(given, maybe_null(&count), maybe_null(&lost)));
    const double seconds = real();
    is_done(recsdk_leavers_wait(given, seconds > 1e-3 ? 1e-6 : seconds, maybe_null(&has_rows)));
    if (rarely()) is_done(recsdk_leavers_close(given));
    if (rarely()) leavers_.owned.reset();
  }

  static int keep_bytes(void* kept, const void* bytes, std::size_t size) {
    auto& file = *static_cast<std::vector<std::uint8_t>*>(kept);
    const auto* const first = static_cast<const std::uint8_t*>(bytes);
    file.insert(file.end(), first, first + size);
    return 0;
  }

  void cuts() {
    if (cut_.owned == nullptr) {
      auto options = sized<recsdk_cut_options>();
      options.changes_only = in_.below(3) == 0 ? 1 : 0;
      options.has_max_copy_bytes = rarely() ? 1 : 0;
      options.max_copy_bytes = in_.flag() ? -1 : std::numeric_limits<std::int64_t>::max();
      recsdk_cut* opened = nullptr;
      const int status = recsdk_table_cut(table(), maybe_null(&options), maybe_null(&opened));
      require(is_done(status) == (opened != nullptr), "a handle is given if the call is done");
      cut_.owned.reset(opened);
      return;
    }
    recsdk_cut* const given = maybe_null(cut_.get());
    auto info = sized<recsdk_cut_info>();
    auto clock = sized<recsdk_clock>();
    auto shared = sized<recsdk_shared_rows>();
    const recsdk_admit_record* records = nullptr;
    std::int64_t count = 0;
    is_done(recsdk_cut_get_info(given, maybe_null(&info)));
    is_done(recsdk_cut_get_clock(given, maybe_null(&clock)));
    is_done(recsdk_cut_get_records(given, maybe_null(&records), maybe_null(&count)));
    is_done(recsdk_cut_get_shared(given, maybe_null(&shared)));
    auto options = sized<recsdk_write_options>();
    if (is_done(recsdk_write_options_init(&options)) && options.struct_size == sizeof(options)) {
      std::vector<std::uint8_t> file;
      options.name = maybe_null("a file");
      options.callback = keep_bytes;
      options.user_data = &file;
      if (rarely()) options.block_bytes = number();
      options.codec = rarely() ? choice(3) : RECSDK_CODEC_NONE;
      auto summary = sized<recsdk_row_file_summary>();
      if (is_done(recsdk_write_rows(given, &options, maybe_null(&summary))))
        file_ = std::move(file);
    }
    if (in_.flag()) is_done(recsdk_cut_finish(given, in_.flag() ? 1 : 0));
    if (in_.flag()) cut_.owned.reset();
  }

  void restores() {
    if (restore_.owned == nullptr) {
      recsdk_restore* opened = nullptr;
      const int status = recsdk_restore_create(table(), maybe_null(&opened));
      require(is_done(status) == (opened != nullptr), "a handle is given if the call is done");
      restore_.owned.reset(opened);
      if (opened == nullptr) return;
    }
    recsdk_restore* const given = maybe_null(restore_.get());
    std::vector<std::uint8_t> bytes = file_;
    if (!bytes.empty() && in_.flag())
      bytes[static_cast<std::size_t>(in_.below(65'536)) % bytes.size()] ^= in_.byte();
    const int descriptor = memfd_create("recsdk_fuzz", MFD_CLOEXEC);
    const auto written = write(descriptor, bytes.data(), bytes.size());
    auto options = sized<recsdk_restore_options>();
    options.has_modulo = rarely() ? 1 : 0;
    options.modulo_rank = number();
    options.modulo_world = number();
    options.drop_state = in_.flag() ? 1 : 0;
    options.drop_metadata = in_.flag() ? 1 : 0;
    auto summary = sized<recsdk_row_file_summary>();
    is_done(recsdk_restore_add_file(
        given, rarely() ? -1 : descriptor, rarely() ? number() : std::int64_t{written},
        maybe_null("a file"), maybe_null(&options), maybe_null(&summary)));
    close(descriptor);
    const recsdk_admit_record record{number(), number(), number(), number()};
    if (rarely()) is_done(recsdk_restore_add_records(given, maybe_null(&record), length(1)));
    const std::vector<float> weights(3 * 17);
    const Keys keys = {number()};
    if (rarely()) {
      is_done(recsdk_restore_add_shared(given, maybe_null(keys.data()), length(1),
                                        maybe_null(weights.data()), nullptr));
    }
    auto clock = sized<recsdk_clock>();
    const auto updates = static_cast<std::uint64_t>(number());
    const bool has_clock = in_.flag();
    const bool is_restored =
        is_done(has_clock ? recsdk_restore_commit_at(given, updates, real(), maybe_null(&clock))
                          : recsdk_restore_commit(given, updates, rarely() ? real() : 0.0));
    if (in_.flag()) restore_.owned.reset();
    if (is_restored) relearn();
  }

  /// Table 0 as it exports itself, after a restore.
  void relearn() {
    Keys keys(2 * kNumKeys);
    std::vector<float> weights(keys.size() * static_cast<std::size_t>(kDims[0]));
    std::int64_t begin = 0;
    std::int64_t count = 0;
    must(recsdk_table_export_rows(tables_[0].get(), &begin, std::ssize(keys), keys.data(),
                                  weights.data(), nullptr, &count));
    model_.clear();
    mapped_rows_.clear();
    const auto width = static_cast<std::ptrdiff_t>(kDims[0]);
    for (std::ptrdiff_t i = 0; i < count; ++i) {
      const auto row = weights.begin() + i * width;
      model_[keys[static_cast<std::size_t>(i)]].assign(row, row + width);
    }
  }

  void many_tables() {
    std::array<recsdk_map_call, 2> calls{};
    std::array<Asked, 2> asked;
    std::array<std::vector<std::int64_t>, 2> rows;
    std::array<std::vector<std::uint8_t>, 2> outcomes;
    bool is_wrong = false;
    std::array<std::size_t, 2> places{};
    for (std::size_t i = 0; i < calls.size(); ++i) {
      at_ = places[i] = static_cast<std::size_t>(in_.below(3));
      asked[i] = ask();
      rows[i].resize(asked[i].keys.size());
      outcomes[i].resize(asked[i].keys.size());
      std::int64_t* const out = needed_apart(rows[i], asked[i]);
      std::uint8_t* const said = needed_apart(outcomes[i], asked[i]);
      calls[i] = {asked[i].table, asked[i].first,     asked[i].count,  any_lease(), out,
                  said,           in_.flag() ? 1 : 0, rarely() ? 1 : 0};
      is_wrong = is_wrong || asked[i].is_wrong || calls[i].reserved != 0;
    }
    is_wrong = is_wrong || places[0] == places[1];
    if (rarely()) {  // over an array of the other table
      calls[1].rows = in_.flag() ? calls[0].rows : asked[0].keys.data();
      calls[1].num_keys = std::min(calls[1].num_keys, std::ssize(asked[0].keys));
      is_wrong = is_wrong || calls[1].num_keys > 0;
      if (!is_wrong) return;
    }
    const int status = recsdk_map_tables(calls.data(), 2);
    if (status == RECSDK_ERROR_BUSY || status == RECSDK_ERROR_CAPACITY) return relearn();
    if (is_refused(status, is_wrong)) return;
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (places[i] == 0 && calls[i].insert != 0) insert_into_model(asked[i].keys);
    }
  }

  void index_maps() {
    const Keys keys = draw_keys();
    Keys rows(keys.size());
    std::vector<std::uint8_t> outcomes(keys.size());
    recsdk_index* const given = maybe_null(index_.get());
    const std::int64_t* const first = maybe_null(keys.data());
    is_done(recsdk_index_map(given, first, length(keys.size()), in_.flag() ? 1 : 0, any_lease(),
                             maybe_null(rows.data()), maybe_null(outcomes.data())));
    recsdk_index_map_call call{};
    call.index = given;
    call.keys = first;
    call.num_keys = length(keys.size());
    call.rows = rows.data();
    call.outcomes = outcomes.data();
    call.insert = 1;
    is_done(recsdk_map_indexes(maybe_null(&call), length(1)));
    if (rarely()) is_done(recsdk_index_erase(given, first, length(keys.size()), nullptr));
    if (rarely()) is_done(recsdk_index_assign(given, first, length(keys.size())));
    if (rarely()) is_done(recsdk_index_clear(given));
    is_done(recsdk_index_note_changed(given, rows.data(), length(rows.size())));
    const Keys odd = numbers(2);
    is_done(recsdk_index_note_changed(given, maybe_null(odd.data()), 2));
  }

  void index_others() {
    recsdk_index* const given = maybe_null(index_.get());
    Keys keys(static_cast<std::size_t>(in_.below(8)));
    Keys rows(keys.size());
    std::int64_t begin = number();
    std::int64_t count = 0;
    auto stats = sized<recsdk_stats>();
    is_done(recsdk_index_export_keys(given, maybe_null(&begin), length(keys.size()),
                                     maybe_null(keys.data()), maybe_null(rows.data()),
                                     maybe_null(&count)));
    is_done(recsdk_index_stats(given, maybe_null(&stats)));
    is_done(recsdk_index_set_time(given, number()));
    is_done(recsdk_index_evict(given, number(), &count));
    is_done(recsdk_index_expire(given, 0, &count));
    is_done(recsdk_index_check_idle(given));
    is_done(recsdk_index_reserve(given, in_.flag() ? 50 : std::min<std::int64_t>(number(), 0)));
    if (index_cut_.owned == nullptr) {
      recsdk_index_cut* opened = nullptr;
      is_done(recsdk_index_cut_begin(given, in_.flag() ? 1 : 0, maybe_null(&opened)));
      index_cut_.owned.reset(opened);
      return;
    }
    auto changes = sized<recsdk_index_changes>();
    is_done(recsdk_index_cut_read(maybe_null(index_cut_.get()), maybe_null(&changes)));
    if (in_.flag()) recsdk_index_cut_finish(index_cut_.owned.release(), in_.flag() ? 1 : 0);
  }

  void device() {
    recsdk_device_table* const given = maybe_null(device_.get());
    const Keys keys = draw_keys();
    const std::int64_t* const first = maybe_null(keys.data());
    std::vector<float> values = draw_floats(keys.size() * kDeviceDim);
    Keys rows(keys.size());
    std::vector<std::uint8_t> outcomes(keys.size());
    is_done(recsdk_device_table_find_or_insert(given, first, length(keys.size()), any_lease(),
                                               maybe_null(values.data()),
                                               maybe_null(outcomes.data())));
    is_done(recsdk_device_table_upsert(given, first, length(keys.size()), maybe_null(values.data()),
                                       nullptr, nullptr));
    is_done(recsdk_device_table_apply_gradients(given, first, length(keys.size()),
                                                maybe_null(values.data()), nullptr));
    is_done(recsdk_device_table_map(given, first, length(keys.size()), in_.flag() ? 1 : 0,
                                    any_lease(), maybe_null(rows.data()),
                                    maybe_null(outcomes.data())));
    if (rarely()) rows = numbers(keys.size());
    struct alignas(64) Lines {
      std::array<float, 16> numbers{};
    };
    std::vector<Lines> out(keys.size() * kDeviceDim / 16 + 1);
    float* const aligned = out.front().numbers.data();
    is_done(recsdk_device_table_gather(given, maybe_null(rows.data()), maybe_null(outcomes.data()),
                                       length(keys.size()), maybe_null(aligned)));
    is_done(recsdk_device_table_update(given, maybe_null(rows.data()), maybe_null(outcomes.data()),
                                       length(keys.size()), maybe_null(aligned)));
    is_done(recsdk_device_table_synchronize(given));
    is_done(recsdk_device_table_read_rows(given, first, length(keys.size()),
                                          maybe_null(values.data()), nullptr, nullptr));
    std::int64_t begin = number();
    std::int64_t count = 0;
    is_done(recsdk_device_table_export_rows(given, &begin, length(rows.size()),
                                            maybe_null(rows.data()), maybe_null(values.data()),
                                            nullptr, maybe_null(&count)));
    is_done(recsdk_device_table_set_learning_rate(given, static_cast<float>(real())));
    if (rarely()) is_done(recsdk_device_table_erase(given, first, length(keys.size()), nullptr));
    if (rarely()) is_done(recsdk_device_table_clear(given));
  }

  /// Tables that are made of anything, or refused.
  void odd_configs() {
    auto config = sized<recsdk_table_config>();
    auto optimizer = sized<recsdk_optimizer_config>();
    auto eviction = sized<recsdk_evict_config>();
    auto initializer = sized<recsdk_initializer_config>();
    auto reads = sized<recsdk_default_config>();
    if (!is_done(recsdk_table_config_init(&config))) return;
    is_done(recsdk_optimizer_config_init(&optimizer, choice(RECSDK_OPTIMIZER_RMSPROP)));
    is_done(recsdk_evict_config_init(&eviction));
    is_done(recsdk_initializer_config_init(&initializer));
    is_done(recsdk_default_config_init(&reads));
    if (rarely()) optimizer.beta1 = real();
    if (rarely()) optimizer.learning_rate = static_cast<float>(real());
    if (rarely()) optimizer.weight_decay = static_cast<float>(real());
    optimizer.catch_up = rarely() ? 1 : 0;
    initializer.kind = choice(RECSDK_INITIALIZER_CUSTOM);
    initializer.low = static_cast<float>(real());
    initializer.high = static_cast<float>(real());
    initializer.stddev = static_cast<float>(real());
    eviction.order = choice(RECSDK_EVICT_SHOW_CLICK_TOTALS);
    eviction.clock = choice(RECSDK_EVICT_BY_TIME);
    if (rarely()) eviction.alpha = real();
    if (rarely()) eviction.decay = real();
    if (rarely()) eviction.share = real();
    if (rarely()) eviction.churn_records = number();
    eviction.churn_steps = rarely() ? number() : 0;
    eviction.below = rarely() ? real() : 0.0;
    eviction.min_age = rarely() ? number() : 0;
    reads.kind = choice(RECSDK_DEFAULT_SHARED_ROWS);
    reads.num_rows = rarely() ? number() : 2;
    config.dim = rarely() ? number() : 3;
    config.name = rarely() ? nullptr : (rarely() ? "" : "some");
    config.has_max_rows = in_.flag() ? 1 : 0;
    config.max_rows = number();
    config.has_eviction_groups = rarely() ? 1 : 0;
    config.eviction_groups = number();
    config.has_owned_groups = rarely() ? 1 : 0;
    config.owned_begin = number();
    config.owned_end = number();
    if (in_.flag()) config.optimizer = &optimizer;
    if (in_.flag()) config.eviction = &eviction;
    if (in_.flag()) config.initializer = &initializer;
    if (in_.flag()) config.default_row = &reads;
    recsdk_table* made = nullptr;
    const bool is_made = is_done(recsdk_table_create(&config, maybe_null(&made)));
    require(is_made == (made != nullptr), "a handle is given if the call is done");
    const TableHandle owned{std::unique_ptr<recsdk_table, TableHandle::Free>(made)};
    if (made == nullptr || config.dim > 1000) return;
    const Keys keys = draw_keys();
    std::vector<float> values(keys.size() * static_cast<std::size_t>(config.dim));
    is_done(recsdk_table_find_or_insert(made, keys.data(), std::ssize(keys), nullptr, values.data(),
                                        nullptr));
    std::ranges::fill(values, 1.0F);
    is_done(
        recsdk_table_apply_gradients(made, keys.data(), std::ssize(keys), values.data(), nullptr));
    must(recsdk_table_check_invariants(made));
    if (rarely() && leases_.size() < 5) return make_table(at_);  // what it gave outlives the old
  }

  // What holds after each call.

  void check() {
    for (const TableHandle& each : tables_) must(recsdk_table_check_invariants(each.get()));
    must(recsdk_index_check_invariants(index_.get()));
    must(recsdk_device_table_check_invariants(device_.get()));
    std::int64_t size = 0;
    must(recsdk_table_size(tables_[0].get(), &size));
    require(size == std::ssize(model_), "a table has the keys of the map");
    Keys keys;
    for (std::int64_t n = 0; n < kNumKeys; ++n) keys.push_back(key_of(n));
    at_ = 0;
    std::vector<float> values(keys.size() * dim());
    must(recsdk_table_lookup(tables_[0].get(), keys.data(), std::ssize(keys), values.data(),
                             nullptr));
    require_values(keys, values);
  }

  static constexpr std::array<std::int64_t, 3> kDims = {3, 17, 4};
  static constexpr std::size_t kDeviceDim = 5;

  std::array<TableHandle, 3> tables_;
  std::map<std::int64_t, std::vector<float>> model_;  // of table 0
  CHandle<recsdk_index, recsdk_index_destroy> index_;
  CHandle<recsdk_device_table, recsdk_device_table_destroy> device_;
  std::vector<CHandle<recsdk_lease, recsdk_lease_release>> leases_;
  CHandle<recsdk_leavers, recsdk_leavers_destroy> leavers_;
  CHandle<recsdk_cut, recsdk_cut_destroy> cut_;
  CHandle<recsdk_restore, recsdk_restore_destroy> restore_;
  CHandle<recsdk_index_cut, end_index_cut> index_cut_;
  std::vector<std::uint8_t> file_;  // the latest that was written
  std::size_t at_ = 0;              // the table of the call
  std::size_t leavers_dim_ = 0;
  std::int64_t step_ = 0;
  float rate_ = 0.5F;
  bool is_failing_ = false;  // a callback is to fail
  Keys mapped_rows_;
  std::vector<std::uint8_t> mapped_outcomes_;
  Keys bag_rows_;
  std::vector<std::uint8_t> bag_outcomes_;
  Keys bag_offsets_;
  std::vector<float> bag_weights_;
  std::size_t num_bags_ = 0;
};

/// Throws if the C interface and the map disagree, or something wrong is not refused.
inline void run_c_api(const std::uint8_t* data, std::size_t size) { CApiReplay(data, size).run(); }

}  // namespace recsdk::test
