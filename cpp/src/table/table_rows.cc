// The calls that address rows by number: pooling and updates.
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "bags/check_bags.h"
#include "bags/gradients.h"
#include "kernels/optimizer_step.h"
#include "recsdk/table.h"
#include "table/default_reader.h"
#include "table/table_impl.h"
#include "util/must.h"
#include "util/thread_pool.h"

namespace recsdk {

using internal::DefaultReader;
using internal::kUpdateGrain;
using internal::PoolArgs;

namespace {

constexpr std::int64_t kBagGrain = 256;   // bags a piece of a parallel pooling
constexpr std::int64_t kKeyGrain = 4096;  // keys, about, that are found and pooled at a time

PoolArgs pool_args(const internal::RowAddresses& addresses, const TableConfig& config,
                   const Bags& bags, const internal::DefaultReader& reader) {
  return {addresses,
          config.weight_dtype,
          config.dim,
          reader.defaults(),
          reader.rows(),
          bags.outcomes.data(),
          bags.offsets.empty() ? nullptr : bags.offsets.data(),
          bags.weights.empty() ? nullptr : bags.weights.data(),
          bags.pooling,
          0,
          0,
          bags.num_bags(),
          nullptr,
          0};
}

// Sorted gradients, in pieces that begin and end at borders of rows.
class GradientPieces {
 public:
  GradientPieces(const internal::SortedGradients& gradients, const TableConfig& config,
                 int max_threads)
      : gradients_(gradients),
        dim_(config.dim),
        max_threads_(max_threads),
        scratch_width_(internal::scratch_floats(config.dim, config.weight_dtype)),
        scratch_((gradients.items.size() + kUpdateGrain - 1) / kUpdateGrain * scratch_width_) {}

  /// Calls body(number of the piece, its gradients) for each, on all threads.
  template <typename Body>
  void for_each(const Body& body) {
    internal::parallel_for(
        gradients_.items.size(), kUpdateGrain, max_threads_,
        [&](std::int64_t begin, std::int64_t end) {
          const std::int64_t number = begin / kUpdateGrain;
          body(number,
               internal::GradientArgs{dim_, gradients_.items.data(), gradients_.row_border(begin),
                                      gradients_.row_border(end), gradients_.sources.data(),
                                      scratch_.data() + number * scratch_width_});
        });
  }

 private:
  const internal::SortedGradients& gradients_;
  const std::int64_t dim_;
  const int max_threads_;
  const std::int64_t scratch_width_;
  internal::Buffer<float> scratch_;
};

// Updates the rows of a piece, a few at a time, each few after they have been copied.
void update_and_copy(internal::UpdateArgs& piece, const internal::SortedGradients& gradients,
                     internal::CutState::UpdateCopies::Piece copies) {
  constexpr std::int64_t kFew = 256;
  const std::int64_t end = piece.end;
  std::uint64_t nonfinite = 0;
  for (; piece.begin < end; piece.begin = piece.end) {
    piece.end = gradients.row_border(std::min(end, piece.begin + kFew));
    copies.copy(piece.begin, piece.end);
    internal::kernels().update(piece);
    nonfinite += std::exchange(piece.nonfinite, 0);
  }
  piece.nonfinite = nonfinite;
}

[[noreturn, gnu::cold]] void throw_nonfinite(const std::string& title, std::uint64_t num_rows) {
  throw Error(
      ErrorCode::kNonFinite,
      title + ": the gradient of at least " + std::to_string(num_rows) +
          " rows is infinite or not a number; lower the learning rate, clip gradients, or set "
          "on_nonfinite to skip");
}

void refuse_nonfinite(GradientPieces& pieces, const Table::Impl& table) {
  pieces.for_each([&](std::int64_t, const internal::GradientArgs& piece) {
    const std::uint64_t bad = internal::kernels().count_nonfinite(piece);
    if (bad != 0) throw_nonfinite(table.title(), bad);
  });
}

}  // namespace

void Table::Impl::check_bags(const Bags& bags) const {
  index.check_sizes(bags.rows.size(), bags.outcomes.size());
  internal::check_bags(bags, index.numbers.end(), [this] { return title(); });
  if (config.default_row.kind != DefaultKind::kSharedRows) return;
  const std::int64_t num_shared = config.default_row.num_rows;  // a restore replaces `shared`
  for (std::size_t i = 0; i < bags.rows.size(); ++i) {
    const auto number = static_cast<std::uint64_t>(bags.rows[i]);
    if (has_row(bags.outcomes[i]) || number < static_cast<std::uint64_t>(num_shared)) continue;
    throw std::invalid_argument(title() + ": a key without a row has the number " +
                                std::to_string(bags.rows[i]) + ", and it reads one of " +
                                std::to_string(num_shared) +
                                " shared rows; pass what map returned for it");
  }
}

void Table::Impl::check_output(std::int64_t num_bags, const float* out, std::int64_t stride) const {
  if (num_bags == 0) return;
  if (out == nullptr) throw std::invalid_argument(title() + ": the output must not be null");
  const std::int64_t most = internal::most_stride(num_bags);
  if (stride < config.dim || stride > most) {
    throw std::invalid_argument(title() + ": " +
                                internal::must("the stride of the output",
                                               "be from dim, " + std::to_string(config.dim) +
                                                   ", to " + std::to_string(most),
                                               stride));
  }
}

void Table::Impl::check_pool(std::span<const PoolBlock> blocks) const {
  for (const PoolBlock& block : blocks) {
    check_bags(block.bags);
    check_output(block.bags.num_bags(), block.out, block.stride);
  }
}

void Table::Impl::check_update(std::span<const GradBlock> blocks) const {
  for (const GradBlock& block : blocks) {
    check_bags(block.bags);
    internal::check_gradient(block, config.dim, [this] { return title(); });
    if (block.weights_grad != nullptr && block.bags.weights.empty() && !block.bags.rows.empty()) {
      throw std::invalid_argument(
          title() + ": weights_grad is asked for bags without weights; pass weights too");
    }
  }
}

void Table::Impl::pool(std::span<const PoolBlock> blocks) const {
  for (const PoolBlock& block : blocks) {
    const DefaultReader reader(*this, block.bags.rows, block.bags.outcomes);
    PoolArgs whole = pool_args(rows.records(), config, block.bags, reader);
    whole.out = block.out;
    whole.stride = block.stride;
    internal::parallel_for(whole.bag_end, kBagGrain, index.max_threads(),
                           [&](std::int64_t begin, std::int64_t end) {
                             PoolArgs piece = whole;
                             piece.bag_begin = begin;
                             piece.bag_end = end;
                             internal::kernels().pool(piece);
                           });
  }
}

// Bags of about as many keys at a time are found and pooled, so that nothing of them leaves the
// cache in between.
void Table::Impl::pool_keys(const KeyBags& bags, float* out, std::int64_t stride,
                            Outcome* outcomes) const {
  const std::int64_t num_bags = bags.num_bags();
  const auto num_keys = static_cast<std::int64_t>(bags.keys.size());
  const std::int64_t grain = std::max<std::int64_t>(kKeyGrain * num_bags / (num_keys + 1), 1);
  PoolArgs whole =
      pool_args(rows.records(), config, {{}, {}, bags.offsets, bags.weights, bags.pooling},
                DefaultReader(*this, {}, {}));
  whole.out = out;
  whole.stride = stride;
  const auto border = [&](std::int64_t b) {
    return bags.offsets.empty() ? b : bags.offsets[static_cast<std::size_t>(b)];
  };
  internal::AtomicCounts counts{};  // of all pieces: if one fails, the table has counted none
  internal::parallel_for(
      num_bags, grain, index.max_threads(), [&](std::int64_t begin, std::int64_t end) {
        PoolArgs piece = whole;
        piece.key_base = border(begin);
        piece.bag_begin = begin;
        piece.bag_end = end;
        const std::int64_t n = border(end) - piece.key_base;
        internal::Buffer<RowNumber> found(n);
        internal::Buffer<Outcome> own(outcomes == nullptr ? n : 0);
        Outcome* const kinds = outcomes == nullptr ? own.data() : outcomes + piece.key_base;
        index.find_visible(bags.keys.subspan(static_cast<std::size_t>(piece.key_base),
                                             static_cast<std::size_t>(n)),
                           found.data(), kinds);
        const auto size = static_cast<std::size_t>(n);
        const DefaultReader reader(*this, {found.data(), size}, {kinds, size});
        piece.rows = reader.rows();
        piece.defaults = reader.defaults();
        piece.outcomes = kinds;
        if (piece.weights != nullptr) piece.weights += piece.key_base;
        internal::kernels().pool(piece);
        internal::add_counts(counts, internal::count_outcomes(kinds, n));
      });
  internal::OutcomeCounts all{};
  std::copy(counts.begin(), counts.end(), all.begin());
  index.count(all);
}

// The copies that an open cut still needs of the rows that change.
internal::CutState::UpdateCopies Table::Impl::plan_copies(
    std::span<const GradBlock> blocks, const internal::SortedGradients& gradients,
    std::unique_lock<internal::FairMutex>& lock) {
  while (open_cut != nullptr) {
    const std::shared_ptr<internal::CutState> cut = open_cut;
    internal::CutState::UpdateCopies copies = cut->plan(gradients, index.max_threads());
    if (copies.bytes_to_wait_for() == 0) return copies;
    lock.unlock();
    --num_updating;
    cut->wait_for_room(copies.bytes_to_wait_for(), copy_waits);
    ++num_updating;
    lock.lock();
    check_update(blocks);  // a restore may have come in between
  }
  return {};
}

// By the weights of rows as they are before the update.
void Table::Impl::write_weights_grad(const GradBlock& block) const {
  const DefaultReader reader(*this, block.bags.rows, block.bags.outcomes);
  const PoolArgs whole = pool_args(rows.records(), config, block.bags, reader);
  internal::parallel_for(
      whole.bag_end, kBagGrain, index.max_threads(), [&](std::int64_t begin, std::int64_t end) {
        internal::WeightsGradArgs piece{whole, block.grad, block.stride, block.weights_grad};
        piece.bags.bag_begin = begin;
        piece.bags.bag_end = end;
        internal::kernels().weights_grad(piece);
      });
}

void Table::Impl::update(std::span<const GradBlock> blocks,
                         std::unique_lock<internal::FairMutex>& lock) {
  const internal::CountedIn counted(num_updating);
  for (const GradBlock& block : blocks) begin_waiting(block.bags);
  const internal::SortedGradients gradients =
      internal::sort_gradients(blocks, index.numbers.end(), index.max_threads());
  const std::int64_t num_items = gradients.items.size();
  if (num_items > cut_memory.most_rows()) cut_memory.note_update(gradients.num_rows());
  internal::SortedGradients of_shared;
  if (shared) {
    of_shared = internal::sort_gradients(blocks, shared->size(), index.max_threads(),
                                         internal::GradientsOf::kSharedRows);
  }
  GradientPieces pieces(gradients, config, index.max_threads());
  GradientPieces shared_pieces(of_shared, config, index.max_threads());
  if (config.on_nonfinite == NonFinite::kRaise) {
    refuse_nonfinite(pieces, *this);
    refuse_nonfinite(shared_pieces, *this);
  }
  const internal::CutState::UpdateCopies copies = plan_copies(blocks, gradients, lock);
  for (const GradBlock& block : blocks) {
    if (block.weights_grad != nullptr) write_weights_grad(block);
  }
  OptimizerConfig optimizer = config.optimizer;
  optimizer.learning_rate = learning_rate.load();
  const internal::OptimizerStep step = internal::make_optimizer_step(
      optimizer, layout, config.on_nonfinite, update_count + 1, log_decay);
  const auto rounding_of = [&](const internal::RowAddresses& keys_of_rows) {
    return internal::make_rounding_step(config.rounding, config.seed, table_hash, update_count + 1,
                                        keys_of_rows);
  };
  const auto finish = [&](internal::UpdateArgs& piece) {
    if (piece.nonfinite != 0) num_nonfinite.fetch_add(piece.nonfinite, std::memory_order_relaxed);
  };
  const internal::RoundingStep rounding = rounding_of(index.numbers.keys());
  pieces.for_each([&](std::int64_t number, const internal::GradientArgs& summed) {
    internal::UpdateArgs piece(summed, rows.records(), config.weight_dtype, rounding, step);
    index.note_weights(piece.items, piece.begin, piece.end);
    if (copies.is_empty()) {
      internal::kernels().update(piece);
    } else {
      update_and_copy(piece, gradients, {copies, number, piece.end});
    }
    finish(piece);
  });
  if (shared) {
    const internal::RoundingStep rounding_shared = rounding_of(shared->keys());
    shared_pieces.for_each([&](std::int64_t, const internal::GradientArgs& summed) {
      internal::UpdateArgs piece(summed, shared->records(), config.weight_dtype, rounding_shared,
                                 step);
      internal::kernels().update(piece);
      finish(piece);
    });
  }
  ++update_count;
  log_decay = internal::next_log_decay(optimizer, log_decay);
}

void Table::pool(std::span<const PoolBlock> blocks) const {
  const auto check = [&] {
    const PoolCall call{this, blocks};
    impl_->check_pool(blocks);
    internal::check_apart({&call, 1});
  };
  if (impl_->begins_with_shared()) {
    check();
    impl_->begin_rows(blocks);
  }
  const std::shared_lock lock(impl_->rows_mutex);
  check();
  impl_->pool(blocks);
}

void Table::pool_keys(const KeyBags& bags, float* out, std::int64_t stride,
                      std::span<Outcome> outcomes) const {
  impl_->index.check_outcomes(bags.keys, outcomes,
                              {{"offsets", bags.offsets}, {"weights", bags.weights}});
  internal::check_parts(bags.keys.size(), bags.offsets, bags.weights,
                        [this] { return impl_->title(); });
  const std::int64_t num_bags = bags.num_bags();
  impl_->check_output(num_bags, out, stride);
  internal::require_apart(internal::CallArray("vectors", out, impl_->config.dim, stride, num_bags),
                          {{"keys", bags.keys},
                           {"offsets", bags.offsets},
                           {"weights", bags.weights},
                           {"outcomes", outcomes}},
                          [this] { return impl_->title(); });
  const std::shared_lock lock(impl_->index.mutex);
  const std::shared_lock rows_lock(impl_->rows_mutex);
  impl_->pool_keys(bags, out, stride, outcomes.empty() ? nullptr : outcomes.data());
}

void Table::update(std::span<const GradBlock> blocks) {
  const UpdateCall call{this, blocks};
  update_tables({&call, 1});
}

void Table::apply_gradients(std::span<const Key> keys, const float* gradients,
                            std::span<Outcome> outcomes) {
  impl_->index.check_outcomes(
      keys, outcomes, {internal::rows_of("gradients", gradients, keys.size(), impl_->config.dim)});
  internal::Found found(keys.size(), outcomes);
  {
    const std::shared_lock lock(impl_->index.mutex);
    impl_->index.find_visible(keys, found.rows.data(), found.outcomes.data());
    const GradBlock block{
        {found.rows, found.outcomes, {}, {}, Pooling::kSum}, gradients, impl_->config.dim, nullptr};
    {
      std::unique_lock rows_lock(impl_->rows_mutex);
      impl_->check_update({&block, 1});
      impl_->update({&block, 1}, rows_lock);
    }
    impl_->index.count(found.counts());
  }
  impl_->cut_memory.ready_some(impl_->index.numbers.end());
}

}  // namespace recsdk
