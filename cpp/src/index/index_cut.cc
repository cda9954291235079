// Cuts of an index, tracking of changes, and replacing all keys.
#include <algorithm>
#include <atomic>
#include <bit>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "index/index_impl.h"
#include "util/must.h"

namespace recsdk {

using internal::ChangeTracker;
using internal::kWordRows;
using internal::RowBits;
using internal::RowMeta;
using internal::RowState;

struct IndexCut::Impl {
  std::shared_ptr<Index::Impl> index;
  std::unique_ptr<ChangeTracker> before;  // changes up to the cut, or null
  bool changes_only = false;
  std::atomic<bool> is_finished{false};
  std::vector<Key> keys;
  std::vector<RowNumber> rows;
  std::vector<Key> left;
  std::vector<LeaveCause> causes;
};

void Index::Impl::replace(internal::KeyMap& other_map, internal::RowNumbers& other_numbers,
                          std::unique_ptr<ChangeTracker>& other_tracker) noexcept {
  key_map.swap(other_map);
  numbers.swap(other_numbers);
  tracker.swap(other_tracker);
  has_parent = true;
  if (capacity) capacity->recount(numbers);
  if (evictor) evictor->forget();
  if (evictor && evictor->kinds() != nullptr) evictor->kinds()->forget();
  if (unmeasured) unmeasured->note_all();
  if (admission) admission->clear();
  if (churn) churn->clear();
}

void Index::Impl::check_room(const internal::RowNumbers& other_numbers) const {
  if (!capacity) return;
  const auto full = capacity->find_overfull(other_numbers);
  if (!full) return;
  throw Error(ErrorCode::kCapacity, title + ": " + std::to_string(full->used) +
                                        " of the keys to be taken in are too many for group " +
                                        std::to_string(full->group) + " of " +
                                        std::to_string(capacity->num_groups()) + ", which has " +
                                        std::to_string(full->quota) +
                                        " rows; raise max_rows, or set fewer eviction_groups");
}

std::unique_ptr<ChangeTracker> Index::Impl::begin_cut(
    std::unique_ptr<ChangeTracker> fresh) noexcept {
  is_cut = true;
  return std::exchange(tracker, std::move(fresh));
}

std::unique_ptr<ChangeTracker> Index::Impl::end_cut(std::unique_ptr<ChangeTracker> before,
                                                    bool durable) noexcept {
  is_cut = false;
  if (durable) {
    has_parent = true;
    return before;
  }
  if (!has_parent) return std::move(tracker);
  const auto is_visible = [&](Key key) {
    const auto row = key_map.find_one(key);
    return row && numbers.state(*row) == RowState::kVisible;
  };
  try {
    tracker->merge(*before, is_visible);
  } catch (const std::exception&) {
    has_parent = false;  // no memory for the changes: the next cut must be of all keys
    return std::move(tracker);
  }
  return before;
}

IndexCut Index::cut(bool changes_only) {
  Impl& index = *impl_;
  index.require_alone("a cut");
  auto cut = std::make_unique<IndexCut::Impl>();
  auto fresh = std::make_unique<ChangeTracker>(index.hash_seed);
  const std::unique_lock lock(index.mutex);
  if (index.is_cut) {
    throw Error(ErrorCode::kBusy,
                index.title + ": a cut is open; finish it before taking another one");
  }
  if (changes_only && !index.has_parent) {
    throw std::invalid_argument(index.title +
                                ": there is no cut that changes could build on; finish one of all "
                                "keys as durable first");
  }
  fresh->grow(index.numbers.end());
  const RowBits& visible = index.numbers.visible();
  const std::int64_t num_words = (index.numbers.end() + kWordRows - 1) / kWordRows;
  for (std::int64_t i = 0; i < num_words; ++i) {
    std::uint64_t bits = visible.word(i);
    if (changes_only) bits &= index.tracker->changed().word(i);
    for (; bits != 0; bits &= bits - 1) {
      const RowNumber row = i * kWordRows + std::countr_zero(bits);
      cut->keys.push_back(index.numbers.key(row));
      cut->rows.push_back(row);
    }
  }
  if (changes_only) {
    std::vector<internal::LeftKey> left = index.tracker->left();
    std::sort(left.begin(), left.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
    for (const auto& [cause, key] : left) {
      cut->left.push_back(key);
      cut->causes.push_back(cause);
    }
  }
  cut->changes_only = changes_only;
  cut->index = impl_;
  cut->before = index.begin_cut(std::move(fresh));
  return IndexCut(std::move(cut));
}

bool Index::is_tracking() const {
  const std::shared_lock lock(impl_->mutex);
  return impl_->has_parent;
}

void Index::note_changed(std::span<const RowNumber> rows) {
  const std::shared_lock lock(impl_->mutex);
  for (const RowNumber row : rows) {
    if (row >= 0 && row < impl_->numbers.end()) continue;
    throw std::invalid_argument(
        impl_->title + ": " +
        internal::must("row numbers",
                       "be those that map returned, below " + std::to_string(impl_->numbers.end()),
                       row));
  }
  if (impl_->tracker == nullptr) return;
  for (const RowNumber row : rows) impl_->tracker->note_changed(row);
}

void Index::check_idle() const {
  const std::shared_lock lock(impl_->mutex);
  impl_->require_idle("replacing rows");
}

void Index::Impl::assign(std::span<const Key> keys, std::span<const std::int64_t> words,
                         const EvictionState& state, std::span<const AdmitRecord> records) {
  require_alone("other keys");
  check_time("the clock's time", state.time);
  const auto count = static_cast<std::int64_t>(keys.size());
  if (config.max_rows && count > *config.max_rows) {
    throw Error(ErrorCode::kCapacity,
                title + ": " + std::to_string(count) + " keys are given, and max_rows is " +
                    std::to_string(*config.max_rows) + "; raise max_rows, or give fewer");
  }
  const RowMeta* const meta = evictor ? &evictor->meta() : nullptr;
  const auto num_words = static_cast<std::size_t>(meta == nullptr ? 0 : meta->num_words());
  internal::KeyMap map(hash_seed);
  internal::RowNumbers others(static_cast<int>(num_words));
  auto changes = std::make_unique<ChangeTracker>(hash_seed);
  map.reserve(count);
  others.prepare_allocate(count);
  changes->grow(count);
  for (std::int64_t row = 0; row < count; ++row) {
    const auto i = static_cast<std::size_t>(row);
    if (map.find_or_insert(keys[i], static_cast<std::uint32_t>(row)) != row) {
      throw std::invalid_argument(title + ": key " + std::to_string(keys[i]) +
                                  " comes twice; pass distinct keys");
    }
    others.allocate(keys[i], RowState::kVisible);
    if (meta == nullptr) continue;
    if (words.empty()) {
      meta->begin_unknown(others.meta(row));
    } else {
      std::copy_n(words.begin() + static_cast<std::ptrdiff_t>(i * num_words), num_words,
                  others.meta(row));
    }
  }
  map.adapt(count);
  check_room(others);
  const std::unique_ptr<internal::Admission> counted = counted_anew(map, records);
  const std::unique_lock lock(mutex);
  require_idle("replacing all keys");
  let_measure(count);
  if (maker != nullptr) {
    const internal::FairMutex::CallbackScope scope(mutex);
    maker->prepare(count, {});
  }
  replace(map, others, changes);
  if (counted != nullptr) admission->replace_by(*counted);
  if (has_clock()) set_state(state);
}

void Index::assign(std::span<const Key> keys) { impl_->assign(keys, {}, {}, {}); }

IndexCut::IndexCut(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
IndexCut::IndexCut(IndexCut&& other) noexcept = default;

IndexCut& IndexCut::operator=(IndexCut&& other) noexcept {
  if (this != &other) {
    finish(false);
    impl_ = std::move(other.impl_);
  }
  return *this;
}

IndexCut::~IndexCut() { finish(false); }

bool IndexCut::changes_only() const noexcept { return impl_->changes_only; }
std::span<const Key> IndexCut::keys() const noexcept { return impl_->keys; }
std::span<const RowNumber> IndexCut::rows() const noexcept { return impl_->rows; }
std::span<const Key> IndexCut::left() const noexcept { return impl_->left; }
std::span<const LeaveCause> IndexCut::causes() const noexcept { return impl_->causes; }

// A garbage collector may drop a cut while a callback makes rows, under the lock.
void IndexCut::finish(bool durable) noexcept {
  if (impl_ == nullptr || impl_->is_finished.exchange(true)) return;
  Index::Impl& index = *impl_->index;
  std::unique_ptr<ChangeTracker> of_no_use;  // freed without the lock
  std::unique_lock lock(index.mutex, std::defer_lock);
  if (!index.mutex.is_in_callback()) lock.lock();
  of_no_use = index.end_cut(std::move(impl_->before), durable);
  if (lock) lock.unlock();
}

}  // namespace recsdk
