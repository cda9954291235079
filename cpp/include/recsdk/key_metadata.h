// What eviction and admission keep of the keys of an index, for programs that save it beside rows
// of their own, or choose by it who leaves.
//
// Shape letters: N keys, n rows, W numbers that are kept of each.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "recsdk/export.h"
#include "recsdk/index.h"
#include "recsdk/policy.h"
#include "recsdk/row_file.h"
#include "recsdk/types.h"

namespace recsdk {

/// What is kept of each key (W,), as fields of row files; none without eviction.
RECSDK_API std::vector<FileField> metadata_fields(const Index& index);

/// Where the clock stands to readers: without batches in flight. Throws std::invalid_argument
/// without eviction and admission.
RECSDK_API EvictionState eviction_state(const Index& index);

/// What is kept of the keys of rows (n,), in ascending order, as readers see it: words (n, W), each
/// with the bytes of its field first. Rows without a visible key have any words. Throws
/// std::invalid_argument without eviction, for rows out of range or order, and for sizes that do
/// not fit. Cost: looks at each row, and at what batches in flight have touched.
RECSDK_API void copy_metadata(const Index& index, std::span<const RowNumber> rows,
                              std::span<std::int64_t> words);

/// How often keys without a row were seen, or the words of a sketch, ascending by key, as readers
/// see it. Throws std::invalid_argument without admission.
RECSDK_API std::vector<AdmitRecord> admission_records(const Index& index);

/// Index::assign of keys (N,) with words (N, W) as copy_metadata gives them, none without eviction,
/// a clock, and records as admission_records gives them. Records beyond the limit leave. A clock
/// before what was seen of any key stands where the latest was seen. Throws as Index::assign, and
/// std::invalid_argument without eviction and admission, for sizes that do not fit, records without
/// admission, and those of keys that have a row or come twice.
RECSDK_API void assign_with_metadata(Index& index, std::span<const Key> keys,
                                     std::span<const std::int64_t> words,
                                     const EvictionState& state,
                                     std::span<const AdmitRecord> records = {});

/// How a key stands in an index, as readers see it, for people who ask why.
struct KeyStanding {
  std::optional<RowNumber> row;      ///< absent: the key has none
  std::vector<std::int64_t> words;   ///< with eviction and a row: what is kept of it (W,)
  std::optional<std::int64_t> seen;  ///< without a row: how often it was seen, if that is kept
  std::int64_t step = 0;             ///< of the last call that inserted, with eviction or admission
  std::optional<std::int64_t> group;  ///< with max_rows: the key's group
  std::int64_t group_rows = 0;        ///< keys that the group has, batches in flight included
  std::int64_t group_quota = 0;       ///< keys that it may have
  std::int64_t num_before = 0;  ///< with eviction and a row: keys of the group that leave before it
  bool has_expired = false;     ///< it leaves at the next look
};
/// Cost: a look at all keys, and a copy of what is kept of keys without a row.
RECSDK_API KeyStanding standing_of(const Index& index, Key key);

/// When EvictOrder::kLowNorm looks at norms again: so many steps after `step`, that of the next
/// batch to be mapped, if the step of each lease is one more than that of the one before. All
/// batches before the one of the look must be trained when it is mapped. Absent with other rules.
/// Throws Error(kBusy) if that batch itself begins with a look, and one before is in flight.
RECSDK_API std::optional<std::int64_t> steps_to_look(const Index& index, std::int64_t step);

/// How far an index has decided who has a row, batches in flight included.
struct Decided {
  std::int64_t num_keys = 0;  ///< that have one
  std::int64_t step = 0;      ///< of the last call that inserted, with eviction or admission
};
/// Two indexes that are given the same calls say the same, whenever leases are released.
RECSDK_API Decided decided(const Index& index);

/// Some keys, and what is kept of each.
struct KeptKeys {
  std::span<const Key> keys;            ///< (n,)
  std::span<const std::int64_t> words;  ///< (n, W), as copy_metadata gives them
  std::int64_t step = 0;                ///< of the last call that inserted
};
/// Sets leaves[i] to 1 for each of the keys (n,) that is to leave; all are 0 before.
using ChooseLeaving = std::function<void(const KeptKeys& kept, std::span<std::uint8_t> leaves)>;

/// Evicts the keys that `choose` picks; those below min_age stay. Returns how many left. All keys
/// are shown to it, some 65,536 at a time, under the index's lock, and it must not call the index;
/// what it throws takes all back. Throws std::invalid_argument without eviction, Error(kBusy) while
/// leases with a step are open. Cost: a look at each key and row number.
RECSDK_API std::int64_t evict_where(Index& index, const ChooseLeaving& choose);

/// How many keys evict_where, Index::evict or Index::expire would make leave now. Nobody leaves.
/// Same conditions and cost, but that would_expire is 0 where no key expires.
RECSDK_API std::int64_t would_evict_where(Index& index, const ChooseLeaving& choose);
RECSDK_API std::int64_t would_evict(Index& index, std::int64_t max_rows);
RECSDK_API std::int64_t would_expire(Index& index);

}  // namespace recsdk
