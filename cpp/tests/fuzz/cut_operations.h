// Random calls of a table before, between and while cuts of it are written, checked against a plain
// model. The same body is a unit test and a fuzz target.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/byte_reader.h"
#include "recsdk/recsdk.h"
#include "saving_tables.h"

namespace recsdk::test {

/// What a delta must hold: keys whose rows changed, and keys that left.
struct Changes {
  std::set<Key> changed;
  std::set<Key> left;
};

class CutMachine {
 public:
  CutMachine(const std::uint8_t* data, std::size_t size)
      : bytes_(data, size), config_(make_config()), table_(config_) {}

  void run() {
    while (!bytes_.is_done()) {
      if (bytes_.below(8) == 0) {
        save_once();
      } else {
        step();
      }
    }
    leases_.clear();
    table_.check_invariants();
  }

 private:
  static void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(what);
  }

  TableConfig make_config() {
    // Rows of 4 bytes to 32 KiB: copies in one region, or in many.
    constexpr std::int64_t kDims[] = {1, 5, 1500, 4000};
    TableConfig config;
    config.dim = kDims[bytes_.below(4)];
    config.optimizer = bytes_.flag() ? OptimizerConfig::adagrad(0.1F) : OptimizerConfig::sgd(0.1F);
    config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
    config.hash_seed = 7;
    config.num_threads = bytes_.flag() ? 2 : 1;
    if (bytes_.flag()) config.max_rows = 150;
    return config;
  }

  std::vector<Key> some_keys() {
    std::vector<Key> keys(static_cast<std::size_t>(1 + bytes_.below(40)));
    const std::int64_t first = bytes_.below(200) - 100;
    for (std::size_t i = 0; i < keys.size(); ++i)
      keys[i] = first + static_cast<Key>(i) * (1 + bytes_.below(2));
    return keys;
  }

  std::vector<float> values_of(const std::vector<Key>& keys) {
    std::vector<float> values(keys.size() * static_cast<std::size_t>(config_.dim));
    const float value = static_cast<float>(bytes_.byte()) / 16.0F;
    std::fill(values.begin(), values.end(), value);
    return values;
  }

  // ---- calls ----

  void step() {
    switch (bytes_.below(8)) {
      case 0:
      case 1:
        return update();
      case 2:
        return insert();
      case 3:
        return erase();
      case 4:
        return upsert();
      case 5:
        return map_ahead();
      case 6:
        return release_lease();
      default:
        return bytes_.below(4) == 0 ? clear() : update();
    }
  }

  void update() {
    const std::vector<Key> keys = some_keys();
    const std::vector<float> gradients = values_of(keys);
    std::vector<Outcome> outcomes(keys.size());
    table_.apply_gradients(keys, gradients.data(), outcomes);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (has_row(outcomes[i])) changes_.changed.insert(keys[i]);
    }
  }

  void insert() {
    const std::vector<Key> keys = some_keys();
    std::vector<float> values(keys.size() * static_cast<std::size_t>(config_.dim));
    if (leases_.empty()) table_.find_or_insert(keys, values.data());
    note_visibility();
  }

  void upsert() {
    const std::vector<Key> keys = some_keys();
    const std::vector<float> values = values_of(keys);
    std::vector<Outcome> outcomes(keys.size());
    if (!leases_.empty()) return;
    table_.upsert(keys, values.data(), nullptr, outcomes);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (has_row(outcomes[i])) changes_.changed.insert(keys[i]);
    }
    note_visibility();
  }

  void erase() {
    const std::vector<Key> keys = some_keys();
    if (leases_.empty()) table_.erase(keys);
    note_visibility();
  }

  void clear() {
    if (leases_.empty()) table_.clear();
    note_visibility();
  }

  // A batch whose rows are updated before readers see them.
  void map_ahead() {
    if (leases_.size() >= 3) return release_lease();
    leases_.push_back(table_.lease(next_step_++));
    const std::vector<Key> keys = some_keys();
    std::vector<RowNumber> rows(keys.size());
    std::vector<Outcome> outcomes(keys.size());
    table_.map(keys, rows, outcomes, {.insert = true, .lease = &leases_.back()});
    const std::vector<float> gradients = values_of(keys);
    GradBlock block{.bags = {}, .grad = gradients.data(), .stride = config_.dim};
    block.bags.rows = rows;
    block.bags.outcomes = outcomes;
    table_.update({&block, 1});
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (visible_.contains(keys[i])) changes_.changed.insert(keys[i]);
    }
    note_visibility();
  }

  void release_lease() {
    if (leases_.empty()) return;
    const auto i = bytes_.below(static_cast<std::int64_t>(leases_.size()));
    leases_.erase(leases_.begin() + i);
    note_visibility();
  }

  // Keys come and go in several ways; all that counts is what readers see.
  void note_visibility() {
    std::set<Key> now;
    for (const FileRow& row : visible_rows(table_)) now.insert(row.key);
    for (const Key key : now) {
      if (visible_.contains(key)) continue;
      changes_.changed.insert(key);
      changes_.left.erase(key);
    }
    for (const Key key : visible_) {
      if (now.contains(key)) continue;
      changes_.changed.erase(key);
      changes_.left.insert(key);
    }
    visible_ = std::move(now);
  }

  // ---- cuts ----

  void save_once() {
    const bool changes_only = has_parent_ && bytes_.flag();
    require(table_.is_tracking() == has_parent_, "is_tracking is wrong");
    const std::vector<FileRow> rows = visible_rows(table_);
    const Changes at_cut = std::exchange(changes_, {});
    const std::uint64_t updates = table_.update_count();
    const int ending = static_cast<int>(bytes_.below(4));
    Bytes file;
    {
      Cut cut = table_.cut({.changes_only = changes_only, .max_copy_bytes = {}});
      require(cut.update_count() == updates, "a cut has another update count");
      require_busy();
      const bool is_whole = write(cut, ending == 0, file);
      if (is_whole) require(cut.copied_bytes() == 0, "copies are left at the end");
      for (std::int64_t n = bytes_.below(3); n > 0; --n) step();
      if (is_whole) check(cut, file, rows, at_cut);
      cut.finish(ending > 1);
      require(cut.is_finished() && cut.copied_bytes() == 0, "a cut holds on to its copies");
    }
    require(table_.stats().checkpoint_copied_bytes == 0, "the table holds on to copies");
    if (ending <= 1) {
      take_back(at_cut);
    } else {
      keep(changes_only, std::move(file), rows);
    }
  }

  void require_busy() {
    try {
      (void)table_.cut({});
    } catch (const Error& error) {
      return require(error.code() == ErrorCode::kBusy, "a second cut fails otherwise");
    }
    throw std::logic_error("there are two cuts");
  }

  // Calls run within each write. False if the sink was made to fail.
  bool write(Cut& cut, bool fails, Bytes& file) {
    MemorySink sink([&] {
      for (std::int64_t n = bytes_.below(3); n > 0; --n) step();
      if (fails && bytes_.below(3) == 0) throw std::runtime_error("the sink fails");
    });
    WriteOptions options;
    options.token = {++token_};
    options.file =
        tiny_blocks(bytes_.flag() && has_codec(Codec::kZstd) ? Codec::kZstd : Codec::kNone);
    try {
      write_rows(cut, sink, options);
    } catch (const std::runtime_error& error) {
      require(std::string(error.what()) == "the sink fails", error.what());
      require(cut.is_finished(), "a failed write leaves the cut open");
      return false;
    }
    file = std::move(sink.content);
    return true;
  }

  static void check(const Cut& cut, const Bytes& file, const std::vector<FileRow>& rows,
                    const Changes& at_cut) {
    const FileContent content = read_all(open(file));
    std::vector<FileRow> expected = rows;
    if (cut.changes_only()) {
      std::erase_if(expected,
                    [&](const FileRow& row) { return !at_cut.changed.contains(row.key); });
    }
    require(content.rows == expected, "the file holds other rows than the cut");
    require(cut.num_rows() == static_cast<std::int64_t>(expected.size()),
            "a cut counts its rows wrong");
    const std::vector<Key> left(at_cut.left.begin(), at_cut.left.end());
    require(content.erased == (cut.changes_only() ? left : std::vector<Key>()),
            "the file holds other erased keys than the cut");
    require(cut.num_erased() == static_cast<std::int64_t>(content.erased.size()),
            "a cut counts erased keys wrong");
  }

  // As if the cut had never been.
  void take_back(const Changes& at_cut) {
    require(table_.is_tracking() == has_parent_, "a cut that was not durable changed tracking");
    if (!has_parent_) {
      changes_ = {};
      return;
    }
    for (const Key key : at_cut.changed) {
      if (visible_.contains(key)) changes_.changed.insert(key);
    }
    for (const Key key : at_cut.left) {
      if (!visible_.contains(key)) changes_.left.insert(key);
    }
  }

  void keep(bool changes_only, Bytes file, const std::vector<FileRow>& rows) {
    has_parent_ = true;
    if (!changes_only) chain_.clear();
    chain_.push_back(std::move(file));
    Table copy(config_);
    restore_into(copy, chain_);
    copy.check_invariants();
    require(by_key(visible_rows(copy)) == by_key(rows), "a restored table differs");
    if (bytes_.below(4) != 0) return;
    if (!leases_.empty()) return;
    restore_into(table_, chain_);
    changes_ = {};
    visible_.clear();
    for (const FileRow& row : rows) visible_.insert(row.key);
  }

  ByteReader bytes_;
  TableConfig config_;
  Table table_;
  std::deque<Lease> leases_;
  std::int64_t next_step_ = 0;
  std::set<Key> visible_;
  Changes changes_;  // since the last durable cut
  bool has_parent_ = false;
  std::vector<Bytes> chain_;
  std::uint8_t token_ = 0;
};

/// Throws if the table does what the model does not.
inline void run_cut_operations(const std::uint8_t* data, std::size_t size) {
  CutMachine(data, size).run();
}

}  // namespace recsdk::test
