// Damages a frozen file as bytes say, and reads keys from what is left of it. The same body is a
// unit test, over seeded bytes, and a fuzz target.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/byte_reader.h"
#include "io/checksum.h"
#include "recsdk/freeze.h"
#include "recsdk/policy.h"
#include "recsdk/serving/serving_table.h"
#include "serving/find.h"
#include "serving/format.h"

namespace recsdk::test {

/// A file in memory, by a path that can be opened while it lives.
class FileInMemory {
 public:
  FileInMemory() : file_(memfd_create("recsdk_fuzz", MFD_CLOEXEC)) {
    if (file_ < 0) throw std::runtime_error("no file in memory for a test");
  }
  FileInMemory(const FileInMemory&) = delete;
  FileInMemory& operator=(const FileInMemory&) = delete;
  ~FileInMemory() { close(file_); }
  int number() const { return file_; }
  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

/// A file that is whole, and keys that it has and lacks.
struct FrozenSample {
  std::vector<std::byte> bytes;
  std::vector<Key> keys;
};

inline FrozenSample make_frozen_sample(FrozenDType dtype, std::int64_t dim, std::size_t num_rows) {
  std::mt19937_64 random(num_rows);
  FreezeConfig config;
  config.name = "item";
  config.dim = dim;
  config.dtype = dtype;
  config.hash_seed = 0x1234'5678'9ABC'DEF1U;
  config.num_shared = static_cast<std::int64_t>(num_rows % 4);
  config.scratch_folder = std::filesystem::temp_directory_path();
  FrozenWriter writer(config);
  FrozenSample sample;
  for (std::size_t i = 0; i < num_rows; ++i) {
    const auto key = static_cast<Key>(random());
    std::vector<float> row(static_cast<std::size_t>(dim));
    for (float& x : row) x = static_cast<float>(random() % 1000) - 500.0F;
    writer.add({&key, 1}, row.data());
    sample.keys.insert(sample.keys.end(), {key, key + 1});
  }
  for (std::int64_t row = 0; row < config.num_shared; ++row) {
    const Key key = shared_row_key(row, config.num_shared);
    const std::vector<float> values(static_cast<std::size_t>(dim), static_cast<float>(row));
    writer.add_shared({&key, 1}, values.data());
  }
  const FileInMemory file;
  sample.bytes.resize(
      static_cast<std::size_t>(writer.write_shard(0, file.number(), file.path()).num_bytes));
  const auto size = static_cast<ssize_t>(sample.bytes.size());
  if (pread(file.number(), sample.bytes.data(), sample.bytes.size(), 0) != size)
    throw std::runtime_error("no whole file for a test");
  return sample;
}

/// Made once for each choice.
inline const FrozenSample& frozen_sample(ByteReader& in) {
  constexpr std::array<std::int64_t, 4> kDims = {1, 6, 17, 40};
  constexpr std::array<std::size_t, 3> kRows = {1, 90, 700};
  static std::map<std::array<std::int64_t, 3>, FrozenSample> samples;
  const std::int64_t dtype = in.below(kNumFrozenDTypes);
  const std::int64_t dim = kDims[static_cast<std::size_t>(in.below(4))];
  const std::size_t num_rows = kRows[static_cast<std::size_t>(in.below(3))];
  const std::array<std::int64_t, 3> choice = {dtype, dim, static_cast<std::int64_t>(num_rows)};
  const auto found = samples.find(choice);
  if (found != samples.end()) return found->second;
  return samples.emplace(choice, make_frozen_sample(static_cast<FrozenDType>(dtype), dim, num_rows))
      .first->second;
}

/// Changes bytes: of the fields of the header, of the index, or anywhere; or the length.
inline void damage(std::vector<std::byte>& file, ByteReader& in) {
  constexpr std::size_t kFields = 160;
  const auto header = static_cast<std::size_t>(internal::kFrozenHeaderBytes);
  const auto any = [&](std::size_t begin, std::size_t size) {
    const auto low = static_cast<std::size_t>(in.below(65'536));
    return begin + (low | static_cast<std::size_t>(in.byte()) << 16) % size;
  };
  const std::int64_t kind = in.below(8);
  if (kind == 0 && !file.empty()) {
    file.resize(any(0, file.size()));
  } else if (kind == 1) {
    file.resize(file.size() + 1U + static_cast<std::size_t>(in.below(300)));
  } else if (kind < 4 && file.size() > kFields) {
    file[any(0, kFields)] = std::byte{in.byte()};
  } else if (kind < 7 && file.size() > header) {
    file[any(header, std::min<std::size_t>(file.size() - header, 2400))] = std::byte{in.byte()};
  } else if (!file.empty()) {
    file[any(0, file.size())] ^= std::byte{1} << (in.byte() % 8);
  }
}

/// Makes the checksum of the header fit again.
inline void mend_checksum(std::vector<std::byte>& file) {
  const std::size_t end = offsetof(internal::FrozenHeader, checksum);
  if (file.size() < sizeof(internal::FrozenHeader)) return;
  const std::uint64_t checksum = internal::checksum64(std::span(file).first(end));
  std::memcpy(file.data() + end, &checksum, sizeof(checksum));
}

inline void require(bool is_so, const char* what) {
  if (!is_so) throw std::logic_error(what);
}

/// Every record that is found is one of the file's rows, whatever the index says.
inline void check_places(const std::string& path, const std::vector<Key>& keys) {
  const internal::FrozenFile file(path);
  const internal::FrozenView* const view = &file.view();
  const internal::Sources sources{{{&view, 1}}, {}};
  std::vector<const std::byte*> records(keys.size());
  internal::find_candidates(sources, keys, records.data());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    for (const std::byte* const record : {records[i], internal::find_record(&sources, keys[i])}) {
      if (record == nullptr) continue;
      const std::int64_t place = record - view->records;
      require(place >= 0 && place < view->num_rows * view->record_bytes &&
                  place % view->record_bytes == 0,
              "a record that was found is none of the file's rows");
    }
  }
}

inline void read_frozen(const std::string& path, const std::vector<Key>& keys) {
  const ServingTable table({&path, 1});
  if (!table.is_whole()) return;  // it says now that it is one of several shards
  const auto dim = static_cast<std::size_t>(table.info().dim);
  std::vector<float> values(keys.size() * dim);
  std::vector<Outcome> outcomes(keys.size());
  table.lookup(keys, values.data(), outcomes);
  const std::array<std::int64_t, 3> offsets = {0, 1, static_cast<std::int64_t>(keys.size())};
  table.pool({{keys, offsets, {}, Pooling::kMean}, values.data(), table.info().dim, {}});
}

/// True if the file was served; an Error(kCheckpoint) is the only other legal end.
inline bool run_frozen(const std::uint8_t* data, std::size_t size) {
  ByteReader in(data, size);
  const FrozenSample& sample = frozen_sample(in);
  const bool is_sealed = in.flag();
  std::vector<std::byte> bytes = sample.bytes;
  while (!in.is_done()) damage(bytes, in);
  if (is_sealed) mend_checksum(bytes);
  const FileInMemory file;
  const auto num_bytes = static_cast<ssize_t>(bytes.size());
  if (write(file.number(), bytes.data(), bytes.size()) != num_bytes)
    throw std::runtime_error("no damaged file for a test");
  try {
    check_places(file.path(), sample.keys);
    read_frozen(file.path(), sample.keys);
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCheckpoint) throw;
    return false;
  }
}

}  // namespace recsdk::test
