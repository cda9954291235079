// Whether arrays of calls over mapped bags lie apart. Calls run at the same time, so what one
// writes lies over nothing of the others either.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "recsdk/table.h"
#include "table/table_impl.h"
#include "util/apart.h"

namespace recsdk::internal {
namespace {

template <typename Read>
void add(const Bags& bags, std::size_t call, const Read& read) {
  const auto add_one = [&](const char* name, auto items) {
    if (!items.empty()) read({name, items, call});
  };
  add_one("rows", bags.rows);
  add_one("outcomes", bags.outcomes);
  add_one("offsets", bags.offsets);
  add_one("weights", bags.weights);
}

// Takes no memory, so that pooling needs none.
void check_alone(const PoolCall& call, const PoolBlock& block) {
  const Table::Impl& table = TableAccess::impl(*call.table);
  const Bags& bags = block.bags;
  require_apart({"vectors", block.out, table.config.dim, block.stride, bags.num_bags()},
                {{"rows", bags.rows},
                 {"outcomes", bags.outcomes},
                 {"offsets", bags.offsets},
                 {"weights", bags.weights}},
                [&] { return table.title(); });
}

template <typename Call, typename EachArray>
void require_apart_of(std::span<const Call> calls, const EachArray& each_array) {
  require_apart(each_array, [&](std::size_t call) -> const std::string& {
    return TableAccess::impl(*calls[call].table).title();
  });
}

}  // namespace

void check_apart(std::span<const PoolCall> calls) {
  if (calls.size() == 1 && calls[0].blocks.size() == 1)
    return check_alone(calls[0], calls[0].blocks[0]);
  require_apart_of(calls, [&](const auto& written, const auto& read) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const std::int64_t dim = calls[i].table->config().dim;
      for (const PoolBlock& block : calls[i].blocks) {
        written({"vectors", block.out, dim, block.stride, block.bags.num_bags(), i});
        add(block.bags, i, read);
      }
    }
  });
}

void check_apart(std::span<const UpdateCall> calls) {
  const bool writes = std::ranges::any_of(calls, [](const UpdateCall& call) {
    return std::ranges::any_of(
        call.blocks, [](const GradBlock& block) { return block.weights_grad != nullptr; });
  });
  if (!writes) return;
  require_apart_of(calls, [&](const auto& written, const auto& read) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const std::int64_t dim = calls[i].table->config().dim;
      for (const GradBlock& block : calls[i].blocks) {
        if (block.weights_grad != nullptr)
          written(
              {"gradients of weights", std::span(block.weights_grad, block.bags.rows.size()), i});
        const std::int64_t num_bags = block.bags.num_bags();
        const bool is_shared = block.stride == 0;
        read({"gradients", block.grad, dim, is_shared ? dim : block.stride,
              is_shared ? std::min<std::int64_t>(num_bags, 1) : num_bags, i});
        add(block.bags, i, read);
      }
    }
  });
}

}  // namespace recsdk::internal
