// Norms of rows: measured, and scaled back to a limit.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/table.h"
#include "rows/row_values.h"
#include "table/default_reader.h"
#include "table/table_impl.h"
#include "util/must.h"
#include "util/prefetch.h"
#include "util/thread_pool.h"

namespace recsdk {

namespace {

constexpr std::int64_t kNormGrain = 256;
constexpr double kTiny = 1e-7;  // as torch adds it to a norm: scaled rows do not exceed the limit

// In double, column after column, so that no thread count or instruction set shows.
double norm_of(const std::vector<float>& row, double p) {
  double sum = 0.0;
  for (const float value : row) {
    const double size = std::abs(static_cast<double>(value));
    if (std::isinf(p)) {
      if (!(size <= sum)) sum = size;  // keeps what is not a number
    } else if (p == 2.0) {
      sum += size * size;
    } else if (p == 1.0) {
      sum += size;
    } else {
      sum += std::pow(size, p);
    }
  }
  if (std::isinf(p) || p == 1.0) return sum;
  return p == 2.0 ? std::sqrt(sum) : std::pow(sum, 1.0 / p);
}

// The norms of kAtOnce rows (kAtOnce, D), as norm_of: side by side, as each sum waits for itself.
constexpr std::size_t kAtOnce = 8;
void norms_of(const std::vector<float>& rows, float* found) {
  const std::size_t dim = rows.size() / kAtOnce;
  std::array<double, kAtOnce> sums{};
  for (std::size_t column = 0; column < dim; ++column) {
    for (std::size_t j = 0; j < kAtOnce; ++j) {
      const auto value = static_cast<double>(rows[j * dim + column]);
      sums[j] += value * value;
    }
  }
  std::transform(sums.begin(), sums.end(), found,
                 [](double sum) { return static_cast<float>(std::sqrt(sum)); });
}

void prefetch_weights(const RowLayout& layout, const internal::RowAddresses& records,
                      std::int64_t row) {
  constexpr std::int64_t kLine = 64;
  constexpr std::int64_t kMostBytes = 512;
  const RowField& field = layout.fields[0];
  const std::byte* const weights = internal::field_address(records, field, row);
  const std::int64_t bytes = std::min(layout.dim * bytes_of(field.dtype), kMostBytes);
  for (std::int64_t i = 0; i < bytes; i += kLine) internal::prefetch_line(weights + i);
}

float factor_of(const std::vector<float>& row, const NormLimit& limit) {
  const double norm = norm_of(row, limit.norm_type);
  return norm > limit.max_norm ? static_cast<float>(limit.max_norm / (norm + kTiny)) : 1.0F;
}

// By way of `row` (D,), which the caller makes before the first row changes: nothing fails here.
void scale(const RowLayout& layout, const internal::RowAddresses& records, std::uint32_t number,
           const NormLimit& limit, std::vector<float>& row) noexcept {
  internal::read_weights(layout, records, number, row.data());
  const float factor = factor_of(row, limit);
  for (float& value : row) value *= factor;
  internal::write_weights(layout, records, number, row.data());
}

void check(const NormLimit& limit, const std::string& title) {
  if (!(limit.max_norm >= 0.0))
    throw std::invalid_argument(title + ": " +
                                internal::must("max_norm", "be 0 or more", limit.max_norm));
  if (!(limit.norm_type > 0.0))
    throw std::invalid_argument(title + ": " +
                                internal::must("norm_type", "be above 0", limit.norm_type));
}

}  // namespace

void Table::Impl::norms(std::span<const std::uint32_t> row_numbers, std::span<float> found) const {
  const std::shared_lock lock(rows_mutex);
  const internal::RowAddresses records = rows.records();
  const auto dim = static_cast<std::size_t>(config.dim);
  internal::parallel_for(
      static_cast<std::int64_t>(row_numbers.size()), kNormGrain, index.max_threads(),
      [&](std::int64_t begin, std::int64_t end) {
        const auto part = row_numbers.subspan(static_cast<std::size_t>(begin),
                                              static_cast<std::size_t>(end - begin));
        float* const out = found.data() + begin;
        std::vector<float> block(kAtOnce * dim);
        std::size_t i = 0;
        for (; i + kAtOnce <= part.size(); i += kAtOnce) {
          for (std::size_t j = i + kAtOnce; j < std::min(i + 2 * kAtOnce, part.size()); ++j)
            prefetch_weights(layout, records, part[j]);
          for (std::size_t j = 0; j < kAtOnce; ++j)
            internal::read_weights(layout, records, part[i + j], block.data() + j * dim);
          norms_of(block, out + i);
        }
        block.resize(dim);
        for (; i < part.size(); ++i) {
          internal::read_weights(layout, records, part[i], block.data());
          out[i] = static_cast<float>(norm_of(block, 2.0));
        }
      });
}

std::vector<std::uint32_t> Table::Impl::rows_beyond(const Bags& mapped, const NormLimit& limit,
                                                    bool are_shared) const {
  std::vector<std::uint32_t> distinct;
  if (are_shared && !shared) return distinct;
  const internal::RowAddresses records = are_shared ? shared->records() : rows.records();
  distinct.reserve(mapped.rows.size());
  for (std::size_t i = 0; i < mapped.rows.size(); ++i) {
    if (has_row(mapped.outcomes[i]) != are_shared)
      distinct.push_back(static_cast<std::uint32_t>(mapped.rows[i]));
  }
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  std::vector<std::uint8_t> is_beyond(distinct.size());
  internal::parallel_for(static_cast<std::int64_t>(distinct.size()), kNormGrain,
                         index.max_threads(), [&](std::int64_t begin, std::int64_t end) {
                           std::vector<float> row(static_cast<std::size_t>(config.dim));
                           for (auto i = static_cast<std::size_t>(begin);
                                i < static_cast<std::size_t>(end); ++i) {
                             internal::read_weights(layout, records, distinct[i], row.data());
                             is_beyond[i] = factor_of(row, limit) != 1.0F ? 1 : 0;
                           }
                         });
  std::size_t num_beyond = 0;
  for (std::size_t i = 0; i < distinct.size(); ++i) {
    if (is_beyond[i] != 0) distinct[num_beyond++] = distinct[i];
  }
  distinct.resize(num_beyond);
  return distinct;
}

std::int64_t Table::limit_norms(std::span<const RowNumber> rows, std::span<const Outcome> outcomes,
                                const NormLimit& limit) {
  Impl& t = *impl_;
  check(limit, t.title());
  const Bags mapped{rows, outcomes, {}, {}, Pooling::kSum};
  {
    t.check_bags(mapped);
    t.begin_rows(mapped);
    const std::shared_lock lock(t.rows_mutex);
    t.check_bags(mapped);
    if (t.rows_beyond(mapped, limit, false).empty() && t.rows_beyond(mapped, limit, true).empty())
      return 0;
  }
  const std::unique_lock lock(t.index.mutex);
  std::vector<std::uint32_t> beyond;
  std::vector<std::uint32_t> shared_beyond;
  {
    const std::shared_lock rows_lock(t.rows_mutex);
    t.check_bags(mapped);  // a restore may have come in between
    beyond = t.rows_beyond(mapped, limit, false);
    shared_beyond = t.rows_beyond(mapped, limit, true);
  }
  std::vector<float> row(static_cast<std::size_t>(t.layout.dim));
  if (t.open_cut != nullptr) t.open_cut->preserve_rows(beyond, t.copy_waits);
  const std::unique_lock rows_lock(t.rows_mutex);
  for (const std::uint32_t number : beyond) {
    t.index.note_weights(number);
    scale(t.layout, t.rows.records(), number, limit, row);
  }
  for (const std::uint32_t number : shared_beyond)
    scale(t.layout, t.shared->records(), number, limit, row);
  return static_cast<std::int64_t>(beyond.size() + shared_beyond.size());
}

void Table::norm_factors(std::span<const RowNumber> rows, std::span<const Outcome> outcomes,
                         const NormLimit& limit, float* factors) const {
  Impl& t = *impl_;
  check(limit, t.title());
  const Bags mapped{rows, outcomes, {}, {}, Pooling::kSum};
  t.check_bags(mapped);
  internal::require_apart(internal::rows_of("factors", factors, rows.size(), 1),
                          {{"rows", rows}, {"outcomes", outcomes}}, [&] { return t.title(); });
  t.begin_rows(mapped);
  const std::shared_lock lock(t.rows_mutex);
  t.check_bags(mapped);
  const internal::DefaultReader reader(t, rows, outcomes);
  const bool has_defaults = reader.defaults().has_rows;
  internal::parallel_for(
      static_cast<std::int64_t>(rows.size()), kNormGrain, t.index.max_threads(),
      [&](std::int64_t begin, std::int64_t end) {
        std::vector<float> row(static_cast<std::size_t>(t.config.dim));
        for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
          factors[i] = 1.0F;
          const bool is_own = has_row(outcomes[i]);
          if (!is_own && !has_defaults) continue;
          internal::read_weights(t.layout, is_own ? t.rows.records() : reader.defaults().rows,
                                 reader.rows()[i], row.data());
          factors[i] = factor_of(row, limit);
        }
      });
}

}  // namespace recsdk
