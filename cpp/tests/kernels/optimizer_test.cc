// Each optimizer against its definition in double, and against itself on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernel_support.h"
#include "kernels/kernels.h"
#include "kernels/optimizer_step.h"
#include "optimizer_configs.h"
#include "recsdk/optimizer.h"
#include "recsdk/row_layout.h"
#include "rows/row_values.h"

namespace recsdk::optimizer_test {
namespace {

using internal::GradItem;
using internal::GradSource;
using internal::kernels;
using internal::UpdateArgs;
using test::all_configs;
using test::bits_equal;
using test::IsaScope;
using test::kDims;
using test::NamedConfig;
using test::random_floats;
using test::TestRows;

/// The gradients of one backward over rows 0 to 9 of 12: some rows once, some often, one not at
/// all.
struct Gradients {
  Gradients(std::int64_t dim, std::uint32_t seed)
      : stride(dim + 3), values(random_floats(16 * size_of(stride), seed)) {
    for (std::uint32_t s = 0; s < 16; ++s) {
      sources.push_back(
          {values.data() + size_of(s) * size_of(stride), 0.25F * static_cast<float>(s % 5 + 1)});
    }
    const std::vector<std::uint32_t> rows = {0, 1, 1, 1, 2, 4, 4, 5, 6, 6, 6, 6, 6, 6, 7, 8, 9, 9};
    for (std::uint32_t i = 0; i < rows.size(); ++i) items.push_back({rows[i], (i * 5 + seed) % 16});
  }

  /// The same without a third of the rows, others in each update.
  Gradients sparse(std::uint64_t t) const {
    Gradients rest = *this;
    std::erase_if(rest.items, [t](const GradItem& item) { return (item.row + t) % 3 == 0; });
    for (GradSource& source : rest.sources)
      source.grad = rest.values.data() + (source.grad - values.data());
    return rest;
  }

  static std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

  /// Item by item in order, as the kernel must.
  std::vector<float> summed(std::uint32_t row, std::int64_t dim) const {
    std::vector<float> sum;
    for (const GradItem& item : items) {
      if (item.row != row) continue;
      const GradSource& source = sources[item.source];
      for (std::int64_t c = 0; c < dim; ++c) {
        const float term = source.grad[c] * source.scale;
        if (static_cast<std::int64_t>(sum.size()) < dim) {
          sum.push_back(term);
        } else {
          sum[size_of(c)] += term;
        }
      }
    }
    return sum;
  }

  std::int64_t stride;  // not a multiple of anything, so that sources are not aligned
  std::vector<float> values;
  std::vector<GradSource> sources;
  std::vector<GradItem> items;
};

/// A table's rows under one optimizer.
class Rows {
 public:
  Rows(std::int64_t dim, OptimizerConfig config)
      : config_(config),
        layout(RowLayout::make(dim, config)),
        rows(layout.stride, 12, layout.scalar_stride) {
    rows.randomize(3, -1.0F, 1.0F);
    for (std::int64_t r = 0; r < 12; ++r) {
      for (std::size_t f = 1; f < layout.fields.size(); ++f) {
        for (std::int64_t i = 0; i < layout.fields[f].count; ++i)
          field(r, f)[i] = layout.fields[f].initial_value;
      }
    }
  }

  float* field(std::int64_t r, std::size_t f) const {
    return reinterpret_cast<float*>(internal::field_address(rows.addresses(), layout.fields[f], r));
  }

  UpdateArgs args(const Gradients& gradients, std::uint64_t t,
                  NonFinite on_nonfinite = NonFinite::kApply) {
    // 64-byte aligned and of its exact size, for the sanitizer.
    scratch_.assign(static_cast<std::size_t>((layout.dim + 15) / 16), {});
    return {
        {layout.dim, gradients.items.data(), 0, static_cast<std::int64_t>(gradients.items.size()),
         gradients.sources.data(), scratch_.front().floats},
        rows.addresses(),
        DType::kFloat32,
        {},
        internal::make_optimizer_step(config_, layout, on_nonfinite, t, log_decay_)};
  }

  std::uint64_t update(const Gradients& gradients, std::uint64_t t,
                       NonFinite on_nonfinite = NonFinite::kApply) {
    UpdateArgs a = args(gradients, t, on_nonfinite);
    kernels().update(a);
    log_decay_ = internal::next_log_decay(config_, log_decay_);
    return a.nonfinite;
  }

 private:
  struct alignas(64) Line {
    float floats[16];
  };
  OptimizerConfig config_;
  double log_decay_ = 0.0;
  std::vector<Line> scratch_;

 public:
  RowLayout layout;
  TestRows rows;
};

/// One row in double: weight and state, field by field.
struct ExactRow {
  std::vector<std::vector<double>> fields;
  std::uint64_t last = 0;
};

using Numbers = std::vector<double>;

double norm_of(const Numbers& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

/// What an optimizer takes off a row's weights for a clipped gradient g.
Numbers change_of(const OptimizerConfig& config, ExactRow& row, const Numbers& g, std::uint64_t t) {
  const auto lr = static_cast<double>(config.learning_rate);
  const auto eps = static_cast<double>(config.eps);
  const auto momentum = static_cast<double>(config.momentum);
  const Numbers& w = row.fields[0];
  const double mean_square = norm_of(g) * norm_of(g) / static_cast<double>(g.size());
  Numbers change(g.size());
  const auto for_columns = [&](const auto& of_column) {
    for (std::size_t c = 0; c < g.size(); ++c) change[c] = of_column(c);
  };
  const auto step = [&](std::size_t field) {
    if (config.bias_correction == BiasCorrection::kRow || config.dampening != 0.0)
      t = static_cast<std::uint64_t>(row.fields[field][0] += 1.0);
    return static_cast<double>(t);
  };
  const auto bias = [&](double beta, double n) { return 1.0 - std::pow(beta, n); };
  const auto move = [](double& mean, double rate, double value) {
    return mean = rate * mean + (1.0 - rate) * value;
  };
  switch (config.kind) {
    case OptimizerKind::kSgd: {
      if (momentum == 0.0) {
        for_columns([&](std::size_t c) { return lr * g[c]; });
        break;
      }
      const bool is_first = config.dampening != 0.0 && step(2) == 1.0;
      for_columns([&](std::size_t c) {
        double& b = row.fields[1][c];
        b = momentum * b + (is_first ? 1.0 : 1.0 - config.dampening) * g[c];
        return lr * (config.nesterov ? g[c] + momentum * b : b);
      });
      break;
    }
    case OptimizerKind::kAdagrad:
      for_columns([&](std::size_t c) {
        row.fields[1][c] += g[c] * g[c];
        return lr / (1.0 + static_cast<double>(t - 1) * static_cast<double>(config.lr_decay)) *
               g[c] / (std::sqrt(row.fields[1][c]) + eps);
      });
      break;
    case OptimizerKind::kRowwiseAdagrad:
      row.fields[1][0] += mean_square;
      for_columns([&](std::size_t c) { return lr * g[c] / (std::sqrt(row.fields[1][0]) + eps); });
      break;
    case OptimizerKind::kAdam:
    case OptimizerKind::kLamb:
    case OptimizerKind::kPartialRowwiseAdam: {
      const double n = step(3);
      const bool is_rowwise = config.kind == OptimizerKind::kPartialRowwiseAdam;
      if (is_rowwise) move(row.fields[2][0], config.beta2, mean_square);
      for_columns([&](std::size_t c) {
        const double m = move(row.fields[1][c], config.beta1, g[c]);
        const double v =
            is_rowwise ? row.fields[2][0] : move(row.fields[2][c], config.beta2, g[c] * g[c]);
        return lr * m / bias(config.beta1, n) / (std::sqrt(v / bias(config.beta2, n)) + eps);
      });
      if (config.kind != OptimizerKind::kLamb) break;
      for_columns([&](std::size_t c) {
        return change[c] + lr * static_cast<double>(config.weight_decay) * w[c];
      });
      const double trust = lr * norm_of(w) / norm_of(change);
      for_columns([&](std::size_t c) { return trust * change[c]; });
      break;
    }
    case OptimizerKind::kFtrl:
      for_columns([&](std::size_t c) {
        double& n = row.fields[1][c];
        double& z = row.fields[2][c];
        z += g[c] - (std::sqrt(n + g[c] * g[c]) - std::sqrt(n)) / lr * w[c];
        n += g[c] * g[c];
        const auto l1 = static_cast<double>(config.l1);
        const double strength = (static_cast<double>(config.beta) + std::sqrt(n)) / lr +
                                2.0 * static_cast<double>(config.l2);
        const double next = std::fabs(z) <= l1 ? 0.0 : (std::copysign(l1, z) - z) / strength;
        return w[c] - next;
      });
      break;
    case OptimizerKind::kRmsprop:
      for_columns([&](std::size_t c) {
        double v = move(row.fields[1][c], config.alpha, g[c] * g[c]);
        if (config.centered) v -= std::pow(move(row.fields[2][c], config.alpha, g[c]), 2.0);
        const double u = g[c] / (std::sqrt(v) + eps);
        if (momentum == 0.0) return lr * u;
        double& b = row.fields[config.centered ? 3U : 2U][c];
        return lr * (b = momentum * b + u);
      });
      break;
  }
  return change;
}

/// `row.last` is its last update.
void step_exactly(const OptimizerConfig& config, ExactRow& row, const std::vector<float>& summed,
                  std::uint64_t t) {
  Numbers& w = row.fields[0];
  Numbers g(summed.begin(), summed.end());
  if (config.clip_value) {
    const auto limit = static_cast<double>(*config.clip_value);
    for (double& x : g) x = std::clamp(x, -limit, limit);
  }
  if (config.clip_norm) {
    const double factor = std::min(1.0, static_cast<double>(*config.clip_norm) / norm_of(g));
    for (double& x : g) x *= factor;
  }
  const auto decay = static_cast<double>(config.weight_decay);
  const double factor = 1.0 - static_cast<double>(config.learning_rate) * decay;
  for (std::size_t c = 0; c < w.size(); ++c) {
    if (config.catch_up && row.last > 0)
      w[c] *= std::pow(factor, static_cast<double>(t - row.last - 1));
    if (config.kind == OptimizerKind::kLamb) continue;
    if (config.weight_decay_mode == WeightDecay::kL2) g[c] += decay * w[c];
    if (config.weight_decay_mode == WeightDecay::kDecoupled) w[c] *= factor;
  }
  row.last = t;
  const Numbers change = change_of(config, row, g, t);
  for (std::size_t c = 0; c < w.size(); ++c) w[c] -= change[c];
}

ExactRow exact_row(const Rows& rows, std::int64_t r) {
  ExactRow exact;
  for (std::size_t f = 0; f < rows.layout.fields.size(); ++f) {
    const float* field = rows.field(r, f);
    exact.fields.emplace_back(field, field + rows.layout.fields[f].count);
  }
  return exact;
}

void expect_close(const Rows& rows, std::int64_t r, const ExactRow& exact, double tolerance) {
  for (std::size_t f = 0; f < exact.fields.size(); ++f) {
    if (rows.layout.fields[f].name == "log_decay") continue;  // weights tell whether it is right
    for (std::size_t i = 0; i < exact.fields[f].size(); ++i) {
      const double want = exact.fields[f][i];
      ASSERT_NEAR(static_cast<double>(rows.field(r, f)[i]), want,
                  tolerance * (1.0 + std::fabs(want)))
          << "row " << r << " field " << rows.layout.fields[f].name << "[" << i << "]";
    }
  }
}

class OnEveryIsa : public ::testing::TestWithParam<std::string> {
 protected:
  OnEveryIsa() : scope_(GetParam()) {}

 private:
  IsaScope scope_;
};

using Update = OnEveryIsa;

TEST_P(Update, FollowsTheDefinition) {
  for (const NamedConfig& named : all_configs()) {
    for (const std::int64_t dim : kDims) {
      SCOPED_TRACE(named.name + " dim " + std::to_string(dim));
      Rows rows(dim, named.config);
      std::vector<ExactRow> exact(12);
      for (std::size_t r = 0; r < 12; ++r) exact[r] = exact_row(rows, static_cast<std::int64_t>(r));
      for (std::uint64_t t = 1; t <= 7; ++t) {
        const Gradients gradients = Gradients(dim, static_cast<std::uint32_t>(t)).sparse(t);
        EXPECT_EQ(rows.update(gradients, t), 0U);
        for (std::uint32_t r = 0; r < 12; ++r) {
          const std::vector<float> summed = gradients.summed(r, dim);
          if (!summed.empty()) step_exactly(named.config, exact[r], summed, t);
        }
      }
      // FTRL's z takes rounded roots over the learning rate.
      const double tolerance = named.config.kind == OptimizerKind::kFtrl ? 5e-6 : 1e-6;
      for (std::int64_t r = 0; r < 12; ++r)
        expect_close(rows, r, exact[static_cast<std::size_t>(r)], tolerance);
    }
  }
}

/// Weights and state of every row, without padding.
std::vector<float> learned(const Rows& rows) {
  std::vector<float> all;
  for (std::int64_t r = 0; r < rows.rows.count(); ++r) {
    for (std::size_t f = 0; f < rows.layout.fields.size(); ++f) {
      all.insert(all.end(), rows.field(r, f), rows.field(r, f) + rows.layout.fields[f].count);
    }
  }
  return all;
}

TEST_P(Update, FtrlLeavesRowsAsTheyAreAtARateOfZero) {
  for (const std::int64_t dim : kDims) {
    Rows rows(dim, OptimizerConfig::ftrl(0.0F));
    const std::vector<float> before = learned(rows);
    rows.update(Gradients(dim, 1).sparse(1), 1);
    EXPECT_TRUE(bits_equal(learned(rows), before)) << "dim " << dim;
  }
}

std::vector<float> learned_after_steps(const OptimizerConfig& config, std::int64_t dim) {
  Rows rows(dim, config);
  for (std::uint64_t t = 1; t <= 5; ++t)
    rows.update(Gradients(dim, static_cast<std::uint32_t>(t)).sparse(t), t);
  return learned(rows);
}

TEST_P(Update, GivesTheBitsOfTheBaseline) {
  for (const NamedConfig& named : all_configs()) {
    for (const std::int64_t dim : kDims) {
      const std::vector<float> here = learned_after_steps(named.config, dim);
      const IsaScope scope("baseline");
      EXPECT_TRUE(bits_equal(here, learned_after_steps(named.config, dim)))
          << named.name << " dim " << dim;
    }
  }
}

TEST_P(Update, PaddingOfTheRecordDoesNotMatter) {
  for (const NamedConfig& named : all_configs()) {
    for (const std::int64_t dim : {1, 6, 19, 67}) {
      const std::vector<float> expected = learned_after_steps(named.config, dim);
      Rows rows(dim, named.config);
      for (std::int64_t r = 0; r < 12; ++r) {
        for (std::size_t f = 0; f < rows.layout.fields.size(); ++f) {
          if (rows.layout.fields[f].place == FieldPlace::kScalars) continue;  // has no padding
          for (std::int64_t i = rows.layout.fields[f].count; i % 4 != 0; ++i)
            rows.field(r, f)[i] = NAN;
        }
      }
      for (std::uint64_t t = 1; t <= 5; ++t)
        rows.update(Gradients(dim, static_cast<std::uint32_t>(t)).sparse(t), t);
      EXPECT_TRUE(bits_equal(learned(rows), expected)) << named.name << " dim " << dim;
    }
  }
}

TEST_P(Update, SumsInOrderAndTouchesOnlyItsRange) {
  for (const std::int64_t dim : kDims) {
    Rows rows(dim, OptimizerConfig::sgd(1.0F));
    for (std::int64_t r = 0; r < 12; ++r) std::fill_n(rows.field(r, 0), dim, 0.0F);
    const Gradients gradients(dim, 1);
    UpdateArgs args = rows.args(gradients, 1);
    args.begin = 4;  // row 2
    args.end = 14;   // up to row 6
    kernels().update(args);
    for (std::uint32_t r = 0; r < 12; ++r) {
      std::vector<float> expected = gradients.summed(r, dim);
      if (r < 2 || r > 6 || expected.empty()) expected.assign(static_cast<std::size_t>(dim), 0.0F);
      for (float& x : expected) x = 0.0F - x;
      EXPECT_TRUE(bits_equal({rows.field(r, 0), rows.field(r, 0) + dim}, expected))
          << "dim " << dim << " row " << r;
    }
  }
}

TEST_P(Update, NoItemsAreFine) {
  Rows rows(8, OptimizerConfig::adam());
  const std::vector<float> before = rows.rows.contents();
  Gradients gradients(8, 1);
  gradients.items.clear();
  EXPECT_EQ(rows.update(gradients, 1), 0U);
  EXPECT_TRUE(bits_equal(rows.rows.contents(), before));
}

/// Puts infinities and NaN into what rows 1 and 5 sum, and an overflow of finite numbers into
/// row 8.
Gradients nonfinite_gradients(std::int64_t dim) {
  Gradients gradients(dim, 1);
  gradients.sources.push_back({gradients.values.data(), INFINITY});
  gradients.items[2].source = 16;
  gradients.sources.push_back({gradients.values.data(), NAN});
  gradients.items[7].source = 17;
  gradients.values[Gradients::size_of(dim) - 1] = std::numeric_limits<float>::max();
  gradients.sources.push_back({gradients.values.data(), 4.0F});
  gradients.items[15].source = 18;
  for (GradItem& item : gradients.items) {
    if (item.source == 0) item.source = 3;  // source 0 has the huge number
  }
  return gradients;
}

TEST_P(Update, NonFiniteSumsAreAppliedAndCounted) {
  for (const std::int64_t dim : kDims) {
    Rows rows(dim, OptimizerConfig::sgd());
    const Gradients gradients = nonfinite_gradients(dim);
    EXPECT_EQ(kernels().count_nonfinite(rows.args(gradients, 1)), 3U) << "dim " << dim;
    EXPECT_EQ(rows.update(gradients, 1), 3U) << "dim " << dim;
    for (const std::int64_t r : {1, 5, 8})
      EXPECT_FALSE(std::isfinite(rows.field(r, 0)[dim - 1])) << "dim " << dim;
    EXPECT_TRUE(std::isfinite(rows.field(0, 0)[dim - 1]));
  }
}

TEST_P(Update, NonFiniteSumsAreLeftOutAndCounted) {
  for (const NamedConfig& named : all_configs()) {
    for (const std::int64_t dim : {1, 5, 16, 33}) {
      Rows rows(dim, named.config);
      Rows expected(dim, named.config);
      const Gradients gradients = nonfinite_gradients(dim);
      EXPECT_EQ(rows.update(gradients, 1, NonFinite::kSkip), 3U);
      Gradients without = gradients;
      std::erase_if(without.items, [](const GradItem& item) {
        return item.row == 1 || item.row == 5 || item.row == 8;
      });
      EXPECT_EQ(expected.update(without, 1), 0U);
      EXPECT_TRUE(bits_equal(learned(rows), learned(expected))) << named.name << " dim " << dim;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Update, ::testing::ValuesIn(available_isas()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace recsdk::optimizer_test
