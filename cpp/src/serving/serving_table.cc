#include "recsdk/serving/serving_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/check_parts.h"
#include "serving/find.h"
#include "serving/frozen_file.h"
#include "serving/serving_kernels.h"
#include "serving/versions.h"
#include "util/apart.h"
#include "util/must.h"

namespace recsdk {
namespace {

using internal::CallArray;
using internal::FrozenFile;
using internal::FrozenHeader;
using internal::FrozenView;

constexpr auto kChunk = static_cast<std::int64_t>(internal::kKeysAtATime);

// What the headers of two files of one table share.
bool is_of_one_table(const FrozenHeader& a, const FrozenHeader& b) {
  return a.table == b.table && a.dtype == b.dtype && a.dim == b.dim &&
         a.num_shards == b.num_shards && a.name_bytes == b.name_bytes &&
         a.num_shared == b.num_shared &&
         std::bit_cast<std::uint32_t>(a.default_value) ==
             std::bit_cast<std::uint32_t>(b.default_value) &&
         std::memcmp(a.token, b.token, sizeof(a.token)) == 0 &&
         std::memcmp(a.name, b.name, a.name_bytes) == 0;
}

}  // namespace

struct ServingTable::Impl {
  std::vector<FrozenFile> files;
  std::vector<const FrozenView*> views;  // (W,), null where a shard is not open
  FrozenInfo info;
  internal::Versions versions;
  internal::Turn taking;

  explicit Impl(std::span<const std::string> paths);
  void add(FrozenFile file);
  internal::SharedRecords shared_of_files() const;
  bool is_whole() const { return std::ssize(files) == info.num_shards; }
  internal::FrozenShards shards() const { return {views}; }
  std::string title() const { return "serving table '" + info.name + "'"; }

  void check_keys(std::span<const Key> keys, std::span<const Outcome> outcomes) const;
  void check(const ServingBlock& block) const;
  void lookup(std::span<const Key> keys, float* values, std::span<Outcome> outcomes) const;
  void pool(const ServingBlock& block) const;
  /// Calls use(candidates), all of one version, for a chunk of keys after the other; once if there
  /// is none.
  template <class Use>
  void for_chunks(std::span<const Key> keys, std::span<Outcome> outcomes, const Use& use) const;
  void take(const ServingDelta::Impl& delta);
};

ServingTable::Impl::Impl(std::span<const std::string> paths) {
  if (paths.empty())
    throw std::invalid_argument("a serving table of no file; pass the files of its shards");
  files.reserve(paths.size());
  for (const std::string& path : paths) add(FrozenFile(path));
  versions.start(info.num_rows, shared_of_files());
}

internal::SharedRecords ServingTable::Impl::shared_of_files() const {
  internal::SharedRecords made;
  made.records.resize(static_cast<std::size_t>(info.num_shared));
  for (const FrozenFile& file : files) {
    const internal::SharedRange range = file.shared_range();
    for (std::int64_t row = range.begin; row < range.end; ++row)
      made.records[static_cast<std::size_t>(row)] = file.shared_record(row - range.begin);
  }
  return made;
}

void ServingTable::Impl::add(FrozenFile file) {
  const FrozenHeader& head = file.header();
  if (files.empty()) {
    info.name = file.table_name();
    info.dim = head.dim;
    info.dtype = static_cast<FrozenDType>(head.dtype);
    info.default_value = head.default_value;
    info.row_bytes = head.row_bytes;
    info.num_shards = head.num_shards;
    info.num_shared = head.num_shared;
    views.resize(head.num_shards);
  } else if (!is_of_one_table(files.front().header(), head)) {
    throw Error(ErrorCode::kCheckpoint,
                file.path() + ": is of another table, or another freeze, than " +
                    files.front().path() + "; open the files of one table together");
  }
  if (views[head.shard] != nullptr) {
    throw std::invalid_argument(file.path() + ": shard " + std::to_string(head.shard) +
                                " is given twice; pass each file once");
  }
  info.num_rows += head.num_rows;
  info.num_bytes += head.file_bytes;
  const std::uint32_t shard = head.shard;
  files.push_back(std::move(file));
  views[shard] = &files.back().view();  // reserved: files do not move
}

void ServingTable::Impl::check_keys(std::span<const Key> keys,
                                    std::span<const Outcome> outcomes) const {
  if (!outcomes.empty() && outcomes.size() != keys.size()) {
    throw std::invalid_argument(title() + ": " +
                                internal::must_fit_keys("outcomes", keys.size(), outcomes.size()) +
                                "; or pass none");
  }
  if (is_whole()) return;
  for (const Key key : keys) {
    if (shards().of(key) != nullptr) continue;
    throw std::invalid_argument(title() + ": key " + std::to_string(key) + " is of shard " +
                                std::to_string(serving_shard(key, info.num_shards)) + " of " +
                                std::to_string(info.num_shards) +
                                ", which is not open here; open its file, or send the key to "
                                "where it is");
  }
}

void ServingTable::Impl::check(const ServingBlock& block) const {
  const ServingBags& bags = block.bags;
  check_keys(bags.keys, block.outcomes);
  const std::int64_t most = internal::most_stride(bags.num_bags());
  if (block.stride < info.dim || block.stride > most) {
    throw std::invalid_argument(
        title() + ": " +
        internal::must(
            "stride",
            "be from the row width, " + std::to_string(info.dim) + ", to " + std::to_string(most),
            block.stride));
  }
  const auto of_table = [this] { return title(); };
  internal::check_parts(bags.keys.size(), bags.offsets, bags.weights, of_table);
}

template <class Use>
void ServingTable::Impl::for_chunks(std::span<const Key> keys, std::span<Outcome> outcomes,
                                    const Use& use) const {
  versions.read([&](const internal::Version& version) {
    std::array<const std::byte*, static_cast<std::size_t>(kChunk)> records;
    std::array<Key, static_cast<std::size_t>(kChunk)> read_keys;  // with shared rows only
    std::array<std::uint8_t, static_cast<std::size_t>(kChunk)> are_missing;
    const internal::Sources all = version.sources(shards());
    const auto n = static_cast<std::int64_t>(keys.size());
    std::int64_t begin = 0;
    do {
      const std::int64_t end = std::min(begin + kChunk, n);
      const auto some =
          keys.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
      internal::find_candidates(all, some, records.data());
      internal::Candidates candidates{some.data(),
                                      begin,
                                      end,
                                      records.data(),
                                      internal::kKeyBytes + info.row_bytes,
                                      outcomes.empty() ? nullptr : outcomes.data(),
                                      &internal::find_record,
                                      &all};
      if (version.shared->is_empty()) {
        use(candidates);
      } else {
        std::copy(some.begin(), some.end(), read_keys.begin());
        candidates.keys = read_keys.data();
        internal::read_shared(all, *version.shared, std::span(read_keys).first(some.size()),
                              records.data(), are_missing.data());
        use(candidates);
        for (std::size_t i = 0; i < some.size() && !outcomes.empty(); ++i) {
          if (are_missing[i] != 0)
            outcomes[static_cast<std::size_t>(begin) + i] = Outcome::kMissing;
        }
      }
      begin = end;
    } while (begin < n);
  });
}

void ServingTable::Impl::take(const ServingDelta::Impl& delta) {
  const FrozenHeader& head = files.front().header();
  if (delta.name != info.name || delta.dtype != info.dtype || delta.dim != info.dim ||
      delta.hash_seed != head.hash_seed || delta.shared.num_rows() != info.num_shared) {
    throw std::invalid_argument(title() + ": the delta was made for other files of table '" +
                                delta.name + "'; make it for this table");
  }
  if (!delta.shared.is_empty()) delta.shared.require_whole(info.name);
  if (!taking.begin()) {
    throw std::invalid_argument(title() + ": another thread takes a delta; take one at a time");
  }
  try {
    versions.take(delta, shards());
  } catch (...) {
    taking.end();
    throw;
  }
  taking.end();
}

void ServingTable::Impl::lookup(std::span<const Key> keys, float* values,
                                std::span<Outcome> outcomes) const {
  const internal::FrozenRows rows{info.dtype, info.dim, info.default_value};
  for_chunks(keys, outcomes, [&](const internal::Candidates& candidates) {
    internal::serving_kernels().gather({candidates, rows, values});
  });
}

void ServingTable::Impl::pool(const ServingBlock& block) const {
  const ServingBags& bags = block.bags;
  internal::ServingPoolArgs args{{},
                                 {info.dtype, info.dim, info.default_value},
                                 bags.offsets.empty() ? nullptr : bags.offsets.data(),
                                 bags.weights.empty() ? nullptr : bags.weights.data(),
                                 bags.pooling,
                                 bags.num_bags(),
                                 block.out,
                                 block.stride,
                                 0,
                                 0.0F};
  for_chunks(bags.keys, block.outcomes, [&](const internal::Candidates& candidates) {
    args.candidates = candidates;
    internal::serving_kernels().pool(args);
  });
}

ServingTable::ServingTable(std::span<const std::string> files)
    : impl_(std::make_unique<Impl>(files)) {}
ServingTable::~ServingTable() = default;
ServingTable::ServingTable(ServingTable&&) noexcept = default;
ServingTable& ServingTable::operator=(ServingTable&&) noexcept = default;

const FrozenInfo& ServingTable::info() const noexcept { return impl_->info; }
std::int64_t ServingTable::size() const noexcept {
  return impl_->versions.read([](const internal::Version& version) { return version.num_rows; });
}
std::int64_t ServingTable::num_deltas() const noexcept {
  return impl_->versions.read([](const internal::Version& version) { return version.num_deltas; });
}
std::int64_t ServingTable::delta_bytes() const noexcept {
  return impl_->versions.read(
      [](const internal::Version& version) { return version.layer_bytes(); });
}
void ServingTable::take(const ServingDelta& delta) { impl_->take(*delta.impl_); }

ServingDelta::ServingDelta(const ServingTable& table) : impl_(std::make_unique<Impl>()) {
  const FrozenInfo& info = table.info();
  impl_->name = info.name;
  impl_->dtype = info.dtype;
  impl_->dim = info.dim;
  impl_->hash_seed = table.impl_->files.front().header().hash_seed;
  impl_->shared = internal::SharedImage(info.dtype, info.dim, info.num_shared);
}
bool ServingTable::is_whole() const noexcept { return impl_->is_whole(); }

void ServingTable::verify() const {
  for (const FrozenFile& file : impl_->files) file.verify();
}

void ServingTable::preload() const noexcept {
  for (const FrozenFile& file : impl_->files) file.preload();
}

void ServingTable::lookup(std::span<const Key> keys, float* values,
                          std::span<Outcome> outcomes) const {
  impl_->check_keys(keys, outcomes);
  const auto of_table = [this] { return impl_->title(); };
  const CallArray written("outcomes", outcomes);
  internal::require_apart(written, {{"keys", keys}}, of_table);
  internal::require_apart(internal::rows_of("values", values, keys.size(), impl_->info.dim),
                          {{"keys", keys}, written}, of_table);
  impl_->lookup(keys, values, outcomes);
}

void ServingTable::pool(const ServingBlock& block) const {
  impl_->check(block);
  const auto of_table = [this] { return impl_->title(); };
  const ServingBags& bags = block.bags;
  const CallArray outcomes("outcomes", block.outcomes);
  internal::require_apart(
      outcomes, {{"keys", bags.keys}, {"offsets", bags.offsets}, {"weights", bags.weights}},
      of_table);
  internal::require_apart(
      {"vectors", block.out, impl_->info.dim, block.stride, bags.num_bags()},
      {{"keys", bags.keys}, {"offsets", bags.offsets}, {"weights", bags.weights}, outcomes},
      of_table);
  impl_->pool(block);
}

void pool_serving(std::span<const ServingCall> calls) {
  for (const ServingCall& call : calls) {
    if (call.table == nullptr)
      throw std::invalid_argument("pool_serving: a call has no table; give each one");
    call.table->impl_->check(call.block);
  }
  const auto each_array = [&](const auto& written, const auto& read) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const ServingBlock& block = calls[i].block;
      const ServingBags& bags = block.bags;
      const std::int64_t dim = calls[i].table->info().dim;
      written({"vectors", block.out, dim, block.stride, bags.num_bags(), i});
      written({"outcomes", block.outcomes, i});
      read({"keys", bags.keys, i});
      if (!bags.offsets.empty()) read({"offsets", bags.offsets, i});
      if (!bags.weights.empty()) read({"weights", bags.weights, i});
    }
  };
  internal::require_apart(each_array,
                          [&](std::size_t i) { return calls[i].table->impl_->title(); });
  for (const ServingCall& call : calls) call.table->impl_->pool(call.block);
}

std::int64_t serving_shard(Key key, std::int64_t num_shards) {
  if (num_shards < 1 || num_shards > internal::kMaxFrozenShards) {
    throw std::invalid_argument(internal::must("num_shards", "be 1 to 65536", num_shards));
  }
  return internal::frozen_shard(key, static_cast<std::uint32_t>(num_shards));
}

}  // namespace recsdk
