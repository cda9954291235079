// Frozen tables in temporary files, and what they must answer, computed plainly.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "io/checksum.h"
#include "kernels/half.h"
#include "recsdk/freeze.h"
#include "recsdk/policy.h"
#include "recsdk/serving/serving_table.h"
#include "serving/format.h"

namespace recsdk::test {

using Rows = std::map<Key, std::vector<float>>;

/// A folder that is removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_(testing::TempDir() + "recsdk_frozen_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no folder for a test");
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline Rows random_rows(std::size_t count, std::int64_t dim, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  Rows rows;
  const Key extremes[] = {0, -1, INT64_MIN, INT64_MAX};
  while (rows.size() < count) {
    const Key key =
        rows.size() < 4 ? extremes[rows.size()] : static_cast<Key>(random() >> (random() % 60));
    std::vector<float>& row = rows[key];
    row.resize(static_cast<std::size_t>(dim));
    for (float& x : row) x = normal(random);
  }
  return rows;
}

/// What the tables of `config_of` answer for a key that they lack.
constexpr float kDefault = -2.5F;

inline FreezeConfig config_of(const TemporaryFolder& folder, std::int64_t dim, FrozenDType dtype) {
  FreezeConfig config;
  config.name = "item";
  config.dim = dim;
  config.dtype = dtype;
  config.default_value = kDefault;
  config.hash_seed = 0x1234'5678'9ABC'DEF1U;
  config.scratch_folder = folder.path();
  return config;
}

/// The rows that keys share that a table of this config lacks.
inline std::vector<std::vector<float>> shared_rows_of(const FreezeConfig& config) {
  std::mt19937_64 random(static_cast<std::uint64_t>(config.num_shared));
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> rows(static_cast<std::size_t>(config.num_shared));
  for (std::vector<float>& row : rows) {
    row.resize(static_cast<std::size_t>(config.dim));
    for (float& x : row) x = normal(random);
  }
  return rows;
}

/// Writes the files of a table; returns their paths, by shard.
inline std::vector<std::string> freeze(const Rows& rows, const FreezeConfig& config) {
  FrozenWriter writer(config);
  for (const auto& [key, row] : rows) writer.add({&key, 1}, row.data());
  const std::vector<std::vector<float>> shared = shared_rows_of(config);
  for (std::size_t i = 0; i < shared.size(); ++i) {
    const Key key = shared_row_key(static_cast<std::int64_t>(i), config.num_shared);
    writer.add_shared({&key, 1}, shared[i].data());
  }
  std::vector<std::string> paths;
  for (std::int64_t shard = 0; shard < config.num_shards; ++shard) {
    paths.push_back(config.scratch_folder + "/" + std::to_string(shard) + ".frozen");
    const int file = open(paths.back().c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const FrozenFileSummary summary = writer.write_shard(shard, file, paths.back());
    EXPECT_EQ(lseek(file, 0, SEEK_END), summary.num_bytes);
    close(file);
  }
  return paths;
}

/// A stored row, column by column, as docs/reference/frozen.md says: column c is values[c] of a row
/// that is not quantized, and values[c] * scale + bias of one that is, with both rounded.
struct StoredRow {
  std::vector<float> values;
  bool is_quantized = false;
  float scale = 0.0F;
  float bias = 0.0F;

  float column(std::size_t c) const {
    if (!is_quantized) return values[c];
    const float scaled = values[c] * scale;
    return scaled + bias;
  }
  std::vector<float> columns() const {
    std::vector<float> all;
    for (std::size_t c = 0; c < values.size(); ++c) all.push_back(column(c));
    return all;
  }
};

template <class Number>
Number number_at(const std::vector<std::byte>& bytes, std::size_t at) {
  Number value{};
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

inline StoredRow stored_row(FrozenDType dtype, const std::vector<float>& row) {
  const std::size_t dim = row.size();
  std::vector<std::byte> bytes(
      static_cast<std::size_t>(frozen_row_bytes(dtype, static_cast<std::int64_t>(dim))));
  EXPECT_TRUE(quantize_row(dtype, row, bytes.data()));
  StoredRow made;
  for (std::size_t i = 0; i < dim; ++i) {
    switch (dtype) {
      case FrozenDType::kFloat32:
        made.values.push_back(number_at<float>(bytes, 4 * i));
        break;
      case FrozenDType::kBFloat16:
        made.values.push_back(internal::widen_bfloat16(number_at<std::uint16_t>(bytes, 2 * i)));
        break;
      case FrozenDType::kFloat16:
        made.values.push_back(internal::widen_float16(number_at<std::uint16_t>(bytes, 2 * i)));
        break;
      case FrozenDType::kInt8:
        made.values.push_back(static_cast<float>(bytes[i]));
        break;
      case FrozenDType::kInt4: {
        const int both = static_cast<int>(bytes[i / 2]);
        made.values.push_back(static_cast<float>(i % 2 == 0 ? both & 15 : both >> 4));
        break;
      }
    }
  }
  made.is_quantized = dtype == FrozenDType::kInt8 || dtype == FrozenDType::kInt4;
  if (dtype == FrozenDType::kInt8) {
    made.scale = number_at<float>(bytes, dim);
    made.bias = number_at<float>(bytes, dim + 4);
  }
  if (dtype == FrozenDType::kInt4) {
    const std::size_t scalars = (dim + 1) / 2;
    made.scale = internal::widen_float16(number_at<std::uint16_t>(bytes, scalars));
    made.bias = internal::widen_float16(number_at<std::uint16_t>(bytes, scalars + 2));
  }
  return made;
}

inline std::vector<float> stored_values(FrozenDType dtype, const std::vector<float>& row) {
  return stored_row(dtype, row).columns();
}

inline std::vector<std::byte> content_of(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(stream)),
                         std::istreambuf_iterator<char>());
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

inline void put_content(const std::string& path, const std::vector<std::byte>& bytes) {
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
}

/// Makes the checksum of a header fit again.
inline void seal(std::vector<std::byte>& file) {
  const std::size_t end = offsetof(internal::FrozenHeader, checksum);
  const std::uint64_t checksum = internal::checksum64(std::span(file).first(end));
  std::memcpy(file.data() + end, &checksum, sizeof(checksum));
}

}  // namespace recsdk::test
