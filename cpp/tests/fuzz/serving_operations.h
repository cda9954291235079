// Replays bytes as calls of the C interface of serving, with arguments of every kind: null
// pointers, negative counts, files of another freeze, deltas of another table. What is refused says
// why and has changed nothing; what is done, is done on plain maps too. The same body is a unit
// test and a fuzz target.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/c_handle.h"
#include "fuzz/file_in_memory.h"
#include "fuzz/odd_arguments.h"
#include "fuzz/table_model.h"
#include "fuzz/table_operations.h"
#include "recsdk/freeze.h"
#include "recsdk/policy.h"
#include "recsdk/serving/c_api.h"
#include "recsdk/serving/serving_table.h"

namespace recsdk::test {

/// A row of small whole numbers that each dtype holds as they are: of int8 and int4 the first two
/// are the range of the steps, so that a step is 1.
inline std::vector<float> plain_row(FrozenDType dtype, std::size_t dim, std::uint8_t some) {
  const int steps = dtype == FrozenDType::kInt8 ? 255 : 15;
  const int low = some % 16 - 8;
  std::vector<float> row(dim);
  for (std::size_t c = 0; c < dim; ++c) {
    const int step = c == 0 ? 0 : c == 1 ? steps : (some * 7 + static_cast<int>(c) * 5) % steps;
    row[c] = static_cast<float>(low + step);
  }
  return row;
}

/// The files of a table in memory, and what they hold. Its keys are key_of(n) for even n below 24.
struct ServedFiles {
  static constexpr float kDefault = -2.5F;

  FreezeConfig config;
  std::map<Key, std::vector<float>> rows;
  std::vector<std::vector<float>> shared;
  std::vector<FileInMemory> files;  // by shard

  std::size_t dim() const { return static_cast<std::size_t>(config.dim); }
};

inline ServedFiles make_served_files(const FreezeConfig& config, std::int64_t num_rows) {
  ServedFiles made;
  made.config = config;
  FrozenWriter writer(config);
  for (std::int64_t n = 0; n < num_rows; n += 2) {
    const Key key = key_of(n);
    made.rows[key] = plain_row(config.dtype, made.dim(), static_cast<std::uint8_t>(n));
    writer.add({&key, 1}, made.rows[key].data());
  }
  for (std::int64_t row = 0; row < config.num_shared; ++row) {
    const Key key = shared_row_key(row, config.num_shared);
    made.shared.push_back(
        plain_row(config.dtype, made.dim(), static_cast<std::uint8_t>(100 + row)));
    writer.add_shared({&key, 1}, made.shared.back().data());
  }
  for (std::int64_t shard = 0; shard < config.num_shards; ++shard) {
    const FileInMemory& file = made.files.emplace_back();
    writer.write_shard(shard, file.number(), file.path());
  }
  return made;
}

class ServingReplay : OddArguments {
 public:
  ServingReplay(const std::uint8_t* data, std::size_t size) : OddArguments(data, size) {
    const std::int64_t dtype = in_.below(kNumFrozenDTypes);
    const std::int64_t shape = in_.below(12);
    for (std::int64_t freeze = 0; freeze < std::ssize(files_); ++freeze)
      files_[static_cast<std::size_t>(freeze)] = &files_of(dtype, shape, freeze);
    for (Opened& each : opened_) open_whole(each, 0);
  }

  void run() {
    while (!in_.is_done()) {
      step();
      for (const Opened& each : opened_) check(each);
    }
  }

 private:
  static constexpr std::int64_t kNumKeys = 24;
  using Row = std::vector<float>;
  using Table = CHandle<recsdk_serving_table, recsdk_serving_close>;

  /// A table that is open, and what it must answer.
  struct Opened {
    Table table;
    const ServedFiles* of = nullptr;
    std::set<std::int64_t> shards;
    std::map<Key, Row> rows;
    std::vector<Row> shared;
    std::int64_t num_deltas = 0;

    bool has_shard_of(Key key) const {
      return shards.contains(serving_shard(key, of->config.num_shards));
    }
    Row row_of(Key key) const {
      const auto found = rows.find(key);
      if (found != rows.end()) return found->second;
      if (shared.empty()) return Row(of->dim(), ServedFiles::kDefault);
      return shared[static_cast<std::size_t>(shared_row(key, std::ssize(shared)))];
    }
  };

  /// A delta, and what it is to do.
  struct Draft {
    CHandle<recsdk_serving_delta, recsdk_serving_delta_destroy> delta;
    const ServedFiles* of = nullptr;
    std::vector<std::pair<Key, Row>> added;
    std::vector<Key> erased;
    std::map<std::int64_t, Row> shared;
  };

  /// Files of one kind: freeze 0 and 1 differ in their token and seed alone.
  static const ServedFiles& files_of(std::int64_t dtype, std::int64_t shape, std::int64_t freeze) {
    constexpr std::array<std::int64_t, 3> kDims = {1, 5, 17};
    static std::map<std::array<std::int64_t, 3>, ServedFiles> made;
    const std::array<std::int64_t, 3> choice = {dtype, shape, freeze};
    const auto found = made.find(choice);
    if (found != made.end()) return found->second;
    FreezeConfig config;
    config.name = "item \xC3\xA9";
    config.dim = kDims[static_cast<std::size_t>(shape % 3)];
    config.dtype = static_cast<FrozenDType>(dtype);
    config.default_value = ServedFiles::kDefault;
    config.num_shards = shape / 3 % 2 == 0 ? 1 : 3;
    config.num_shared = shape / 6 == 0 ? 0 : 4;
    config.token[0] = static_cast<std::uint8_t>(freeze);
    config.hash_seed = 0x1234'5678'9ABC'DEF1U + static_cast<std::uint64_t>(freeze);
    config.scratch_folder = std::filesystem::temp_directory_path();
    return made.emplace(choice, make_served_files(config, kNumKeys)).first->second;
  }

  // Drawing arguments.

  Key draw_key() { return key_of(in_.below(kNumKeys)); }

  std::vector<Key> draw_keys() {
    std::vector<Key> keys(static_cast<std::size_t>(in_.below(10)));
    for (Key& key : keys) key = draw_key();
    return keys;
  }

  Opened& any_table() { return opened_[static_cast<std::size_t>(in_.below(2))]; }
  Draft& any_draft() { return drafts_[static_cast<std::size_t>(in_.below(2))]; }

  // Answers.

  /// A call has this status, and says why if it failed.
  void expect(int status, int wanted, const char* claim) {
    require(status == wanted, claim);
    require(status == RECSDK_SERVING_OK || recsdk_serving_last_error_message()[0] != '\0',
            "a call that fails says why");
  }

  /// A call that is wrong exactly if `is_wrong`; true if it was done.
  bool is_done(int status, bool is_wrong) {
    expect(status, is_wrong ? RECSDK_SERVING_ERROR_INVALID_ARGUMENT : RECSDK_SERVING_OK,
           "what is wrong is refused, what is right is done");
    return !is_wrong;
  }

  // Calls.

  void step() {
    switch (in_.below(13)) {
      case 0:
        return open();
      case 1:
        return get_info();
      case 2:
      case 3:
        return look_up();
      case 4:
      case 5:
        return pool();
      case 6:
        return read_files();
      case 7:
        return begin_delta();
      case 8:
        return add();
      case 9:
        return add_shared();
      case 10:
        return erase();
      case 11:
        return take();
      default:
        return route();
    }
  }

  void set_opened(Opened& opened, recsdk_serving_table* table, const ServedFiles& of,
                  const std::set<std::int64_t>& shards) {
    opened = Opened{Table{std::unique_ptr<recsdk_serving_table, Table::Free>(table)},
                    &of,
                    shards,
                    {},
                    of.shared,
                    0};
    for (const auto& [key, row] : of.rows) {
      if (opened.has_shard_of(key)) opened.rows[key] = row;
    }
  }

  void open_whole(Opened& opened, std::size_t freeze) {
    const ServedFiles& of = *files_[freeze];
    std::vector<std::string> paths;
    for (const FileInMemory& file : of.files) paths.push_back(file.path());
    std::vector<const char*> files;
    std::set<std::int64_t> shards;
    for (const std::string& path : paths) {
      files.push_back(path.c_str());
      shards.insert(std::ssize(shards));
    }
    recsdk_serving_table* table = nullptr;
    expect(recsdk_serving_open(files.data(), std::ssize(files), &table), RECSDK_SERVING_OK,
           "files that are whole are opened");
    set_opened(opened, table, of, shards);
  }

  /// Any files in any order: as they come, they tell what is wrong.
  void open() {
    std::vector<std::string> paths;
    std::set<std::int64_t> shards;
    std::size_t freeze = 0;
    int wanted = RECSDK_SERVING_OK;
    for (std::int64_t left = in_.below(4); left > 0; --left) {
      const std::size_t of = rarely() ? 1 - freeze : freeze;
      if (paths.empty()) freeze = of;
      const std::int64_t shard = in_.below(files_[of]->config.num_shards);
      int status = RECSDK_SERVING_OK;
      if (rarely()) {
        paths.emplace_back("/nowhere");
        status = RECSDK_SERVING_ERROR_FILE;
      } else {
        paths.push_back(files_[of]->files[static_cast<std::size_t>(shard)].path());
        if (of != freeze) {
          status = RECSDK_SERVING_ERROR_FILE;
        } else if (!shards.insert(shard).second) {
          status = RECSDK_SERVING_ERROR_INVALID_ARGUMENT;
        }
      }
      if (wanted == RECSDK_SERVING_OK) wanted = status;
    }
    std::vector<const char*> files;
    bool has_null = false;
    for (const std::string& path : paths) {
      files.push_back(maybe_null(path.c_str()));
      has_null = has_null || files.back() == nullptr;
    }
    const std::int64_t count = length(files.size());
    const char* const* const given = maybe_null(files.data());
    recsdk_serving_table* table = nullptr;
    recsdk_serving_table** const out = maybe_null(&table);
    if (has_null || count == 0 || count != std::ssize(files) || given == nullptr || out == nullptr)
      wanted = RECSDK_SERVING_ERROR_INVALID_ARGUMENT;
    const int status = recsdk_serving_open(given, count, out);
    expect(status, wanted, "files of one table are opened, and no others");
    require((table != nullptr) == (status == RECSDK_SERVING_OK), "a handle is given if it is done");
    if (table != nullptr) set_opened(any_table(), table, *files_[freeze], shards);
  }

  void get_info() {
    const Opened& opened = any_table();
    recsdk_serving_info info;
    std::memset(&info, 0xAB, sizeof(info));
    const recsdk_serving_info before = info;
    info.struct_size = rarely() ? static_cast<std::size_t>(in_.below(300)) : sizeof(info);
    const std::size_t size = info.struct_size;
    const recsdk_serving_table* const table = maybe_null(opened.table.get());
    recsdk_serving_info* const out = maybe_null(&info);
    const bool is_size =
        size > sizeof(size) && size <= sizeof(info) && size % alignof(recsdk_serving_info) == 0;
    const bool is_wrong = table == nullptr || out == nullptr || !is_size;
    if (!is_done(recsdk_serving_get_info(table, out), is_wrong)) return;
    const auto* const bytes = reinterpret_cast<const std::byte*>(&info);
    require(std::memcmp(bytes + size, reinterpret_cast<const std::byte*>(&before) + size,
                        sizeof(info) - size) == 0,
            "nothing behind the end of a struct is written");
    if (size == sizeof(info)) check_info(opened, info);
  }

  static void check_info(const Opened& opened, const recsdk_serving_info& info) {
    const FreezeConfig& config = opened.of->config;
    require(info.name == config.name && info.dim == config.dim, "a table has its name and width");
    require(info.row_bytes == frozen_row_bytes(config.dtype, config.dim), "a row has its bytes");
    require(info.num_shards == config.num_shards && info.num_shared == config.num_shared &&
                info.dtype == static_cast<std::int32_t>(config.dtype) &&
                info.default_value == config.default_value && info.reserved == 0,
            "a table is what was frozen");
    require(info.num_rows == std::ssize(opened.rows), "a table has the keys of the map");
    require(info.num_deltas == opened.num_deltas, "deltas are counted");
    require((info.is_whole != 0) == (std::ssize(opened.shards) == config.num_shards),
            "a table is whole if all shards are open");
    require(info.num_bytes > 0 && info.delta_bytes >= 0, "bytes are counted");
  }

  void look_up() {
    const Opened& opened = any_table();
    const std::vector<Key> keys = draw_keys();
    const std::int64_t count = length(keys.size());
    std::vector<float> values(keys.size() * opened.of->dim());
    std::vector<std::uint8_t> outcomes(keys.size(), 77);
    const recsdk_serving_table* const table = maybe_null(opened.table.get());
    const Key* const given = maybe_null(keys.data());
    float* const out = maybe_null(values.data());
    std::uint8_t* said = maybe_over(outcomes, values);
    const bool is_over = !keys.empty() && said != outcomes.data();
    said = maybe_null(said);
    const bool is_wrong =
        table == nullptr || count != std::ssize(keys) || (is_over && said != nullptr) ||
        (count > 0 && (given == nullptr || out == nullptr)) || !has_shards_of(opened, keys);
    if (!is_done(recsdk_serving_lookup(table, given, count, out, said), is_wrong)) return;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const Row wanted = opened.row_of(keys[i]);
      require(std::equal(wanted.begin(), wanted.end(), &values[i * wanted.size()]),
              "a row is the map's");
      require(said == nullptr || outcomes[i] == outcome_of(opened, keys[i]), "an outcome is right");
    }
  }

  static bool has_shards_of(const Opened& opened, const std::vector<Key>& keys) {
    return std::ranges::all_of(keys, [&](Key key) { return opened.has_shard_of(key); });
  }

  static std::uint8_t outcome_of(const Opened& opened, Key key) {
    return opened.rows.contains(key) ? RECSDK_SERVING_FOUND : RECSDK_SERVING_MISSING;
  }

  /// Bags of one table, as they are asked for and as they must be answered.
  struct Bags {
    const Opened* opened = nullptr;
    std::vector<Key> keys;
    std::vector<std::int64_t> offsets;
    std::vector<float> weights;
    std::vector<float> out;
    std::vector<std::uint8_t> outcomes;
    recsdk_serving_call call{};
    bool is_wrong = false;
  };

  static constexpr float kUntouched = 12345.0F;

  void draw_bags(Bags& bags) {
    bags.opened = &any_table();
    bags.keys = draw_keys();
    bags.offsets = {0};
    for (std::int64_t left = in_.below(4); left > 0; --left)
      bags.offsets.push_back(in_.below(std::ssize(bags.keys) + 1));
    bags.offsets.push_back(std::ssize(bags.keys));
    if (!rarely()) std::ranges::sort(bags.offsets);
    if (rarely()) bags.offsets.front() = 1;
    if (rarely()) bags.offsets.back() += in_.flag() ? 1 : -1;
    for (std::size_t i = 0; i < bags.keys.size(); ++i)
      bags.weights.push_back(static_cast<float>(in_.below(5)) - 2.0F);
    bags.outcomes.assign(bags.keys.size(), 77);
    const bool has_offsets = in_.flag() || in_.flag();
    const std::int64_t num_bags =
        has_offsets ? std::ssize(bags.offsets) - 1 : std::ssize(bags.keys);
    const std::int64_t dim = bags.opened->of->config.dim;
    const std::int64_t stride = dim + in_.below(3);
    bags.out.assign(static_cast<std::size_t>(stride * num_bags), kUntouched);
    recsdk_serving_call& call = bags.call;
    call.table = maybe_null(bags.opened->table.get());
    call.keys = maybe_null(bags.keys.data());
    call.num_keys = length(bags.keys.size());
    call.offsets = has_offsets ? bags.offsets.data() : nullptr;
    call.num_bags = length(static_cast<std::size_t>(num_bags));
    call.weights = in_.flag() ? bags.weights.data() : nullptr;
    call.pooling = rarely() ? in_.byte() : static_cast<std::int32_t>(in_.below(2));
    call.reserved = rarely() ? 1 : 0;
    call.out = maybe_null(maybe_over(bags.out, bags.keys));
    call.stride = rarely() ? no_stride(dim) : stride;
    call.outcomes = maybe_null(maybe_over(bags.outcomes, bags.keys));
    bags.is_wrong = are_wrong(bags, num_bags) || call.stride != stride;
  }

  static bool are_wrong(const Bags& bags, std::int64_t num_bags) {
    const recsdk_serving_call& call = bags.call;
    const bool lacks_array =
        (call.num_keys > 0 && call.keys == nullptr) || (call.num_bags > 0 && call.out == nullptr);
    const bool lacks_length = call.num_keys != std::ssize(bags.keys) || call.num_bags != num_bags;
    const bool has_wrong_offsets =
        call.offsets != nullptr &&
        (bags.offsets.front() != 0 || bags.offsets.back() != std::ssize(bags.keys) ||
         !std::ranges::is_sorted(bags.offsets));
    const void* const keys = bags.keys.data();
    const bool is_over =
        !bags.keys.empty() && ((num_bags > 0 && call.out == keys) || call.outcomes == keys);
    return call.table == nullptr || lacks_array || is_over || lacks_length || has_wrong_offsets ||
           call.pooling > RECSDK_SERVING_MEAN || call.reserved != 0 ||
           !has_shards_of(*bags.opened, bags.keys);
  }

  void pool() {
    std::vector<Bags> all(static_cast<std::size_t>(in_.below(4)));
    std::vector<recsdk_serving_call> calls;
    bool is_wrong = false;
    for (Bags& bags : all) {
      draw_bags(bags);
      calls.push_back(bags.call);
      is_wrong = is_wrong || bags.is_wrong;
    }
    const std::int64_t count = length(calls.size());
    const recsdk_serving_call* const given = maybe_null(calls.data());
    is_wrong =
        is_wrong ? count != 0 : count != std::ssize(calls) || (count > 0 && given == nullptr);
    const bool done = is_done(recsdk_serving_pool(given, count), is_wrong);
    for (const Bags& bags : all) {
      if (done) {
        check_pooled(bags);
      } else {
        require(std::ranges::count(bags.out, kUntouched) == std::ssize(bags.out),
                "what is refused has written nothing");
      }
    }
  }

  /// Whole numbers, so that sums are exact in any order.
  static void check_pooled(const Bags& bags) {
    const recsdk_serving_call& call = bags.call;
    const auto dim = static_cast<std::ptrdiff_t>(bags.opened->of->dim());
    for (std::ptrdiff_t bag = 0; bag < call.num_bags; ++bag) {
      const auto pooled = std::span(bags.out).subspan(
          static_cast<std::size_t>(bag * call.stride),
          static_cast<std::size_t>(bag + 1 < call.num_bags ? call.stride : dim));
      const Row wanted = pooled_row(bags, static_cast<std::size_t>(bag));
      for (std::size_t c = 0; c < pooled.size(); ++c) {
        const float number = c < wanted.size() ? wanted[c] : kUntouched;
        require(std::fabs(pooled[c] - number) <= 1e-3F,
                "a bag is pooled, and nothing beside it is written");
      }
    }
    for (std::size_t i = 0; call.outcomes != nullptr && i < bags.keys.size(); ++i)
      require(bags.outcomes[i] == outcome_of(*bags.opened, bags.keys[i]), "an outcome is right");
  }

  static Row pooled_row(const Bags& bags, std::size_t bag) {
    const bool has_offsets = bags.call.offsets != nullptr;
    const std::size_t begin = has_offsets ? static_cast<std::size_t>(bags.offsets[bag]) : bag;
    const std::size_t end = has_offsets ? static_cast<std::size_t>(bags.offsets[bag + 1]) : bag + 1;
    Row sum(bags.opened->of->dim());
    float total = 0.0F;
    for (std::size_t i = begin; i < end; ++i) {
      const float weight = bags.call.weights == nullptr ? 1.0F : bags.weights[i];
      const Row row = bags.opened->row_of(bags.keys[i]);
      for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += weight * row[c];
      total += weight;
    }
    if (bags.call.pooling == RECSDK_SERVING_SUM || end == begin) return sum;
    for (float& x : sum) x = total == 0.0F ? 0.0F : x / total;
    return sum;
  }

  void read_files() {
    const recsdk_serving_table* const table = maybe_null(any_table().table.get());
    const bool is_wrong = table == nullptr;
    is_done(in_.flag() ? recsdk_serving_verify(table) : recsdk_serving_preload(table), is_wrong);
    if (rarely()) open_whole(any_table(), static_cast<std::size_t>(in_.below(2)));
  }

  void begin_delta() {
    const Opened& opened = any_table();
    const recsdk_serving_table* const table = maybe_null(opened.table.get());
    recsdk_serving_delta* delta = nullptr;
    recsdk_serving_delta** const out = maybe_null(&delta);
    const bool is_wrong = table == nullptr || out == nullptr;
    if (!is_done(recsdk_serving_delta_create(table, out), is_wrong)) return;
    Draft& draft = any_draft();
    draft = Draft{{}, opened.of, {}, {}, {}};
    draft.delta.owned.reset(delta);
  }

  /// Rows (N, D) of these keys; one may have a number that the dtype cannot hold.
  std::vector<float> draw_rows(const Draft& draft, std::size_t count, bool& has_large) {
    std::vector<float> rows;
    for (std::size_t i = 0; i < count; ++i) {
      const Row row = plain_row(dtype_of(draft), dim_of(draft), in_.byte());
      rows.insert(rows.end(), row.begin(), row.end());
    }
    has_large = count > 0 && rarely() && dtype_of(draft) >= FrozenDType::kFloat16;
    if (has_large) {
      rows[static_cast<std::size_t>(in_.below(std::ssize(rows)))] =
          dtype_of(draft) == FrozenDType::kFloat16 ? 70'000.0F
                                                   : std::numeric_limits<float>::infinity();
    }
    return rows;
  }

  /// A draft that none has begun has no handle, which is refused.
  static FrozenDType dtype_of(const Draft& draft) {
    return draft.of == nullptr ? FrozenDType::kFloat32 : draft.of->config.dtype;
  }
  static std::size_t dim_of(const Draft& draft) {
    return draft.of == nullptr ? 1 : draft.of->dim();
  }

  static Row row_at(const std::vector<float>& rows, std::size_t i, std::size_t dim) {
    const auto first = rows.begin() + static_cast<std::ptrdiff_t>(i * dim);
    return {first, first + static_cast<std::ptrdiff_t>(dim)};
  }

  void add() {
    Draft& draft = any_draft();
    const std::vector<Key> keys = draw_keys();
    bool has_large = false;
    const std::vector<float> rows = draw_rows(draft, keys.size(), has_large);
    const std::int64_t count = length(keys.size());
    recsdk_serving_delta* const delta = maybe_null(draft.delta.get());
    const Key* const given = maybe_null(keys.data());
    const float* const weights = maybe_null(rows.data());
    const bool is_wrong = delta == nullptr || count != std::ssize(keys) || has_large ||
                          (count > 0 && (given == nullptr || weights == nullptr));
    if (!is_done(recsdk_serving_delta_add(delta, given, count, weights), is_wrong)) return;
    for (std::size_t i = 0; i < keys.size(); ++i)
      draft.added.emplace_back(keys[i], row_at(rows, i, draft.of->dim()));
  }

  void add_shared() {
    Draft& draft = any_draft();
    const std::int64_t num_shared = draft.of == nullptr ? 0 : draft.of->config.num_shared;
    std::vector<Key> keys;
    std::set<std::int64_t> rows_now;
    bool is_twice = false;
    for (std::int64_t left = in_.below(6); left > 0; --left) {
      const Key key = draw_key();
      const std::int64_t row = num_shared == 0 ? 0 : shared_row(key, num_shared);
      const bool is_again = draft.shared.contains(row) || rows_now.contains(row);
      if (is_again && !rarely()) continue;  // mostly as it ought to be
      is_twice = is_twice || is_again;
      rows_now.insert(row);
      keys.push_back(key);
    }
    bool has_large = false;
    const std::vector<float> rows = draw_rows(draft, keys.size(), has_large);
    const std::int64_t count = length(keys.size());
    recsdk_serving_delta* const delta = maybe_null(draft.delta.get());
    const Key* const given = maybe_null(keys.data());
    const float* const weights = maybe_null(rows.data());
    const bool is_wrong = delta == nullptr || count != std::ssize(keys) || has_large || is_twice ||
                          (count > 0 && (given == nullptr || weights == nullptr)) ||
                          (count > 0 && num_shared == 0);
    if (!is_done(recsdk_serving_delta_add_shared(delta, given, count, weights), is_wrong)) return;
    for (std::size_t i = 0; i < keys.size(); ++i)
      draft.shared[shared_row(keys[i], num_shared)] = row_at(rows, i, draft.of->dim());
  }

  void erase() {
    Draft& draft = any_draft();
    const std::vector<Key> keys = draw_keys();
    const std::int64_t count = length(keys.size());
    recsdk_serving_delta* const delta = maybe_null(draft.delta.get());
    const Key* const given = maybe_null(keys.data());
    const bool is_wrong =
        delta == nullptr || count != std::ssize(keys) || (count > 0 && given == nullptr);
    if (!is_done(recsdk_serving_delta_erase(delta, given, count), is_wrong)) return;
    draft.erased.insert(draft.erased.end(), keys.begin(), keys.end());
  }

  /// Whether a key of a shard that is open comes twice.
  static bool has_twice(const Opened& opened, const Draft& draft) {
    std::set<Key> seen;
    bool is_twice = false;
    const auto see = [&](Key key) {
      if (opened.has_shard_of(key)) is_twice = !seen.insert(key).second || is_twice;
    };
    for (const auto& [key, row] : draft.added) see(key);
    for (const Key key : draft.erased) see(key);
    return is_twice;
  }

  void take() {
    Opened& opened = any_table();
    Draft& draft = any_draft();
    recsdk_serving_table* const table = maybe_null(opened.table.get());
    const recsdk_serving_delta* const delta = maybe_null(draft.delta.get());
    const bool has_some_shared =
        !draft.shared.empty() &&
        std::ssize(draft.shared) != (draft.of == nullptr ? 0 : draft.of->config.num_shared);
    const bool is_wrong = table == nullptr || delta == nullptr || opened.of != draft.of ||
                          has_some_shared || has_twice(opened, draft);
    const bool done = is_done(recsdk_serving_take(table, delta), is_wrong);
    if (done) {
      for (const auto& [key, row] : draft.added) {
        if (opened.has_shard_of(key)) opened.rows[key] = row;
      }
      for (const Key key : draft.erased) {
        if (opened.has_shard_of(key)) opened.rows.erase(key);
      }
      for (const auto& [row, values] : draft.shared)
        opened.shared[static_cast<std::size_t>(row)] = values;
      ++opened.num_deltas;
    }
    if (!done || in_.flag()) draft = Draft();  // else it is taken again, or by another table
  }

  void route() {
    constexpr std::array<std::int64_t, 6> kCounts = {
        1, 3, 65'536, 65'537, 0, std::numeric_limits<std::int64_t>::min()};
    const std::int64_t count = kCounts[static_cast<std::size_t>(in_.below(std::ssize(kCounts)))];
    const Key key = draw_key();
    std::int64_t shard = -1;
    std::int64_t* const out = maybe_null(&shard);
    const bool is_wrong = out == nullptr || count < 1 || count > 65'536;
    if (is_done(recsdk_serving_shard(key, count, out), is_wrong))
      require(shard >= 0 && shard < count, "a shard is one of them");
    require(recsdk_serving_abi_version() == RECSDK_SERVING_ABI_VERSION, "the version is ours");
    if (rarely()) any_draft() = Draft();
    if (rarely()) recsdk_serving_close(nullptr);
    if (rarely()) recsdk_serving_delta_destroy(nullptr);
  }

  // What holds after each call.

  void check(const Opened& opened) {
    std::vector<Key> keys;
    for (std::int64_t n = 0; n < kNumKeys; ++n) {
      if (opened.has_shard_of(key_of(n))) keys.push_back(key_of(n));
    }
    std::vector<float> values(keys.size() * opened.of->dim());
    expect(recsdk_serving_lookup(opened.table.get(), keys.data(), std::ssize(keys), values.data(),
                                 nullptr),
           RECSDK_SERVING_OK, "keys of shards that are open are read");
    for (std::size_t i = 0; i < keys.size(); ++i) {
      require(row_at(values, i, opened.of->dim()) == opened.row_of(keys[i]), "a row is the map's");
    }
    recsdk_serving_info info{};
    info.struct_size = sizeof(info);
    expect(recsdk_serving_get_info(opened.table.get(), &info), RECSDK_SERVING_OK,
           "a table says what it is");
    check_info(opened, info);
  }

  std::array<const ServedFiles*, 2> files_{};
  std::array<Opened, 2> opened_;
  std::array<Draft, 2> drafts_;
};

/// Throws if the C interface of serving and the maps disagree, or something wrong is not refused.
inline void run_serving(const std::uint8_t* data, std::size_t size) {
  ServingReplay(data, size).run();
}

}  // namespace recsdk::test
