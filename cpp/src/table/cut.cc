// Cuts: how they begin and end. How rows get through is in cut_state.cc.
#include "table/cut.h"

#include <algorithm>
#include <ctime>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "util/fork_gate.h"
#include "util/must.h"

namespace recsdk {

using internal::FairMutex;

namespace {

std::chrono::nanoseconds processor_time_of_thread() noexcept {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace

Cut Table::cut(const CutOptions& options) {
  if (options.max_copy_bytes && *options.max_copy_bytes < 0) {
    throw std::invalid_argument(
        impl_->title() + ": " +
        internal::must("max_copy_bytes", "be 0 or more", *options.max_copy_bytes) +
        "; leave it out for no limit");
  }
  Impl& t = *impl_;
  auto cut = std::make_unique<Cut::Impl>();
  const std::unique_lock lock(t.index.mutex);
  const std::unique_lock rows_lock(t.rows_mutex);
  if (t.open_cut != nullptr) {
    throw Error(ErrorCode::kBusy,
                t.title() + ": a cut is open; finish it before taking another one");
  }
  if (options.changes_only && !t.index.has_parent) {
    throw std::invalid_argument(
        t.title() + ": there is no save that changes could build on; save in full first");
  }
  internal::CutMemory::Parts parts =
      t.cut_memory.take(t.index.numbers.end(), options.max_copy_bytes);
  cut->memory_ticket = parts.ticket;
  std::shared_ptr<internal::CutState> state;
  try {
    state = std::make_shared<internal::CutState>(t.layout, t.index.numbers, t.rows,
                                                 options.max_copy_bytes,
                                                 t.cut_memory.bytes_at_once(), parts);
  } catch (...) {
    t.cut_memory.forget();
    throw;
  }
  cut->num_rows = state->mark(options.changes_only ? &t.index.tracker->changed() : nullptr,
                              t.index.max_threads());
  if (t.index.has_clock() || t.shared) {
    try {
      if (t.shared) cut->shared = t.shared->values();
      if (t.index.has_clock()) cut->eviction = t.index.visible_state();
      if (t.index.admission) cut->admission = t.index.visible_records();
      if (t.index.evictor)
        state->set_meta({t.index.visible_meta(state->marked(), cut->num_rows), t.meta_bytes()});
    } catch (...) {
      t.cut_memory.forget();
      throw;
    }
  }
  cut->num_erased = options.changes_only ? t.index.tracker->num_left() : 0;
  cut->changes_only = options.changes_only;
  cut->update_count = t.update_count;
  cut->learning_rate = t.learning_rate.load();
  cut->log_decay = t.log_decay;
  cut->table = impl_;
  cut->state = state;
  cut->before = t.index.begin_cut(std::move(parts.tracker));
  t.open_cut = std::move(state);
  return Cut(std::move(cut));
}

bool Table::is_tracking() const { return impl_->keys.is_tracking(); }

void Cut::Impl::stock(bool is_beside_updates) noexcept {
  do {
    if (is_beside_updates) give_way();
  } while (state->stock());
}

std::int64_t Cut::Impl::read(const internal::RowArrays& arrays) {
  for (;;) {
    {
      const auto gate = internal::hold_off_fork();
      const std::shared_lock lock(table->rows_mutex);
      const std::int64_t n = state->read(arrays);
      if (n > 0) return n;
    }
    if (state->is_read()) return 0;
  }
}

// Polls: so an update that ends need not wake it, and a child of fork finds no lock held.
void Cut::Impl::give_way() noexcept {
  constexpr auto kNap = std::chrono::microseconds(100);
  constexpr std::chrono::nanoseconds kFirstPatience = std::chrono::milliseconds(100);
  constexpr int kPatience = 4;
  const std::chrono::nanoseconds worked = processor_time_of_thread();
  const auto until = std::chrono::steady_clock::now() +
                     (worked_ ? kPatience * (worked - *worked_) : kFirstPatience);
  while (table->num_updating.load() > 0 && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(kNap);
  worked_ = processor_time_of_thread();
}

std::vector<internal::LeftKey> Cut::Impl::left_keys() const {
  if (!changes_only) return {};
  const auto gate = internal::hold_off_fork();
  const std::lock_guard lock(before_mutex);
  if (is_finished.load()) internal::CutState::throw_closed();
  return before->left();
}

// Copies are freed first, without the table's locks: an update that waits for the reader may hold
// one.
void Cut::Impl::finish(bool durable) noexcept {
  // Held off to the end, or a child might find the cut finished, but the table without a new one.
  // A garbage collector may drop a cut while a custom initializer runs: the table's first lock is
  // held then, too late to hold off a fork.
  const bool is_in_callback = table->index.mutex.is_in_callback();
  std::shared_lock<std::shared_mutex> gate;
  if (!is_in_callback) gate = internal::hold_off_fork();
  if (is_finished.exchange(true)) return;
  const std::int64_t end_row = table->index.numbers.end();
  internal::CutMemory::Parts parts = state->close(table->cut_memory.bytes_for_copies(end_row));
  {
    const std::lock_guard before_lock(before_mutex);
    std::unique_lock<FairMutex> lock(table->index.mutex, std::defer_lock);
    if (!is_in_callback) lock.lock();
    const std::unique_lock rows_lock(table->rows_mutex);
    parts.tracker = table->index.end_cut(std::move(before), durable);
    table->open_cut.reset();
  }
  parts.ticket = memory_ticket;
  table->cut_memory.keep(std::move(parts), end_row);
}

Cut::Cut(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Cut::Cut(Cut&& other) noexcept = default;

Cut& Cut::operator=(Cut&& other) noexcept {
  if (this != &other) {
    if (impl_ != nullptr) impl_->finish(false);
    impl_ = std::move(other.impl_);
  }
  return *this;
}

Cut::~Cut() {
  if (impl_ != nullptr) impl_->finish(false);
}

std::int64_t Cut::num_rows() const noexcept { return impl_->num_rows; }
std::int64_t Cut::num_erased() const noexcept { return impl_->num_erased; }
bool Cut::changes_only() const noexcept { return impl_->changes_only; }
const RowLayout& Cut::layout() const noexcept { return impl_->table->layout; }
std::uint64_t Cut::update_count() const noexcept { return impl_->update_count; }
float Cut::learning_rate() const noexcept { return impl_->learning_rate; }
double Cut::log_decay() const noexcept { return impl_->log_decay; }
const std::optional<EvictionState>& Cut::eviction() const noexcept { return impl_->eviction; }
const std::optional<std::vector<AdmitRecord>>& Cut::admission() const noexcept {
  return impl_->admission;
}
const std::optional<SharedRows>& Cut::shared_rows() const noexcept { return impl_->shared; }
std::int64_t Cut::copied_bytes() const noexcept { return impl_->state->copied_bytes(); }
std::int64_t Cut::max_copied_bytes() const noexcept { return impl_->state->max_copied_bytes(); }
bool Cut::is_finished() const noexcept { return impl_->is_finished.load(); }
void Cut::prepare_copies() noexcept { impl_->stock(true); }
void Cut::finish(bool durable) noexcept { impl_->finish(durable); }

}  // namespace recsdk
