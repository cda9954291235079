// Damages a frozen file as bytes say, and reads keys from what is left of it. The same body is a
// unit test, over seeded bytes, and a fuzz target.
#pragma once

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
#include "fuzz/file_in_memory.h"
#include "io/checksum.h"
#include "recsdk/freeze.h"
#include "recsdk/policy.h"
#include "recsdk/serving/serving_table.h"
#include "serving/find.h"
#include "serving/format.h"

namespace recsdk::test {

/// A file that is whole, keys that it has and lacks, and what it answers.
struct FrozenSample {
  std::vector<std::byte> bytes;
  std::vector<Key> keys;
  std::vector<float> values;  // of keys, (N, D)
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
  const std::string path = file.path();
  sample.values.resize(sample.keys.size() * static_cast<std::size_t>(dim));
  ServingTable({&path, 1}).lookup(sample.keys, sample.values.data());
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

/// A number that a count or a place cannot be, or hardly.
inline std::uint64_t odd_number(ByteReader& in) {
  const auto some = static_cast<std::uint64_t>(in.byte());
  const std::array numbers = {std::uint64_t{0},
                              some,
                              ~std::uint64_t{0} - some,
                              std::uint64_t{1} << (some % 64),
                              (std::uint64_t{1} << (some % 64)) - 1,
                              std::uint64_t{0x7FFF'FFFF'FFFF'FFFF} - some,
                              (some << 56) | std::uint64_t{in.byte()}};
  return numbers[static_cast<std::size_t>(in.below(std::ssize(numbers)))];
}

inline void put_number(std::vector<std::byte>& file, std::size_t at, std::uint64_t number) {
  if (at + sizeof(number) <= file.size()) std::memcpy(&file[at], &number, sizeof(number));
}

/// A field of eight or four bytes of the header, or where a line of the index begins and how many
/// records it has.
inline void damage_number(std::vector<std::byte>& file, ByteReader& in) {
  constexpr std::array<std::size_t, 9> kWide = {
      offsetof(internal::FrozenHeader, dim),        offsetof(internal::FrozenHeader, row_bytes),
      offsetof(internal::FrozenHeader, num_rows),   offsetof(internal::FrozenHeader, num_lines),
      offsetof(internal::FrozenHeader, hash_seed),  offsetof(internal::FrozenHeader, file_bytes),
      offsetof(internal::FrozenHeader, num_shared), offsetof(internal::FrozenHeader, shard),
      offsetof(internal::FrozenHeader, table)};
  const std::int64_t place = in.below(2 * std::ssize(kWide));
  const std::uint64_t number = odd_number(in);
  if (place < std::ssize(kWide)) {
    put_number(file, kWide[static_cast<std::size_t>(place)], number);
  } else {
    const auto line = static_cast<std::size_t>(in.below(40)) * sizeof(internal::FrozenLine);
    put_number(file, static_cast<std::size_t>(internal::kFrozenHeaderBytes) + line, number);
  }
}

/// Two stretches of one length change places, as lines, records, or the sections themselves.
inline void swap_stretches(std::vector<std::byte>& file, ByteReader& in) {
  const auto header = static_cast<std::size_t>(internal::kFrozenHeaderBytes);
  if (file.size() <= header) return;
  const std::size_t lines = (file.size() - header) / sizeof(internal::FrozenLine);
  const auto line = [&] { return static_cast<std::size_t>(in.below(2048)) % (lines + 1); };
  const std::size_t first = line();
  const std::size_t second = line();
  const std::size_t apart = first < second ? second - first : first - second;
  const std::size_t size = std::min({apart, line(), lines - std::max(first, second)});
  const auto at = [&](std::size_t place) {
    return file.begin() +
           static_cast<std::ptrdiff_t>(header + place * sizeof(internal::FrozenLine));
  };
  std::swap_ranges(at(first), at(first + size), at(second));
}

/// Changes bytes: of the fields of the header, of the index, or anywhere; or the length; or what
/// lies where.
inline void damage(std::vector<std::byte>& file, ByteReader& in) {
  constexpr std::size_t kFields = 160;
  const auto header = static_cast<std::size_t>(internal::kFrozenHeaderBytes);
  const auto any = [&](std::size_t begin, std::size_t size) {
    const auto low = static_cast<std::size_t>(in.below(65'536));
    return begin + (low | static_cast<std::size_t>(in.byte()) << 16) % size;
  };
  const std::int64_t kind = in.below(12);
  if (kind >= 10) {
    swap_stretches(file, in);
  } else if (kind >= 8) {
    damage_number(file, in);
  } else if (kind == 0 && !file.empty()) {
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

/// A delta in front of what is left of the file: the keys that it brings read its rows, and those
/// that it erases read what missing ones do.
inline void take_delta(const std::string& path, const std::vector<Key>& keys) {
  ServingTable table({&path, 1});
  if (!table.is_whole()) return;
  const auto dim = static_cast<std::size_t>(table.info().dim);
  const std::size_t half = keys.size() / 2;
  const std::span<const Key> added = std::span(keys).first(half);
  const std::span<const Key> gone = std::span(keys).subspan(half);
  ServingDelta delta(table);
  const std::vector<float> ones(added.size() * dim, 1.0F);
  delta.add(added, ones.data());
  delta.erase(gone);
  table.take(delta);
  std::vector<float> values(keys.size() * dim);
  std::vector<Outcome> outcomes(keys.size());
  table.lookup(keys, values.data(), outcomes);
  require(std::ranges::count(std::span(outcomes).first(half), Outcome::kFound) == std::ssize(added),
          "what a delta brought is found");
  require(
      std::ranges::count(std::span(outcomes).subspan(half), Outcome::kMissing) == std::ssize(gone),
      "what a delta took is missing");
  require(std::ranges::count(std::span(values).first(half * dim), 1.0F) == std::ssize(ones),
          "what a delta brought is read");
}

/// `verify` passes if and only if every byte is as it was written, and then the answers are, too.
inline void check_verified(const std::string& path, const FrozenSample& sample, bool is_whole) {
  const ServingTable table({&path, 1});
  bool passes = true;
  try {
    table.verify();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCheckpoint) throw;
    passes = false;
  }
  require(passes == is_whole, "verify finds every change");
  if (!is_whole) return;
  std::vector<float> values(sample.values.size());
  table.lookup(sample.keys, values.data());
  require(values == sample.values, "a file that is whole answers as it was frozen");
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
    take_delta(file.path(), sample.keys);
    if (!is_sealed) check_verified(file.path(), sample, bytes == sample.bytes);
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCheckpoint) throw;
    return false;
  }
}

}  // namespace recsdk::test
