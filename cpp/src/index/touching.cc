// What a call changes of the metadata of its keys, and what readers see of them meanwhile.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "index/index_impl.h"
#include "util/prefetch.h"

namespace recsdk {

using internal::Insertion;
using internal::kItemsAhead;
using internal::kWordRows;
using internal::LeaseRecord;
using internal::prefetch_far_line;
using internal::RowMeta;

namespace {

// A row, and its words from before.
using Undo = std::pair<std::uint32_t, const std::int64_t*>;

}  // namespace

// The rows that came get fresh metadata.
void Index::Impl::begin_meta(const Insertion& insertion) noexcept {
  const std::span<const std::uint32_t> rows = insertion.rows;
  const bool has_scores = !insertion.data.scores.empty();
  const internal::RowKinds* const kinds = evictor->kinds();
  for (std::size_t j = 0; j < rows.size(); ++j) {
    if (j + kItemsAhead < rows.size()) {
      numbers.prefetch_meta(rows[j + kItemsAhead]);
      if (kinds != nullptr) kinds->prefetch(rows[j + kItemsAhead]);
    }
    evictor->meta().begin(numbers.meta(rows[j]), insertion.step, has_scores);
    if (kinds != nullptr) kinds->begin(rows[j]);
  }
}

// Runs with the words of each row that a key of the call has.
template <typename Body>
void Index::Impl::for_touched(std::size_t num_keys, const RowNumber* rows_in,
                              const Outcome* outcomes, const Body& body) const noexcept {
  // Into the second level of cache, to which more lines can be on their way than to the first.
  constexpr std::size_t kFar = 128;
  const internal::RowAddresses records = numbers.meta();
  // A key without a row has number 0: one more line is faster than a branch.
  const auto ask_for = [&](std::size_t i) { prefetch_far_line(records.record(rows_in[i])); };
  for (std::size_t i = 0; i < std::min(kFar, num_keys); ++i) ask_for(i);
  for (std::size_t i = 0; i < num_keys; ++i) {
    if (i + kFar < num_keys) ask_for(i + kFar);
    if (has_row(outcomes[i])) body(i, reinterpret_cast<std::int64_t*>(records.record(rows_in[i])));
  }
}

// Remembers what a batch in flight finds, before each is touched by `touch`.
template <typename Touch>
void Index::Impl::touch_in_flight(std::size_t num_keys, const RowNumber* rows_in,
                                  const Outcome* outcomes, std::int64_t step, LeaseRecord& record,
                                  const Touch& touch) noexcept {
  const RowMeta& meta = evictor->meta();
  const auto num_words = static_cast<std::size_t>(meta.num_words());
  const std::size_t old_size = record.touched.size();
  record.touched.resize(old_size + num_keys * (num_words + 1));  // there is room
  std::int64_t* next = record.touched.data() + old_size;
  for_touched(num_keys, rows_in, outcomes, [&](std::size_t i, std::int64_t* words) {
    if (record.shares_step || meta.step(words) != step) {
      *next++ = rows_in[i];
      next = std::copy_n(words, num_words, next);
    }
    touch(i, words);
  });
  record.touched.resize(static_cast<std::size_t>(next - record.touched.data()));
}

template <typename Touch>
void Index::Impl::touch_all(std::size_t num_keys, const RowNumber* rows_in, const Outcome* outcomes,
                            std::int64_t step, LeaseRecord* record, const Touch& touch) noexcept {
  if (record != nullptr) {
    touch_in_flight(num_keys, rows_in, outcomes, step, *record, touch);
    return;
  }
  for_touched(num_keys, rows_in, outcomes, touch);
  if (tracker == nullptr) return;
  for (std::size_t i = 0; i < num_keys; ++i) {
    if (has_row(outcomes[i])) tracker->note_changed(rows_in[i]);
  }
}

void Index::Impl::touch(std::size_t num_keys, const RowNumber* rows_in, const Outcome* outcomes,
                        const Insertion& insertion, LeaseRecord* record) noexcept {
  const RowMeta& meta = evictor->meta();
  if (meta.may_fall()) {
    const auto touch = [&](std::size_t i, std::int64_t* words) {
      if (meta.touch_shown(words, insertion.step, RowMeta::occurrence(insertion.data, i))) return;
      evictor->note_fallen(static_cast<std::uint32_t>(rows_in[i]), numbers, *capacity);
    };
    return touch_all(num_keys, rows_in, outcomes, insertion.step, record, touch);
  }
  if (!insertion.data.scores.empty()) {
    const auto touch = [&](std::size_t i, std::int64_t* words) {
      const std::uint64_t before = meta.order(words);
      meta.touch(words, insertion.step, RowMeta::occurrence(insertion.data, i));
      if (meta.order(words) >= before) return;
      evictor->note_fallen(static_cast<std::uint32_t>(rows_in[i]), numbers, *capacity);
    };
    return touch_all(num_keys, rows_in, outcomes, insertion.step, record, touch);
  }
  meta.with_touch(insertion.data, insertion.step, [&](const auto& touch) {
    touch_all(num_keys, rows_in, outcomes, insertion.step, record, touch);
  });
}

// The rows that came, or a call has touched: what the next look finds of them follows from that.
void Index::Impl::note_unmeasured(std::size_t num_keys, const RowNumber* rows_in,
                                  const Outcome* outcomes, const Insertion& insertion) noexcept {
  if (!unmeasured) return;
  for (const std::uint32_t row : insertion.rows) unmeasured->note(row);
  if (evictor->meta().is_by_norm()) return;
  for (std::size_t i = 0; i < num_keys; ++i) {
    if (has_row(outcomes[i])) unmeasured->note(rows_in[i]);
  }
}

// What was measured is seen by readers, and is in the next cut of changes, as what a call touches.
void Index::Impl::note_measured(const Insertion& insertion, LeaseRecord* record) noexcept {
  const RowMeta& meta = evictor->meta();
  if (record == nullptr) {
    if (tracker == nullptr) return;
    for (const internal::Measured& each : insertion.measured) tracker->note_changed(each.row);
    return;
  }
  const auto num_words = static_cast<std::size_t>(meta.num_words());
  for (const internal::Measured& each : insertion.measured) {  // there is room
    record->touched.push_back(each.row);
    record->touched.resize(record->touched.size() + num_words);
    meta.copy_before(numbers.meta(each.row), each.before,
                     &record->touched[record->touched.size() - num_words]);
  }
}

void Index::Impl::note_placed(internal::RowKinds::Before& before, LeaseRecord* record) noexcept {
  if (record != nullptr) {
    record->kinds_before = std::move(before);
  } else if (tracker != nullptr) {
    note_shifted(before);
  }
}

void Index::Impl::note_shifted(const internal::RowKinds::Before& before) noexcept {
  for (std::size_t i = 0; i < before.shifted.size(); ++i) {
    for (std::uint64_t bits = before.shifted[i]; bits != 0; bits &= bits - 1)
      tracker->note_changed(static_cast<std::int64_t>(i) * kWordRows + std::countr_zero(bits));
  }
}

// Where rows, ascending, stand to readers, in place of what their words say.
void Index::Impl::set_visible_places(std::span<const std::uint32_t> rows,
                                     std::span<std::int64_t> words) const {
  const internal::RowKinds& kinds = *evictor->kinds();
  const RowMeta& meta = evictor->meta();
  // Kinds from before looks of batches in flight; of a row what the oldest found comes first.
  std::vector<std::pair<std::uint32_t, std::uint32_t>> undone;
  const internal::RowKinds::Before* oldest = nullptr;
  for (const auto& record : open_steps) {
    if (!record->kinds_before) continue;
    if (oldest == nullptr) oldest = &*record->kinds_before;
    undone.insert(undone.end(), record->kinds_before->rows.begin(),
                  record->kinds_before->rows.end());
  }
  std::stable_sort(undone.begin(), undone.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  const auto num_words = static_cast<std::size_t>(meta.num_words());
  auto undo = undone.cbegin();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::int64_t* const of_row = &words[i * num_words];
    while (undo != undone.cend() && undo->first < rows[i]) ++undo;
    const bool is_undone = undo != undone.cend() && undo->first == rows[i];
    const std::uint32_t kind = is_undone ? undo->second : kinds.kind_of(rows[i]);
    meta.set_measured(of_row, oldest == nullptr ? kinds.place(rows[i], of_row)
                                                : kinds.place_before(kind, of_row, *oldest));
  }
}

std::vector<std::int64_t> Index::Impl::visible_meta(const internal::RowBits& rows,
                                                    std::int64_t count) const {
  const std::int64_t num_words = evictor->meta().num_words();
  // What batches in flight changed, by row; of a row what the oldest found comes first.
  std::vector<Undo> undone;
  for (const auto& record : open_steps) {
    const auto& touched = record->touched;
    const auto stride = static_cast<std::size_t>(num_words) + 1;
    for (std::size_t i = 0; i < touched.size(); i += stride)
      undone.emplace_back(static_cast<std::uint32_t>(touched[i]), &touched[i + 1]);
  }
  std::stable_sort(undone.begin(), undone.end(),
                   [](const Undo& a, const Undo& b) { return a.first < b.first; });
  std::vector<std::int64_t> words;
  words.reserve(static_cast<std::size_t>(count * num_words));
  std::vector<std::uint32_t> placed;
  auto undo = undone.cbegin();
  for (std::int64_t i = 0; i < (numbers.end() + kWordRows - 1) / kWordRows; ++i) {
    for (std::uint64_t bits = rows.word(i); bits != 0; bits &= bits - 1) {
      const RowNumber row = i * kWordRows + std::countr_zero(bits);
      while (undo != undone.cend() && undo->first < row) ++undo;
      const bool is_undone = undo != undone.cend() && undo->first == row;
      const std::int64_t* const found = is_undone ? undo->second : numbers.meta(row);
      words.insert(words.end(), found, found + num_words);
      if (evictor->kinds() != nullptr) placed.push_back(static_cast<std::uint32_t>(row));
    }
  }
  if (evictor->kinds() != nullptr) set_visible_places(placed, words);
  return words;
}

}  // namespace recsdk
