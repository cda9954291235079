// Mapping the keys of many indexes at once.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "index/index_impl.h"
#include "index/many.h"
#include "recsdk/index.h"
#include "recsdk/runtime.h"
#include "rows/store_numbers.h"
#include "util/apart.h"
#include "util/must.h"
#include "util/thread_pool.h"
#include "util/unset_allocator.h"

namespace recsdk {

namespace {

template <typename Item>
using Unset = std::vector<Item, internal::UnsetAllocator<Item>>;

constexpr std::int64_t kNumbersOfPiece = 16384;

std::size_t num_keys_of(const IndexMapCall& call) {
  std::size_t count = call.keys.size();
  for (const std::span<const Key> piece : call.pieces) count += piece.size();
  return count;
}

// ---- what is refused ----------------------------------------------------------------------------

[[noreturn]] void refuse(const Index::Impl& index, const std::string& what) {
  throw std::invalid_argument(index.title + ": " + what);
}

/// The highest number that can be said; without any, all can.
std::int64_t most_of(const StoreNumbers& store) {
  return store.narrow.empty() ? std::numeric_limits<std::int64_t>::max()
                              : std::numeric_limits<std::int32_t>::max();
}

void check_parts(const Index::Impl& index, const StoreNumbers& store, std::size_t num_keys) {
  const auto size = static_cast<std::int64_t>(store.narrow.size() + store.wide.size());
  auto left = static_cast<std::int64_t>(num_keys);
  for (const NumberedKeys& part : store.parts) {
    if (part.count < 0 || part.count > left)
      refuse(index,
             internal::must("a part of its numbers",
                            "be 0 to the keys that are left, " + std::to_string(left), part.count));
    if (part.begin < 0 || part.begin > size || part.count > size - part.begin)
      refuse(index,
             internal::must(
                 "each part of its numbers", "lie within the store's, 0 to " + std::to_string(size),
                 std::to_string(part.count) + " from " + std::to_string(part.begin) + " on"));
    left -= part.count;
  }
  if (left != 0)
    refuse(index, internal::must("the parts of its numbers",
                                 "add up to its keys, " + std::to_string(num_keys),
                                 num_keys - static_cast<std::size_t>(left)));
}

void check_number(const Index::Impl& index, const char* name, std::int64_t number,
                  std::int64_t most) {
  if (number < 0 || number > most)
    refuse(index, internal::must(std::string(name) + " of a store",
                                 "be 0 to " + std::to_string(most), number) +
                      "; pass int64 numbers if there are more");
}

void check_store(const Index::Impl& index, const IndexMapCall& call, std::size_t num_keys) {
  const StoreNumbers& store = *call.store;
  if (!call.rows.empty()) refuse(index, "rows and a store are both given; pass one");
  if (!store.narrow.empty() && !store.wide.empty())
    refuse(index, "narrow and wide numbers of a store are both given; pass one");
  check_parts(index, store, num_keys);
  const DefaultConfig& reads = index.config.default_row;
  const StorePlace& place = store.place;
  const std::int64_t most = most_of(store);
  const std::int64_t num_shared = reads.kind == DefaultKind::kSharedRows ? reads.num_rows : 0;
  if (place.num_shared != num_shared)
    refuse(index, internal::must("num_shared of a store",
                                 "be the number of rows that its keys without one share, " +
                                     std::to_string(num_shared),
                                 place.num_shared));
  check_number(index, "first_row", place.first_row, most);
  check_number(index, "default_row", place.default_row, most - num_shared);
}

template <typename Written>
void add_numbers(const StoreNumbers& store, std::size_t call, const Written& written) {
  for (const NumberedKeys& part : store.parts) {
    const auto begin = static_cast<std::size_t>(part.begin);
    const auto count = static_cast<std::size_t>(part.count);
    if (store.wide.empty())
      written({"numbers of a store", store.narrow.subspan(begin, count), call});
    else
      written({"numbers of a store", store.wide.subspan(begin, count), call});
  }
}

void check(const IndexMapCall& call) {
  const Index::Impl& index = IndexAccess::impl(*call.index);
  const std::size_t num_keys = num_keys_of(call);
  if (!call.pieces.empty() && !call.keys.empty())
    refuse(index, "keys and pieces are both given; pass one");
  index.check_sizes(num_keys, call.outcomes.size());
  if (call.store == nullptr)
    index.check_rows(num_keys, call.rows.size());
  else
    check_store(index, call, num_keys);
  index.check_data(num_keys, call.options.data, call.options.insert, call.options.admits_all);
  index.check_admits_all(call.options);
  index.check_lease(call.options.lease);
}

// Calls run at the same time, so what one writes lies over nothing of the others either.
void check_apart(std::span<const IndexMapCall> calls) {
  const auto each_array = [&](const auto& written, const auto& read) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const IndexMapCall& call = calls[i];
      written({"rows", call.rows, i});
      written({"outcomes", call.outcomes, i});
      if (call.store != nullptr) add_numbers(*call.store, i, written);
      const auto add = [&](const char* name, auto items) {
        if (!items.empty()) read({name, items, i});
      };
      add("keys", call.keys);
      for (const std::span<const Key> piece : call.pieces) add("keys", piece);
      add("times", call.options.data.times);
      add("scores", call.options.data.scores);
      add("counts", call.options.data.counts);
      add("clicks", call.options.data.clicks);
    }
  };
  internal::require_apart(each_array,
                          [&](std::size_t i) { return IndexAccess::impl(*calls[i].index).title; });
}

// ---- mapping ------------------------------------------------------------------------------------

/// The numbers of rows (N,), on all threads; those of one table are many at times.
template <typename Number>
void write_numbers(std::span<const RowNumber> rows, std::span<const Outcome> outcomes,
                   const StorePlace& place, Number* out) {
  internal::parallel_for(static_cast<std::int64_t>(rows.size()), kNumbersOfPiece, num_threads(),
                         [&](std::int64_t begin, std::int64_t end) {
                           const auto first = static_cast<std::size_t>(begin);
                           const auto count = static_cast<std::size_t>(end - begin);
                           internal::write_store_numbers(rows.subspan(first, count),
                                                         outcomes.subspan(first, count), place,
                                                         out + begin);
                         });
}

void write_numbers(const StoreNumbers& store, std::span<const RowNumber> rows,
                   std::span<const Outcome> outcomes) {
  std::size_t first = 0;
  for (const NumberedKeys& part : store.parts) {
    const auto count = static_cast<std::size_t>(part.count);
    const auto own = rows.subspan(first, count);
    const auto their = outcomes.subspan(first, count);
    if (store.wide.empty())
      write_numbers(own, their, store.place, store.narrow.data() + part.begin);
    else
      write_numbers(own, their, store.place, store.wide.data() + part.begin);
    first += count;
  }
}

void map_keys(const IndexMapCall& call, std::span<const Key> keys) {
  Index::Impl& index = IndexAccess::impl(*call.index);
  if (call.store == nullptr) {
    index.map(keys, call.rows.data(), call.outcomes.data(), call.options, std::nullopt);
    return;
  }
  Unset<RowNumber> rows(keys.size());
  const std::int64_t last = most_of(*call.store) - call.store->place.first_row;
  index.map(keys, rows.data(), call.outcomes.data(), call.options,
            last == std::numeric_limits<std::int64_t>::max() ? last : last + 1);
  write_numbers(*call.store, rows, call.outcomes);
}

void map(const IndexMapCall& call) {
  if (call.pieces.empty()) return map_keys(call, call.keys);
  Unset<Key> keys(num_keys_of(call));
  auto end = keys.begin();
  for (const std::span<const Key> piece : call.pieces) end = std::ranges::copy(piece, end).out;
  map_keys(call, keys);
}

}  // namespace

void map_indexes(std::span<const IndexMapCall> calls) {
  internal::check_distinct(
      calls, [](const IndexMapCall& call) { return call.index; },
      [](const Index& index) { return IndexAccess::impl(index).title; });
  for (const IndexMapCall& call : calls) check(call);
  check_apart(calls);
  internal::run_all(calls, map);
}

}  // namespace recsdk
