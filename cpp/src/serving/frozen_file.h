// One frozen file, mapped into memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "serving/format.h"

namespace recsdk::internal {

/// What finding and reading rows needs of a file.
struct FrozenView {
  const FrozenLine* lines = nullptr;
  const std::byte* records = nullptr;
  std::int64_t num_lines = 0;
  std::int64_t num_rows = 0;
  std::int64_t record_bytes = 0;
  std::uint64_t hash_seed = 0;
};

class FrozenFile {
 public:
  /// Maps a file and checks its header. Throws Error(kCheckpoint) with its name and the reason.
  explicit FrozenFile(const std::string& path);
  ~FrozenFile();
  FrozenFile(FrozenFile&& other) noexcept;
  FrozenFile(const FrozenFile&) = delete;
  FrozenFile& operator=(const FrozenFile&) = delete;
  FrozenFile& operator=(FrozenFile&&) = delete;

  const std::string& path() const { return path_; }
  const FrozenHeader& header() const { return *static_cast<const FrozenHeader*>(memory_); }
  std::string table_name() const { return {header().name, header().name_bytes}; }
  const FrozenView& view() const { return view_; }
  /// The shared rows that it has, and the records of the first of them and those behind.
  SharedRange shared_range() const {
    return frozen_shared_range(header().shard, header().num_shards, header().num_shared);
  }
  const std::byte* shared_record(std::int64_t i) const {
    return view_.records + (view_.num_rows + i) * view_.record_bytes;
  }

  /// As those of ServingTable, of this file.
  void verify() const;
  void preload() const noexcept;

 private:
  [[noreturn]] void refuse(const std::string& reason) const;
  void map();
  void check() const;
  void check_sizes() const;

  std::string path_;
  void* memory_ = nullptr;
  std::size_t size_ = 0;
  FrozenView view_;
};

}  // namespace recsdk::internal
