// Layout of records.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "kernel_support.h"
#include "recsdk/row_layout.h"

namespace recsdk::row_layout_test {
namespace {

OptimizerConfig adam_by_row() {
  OptimizerConfig config = OptimizerConfig::adam();
  config.bias_correction = BiasCorrection::kRow;
  return config;
}

std::vector<std::string> names_of(const RowLayout& layout) {
  std::vector<std::string> names;
  names.reserve(layout.fields.size());
  for (const RowField& field : layout.fields) names.push_back(field.name);
  return names;
}

TEST(RowLayout, FieldsLieSideBySideAlignedAndPadded) {
  for (const OptimizerConfig& config :
       {OptimizerConfig::sgd(), OptimizerConfig::adagrad(), OptimizerConfig::rowwise_adagrad(),
        OptimizerConfig::adam(), adam_by_row()}) {
    for (const std::int64_t dim : test::kDims) {
      const RowLayout layout = RowLayout::make(dim, config);
      std::int64_t end = 0;
      std::int64_t end_of_scalars = 0;
      std::int64_t state_width = 0;
      for (const RowField& field : layout.fields) {
        EXPECT_EQ(field.dtype, DType::kFloat32);
        if (field.place == FieldPlace::kScalars) {
          EXPECT_EQ(field.offset, end_of_scalars);
          EXPECT_EQ(field.count, 1);
          end_of_scalars += 4;
        } else {
          EXPECT_EQ(field.offset, end);
          EXPECT_EQ(field.offset % 16, 0);
          EXPECT_EQ(field.count, dim);
          end = (field.offset + field.count * 4 + 15) / 16 * 16;
        }
        if (&field != layout.fields.data()) state_width += field.count;
      }
      EXPECT_EQ(layout.fields[0].name, "weight");
      EXPECT_EQ(layout.fields[0].count, dim);
      EXPECT_EQ(layout.dim, dim);
      EXPECT_EQ(layout.stride, end);
      EXPECT_EQ(layout.scalar_stride, end_of_scalars);
      EXPECT_EQ(layout.row_bytes(), end + end_of_scalars);
      EXPECT_EQ(layout.state_width(), state_width);
    }
  }
}

TEST(RowLayout, StateOfEachOptimizer) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(names_of(RowLayout::make(6, OptimizerConfig::sgd())), Names({"weight"}));
  EXPECT_EQ(names_of(RowLayout::make(6, OptimizerConfig::adagrad())), Names({"weight", "sum"}));
  EXPECT_EQ(names_of(RowLayout::make(6, OptimizerConfig::rowwise_adagrad())),
            Names({"weight", "sum"}));
  EXPECT_EQ(names_of(RowLayout::make(6, OptimizerConfig::adam())),
            Names({"weight", "exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(names_of(RowLayout::make(6, adam_by_row())),
            Names({"weight", "exp_avg", "exp_avg_sq", "step"}));
  EXPECT_EQ(RowLayout::make(6, OptimizerConfig::rowwise_adagrad()).stride, 32);
  EXPECT_EQ(RowLayout::make(6, OptimizerConfig::rowwise_adagrad()).scalar_stride, 4);
  EXPECT_EQ(RowLayout::make(6, OptimizerConfig::adagrad()).state_width(), 6);
  EXPECT_EQ(RowLayout::make(6, adam_by_row()).state_width(), 13);
}

TEST(RowLayout, NewRowsStartWithTheInitialAccumulatorValue) {
  OptimizerConfig config = OptimizerConfig::rowwise_adagrad();
  config.initial_accumulator_value = 0.25F;
  EXPECT_EQ(RowLayout::make(6, config).fields[1].initial_value, 0.25F);
  EXPECT_EQ(RowLayout::make(6, adam_by_row()).fields[3].initial_value, 0.0F);
}

TEST(RowLayout, RefusesAWidthOutOfRange) {
  for (const std::int64_t dim : {std::int64_t{0}, std::int64_t{-4}, (std::int64_t{1} << 20) + 1}) {
    try {
      RowLayout::make(dim, OptimizerConfig::sgd());
      FAIL() << "no exception";
    } catch (const std::invalid_argument& error) {
      EXPECT_EQ(std::string(error.what()), "dim must be 1 to 1048576, got " + std::to_string(dim));
    }
  }
}

TEST(RowLayout, WeightsOf16BitsHaveStateOf32) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const RowLayout layout = RowLayout::make(6, OptimizerConfig::adagrad(), dtype);
    EXPECT_EQ(layout.fields[0].dtype, dtype);
    EXPECT_EQ(layout.fields[1].dtype, DType::kFloat32);
    EXPECT_EQ(layout.fields[1].offset, 16);
    EXPECT_EQ(layout.stride, 48);
    EXPECT_EQ(RowLayout::make(64, OptimizerConfig::rowwise_adagrad(), dtype).row_bytes(), 132);
  }
  EXPECT_THROW(RowLayout::make(4, OptimizerConfig::sgd(), static_cast<DType>(3)),
               std::invalid_argument);
}

TEST(RowLayout, RefusesABadOptimizer) {
  EXPECT_THROW(RowLayout::make(4, OptimizerConfig::sgd(-1.0F)), std::invalid_argument);
}

}  // namespace
}  // namespace recsdk::row_layout_test
