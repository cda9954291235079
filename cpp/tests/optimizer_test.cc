// Each optimizer against its definition in double, and against itself on every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "embedding/kernels.h"
#include "embedding/optimizer_step.h"
#include "kernel_support.h"
#include "optimizer_configs.h"
#include "recsdk/optimizer.h"
#include "recsdk/row_layout.h"

namespace recsdk {
namespace {

using internal::GradItem;
using internal::GradSource;
using internal::kernels;
using internal::UpdateArgs;
using testing::all_configs;
using testing::bits_equal;
using testing::IsaScope;
using testing::kDims;
using testing::NamedConfig;
using testing::random_floats;
using testing::TestRows;

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
      : config_(config), layout(RowLayout::make(dim, config)), rows(layout.stride, 12) {
    rows.randomize(3, -1.0F, 1.0F);
    for (std::int64_t r = 0; r < 12; ++r) {
      for (std::size_t f = 1; f < layout.fields.size(); ++f) {
        for (std::int64_t i = 0; i < layout.fields[f].count; ++i)
          field(r, f)[i] = layout.fields[f].initial_value;
      }
    }
  }

  float* field(std::int64_t r, std::size_t f) const {
    return rows.row(r) + layout.fields[f].offset / 4;
  }

  UpdateArgs args(const Gradients& gradients, std::uint64_t t,
                  NonFinite on_nonfinite = NonFinite::kApply) {
    // 64-byte aligned and of its exact size, for the sanitizer.
    scratch_.assign(static_cast<std::size_t>((layout.dim + 15) / 16), {});
    return {rows.addresses(),
            layout.dim,
            gradients.items.data(),
            0,
            static_cast<std::int64_t>(gradients.items.size()),
            gradients.sources.data(),
            internal::make_optimizer_step(config_, layout, on_nonfinite, t),
            scratch_.front().floats,
            0};
  }

  std::uint64_t update(const Gradients& gradients, std::uint64_t t,
                       NonFinite on_nonfinite = NonFinite::kApply) {
    UpdateArgs a = args(gradients, t, on_nonfinite);
    kernels().update(a);
    return a.nonfinite;
  }

 private:
  struct alignas(64) Line {
    float floats[16];
  };
  OptimizerConfig config_;
  std::vector<Line> scratch_;

 public:
  RowLayout layout;
  TestRows rows;
};

/// One row in double: weight and state, field by field.
struct ExactRow {
  std::vector<std::vector<double>> fields;
};

void step_exactly(const OptimizerConfig& config, ExactRow& row, const std::vector<float>& summed,
                  std::uint64_t t) {
  const std::size_t dim = summed.size();
  const auto lr = static_cast<double>(config.learning_rate);
  const auto eps = static_cast<double>(config.eps);
  std::vector<double>& w = row.fields[0];
  std::vector<double> g(dim);
  double mean_square = 0.0;
  for (std::size_t c = 0; c < dim; ++c) {
    g[c] = static_cast<double>(summed[c]) + static_cast<double>(config.weight_decay) * w[c];
    mean_square += g[c] * g[c] / static_cast<double>(dim);
  }
  if (config.kind == OptimizerKind::kRowwiseAdagrad) row.fields[1][0] += mean_square;
  if (config.bias_correction == BiasCorrection::kRow)
    t = static_cast<std::uint64_t>(row.fields[3][0] += 1.0);
  for (std::size_t c = 0; c < dim; ++c) {
    switch (config.kind) {
      case OptimizerKind::kSgd:
        w[c] -= lr * g[c];
        break;
      case OptimizerKind::kAdagrad:
        row.fields[1][c] += g[c] * g[c];
        w[c] -= lr / (1.0 + static_cast<double>(t - 1) * static_cast<double>(config.lr_decay)) *
                g[c] / (std::sqrt(row.fields[1][c]) + eps);
        break;
      case OptimizerKind::kRowwiseAdagrad:
        w[c] -= lr * g[c] / (std::sqrt(row.fields[1][0]) + eps);
        break;
      case OptimizerKind::kAdam: {
        double& m = row.fields[1][c];
        double& v = row.fields[2][c];
        m = config.beta1 * m + (1.0 - config.beta1) * g[c];
        v = config.beta2 * v + (1.0 - config.beta2) * g[c] * g[c];
        w[c] -=
            lr / (1.0 - std::pow(config.beta1, static_cast<double>(t))) * m /
            (std::sqrt(v) / std::sqrt(1.0 - std::pow(config.beta2, static_cast<double>(t))) + eps);
        break;
      }
    }
  }
}

ExactRow exact_row(const Rows& rows, std::int64_t r) {
  ExactRow exact;
  for (std::size_t f = 0; f < rows.layout.fields.size(); ++f) {
    const float* field = rows.field(r, f);
    exact.fields.emplace_back(field, field + rows.layout.fields[f].count);
  }
  return exact;
}

void expect_close(const Rows& rows, std::int64_t r, const ExactRow& exact) {
  for (std::size_t f = 0; f < exact.fields.size(); ++f) {
    for (std::size_t i = 0; i < exact.fields[f].size(); ++i) {
      const double want = exact.fields[f][i];
      ASSERT_NEAR(static_cast<double>(rows.field(r, f)[i]), want, 1e-6 + 1e-6 * std::fabs(want))
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
      for (std::uint64_t t = 1; t <= 4; ++t) {
        const Gradients gradients(dim, static_cast<std::uint32_t>(t));
        EXPECT_EQ(rows.update(gradients, t), 0U);
        for (std::uint32_t r = 0; r < 12; ++r) {
          const std::vector<float> summed = gradients.summed(r, dim);
          if (!summed.empty()) step_exactly(named.config, exact[r], summed, t);
        }
      }
      for (std::int64_t r = 0; r < 12; ++r)
        expect_close(rows, r, exact[static_cast<std::size_t>(r)]);
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

std::vector<float> learned_after_steps(const OptimizerConfig& config, std::int64_t dim) {
  Rows rows(dim, config);
  for (std::uint64_t t = 1; t <= 3; ++t)
    rows.update(Gradients(dim, static_cast<std::uint32_t>(t)), t);
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
          for (std::int64_t i = rows.layout.fields[f].count; i % 4 != 0; ++i)
            rows.field(r, f)[i] = NAN;
        }
      }
      for (std::uint64_t t = 1; t <= 3; ++t)
        rows.update(Gradients(dim, static_cast<std::uint32_t>(t)), t);
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
}  // namespace recsdk
