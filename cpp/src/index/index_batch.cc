// Calls over many indexes at once.
#include "index/index_impl.h"
#include "index/many.h"

namespace recsdk {

void map_indexes(std::span<const IndexMapCall> calls) {
  internal::check_distinct(
      calls, [](const IndexMapCall& call) { return call.index; },
      [](const Index& index) { return IndexAccess::impl(index).title; });
  for (const IndexMapCall& call : calls) {
    const Index::Impl& index = IndexAccess::impl(*call.index);
    index.check_sizes(call.keys.size(), call.outcomes.size());
    index.check_rows(call.keys.size(), call.rows.size());
    index.check_data(call.keys.size(), call.options.data, call.options.insert);
    index.check_lease(call.options.lease);
  }
  internal::run_all(calls, [](const IndexMapCall& call) {
    call.index->map(call.keys, call.rows, call.outcomes, call.options);
  });
}

}  // namespace recsdk
