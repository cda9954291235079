#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "recsdk/freeze.h"
#include "serving/delta_rows.h"
#include "serving/format.h"

namespace recsdk {
namespace internal {
namespace {

using Sorted = std::vector<std::pair<std::uint64_t, const std::byte*>>;  // hash and record

[[noreturn]] void refuse_twice(const ServingDelta::Impl& delta, const std::byte* record,
                               const char* how) {
  throw std::invalid_argument("delta of serving table '" + delta.name + "': key " +
                              std::to_string(key_of_record(record)) + " is " + how +
                              "; give each key once");
}

Sorted sorted_rows(const ServingDelta::Impl& delta, const Sources& sources) {
  Sorted rows;
  rows.reserve(static_cast<std::size_t>(delta.num_rows));
  const auto size = static_cast<std::size_t>(delta.record_bytes());
  for (const std::vector<std::byte>& some : delta.records) {
    for (std::size_t at = 0; at < some.size(); at += size) {
      const Key key = key_of_record(&some[at]);
      if (sources.files.of(key) != nullptr)
        rows.emplace_back(frozen_hash(key, delta.hash_seed), &some[at]);
    }
  }
  std::sort(rows.begin(), rows.end());
  for (std::size_t i = 1; i < rows.size(); ++i) {
    if (rows[i].first == rows[i - 1].first) refuse_twice(delta, rows[i].second, "added twice");
  }
  return rows;
}

/// `erased` has the keys' bytes. Those that are not open here are left out.
Sorted sorted_erased(const ServingDelta::Impl& delta, const Sources& sources, const Sorted& rows) {
  Sorted erased;
  for (const Key& key : delta.erased) {
    if (sources.files.of(key) == nullptr) continue;
    const std::uint64_t hash = frozen_hash(key, delta.hash_seed);
    erased.emplace_back(hash, reinterpret_cast<const std::byte*>(&key));
  }
  std::sort(erased.begin(), erased.end());
  for (std::size_t i = 0; i < erased.size(); ++i) {
    const auto& [hash, record] = erased[i];
    if (i > 0 && hash == erased[i - 1].first) refuse_twice(delta, record, "erased twice");
    const auto found =
        std::lower_bound(rows.begin(), rows.end(), std::pair(hash, record),
                         [](const auto& a, const auto& b) { return a.first < b.first; });
    if (found != rows.end() && found->first == hash)
      refuse_twice(delta, record, "both added and erased");
  }
  return erased;
}

std::vector<std::uint8_t> have_rows_before(const Sources& sources, const Sorted& sorted) {
  std::vector<Key> keys;
  keys.reserve(sorted.size());
  for (const auto& [hash, record] : sorted) keys.push_back(key_of_record(record));
  return have_rows(sources, keys);
}

/// Those of a range of hashes, the first of the records left, which are shortened.
std::span<const std::byte* const> take_range(std::span<const std::byte* const>& left,
                                             std::uint64_t range, int bits, std::uint64_t seed) {
  const auto end = std::find_if(left.begin(), left.end(), [&](const std::byte* record) {
    return range_of(frozen_hash(key_of_record(record), seed), bits) != range;
  });
  const auto count = static_cast<std::size_t>(end - left.begin());
  const auto taken = left.first(count);
  left = left.subspan(count);
  return taken;
}

std::shared_ptr<const Layer> layer_of(const ServingDelta::Impl& delta,
                                      std::span<const std::byte* const> rows,
                                      std::span<const std::byte* const> erased) {
  const LayerShape shape{delta.record_bytes(), delta.hash_seed};
  const int bits =
      range_bits_for(std::ssize(rows) * shape.record_bytes + std::ssize(erased) * kKeyBytes);
  Pieces pieces;
  for (std::uint64_t range = 0; range >> bits == 0; ++range) {
    const auto some_rows = take_range(rows, range, bits, shape.hash_seed);
    const auto some_erased = take_range(erased, range, bits, shape.hash_seed);
    pieces.push_back(std::make_shared<const Piece>(
        Piece{Image(some_rows, shape.record_bytes, shape.hash_seed, bits),
              Image(some_erased, kKeyBytes, shape.hash_seed, bits)}));
  }
  return std::make_shared<const Layer>(std::move(pieces), shape);
}

}  // namespace

Prepared prepare(const ServingDelta::Impl& delta, const Sources& sources) {
  const Sorted rows = sorted_rows(delta, sources);
  const Sorted erased = sorted_erased(delta, sources, rows);
  Prepared made;
  std::vector<const std::byte*> kept_rows;
  std::vector<const std::byte*> kept_erased;
  const std::vector<std::uint8_t> was_there = have_rows_before(sources, rows);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    kept_rows.push_back(rows[i].second);
    made.num_more_rows += was_there[i] == 0 ? 1 : 0;
  }
  const std::vector<std::uint8_t> leaves = have_rows_before(sources, erased);
  for (std::size_t i = 0; i < erased.size(); ++i) {
    if (leaves[i] == 0) continue;
    kept_erased.push_back(erased[i].second);
    --made.num_more_rows;
  }
  if (kept_rows.empty() && kept_erased.empty()) return made;
  made.layer = layer_of(delta, kept_rows, kept_erased);
  return made;
}

}  // namespace internal

std::int64_t ServingDelta::Impl::record_bytes() const {
  return internal::kKeyBytes + internal::frozen_row_bytes(dtype, dim);
}

void ServingDelta::add(std::span<const Key> keys, const float* weights) {
  const auto size = static_cast<std::size_t>(impl_->record_bytes());
  const auto dim = static_cast<std::size_t>(impl_->dim);
  std::vector<std::byte> records(keys.size() * size);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::byte* const record = records.data() + i * size;
    std::memcpy(record, &keys[i], sizeof(Key));
    if (!quantize_row(impl_->dtype, {weights + i * dim, dim}, record + sizeof(Key))) {
      throw std::invalid_argument(internal::frozen_row_refusal(impl_->name, impl_->dtype, keys[i]));
    }
  }
  impl_->records.push_back(std::move(records));
  impl_->num_rows += std::ssize(keys);
}

void ServingDelta::add_shared(std::span<const Key> keys, const float* weights) {
  impl_->shared.add(impl_->name, keys, weights);
}

void ServingDelta::erase(std::span<const Key> keys) {
  impl_->erased.insert(impl_->erased.end(), keys.begin(), keys.end());
}

ServingDelta::~ServingDelta() = default;
ServingDelta::ServingDelta(ServingDelta&&) noexcept = default;
ServingDelta& ServingDelta::operator=(ServingDelta&&) noexcept = default;
std::int64_t ServingDelta::num_rows() const noexcept { return impl_->num_rows; }
std::int64_t ServingDelta::num_erased() const noexcept { return std::ssize(impl_->erased); }

}  // namespace recsdk
