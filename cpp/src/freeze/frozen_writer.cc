#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "freeze/spill.h"
#include "io/checksum.h"
#include "recsdk/error.h"
#include "recsdk/freeze.h"
#include "serving/format.h"
#include "serving/line_writer.h"
#include "serving/shared_image.h"
#include "util/must.h"

namespace recsdk {
namespace {

using internal::FrozenHeader;
using internal::LineWriter;
using internal::Spill;

constexpr std::int64_t kBufferBytes = std::int64_t{32} << 20;  // of all parts
constexpr std::int64_t kPartBytes = std::int64_t{32} << 20;    // that are sorted at a time
constexpr std::int64_t kMostParts = 1 << 16;
constexpr std::size_t kWriteBytes = std::size_t{1} << 20;

void check(const FreezeConfig& config) {
  const auto refuse = [](const char* name, const std::string& wanted, const auto& got) {
    throw std::invalid_argument("freeze: " + internal::must(name, wanted, got));
  };
  const auto between = [&](const char* name, std::int64_t value, std::int64_t low,
                           std::int64_t high) {
    if (value < low || value > high)
      refuse(name, "be " + std::to_string(low) + " to " + std::to_string(high), value);
  };
  between("the length of name in bytes", std::ssize(config.name), 1, internal::kMaxFrozenName);
  between("dim", config.dim, 1, internal::kMaxFrozenDim);
  between("num_shards", config.num_shards, 1, internal::kMaxFrozenShards);
  between("num_shared", config.num_shared, 0, internal::kMaxFrozenShared);
  between("expected_rows", config.expected_rows, 0, internal::kMaxFrozenRows);
  if (static_cast<int>(config.dtype) >= kNumFrozenDTypes)
    refuse("dtype", "be one of FrozenDType", config.dtype);
  if (!std::isfinite(config.default_value))
    refuse("default_value", "be finite", config.default_value);
  if (config.scratch_folder.empty()) refuse("scratch_folder", "name a folder", "none");
}

/// Appends to a place of a file, with the checksum of all that was appended.
class Section {
 public:
  Section(int descriptor, std::int64_t offset, const std::string& name)
      : descriptor_(descriptor), offset_(offset), name_(name) {}

  void append(std::span<const std::byte> bytes) {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    if (buffer_.size() >= kWriteBytes) write_out();
  }
  std::uint64_t finish() {
    write_out();
    return checksum_.value();
  }

 private:
  void write_out() {
    checksum_.add(buffer_);
    internal::write_at(descriptor_, offset_, buffer_, name_);
    offset_ += std::ssize(buffer_);
    buffer_.clear();
  }

  int descriptor_;
  std::int64_t offset_;
  std::string name_;
  std::vector<std::byte> buffer_;
  internal::StreamChecksum64 checksum_;
};

}  // namespace

struct FrozenWriter::Impl {
  FreezeConfig config;
  std::int64_t row_bytes;
  std::int64_t record_bytes;
  std::int64_t parts_per_shard;
  std::int64_t num_rows = 0;
  bool is_sealed = false;
  Spill spill;
  internal::SharedImage shared;

  explicit Impl(const FreezeConfig& given);
  static std::int64_t parts_for(const FreezeConfig& config, std::int64_t record_bytes);
  std::int64_t part_of(Key key, std::uint64_t hash) const;
  void add(std::span<const Key> keys, const float* weights);
  void write_part(std::int64_t part, Section& records, LineWriter<Section>& lines) const;
  std::int64_t rows_of(std::int64_t shard) const;
  FrozenHeader header_of(std::int64_t shard) const;
  FrozenFileSummary write_shard(std::int64_t shard, int descriptor, const std::string& name) const;
};

FrozenWriter::Impl::Impl(const FreezeConfig& given)
    : config(given),
      row_bytes(internal::frozen_row_bytes(given.dtype, given.dim)),
      record_bytes(internal::kKeyBytes + row_bytes),
      parts_per_shard(parts_for(given, record_bytes)),
      spill(given.scratch_folder, parts_per_shard * given.num_shards, record_bytes, kBufferBytes),
      shared(given.dtype, given.dim, given.num_shared) {}

std::int64_t FrozenWriter::Impl::parts_for(const FreezeConfig& config, std::int64_t record_bytes) {
  const std::int64_t rows = config.expected_rows / config.num_shards + 1;
  const std::int64_t rows_of_part = std::max<std::int64_t>(kPartBytes / (record_bytes + 16), 1);
  const std::int64_t most = std::max<std::int64_t>(kMostParts / config.num_shards, 1);
  return std::min(rows / rows_of_part + 1, most);
}

std::int64_t FrozenWriter::Impl::part_of(Key key, std::uint64_t hash) const {
  const auto num_shards = static_cast<std::uint32_t>(config.num_shards);
  const std::int64_t shard = num_shards == 1 ? 0 : internal::frozen_shard(key, num_shards);
  return shard * parts_per_shard + internal::frozen_line(hash, parts_per_shard);
}

void FrozenWriter::Impl::add(std::span<const Key> keys, const float* weights) {
  const auto dim = static_cast<std::size_t>(config.dim);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint64_t hash = internal::frozen_hash(keys[i], config.hash_seed);
    std::byte* const record = spill.next(part_of(keys[i], hash));
    std::memcpy(record, &keys[i], sizeof(Key));
    if (!quantize_row(config.dtype, {weights + i * dim, dim}, record + sizeof(Key))) {
      throw std::invalid_argument(internal::frozen_row_refusal(config.name, config.dtype, keys[i]));
    }
    ++num_rows;
  }
}

std::int64_t FrozenWriter::Impl::rows_of(std::int64_t shard) const {
  std::int64_t rows = 0;
  for (std::int64_t part = 0; part < parts_per_shard; ++part)
    rows += spill.num_records(shard * parts_per_shard + part);
  return rows;
}

void FrozenWriter::Impl::write_part(std::int64_t part, Section& records,
                                    LineWriter<Section>& lines) const {
  const std::vector<std::byte> bytes = spill.read(part);
  const auto size = static_cast<std::size_t>(record_bytes);
  const auto key_at = [&](std::size_t i) {
    Key key = 0;
    std::memcpy(&key, bytes.data() + i * size, sizeof(key));
    return key;
  };
  std::vector<std::pair<std::uint64_t, std::size_t>> order(bytes.size() / size);
  for (std::size_t i = 0; i < order.size(); ++i)
    order[i] = {internal::frozen_hash(key_at(i), config.hash_seed), i};
  std::sort(order.begin(), order.end());
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (i > 0 && order[i].first == order[i - 1].first) {
      throw Error(ErrorCode::kCheckpoint, "table '" + config.name + "': key " +
                                              std::to_string(key_at(order[i].second)) +
                                              " has two rows; what they come from is damaged");
    }
    lines.add(order[i].first);
    records.append(std::span(bytes).subspan(order[i].second * size, size));
  }
}

FrozenHeader FrozenWriter::Impl::header_of(std::int64_t shard) const {
  FrozenHeader head{};
  std::memcpy(head.magic, internal::kFrozenMagic, sizeof(head.magic));
  head.version = kFrozenVersion;
  head.byte_order = internal::kFrozenByteOrder;
  head.dtype = static_cast<std::uint32_t>(config.dtype);
  head.default_value = config.default_value;
  head.dim = config.dim;
  head.row_bytes = row_bytes;
  head.num_rows = rows_of(shard);
  head.num_lines = internal::frozen_lines(head.num_rows);
  head.hash_seed = config.hash_seed;
  head.shard = static_cast<std::uint32_t>(shard);
  head.num_shards = static_cast<std::uint32_t>(config.num_shards);
  std::copy(config.token.begin(), config.token.end(), head.token);
  head.num_shared = config.num_shared;
  const std::int64_t num_own_shared =
      internal::frozen_shared_range(shard, config.num_shards, config.num_shared).size();
  head.file_bytes = internal::frozen_records_offset(head.num_lines) +
                    (head.num_rows + num_own_shared) * record_bytes;
  head.table = config.table;
  head.name_bytes = static_cast<std::uint32_t>(config.name.size());
  std::memcpy(head.name, config.name.data(), config.name.size());
  return head;
}

FrozenFileSummary FrozenWriter::Impl::write_shard(std::int64_t shard, int descriptor,
                                                  const std::string& name) const {
  FrozenHeader head = header_of(shard);
  Section index(descriptor, internal::kFrozenHeaderBytes, name);
  Section records(descriptor, internal::frozen_records_offset(head.num_lines), name);
  LineWriter<Section> lines(index, head.num_lines);
  for (std::int64_t part = 0; part < parts_per_shard; ++part)
    write_part(shard * parts_per_shard + part, records, lines);
  lines.finish();
  head.index_checksum = index.finish();
  head.records_checksum = records.finish();
  Section of_shared(descriptor,
                    internal::frozen_records_offset(head.num_lines) + head.num_rows * record_bytes,
                    name);
  of_shared.append(
      shared.records(internal::frozen_shared_range(shard, config.num_shards, config.num_shared)));
  if (config.num_shared > 0) head.shared_checksum = of_shared.finish();
  const auto bytes = std::as_bytes(std::span(&head, 1));
  head.checksum = internal::checksum64(bytes.first(offsetof(FrozenHeader, checksum)));
  internal::write_at(descriptor, 0, bytes, name);
  return {head.num_rows, head.file_bytes, head.checksum};
}

FrozenWriter::FrozenWriter(const FreezeConfig& config) {
  check(config);
  impl_ = std::make_unique<Impl>(config);
}
FrozenWriter::~FrozenWriter() = default;
FrozenWriter::FrozenWriter(FrozenWriter&&) noexcept = default;
FrozenWriter& FrozenWriter::operator=(FrozenWriter&&) noexcept = default;

void FrozenWriter::add(std::span<const Key> keys, const float* weights) {
  if (impl_->is_sealed)
    throw std::invalid_argument("freeze: rows after the first file; add all rows before it");
  impl_->add(keys, weights);
}

void FrozenWriter::add_shared(std::span<const Key> keys, const float* weights) {
  if (impl_->is_sealed)
    throw std::invalid_argument("freeze: rows after the first file; add all rows before it");
  impl_->shared.add(impl_->config.name, keys, weights);
}

std::int64_t FrozenWriter::num_rows() const { return impl_->num_rows; }

FrozenFileSummary FrozenWriter::write_shard(std::int64_t shard, int descriptor,
                                            const std::string& name) {
  if (shard < 0 || shard >= impl_->config.num_shards) {
    throw std::invalid_argument(internal::must(
        "freeze: shard", "be 0 to " + std::to_string(impl_->config.num_shards - 1), shard));
  }
  impl_->shared.require_whole(impl_->config.name);
  impl_->is_sealed = true;
  return impl_->write_shard(shard, descriptor, name);
}

}  // namespace recsdk
