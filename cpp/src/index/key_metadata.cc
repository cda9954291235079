// What eviction keeps of keys, read and replaced from outside.
#include "recsdk/key_metadata.h"

#include <algorithm>
#include <shared_mutex>
#include <stdexcept>
#include <string>

#include "index/index_impl.h"

namespace recsdk {

namespace {

[[noreturn, gnu::cold]] void fail(const Index::Impl& index, const std::string& what) {
  throw std::invalid_argument(index.title + ": " + what);
}

const internal::RowMeta& meta_of(const Index::Impl& index) {
  if (!index.evictor) fail(index, "keys have metadata with eviction only; set eviction");
  return index.evictor->meta();
}

void require_words(const Index::Impl& index, std::size_t num_keys, std::size_t num_given) {
  const auto num_words = static_cast<std::size_t>(meta_of(index).num_words());
  if (num_given == num_keys * num_words) return;
  fail(index, "there are " + std::to_string(num_given) + " words of metadata for " +
                  std::to_string(num_keys) + " keys; pass " + std::to_string(num_words) +
                  " for each");
}

}  // namespace

std::vector<FileField> metadata_fields(const Index& index) {
  std::vector<FileField> fields;
  const Index::Impl& impl = IndexAccess::impl(index);
  if (!impl.evictor) return fields;
  for (const internal::MetaKind kind : impl.evictor->meta().kinds())
    fields.push_back(internal::file_field(kind));
  return fields;
}

EvictionState eviction_state(const Index& index) {
  const Index::Impl& impl = IndexAccess::impl(index);
  meta_of(impl);
  const std::shared_lock lock(impl.mutex);
  return impl.visible_state();
}

void copy_metadata(const Index& index, std::span<const RowNumber> rows,
                   std::span<std::int64_t> words) {
  const Index::Impl& impl = IndexAccess::impl(index);
  require_words(impl, rows.size(), words.size());
  const std::shared_lock lock(impl.mutex);
  internal::RowBits wanted;
  wanted.grow(impl.numbers.end());
  RowNumber before = -1;
  for (const RowNumber row : rows) {
    if (row <= before || row >= impl.numbers.end())
      fail(impl, "row number " + std::to_string(row) +
                     " is out of range or order; pass row numbers of a cut");
    wanted.assign_alone(row, true);
    before = row;
  }
  const std::vector<std::int64_t> found =
      impl.visible_meta(wanted, static_cast<std::int64_t>(rows.size()));
  std::copy(found.begin(), found.end(), words.begin());
}

void assign_with_metadata(Index& index, std::span<const Key> keys,
                          std::span<const std::int64_t> words, const EvictionState& state) {
  Index::Impl& impl = IndexAccess::impl(index);
  require_words(impl, keys.size(), words.size());
  impl.assign(keys, words, state);
}

}  // namespace recsdk
