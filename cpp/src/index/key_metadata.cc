// What eviction and admission keep of keys, read and replaced from outside, and keys that leave by
// it.
#include "recsdk/key_metadata.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "index/index_impl.h"
#include "util/must.h"

namespace recsdk {

namespace {

[[noreturn, gnu::cold]] void fail(const Index::Impl& index, const std::string& what) {
  throw std::invalid_argument(index.title + ": " + what);
}

const internal::RowMeta& meta_of(const Index::Impl& index) {
  if (!index.evictor) fail(index, "keys have metadata with eviction only; set eviction");
  return index.evictor->meta();
}

void require_clock(const Index::Impl& index) {
  if (index.has_clock()) return;
  fail(index, "it counts steps with eviction or admission only; set one of them");
}

void require_words(const Index::Impl& index, std::size_t num_keys, std::size_t num_given) {
  const auto num_words = static_cast<std::size_t>(meta_of(index).num_words());
  if (num_given == num_keys * num_words) return;
  fail(index, internal::must("words of metadata",
                             "be " + std::to_string(num_words) + " for each of " +
                                 std::to_string(num_keys) + " keys",
                             num_given));
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
  require_clock(impl);
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
      fail(impl, internal::must(
                     "row numbers",
                     "ascend and be of a cut, below " + std::to_string(impl.numbers.end()), row));
    wanted.assign_alone(row, true);
    before = row;
  }
  const std::vector<std::int64_t> found =
      impl.visible_meta(wanted, static_cast<std::int64_t>(rows.size()));
  std::copy(found.begin(), found.end(), words.begin());
}

std::vector<AdmitRecord> admission_records(const Index& index) {
  const Index::Impl& impl = IndexAccess::impl(index);
  if (!impl.admission) fail(impl, "keys without a row are counted with admission only; set it");
  const std::shared_lock lock(impl.mutex);
  return impl.visible_records();
}

void assign_with_metadata(Index& index, std::span<const Key> keys,
                          std::span<const std::int64_t> words, const EvictionState& state,
                          std::span<const AdmitRecord> records) {
  Index::Impl& impl = IndexAccess::impl(index);
  require_clock(impl);
  if (impl.evictor || !words.empty()) require_words(impl, keys.size(), words.size());
  impl.assign(keys, words, state, records);
}

KeyStanding standing_of(const Index& index, Key key) {
  const Index::Impl& impl = IndexAccess::impl(index);
  const std::shared_lock lock(impl.mutex);
  KeyStanding found;
  found.step = impl.visible_state().step;
  if (impl.config.max_rows) {
    const std::uint32_t group = impl.capacity->group_of(key);
    found.group = group;
    found.group_rows = impl.capacity->used(group);
    found.group_quota = impl.capacity->quota(group);
  }
  RowNumber row = 0;
  Outcome outcome = Outcome::kMissing;
  impl.find_visible({&key, 1}, &row, &outcome);
  if (outcome != Outcome::kFound) {
    if (impl.admission) found.seen = impl.admission->seen_of(key, impl.visible_records());
    return found;
  }
  found.row = row;
  if (!impl.evictor) return found;
  internal::RowBits wanted;
  wanted.grow(impl.numbers.end());
  wanted.assign_alone(row, true);
  found.words = impl.visible_meta(wanted, 1);
  const std::int64_t next = found.step + static_cast<std::int64_t>(found.step < INT64_MAX);
  const std::vector<internal::Evictor::Victim> expired =
      impl.evictor->meta().expires() ? impl.find_expired(next, std::nullopt)
                                     : std::vector<internal::Evictor::Victim>();
  found.has_expired = std::any_of(expired.begin(), expired.end(),
                                  [&](const auto& each) { return each.row == row; });
  const auto own = impl.evictor->place(static_cast<std::uint32_t>(row), impl.numbers);
  for (std::uint32_t other = 0; other < impl.numbers.end(); ++other) {
    const bool is_there =
        impl.numbers.state(other) != internal::RowState::kFree && !impl.numbers.is_leaving(other) &&
        impl.capacity->group_of(impl.numbers.key(other)) == impl.capacity->group_of(key);
    found.num_before +=
        static_cast<std::int64_t>(is_there && impl.evictor->place(other, impl.numbers) < own);
  }
  return found;
}

std::optional<std::int64_t> steps_to_look(const Index& index, std::int64_t step) {
  const Index::Impl& impl = IndexAccess::impl(index);
  if (!impl.evictor || !impl.evictor->meta().is_by_norm()) return std::nullopt;
  const std::shared_lock lock(impl.mutex);
  const std::int64_t now = impl.step_of(step);
  if (impl.is_look_due(now)) impl.require_trained(step);
  return impl.evictor->meta().steps_to_look(now);
}

Decided decided(const Index& index) {
  const Index::Impl& impl = IndexAccess::impl(index);
  const std::shared_lock lock(impl.mutex);
  return {impl.key_map.size(), impl.clock.step};
}

std::int64_t evict_where(Index& index, const ChooseLeaving& choose) {
  Index::Impl& impl = IndexAccess::impl(index);
  meta_of(impl);
  const std::unique_lock lock(impl.mutex);
  return impl.evict_chosen(impl.choose_where(choose));
}

std::int64_t would_evict_where(Index& index, const ChooseLeaving& choose) {
  Index::Impl& impl = IndexAccess::impl(index);
  meta_of(impl);
  const std::unique_lock lock(impl.mutex);
  return static_cast<std::int64_t>(impl.choose_where(choose).size());
}

std::int64_t would_evict(Index& index, std::int64_t max_rows) {
  Index::Impl& impl = IndexAccess::impl(index);
  const std::unique_lock lock(impl.mutex);
  return impl.evict(max_rows, /*is_dry=*/true);
}

std::int64_t would_expire(Index& index) {
  Index::Impl& impl = IndexAccess::impl(index);
  const std::unique_lock lock(impl.mutex);
  return impl.evictor && impl.evictor->meta().expires() ? impl.expire(/*is_dry=*/true) : 0;
}

// In ascending order of row number, so that what follows depends on nothing else.
std::vector<internal::Evictor::Victim> Index::Impl::choose_where(const ChooseLeaving& choose) {
  constexpr std::size_t kKeysAtOnce = 65'536;
  require_no_steps("evict");
  const internal::RowMeta& meta = evictor->meta();
  const auto num_words = static_cast<std::size_t>(meta.num_words());
  const std::int64_t step = step_of(std::nullopt);
  std::vector<internal::Evictor::Victim> chosen;
  std::vector<internal::Evictor::Victim> shown;
  std::vector<Key> keys;
  std::vector<std::uint32_t> rows;
  std::vector<std::int64_t> words;
  std::vector<std::uint8_t> leaves;
  for (RowNumber row = 0; row < numbers.end();) {
    shown.clear();
    keys.clear();
    rows.clear();
    words.clear();
    for (; row < numbers.end() && shown.size() < kKeysAtOnce; ++row) {
      if (numbers.state(row) != internal::RowState::kVisible) continue;
      const std::int64_t* const kept = numbers.meta(row);
      shown.push_back({numbers.key(row), static_cast<std::uint32_t>(row)});
      keys.push_back(shown.back().key);
      words.insert(words.end(), kept, kept + num_words);
      rows.push_back(static_cast<std::uint32_t>(row));
    }
    if (evictor->kinds() != nullptr) set_visible_places(rows, words);
    if (shown.empty()) break;
    leaves.assign(shown.size(), 0);
    {
      const internal::FairMutex::CallbackScope scope(mutex);
      choose({keys, words, clock.step}, leaves);
    }
    for (std::size_t i = 0; i < shown.size(); ++i) {
      if (leaves[i] != 0 && meta.may_leave(&words[i * num_words], step)) chosen.push_back(shown[i]);
    }
  }
  return chosen;
}

}  // namespace recsdk
