// The loops over rows, written once in kernels_*.inc on vector extensions and compiled for each
// instruction set; all of them give the same bits. They allocate nothing, take no lock and do not
// throw. Records are read and written in whole 16-byte steps (their fields are padded to that),
// buffers of the caller never beyond their D floats.
//
// Why equal bits: element-wise work rounds the same in any register width because contraction to
// fused multiply-add is off; sums over a row always use 16 lanes (lane l adds elements l, l+16,
// ...) and one fixed tree to add the lanes. Where a result is not a number, its payload may differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "recsdk/initializer.h"
#include "recsdk/optimizer.h"
#include "recsdk/types.h"

namespace recsdk::internal {

/// Address arithmetic of rows in fixed slabs: row r lies at slabs[r >> shift] + (r & mask) *
/// stride.
struct RowAddresses {
  std::byte* const* slabs;
  int shift;
  std::int64_t mask;
  std::int64_t stride;  // bytes

  float* row(std::int64_t r) const {
    return reinterpret_cast<float*>(slabs[r >> shift] + (r & mask) * stride);
  }
};

/// Pools bags [bag_begin, bag_end) of one block. Offsets null: each key is a bag.
struct PoolArgs {
  RowAddresses addresses;
  std::int64_t dim;
  float default_value;
  const RowNumber* rows;
  const Outcome* outcomes;
  const std::int64_t* offsets;
  const float* weights;  // or null
  Pooling pooling;
  std::int64_t bag_begin;
  std::int64_t bag_end;
  float* out;           // of bag 0
  std::int64_t stride;  // floats
};

/// Gradients of the weights of bags [bag_begin, bag_end): weights_grad[i] is the derivative of
/// sum(grad * pooled) by weights[i].
struct WeightsGradArgs {
  PoolArgs bags;             // out is not used
  const float* grad;         // of bag 0
  std::int64_t grad_stride;  // floats
  float* weights_grad;       // (N,)
};

/// One vector that gradients are read from, and the factor of it.
struct GradSource {
  const float* grad;
  float scale;
};

/// One occurrence of a row in a backward.
struct GradItem {
  std::uint32_t row;
  std::uint32_t source;  // index into the sources
};

/// The optimizer's numbers, ready for the loop. Filled by make_optimizer_step.
struct OptimizerStep {
  OptimizerKind kind;
  NonFinite on_nonfinite;  // kRaise has been checked before and is handled as kApply
  BiasCorrection bias_correction;
  float learning_rate;  // Adagrad: lr / (1 + (t - 1) * lr_decay); Adam with kTable: lr / (1 - b1^t)
  float eps;
  float weight_decay;
  float one_minus_beta1;  // Adam
  float beta2;
  float one_minus_beta2;
  float inv_sqrt_bias2;  // Adam with kTable: 1 / sqrt(1 - b2^t)
  double exact_beta1;    // Adam with kRow, whose bias is corrected row by row
  double exact_beta2;
  std::int64_t state0;  // float index of the first state field in a record
  std::int64_t state1;  // of the second
  std::int64_t state2;  // of the third: Adam's row step, a float as torch keeps it
};

/// Updates the rows of items [begin, end), sorted by row; the range starts and ends at row borders.
/// `scratch` has room for 16 * ceil(dim / 16) floats, 64-byte aligned.
struct UpdateArgs {
  RowAddresses addresses;
  std::int64_t dim;
  const GradItem* items;
  std::int64_t begin;
  std::int64_t end;
  const GradSource* sources;
  OptimizerStep step;
  float* scratch;
  std::uint64_t nonfinite;  // out: rows whose summed gradient was not finite
};

/// Writes initial weights (not kCustom) of `count` rows: row i of keys[i] to the record rows[i],
/// or, with `rows` null, to out + i * dim.
struct InitializeArgs {
  const InitializerConfig* config;
  std::uint64_t seed;
  std::uint64_t table_hash;
  std::int64_t dim;
  const Key* keys;
  std::int64_t count;
  RowAddresses addresses;
  const std::uint32_t* rows;
  float* out;
};

/// Copies weights of rows out: out[i * dim ...] (N, D).
struct GatherArgs {
  RowAddresses addresses;
  std::int64_t dim;
  float default_value;
  const RowNumber* rows;
  const Outcome* outcomes;
  std::int64_t begin;
  std::int64_t end;
  float* out;  // of key 0
};

struct Kernels {
  const char* isa;
  void (*pool)(const PoolArgs&);
  void (*weights_grad)(const WeightsGradArgs&);
  void (*update)(UpdateArgs&);
  void (*initialize)(const InitializeArgs&);
  void (*gather)(const GatherArgs&);
  /// Rows of items [begin, end) whose summed gradient is not finite; changes nothing but the
  /// scratch.
  std::uint64_t (*count_nonfinite)(const UpdateArgs&);
};

/// The table of the chosen instruction set. Cheap. The first call throws what isa() throws.
const Kernels& kernels();

// One per compiled copy; only kernels() chooses among them.
extern const Kernels kKernelsBaseline;
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;

}  // namespace recsdk::internal
