// Frozen tables answer as a plain map would, bit for bit, and refuse files that are not whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "recsdk/runtime.h"
#include "serving/find.h"
#include "support/frozen_tables.h"

namespace recsdk::test::serving_test {
namespace {

/// Some keys of a table, some that it lacks, some twice.
std::vector<Key> mixed_keys(const Rows& rows, std::size_t count, std::mt19937_64& random) {
  std::vector<Key> there;
  for (const auto& [key, row] : rows) there.push_back(key);
  std::vector<Key> keys;
  while (keys.size() < count) {
    const bool is_there = !there.empty() && random() % 4 != 0;
    keys.push_back(is_there ? there[random() % there.size()] : static_cast<Key>(random()));
  }
  return keys;
}

using Values = std::vector<float>;

bool has_bits(const float* got, const Values& wanted) {
  return std::memcmp(got, wanted.data(), wanted.size() * sizeof(float)) == 0;
}

/// What a table must answer.
struct Model {
  std::map<Key, StoredRow> stored;
  std::size_t dim;
  std::vector<StoredRow> shared;
  StoredRow fallback;

  Model(const Rows& rows, const FreezeConfig& config) : dim(static_cast<std::size_t>(config.dim)) {
    for (const auto& [key, row] : rows) stored[key] = stored_row(config.dtype, row);
    for (const Values& row : shared_rows_of(config))
      shared.push_back(stored_row(config.dtype, row));
    fallback.is_quantized =
        config.dtype == FrozenDType::kInt8 || config.dtype == FrozenDType::kInt4;
    fallback.values = Values(dim, fallback.is_quantized ? 0.0F : kDefault);
    fallback.bias = kDefault;
  }
  const StoredRow& row_of(Key key) const {
    const auto found = stored.find(key);
    if (found != stored.end()) return found->second;
    if (shared.empty()) return fallback;
    return shared[static_cast<std::size_t>(shared_row(key, std::ssize(shared)))];
  }
  Values of(Key key) const { return row_of(key).columns(); }
  /// Of quantized rows, steps times scale are added with one rounding, and their biases apart.
  Values pooled(const ServingBags& bags, std::size_t bag) const {
    Values sum(dim, 0.0F);
    float biases = 0.0F;
    float divisor = 0.0F;
    const auto begin = static_cast<std::size_t>(bags.offsets[bag]);
    const auto end = static_cast<std::size_t>(bags.offsets[bag + 1]);
    for (std::size_t i = begin; i < end; ++i) {
      const StoredRow& row = row_of(bags.keys[i]);
      const float weight = bags.weights.empty() ? 1.0F : bags.weights[i];
      const float factor = row.is_quantized ? weight * row.scale : weight;
      for (std::size_t c = 0; c < dim; ++c) {
        const float x = factor * row.values[c];
        sum[c] = row.is_quantized ? std::fma(factor, row.values[c], sum[c]) : sum[c] + x;
      }
      const float bias = weight * row.bias;
      biases += bias;
      divisor += weight;
    }
    for (float& x : sum) {
      if (fallback.is_quantized) x += biases;
      if (bags.pooling == Pooling::kMean) x = divisor == 0.0F ? 0.0F : x / divisor;
    }
    return sum;
  }
};

void expect_lookup(const ServingTable& table, const Model& model, std::span<const Key> keys) {
  Values values(keys.size() * model.dim);
  std::vector<Outcome> outcomes(keys.size(), Outcome::kRefused);
  table.lookup(keys, values.data(), outcomes);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    ASSERT_TRUE(has_bits(&values[i * model.dim], model.of(keys[i]))) << "key " << keys[i];
    ASSERT_EQ(outcomes[i], model.stored.contains(keys[i]) ? Outcome::kFound : Outcome::kMissing);
  }
}

void expect_pool(const ServingTable& table, const Model& model, const ServingBags& bags) {
  const auto num_bags = static_cast<std::size_t>(bags.num_bags());
  const std::size_t stride = model.dim + 3;
  Values out(num_bags * stride, 77.0F);
  std::vector<Outcome> outcomes(bags.keys.size(), Outcome::kRefused);
  table.pool({bags, out.data(), static_cast<std::int64_t>(stride), outcomes});
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    const bool is_there = model.stored.contains(bags.keys[i]);
    ASSERT_EQ(outcomes[i], is_there ? Outcome::kFound : Outcome::kMissing) << bags.keys[i];
  }
  for (std::size_t b = 0; b < num_bags; ++b) {
    ASSERT_TRUE(has_bits(&out[b * stride], model.pooled(bags, b))) << "bag " << b;
    ASSERT_EQ(out[b * stride + model.dim], 77.0F) << "behind bag " << b;
  }
}

/// Offsets of bags over `num_keys` keys: empty ones, small ones, one larger than what is found at
/// a time.
std::vector<std::int64_t> offsets_of(std::int64_t num_keys, std::mt19937_64& random) {
  std::vector<std::int64_t> offsets{0, 0};
  while (offsets.back() < num_keys) {
    const auto size = static_cast<std::int64_t>(offsets.size() == 5 ? 5000 : random() % 7);
    offsets.push_back(std::min(offsets.back() + size, num_keys));
  }
  offsets.push_back(num_keys);
  return offsets;
}

void expect_answers(const Rows& rows, const FreezeConfig& config, std::mt19937_64& random) {
  const std::vector<std::string> paths = freeze(rows, config);
  const ServingTable table(paths);
  const Model model(rows, config);
  table.verify();
  ASSERT_EQ(table.size(), static_cast<std::int64_t>(rows.size()));
  const std::vector<Key> keys = mixed_keys(rows, 6000, random);
  const std::vector<std::int64_t> offsets = offsets_of(6000, random);
  Values weights(keys.size());
  for (float& w : weights) w = static_cast<float>(random() % 5) - 1.0F;
  for (const std::string& name : available_isas()) {
    set_isa(name);
    SCOPED_TRACE(name);
    expect_lookup(table, model, keys);
    for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
      expect_pool(table, model, {keys, offsets, {}, pooling});
      expect_pool(table, model, {keys, offsets, weights, pooling});
    }
  }
}

class ServingDTypeTest : public testing::TestWithParam<int> {};

TEST_P(ServingDTypeTest, AnswersAsAPlainMap) {
  const auto dtype = static_cast<FrozenDType>(GetParam());
  std::mt19937_64 random(static_cast<std::uint64_t>(GetParam()));
  struct Shape {
    std::size_t rows;
    std::int64_t dim;
    std::int64_t shards;
    std::int64_t shared;
  };
  for (const Shape shape : {Shape{0, 4, 1, 0},
                            {1, 1, 2, 1},
                            {500, 3, 1, 7},
                            {700, 8, 3, 64},
                            {300, 17, 1, 1},
                            {200, 39, 2, 5},
                            {100, 64, 1, 0},
                            {40, 133, 1, 100}}) {
    SCOPED_TRACE(testing::Message() << shape.rows << " rows of width " << shape.dim);
    const TemporaryFolder folder;
    FreezeConfig config = config_of(folder, shape.dim, dtype);
    config.num_shards = shape.shards;
    config.num_shared = shape.shared;
    expect_answers(random_rows(shape.rows, shape.dim, random), config, random);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ServingDTypeTest, testing::Range(0, kNumFrozenDTypes));

TEST(ServingTest, ManySmallPartsMakeTheSameTable) {
  std::mt19937_64 random(7);
  const Rows rows = random_rows(3000, 5, random);
  const TemporaryFolder folder;
  FreezeConfig config = config_of(folder, 5, FrozenDType::kFloat32);
  const std::vector<std::byte> plain = content_of(freeze(rows, config)[0]);
  config.expected_rows = std::int64_t{1} << 36;  // far more parts than needed
  EXPECT_EQ(content_of(freeze(rows, config)[0]), plain);
}

TEST(ServingTest, IndexTakesAtMostTwelveBytesAKey) {
  std::mt19937_64 random(8);
  const TemporaryFolder folder;
  const FreezeConfig config = config_of(folder, 8, FrozenDType::kInt8);
  const ServingTable table(freeze(random_rows(20'000, 8, random), config));
  const FrozenInfo& info = table.info();
  const std::int64_t beside =
      info.num_bytes - internal::kFrozenHeaderBytes - info.num_rows * info.row_bytes;
  EXPECT_LE(beside, 12 * info.num_rows);
}

/// Keys that share a line of the index of a table of 2000 rows.
std::vector<Key> crowd(std::size_t count, std::uint64_t seed) {
  std::vector<Key> keys;
  for (Key key = 0; keys.size() < count; ++key) {
    if (internal::frozen_line(internal::frozen_hash(key, seed), internal::frozen_lines(2000)) == 3)
      keys.push_back(key);
  }
  return keys;
}

Rows crowded_rows(std::size_t count, const FreezeConfig& config, std::mt19937_64& random) {
  Rows rows = random_rows(2000 - count, config.dim, random);
  for (const Key key : crowd(count + 40, config.hash_seed)) {
    if (rows.size() < 2000) rows.try_emplace(key, Values{static_cast<float>(key), 1.0F});
  }
  return rows;
}

TEST(ServingTest, KeysWithoutATagAreFound) {
  std::mt19937_64 random(9);
  const TemporaryFolder folder;
  const FreezeConfig config = config_of(folder, 2, FrozenDType::kFloat32);
  const Rows rows = crowded_rows(200, config, random);
  const ServingTable table(freeze(rows, config));
  std::vector<Key> keys = crowd(400, config.hash_seed);  // some are missing, in a full line
  for (const auto& [key, row] : rows) keys.push_back(key);
  std::shuffle(keys.begin(), keys.end(), random);
  const Model model(rows, config);
  const std::vector<std::int64_t> offsets = offsets_of(std::ssize(keys), random);
  for (const std::string& name : available_isas()) {
    set_isa(name);
    SCOPED_TRACE(name);
    expect_lookup(table, model, keys);
    expect_pool(table, model, {keys, offsets, {}, Pooling::kSum});
  }
}

TEST(ServingTest, KeysThatCollideOnPurposeAreRefused) {
  std::mt19937_64 random(10);
  const TemporaryFolder folder;
  const FreezeConfig config = config_of(folder, 2, FrozenDType::kFloat32);
  const Rows rows = crowded_rows(300, config, random);
  EXPECT_THROW(freeze(rows, config), Error);
}

TEST(ServingTest, RefusesAKeyWithTwoRowsAndRowsThatNoStepCanHold) {
  const TemporaryFolder folder;
  const FreezeConfig config = config_of(folder, 2, FrozenDType::kInt4);
  FrozenWriter writer(config);
  const Key key = 5;
  const Values row{1.0F, 2.0F};
  writer.add({&key, 1}, row.data());
  writer.add({&key, 1}, row.data());
  const std::string path = folder.path() + "/x";
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  EXPECT_THROW(writer.write_shard(0, file, path), Error);
  close(file);
  EXPECT_THROW(writer.add({&key, 1}, row.data()), std::invalid_argument);
  for (const FrozenDType dtype : {FrozenDType::kInt8, FrozenDType::kInt4}) {
    for (const float bad : {INFINITY, -INFINITY, NAN, dtype == FrozenDType::kInt4 ? 1e30F : NAN}) {
      std::byte out[16];
      const Values with_bad{bad, 1.0F};
      EXPECT_FALSE(quantize_row(dtype, with_bad, out)) << bad;
    }
  }
}

/// One file, what is in it, and reading it whole.
class DamagedFileTest : public testing::Test {
 protected:
  DamagedFileTest() : config_(config_of(folder_, 6, FrozenDType::kFloat16)) {
    std::mt19937_64 random(11);
    rows_ = random_rows(400, 6, random);
    path_ = freeze(rows_, config_)[0];
    whole_ = content_of(path_);
    keys_ = mixed_keys(rows_, 1000, random);
  }

  ServingTable open() const { return ServingTable({&path_, 1}); }

  /// Opens and reads a file that may be damaged; nothing but Error may come of it.
  bool serves(const std::vector<std::byte>& file) const {
    put_content(path_, file);
    try {
      const ServingTable table = open();
      Values values(keys_.size() * 6);
      table.lookup(keys_, values.data());
      table.pool({{keys_, {}, {}, Pooling::kSum}, values.data(), 6, {}});
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  bool verifies(const std::vector<std::byte>& file) const {
    put_content(path_, file);
    try {
      open().verify();
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  TemporaryFolder folder_;
  FreezeConfig config_;
  Rows rows_;
  std::string path_;
  std::vector<std::byte> whole_;
  std::vector<Key> keys_;
};

TEST_F(DamagedFileTest, EachFlippedByteIsFound) {
  EXPECT_TRUE(verifies(whole_));
  std::mt19937_64 random(12);
  for (int i = 0; i < 300; ++i) {
    std::vector<std::byte> file = whole_;
    file[i < 150 ? random() % 160 : random() % file.size()] ^= std::byte{1} << random() % 8;
    EXPECT_FALSE(verifies(file));
  }
}

TEST_F(DamagedFileTest, TruncatedFilesAreRefused) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{100}, std::size_t{8191},
                                 std::size_t{8192}, whole_.size() - 1}) {
    EXPECT_FALSE(serves({whole_.begin(), whole_.begin() + static_cast<std::ptrdiff_t>(size)}));
  }
  std::vector<std::byte> longer = whole_;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(serves(longer));
}

TEST_F(DamagedFileTest, HeadersThatLieAreRefused) {
  const auto with = [&](const std::function<void(internal::FrozenHeader&)>& change) {
    std::vector<std::byte> file = whole_;
    internal::FrozenHeader head;
    std::memcpy(&head, file.data(), sizeof(head));
    change(head);
    std::memcpy(file.data(), &head, sizeof(head));
    seal(file);
    return serves(file);
  };
  using Head = internal::FrozenHeader;
  EXPECT_TRUE(with([](Head&) {}));
  EXPECT_FALSE(with([](Head& h) { h.magic[0] = 'r'; }));
  EXPECT_FALSE(with([](Head& h) { h.version = 2; }));
  EXPECT_FALSE(with([](Head& h) { h.byte_order = 0x04030201; }));
  for (const std::int64_t value :
       {std::int64_t{-1}, std::int64_t{0}, std::int64_t{5}, std::int64_t{401},
        std::int64_t{1} << 37, INT64_MAX, INT64_MIN}) {
    EXPECT_FALSE(with([&](Head& h) { h.dim = value; }));
    EXPECT_FALSE(with([&](Head& h) { h.row_bytes = value; }));
    EXPECT_FALSE(with([&](Head& h) { h.num_rows = value; }));
    EXPECT_FALSE(with([&](Head& h) { h.num_lines = value; }));
    EXPECT_FALSE(with([&](Head& h) { h.file_bytes = value; }));
  }
  for (const std::uint32_t value : {5000U, 1U << 31, ~0U}) {
    EXPECT_FALSE(with([&](Head& h) { h.dtype = value; }));
    EXPECT_FALSE(with([&](Head& h) { h.name_bytes = value; }));
    EXPECT_FALSE(with([&](Head& h) { h.shard = value; }));
  }
  EXPECT_FALSE(with([](Head& h) { h.num_shards = 0; }));
  EXPECT_FALSE(with([](Head& h) { h.num_shards = 65'537; }));
  EXPECT_FALSE(with([](Head& h) { h.name_bytes = 0; }));
  EXPECT_FALSE(with([](Head& h) { h.default_value = NAN; }));
}

TEST_F(DamagedFileTest, NoIndexLeadsOutsideTheFile) {
  std::mt19937_64 random(13);
  const std::size_t end =
      static_cast<std::size_t>(internal::frozen_records_offset(internal::frozen_lines(400)));
  for (int i = 0; i < 60; ++i) {
    std::vector<std::byte> file = whole_;
    for (std::size_t at = 8192; at < end; ++at) {
      if (i < 30 ? random() % 4 == 0 : at % 64 < 8) file[at] = static_cast<std::byte>(random());
    }
    EXPECT_TRUE(serves(file));  // opening does not read the index; keys may be missing
    EXPECT_FALSE(verifies(file));
  }
}

TEST_F(DamagedFileTest, LinesThatClaimMoreRowsThanThereAreGiveNoOthers) {
  FreezeConfig config = config_;
  config.num_shared = 3;  // their records lie behind the rows
  freeze(rows_, config);
  const std::vector<std::byte> whole = content_of(path_);
  const auto num_rows = static_cast<std::uint64_t>(rows_.size());
  for (const std::uint64_t begin : {num_rows - 1, num_rows, (std::uint64_t{1} << 56) - 1}) {
    std::vector<std::byte> file = whole;
    const std::uint64_t claim = begin | std::uint64_t{internal::FrozenLine::kMostRecords} << 56;
    for (std::int64_t i = 0; i < internal::frozen_lines(400); ++i)
      std::memcpy(&file[static_cast<std::size_t>(8192 + i * 64)], &claim, sizeof(claim));
    put_content(path_, file);
    const internal::FrozenFile damaged(path_);
    const internal::FrozenView* const view = &damaged.view();
    const internal::Sources sources{{{&view, 1}}, {}};
    const std::byte* const last = damaged.shared_record(-1);
    for (const std::string& name : available_isas()) {
      set_isa(name);
      std::vector<const std::byte*> records(keys_.size());
      internal::find_candidates(sources, keys_, records.data());
      for (const std::byte* const record : records)
        ASSERT_TRUE(record == nullptr || (begin < num_rows && record == last)) << name;
    }
  }
}

TEST_F(DamagedFileTest, WhatIsNoFileIsRefusedByName) {
  for (const std::string& path : {folder_.path(), folder_.path() + "/nothing"}) {
    try {
      const ServingTable table({&path, 1});
      FAIL() << path;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCheckpoint);
      EXPECT_NE(std::string(error.what()).find(path), std::string::npos);
    }
  }
}

TEST(ServingShardsTest, AKeyOfAShardThatIsNotOpenIsRefused) {
  std::mt19937_64 random(14);
  const TemporaryFolder folder;
  FreezeConfig config = config_of(folder, 4, FrozenDType::kFloat32);
  config.num_shards = 3;
  const Rows rows = random_rows(90, 4, random);
  const std::vector<std::string> paths = freeze(rows, config);
  const std::span<const std::string> all = paths;
  const ServingTable part(all.first(2));
  EXPECT_FALSE(part.is_whole());
  Values values(4);
  int num_refused = 0;
  for (const auto& [key, row] : rows) {
    if (serving_shard(key, 3) == 2) {
      EXPECT_THROW(part.lookup({&key, 1}, values.data()), std::invalid_argument);
      ++num_refused;
    } else {
      part.lookup({&key, 1}, values.data());
      EXPECT_EQ(values, row);
    }
  }
  EXPECT_GT(num_refused, 0);
  const std::vector<std::string> twice{paths[0], paths[0]};
  EXPECT_THROW(ServingTable{twice}, std::invalid_argument);
  EXPECT_THROW(ServingTable{std::vector<std::string>{}}, std::invalid_argument);
  const TemporaryFolder other_folder;
  config.scratch_folder = other_folder.path();
  config.token[3] = 9;
  const std::vector<std::string> mixed{paths[0], freeze(rows, config)[1]};
  EXPECT_THROW(ServingTable{mixed}, Error);
}

TEST(ServingArgumentsTest, WhatDoesNotFitIsRefused) {
  const TemporaryFolder folder;
  const ServingTable table(
      freeze({{1, {1.0F, 2.0F}}}, config_of(folder, 2, FrozenDType::kFloat32)));
  const std::vector<Key> keys{1, 2, 3};
  Values out(6);
  const auto pool = [&](std::vector<std::int64_t> offsets, std::size_t num_weights = 0,
                        std::int64_t stride = 2, std::size_t num_outcomes = 0) {
    const Values weights(num_weights, 1.0F);
    std::vector<Outcome> outcomes(num_outcomes);
    table.pool({{keys, offsets, weights, Pooling::kSum}, out.data(), stride, outcomes});
  };
  EXPECT_NO_THROW(pool({0, 1, 3}));
  EXPECT_THROW(pool({0, 2}), std::invalid_argument);
  EXPECT_THROW(pool({1, 3}), std::invalid_argument);
  EXPECT_THROW(pool({0, 2, 1, 3}), std::invalid_argument);
  EXPECT_THROW(pool({0, 3}, 2), std::invalid_argument);
  EXPECT_THROW(pool({0, 3}, 0, 1), std::invalid_argument);
  EXPECT_THROW(pool({0, 3}, 0, 2, 2), std::invalid_argument);
}

TEST(ServingThreadsTest, ThreadsReadSideBySide) {
  std::mt19937_64 random(15);
  const TemporaryFolder folder;
  const FreezeConfig config = config_of(folder, 16, FrozenDType::kInt8);
  const Rows rows = random_rows(2000, 16, random);
  const ServingTable table(freeze(rows, config));
  const Model model(rows, config);
  const std::vector<Key> keys = mixed_keys(rows, 3000, random);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) threads.emplace_back([&] { expect_lookup(table, model, keys); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace recsdk::test::serving_test
